"""Models of a hub, fetched from one on this machine in the hub's layout of addresses."""

import shutil
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.cli import main
from sglang_lite.runtime.models.aliases import ALIASES, HubModel, PackagedModel
from tests.hub import ask, local_hub


@pytest.fixture
def cache(folders, tmp_path, monkeypatch):
    """Empty cache folder of huggingface_hub, which asks a hub that has two small checkpoints, one
    of them at the address of an alias.
    """
    with local_hub({"owner/tiny": Path(folders[0]), "Qwen/Qwen3-0.6B": Path(folders[1])}) as url:
        ask(url, tmp_path, monkeypatch)
        yield tmp_path


@pytest.mark.parametrize(("name", "number"), [("owner/tiny", 0), ("qwen3-0.6b", 1)])
def test_a_model_is_pulled_and_then_used_without_the_hub(
    name, number, cache, folders, capsys, monkeypatch
):
    assert main(["models", "pull", name]) == 0
    pulled = capsys.readouterr().out
    there = Path(pulled.strip())
    assert there.is_relative_to(cache)
    for file in Path(folders[number]).iterdir():
        assert (there / file.name).read_bytes() == file.read_bytes()
    ask("http://127.0.0.1:9", cache, monkeypatch)
    assert main(["models", "pull", name]) == 0
    assert capsys.readouterr().out == pulled
    with sgl.Engine(name, in_process=True, dtype="float32") as engine:
        assert (
            engine.generate("abc", {"max_new_tokens": 4, "ignore_eos": True})["meta_info"][
                "completion_tokens"
            ]
            == 4
        )
    main(["models"])
    assert ("qwen3-0.6b           1.2 GB *  + 0.9 GB" in capsys.readouterr().out) == (
        name == "qwen3-0.6b"
    )


def test_a_model_that_the_hub_does_not_have_is_one_line(cache, capsys):
    assert main(["models", "pull", "owner/none"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "sglang-lite: owner/none: no folder here, not in the Hugging Face cache, and the hub did not give it: 404 "
    )
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "command", [["models", "qwen3-0.6b"], ["models", "pull", "qwen3-0.6b"]], ids=len
)
def test_a_hub_that_can_not_be_reached_is_one_line(command, cache, capsys, monkeypatch):
    ask("http://127.0.0.1:9", cache, monkeypatch)
    assert main(command) == 1
    said = capsys.readouterr().err
    assert (
        "the hub did not give it: ConnectError: " in said
        or "the hub did not give it: [Errno 111]" in said
    )
    assert "Check the name or path, and the network" in said
    assert said.count("\n") == 1


def test_an_alias_is_described_from_its_headers(cache, capsys):
    assert main(["models", "qwen3-0.6b"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert not list(cache.rglob("*.safetensors"))


def test_aliases_are_models_of_up_to_four_billion_weights():
    of_hub = [alias for alias in ALIASES.values() if isinstance(alias, HubModel)]
    assert len({alias.hub_id for alias in of_hub}) == len(of_hub)
    assert all(alias.parameters < 4.1e9 for alias in of_hub)
    assert all(
        isinstance(ALIASES[name], PackagedModel) for name in ("smollm2-135m", "all-minilm-l6-v2")
    )


def test_a_revision_of_a_model_has_its_own_weights(folders, tmp_path, monkeypatch):
    """Two of them, in the layout of the hub's cache."""
    model = tmp_path / "models--owner--tiny"
    for revision, commit, folder in (
        ("main", "a" * 40, folders[0]),
        ("other", "b" * 40, folders[1]),
    ):
        shutil.copytree(folder, model / "snapshots" / commit)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / revision).write_text(commit)
    ask("http://127.0.0.1:9", tmp_path, monkeypatch)
    found = [answer(folder) for folder in (folders[1], folders[0])]
    assert [answer("owner/tiny", revision="other"), answer("owner/tiny")] == found
    assert found[0] != found[1]


def answer(model, **settings):
    with sgl.Engine(model, in_process=True, dtype="float32", **settings) as engine:
        return engine.generate("abc", {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True})[
            "output_ids"
        ]
