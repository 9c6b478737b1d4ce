"""Which models fit a machine, and which one is proposed: by the list, the doctor, a new project,
and an engine.
"""

import json
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.cli import main
from sglang_lite.commands.doctor import diagnose_all
from sglang_lite.runtime.host import startup_messages
from sglang_lite.runtime.loading.model_choice import HostMachine, choose_model
from sglang_lite.runtime.models.aliases import ALIASES

GB = 1_000_000_000


@pytest.fixture
def machine(monkeypatch):
    """Sets the free memory and the cores of a machine without a GPU that computes in 16 bits,
    without AMX.
    """

    def pretend(free_gb, cores=2):
        monkeypatch.setattr(
            "sglang_lite.runtime.models.memory_check.free_bytes",
            lambda device: None if free_gb is None else int(free_gb * GB),
        )
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
        monkeypatch.setattr(
            "sglang_lite.runtime.loading.model_choice.precision",
            lambda dtype, device: SimpleNamespace(weights=SimpleNamespace(itemsize=2)),
        )
        for module in ("model_choice", "load_model"):
            monkeypatch.setattr(
                f"sglang_lite.runtime.loading.{module}.keeps_only_blocks", lambda: True
            )

    return pretend


@pytest.mark.parametrize(
    ("free_gb", "cores", "has_copies", "proposed"),
    [
        (16, 2, False, "qwen2.5-coder-1.5b"),
        (16, 1, False, "qwen2.5-coder-0.5b"),  # a core reads too little for the larger one
        (2.4, 8, False, "qwen2.5-coder-1.5b"),
        (2, 8, False, "qwen2.5-coder-0.5b"),
        (1.3, 8, False, "smollm2-135m"),
        (1, 8, False, None),
        (0, 8, False, None),
        (5.4, 8, True, "qwen2.5-coder-1.5b"),
        (4, 8, True, "qwen2.5-coder-0.5b"),
        (1.5, 8, True, "smollm2-135m"),
    ],
)
def test_the_proposed_model_is_the_best_that_memory_and_cores_allow(
    free_gb, cores, has_copies, proposed
):
    found = choose_model(HostMachine("cpu", int(free_gb * GB), cores, 2, has_copies)).proposed
    assert (found and found.name) == proposed


def test_a_gpu_reads_fast_enough_for_all():
    choice = choose_model(HostMachine("cuda:0", 100 * GB, 1, item=2))
    assert choice.proposed is not None
    assert choice.proposed.name == "qwen2.5-coder-1.5b"
    assert not choice.others
    assert not any(fit.is_slow for fit in choice.fitting)
    assert choose_model(HostMachine("cuda:0", 3 * GB, 1, item=2)).proposed is None


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("free_gb", [0, 1, 3, 8, 100])
def test_every_model_is_listed_once_with_what_it_lacks(free_gb, item):
    free = free_gb * GB
    choice = choose_model(HostMachine("cpu", free, 4, item))
    assert sorted(fit.name for fit in (*choice.fitting, *choice.others)) == sorted(ALIASES)
    assert all(fit.needed <= free and fit.lacking == 0 for fit in choice.fitting)
    assert all(fit.needed == free + fit.lacking and fit.lacking > 0 for fit in choice.others)


def test_needs_are_at_least_what_processes_were_measured_to_take():
    """Resident GB of engines' processes after a request of 8,000 tokens or nearly as many, on a CPU
    in bfloat16 (docs/models.md).
    """
    choice = choose_model(HostMachine("cpu", 100 * GB, 2, item=2))
    needed = {fit.name: fit.needed / GB for fit in choice.fitting}
    measured = {
        "smollm2-135m": 0.74,
        "qwen2.5-coder-0.5b": 1.36,
        "qwen2.5-coder-1.5b": 1.94,
        "qwen3-0.6b": 2.98,
    }
    for name, taken in measured.items():
        assert taken <= needed[name] <= taken + 0.6, name


def test_the_list_has_what_fits_and_why_the_others_do_not(machine, capsys):
    machine(5.6)
    assert main(["models", "--fits"]) == 0
    printed = capsys.readouterr().out
    assert main(["models", "list", "--fits"]) == 0
    assert capsys.readouterr().out == printed
    first, *lines = printed.splitlines()
    assert first == "cpu, 2 cores, 5.6 GB of memory free. Proposed: >"
    assert [line for line in lines if line.startswith(">")] == [lines[0]]
    assert lines[0].startswith("> qwen2.5-coder-1.5b     2.3 GB  ")
    others = lines[lines.index("Don't fit:") + 1 :]
    assert any(
        line.startswith("  qwen3-4b              10.2 GB  ")
        and line.endswith("; 4.6 GB more than is free")
        for line in others
    )
    assert any("qwen3-1.7b" in line and "; slow: it reads 3.4 GB a token" in line for line in lines)


def test_the_list_as_json(machine, capsys):
    machine(2)
    assert main(["models", "--fits", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["proposed"]["name"] == "qwen2.5-coder-0.5b"
    assert found["machine"]["free"] == 2 * GB
    assert {fit["lacking"] for fit in found["fitting"]} == {0}


@pytest.mark.parametrize("free_gb", [0.3, None])
def test_a_machine_that_no_model_fits_is_told_both_numbers(free_gb, machine, capsys):
    machine(free_gb)
    assert main(["models", "--fits"]) == 1
    said = capsys.readouterr()
    assert "> " not in said.out
    assert said.err.count("\n") == 1
    assert (
        f"no model with a short name fits: all-minilm-l6-v2 needs 1.0 GB, {free_gb or 0.0} GB are free on cpu."
        in said.err
    )


def test_a_name_beside_fits_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["models", "smollm2-135m", "--fits"])
    assert "--fits is for the list: leave the name out." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("free_gb", "told"),
    [(16, "qwen2.5-coder-1.5b fits: it needs 2.3 GB"), (0.5, "none that was run here fits 0.5 GB")],
)
def test_the_doctor_tells_the_proposed_model(free_gb, told, machine, monkeypatch, tmp_path):
    # without a model, whose speed is measured
    monkeypatch.setenv("SGLANG_LITE_CACHE", str(tmp_path))
    machine(free_gb)
    (found,) = [each for each in diagnose_all() if each.about == "model"]
    assert (found.found, found.advice) == (told, "sglang-lite models --fits lists what fits.")


@pytest.mark.parametrize(
    ("free_gb", "told"), [(16, " --rows notes.jsonl --model qwen2.5-coder-1.5b\n"), (1.3, "")]
)
def test_a_new_project_names_the_proposed_model_beside_its_output(
    free_gb, told, machine, tmp_path, capsys
):
    machine(free_gb)
    assert main(["init", str(tmp_path / "project")]) == 0
    printed = capsys.readouterr()
    assert "--model" not in printed.out
    assert printed.err.endswith(told)
    assert bool(printed.err) == bool(told)


@pytest.fixture
def messages(monkeypatch, caplog):
    """Messages of an engine's start, as in a process that has started none."""
    monkeypatch.setattr(startup_messages, "_suggested", threading.Lock())
    caplog.set_level(logging.INFO, "sglang_lite")
    return lambda: [message for message in caplog.messages if "copies and chooses" in message]


def test_the_default_model_says_once_what_it_can_not_do(machine, messages, model_file, capsys):
    machine(16)
    settings: dict[str, Any] = {"in_process": True, "max_total_tokens": 256, "context_length": 128}
    for named in ("smollm2-135m", str(model_file)):
        with sgl.Engine(named, **settings):
            assert messages() == []
    for _ in range(2):
        with sgl.Engine(**settings):
            pass
    assert messages() == [
        "smollm2-135m copies and chooses; rewriting and longer extraction need a larger model: "
        "sgl.Engine('qwen2.5-coder-1.5b') needs 2.3 GB of the 16.0 GB free here."
    ]
    assert capsys.readouterr().out == ""


def test_the_line_comes_from_an_engines_process(messages):
    with sgl.Engine(max_total_tokens=256, context_length=128):
        (line,) = messages()
    assert line.startswith(
        "smollm2-135m copies and chooses; rewriting and longer extraction need a larger model"
    )


def test_a_machine_without_room_for_another_is_told_so(machine, messages):
    machine(1.3)
    with sgl.Engine(in_process=True, max_total_tokens=256, context_length=128):
        assert messages()[0].endswith(
            "need a larger model than fits here (sglang-lite models --fits)."
        )


@pytest.mark.parametrize(
    ("has_copies", "free_gb", "gib"), [(True, 0.2, (0.3, 0.2)), (False, 0.06, (0.1, 0.1))]
)
def test_a_gguf_file_larger_than_the_memory_is_refused_with_both_numbers(
    has_copies, free_gb, gib, machine, model_file, monkeypatch
):
    """Blocks of the file take 0.10 GB, of which half a byte a weight is sure; decoded weights, with
    AMX, 0.27 GB.
    """
    machine(free_gb)
    monkeypatch.setattr(
        "sglang_lite.runtime.loading.load_model.keeps_only_blocks", lambda: not has_copies
    )
    needed, free = gib
    with pytest.raises(
        sgl.ModelError,
        match=rf"needs {needed} GiB \(weights {needed} GiB, .* positions .*\); {free} GiB are free on cpu",
    ):
        sgl.Engine(model_file, in_process=True, dtype="bfloat16", device="cpu")
