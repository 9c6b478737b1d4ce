"""What comes out of a decoder's layers is written as transformers computes it, and again when its
steps are played.
"""

import gzip
import json

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from sglang_lite.cli import main
from sglang_lite.protocol import ParameterError, SamplingParams
from sglang_lite.runtime.executor.step_record import NO_CHANGES, append_step, read_steps
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from tests.runtime.kernels import needs_interpreter, needs_kernels
from tests.runtime.models.test_families import engine
from tests.runtime.parallel.asked import saved

SETTINGS = {
    "device": "cpu",
    "max_running": 2,
    "max_total_tokens": 256,
    "page_size": 4,
    "step_tokens": 8,
}
PROMPT = [5, 9, 17, 30, 2, 8, 40, 11, 3]  # two steps
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model") / "model", num_hidden_layers=3)


def read(folder):
    """Tensors of all of a process's files, one file after another."""
    (of_process,) = folder.iterdir()
    assert of_process.name.startswith("TP0_PP0_Rank0_pid")
    passes = [torch.load(file) for file in sorted(of_process.glob("Pass*.pt"))]
    return of_process, {name: torch.cat([each[name] for each in passes]) for name in passes[0]}


@pytest.mark.parametrize(
    "kernels", [False, pytest.param(True, marks=[needs_kernels, needs_interpreter])]
)
def test_hidden_states_are_those_of_transformers(folder, kernels, tmp_path, monkeypatch, capsys):
    if kernels:
        monkeypatch.setattr("sglang_lite.runtime.loading.load_model.Decoder", GpuDecoder)
    dumps = {
        "debug_tensor_dump_output_folder": str(tmp_path / "dump"),
        "debug_tensor_dump_layers": [0, 2],
    }
    with engine(folder, **SETTINGS, **dumps) as running:
        made = running.complete(PROMPT, GREEDY).token_ids
    of_process, found = read(tmp_path / "dump")
    ids, count = [*PROMPT, made[0]], len(PROMPT) + 1
    assert found["model.forward_batch_info.input_ids"].tolist() == ids
    assert found["model.forward_batch_info.positions"].tolist() == list(range(count))
    theirs, last = AutoModelForCausalLM.from_pretrained(folder), []
    theirs.model.layers[2].register_forward_hook(lambda _, given, out: last.append(out))
    with torch.inference_mode():
        states = theirs.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    expected = {
        "model.layers.0": states[1][0],
        "model.layers.2": last[0].view(count, -1),
        "model.norm": states[3][0],
    }
    assert found.keys() - expected.keys() == {
        f"model.forward_batch_info.{name}" for name in ("input_ids", "positions")
    }
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, atol=2e-5, rtol=2e-5)
    again = [
        "--model",
        str(folder),
        "--out",
        str(tmp_path / "again"),
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    assert main(["replay", str(of_process / "steps"), *again]) == 0
    assert capsys.readouterr().out.startswith("3 steps written to ")
    _, played = read(tmp_path / "again")
    assert {*played} - {*found} == {"model.layers.1"}
    assert all(torch.equal(played[name], each) for name, each in found.items())


def test_layers_are_ranges_of_profiles(folder, tmp_path):
    with engine(folder, **SETTINGS, enable_layerwise_nvtx_marker=True) as running:
        running.start_profile(str(tmp_path))
        running.complete(PROMPT, GREEDY)
        path = running.stop_profile()
    with gzip.open(path) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert [names.count(f"layer {number}") for number in range(4)] == [3, 3, 3, 0]


def test_a_file_of_steps_may_end_in_the_middle_of_one_and_has_no_adapters(folder, tmp_path, capsys):
    with engine(
        folder, **SETTINGS, debug_tensor_dump_output_folder=str(tmp_path / "dump")
    ) as running:
        running.complete(PROMPT, GREEDY)
    of_process, _ = read(tmp_path / "dump")
    content = (of_process / "steps").read_bytes()
    (tmp_path / "torn").write_bytes(content[:-1])
    capacity, records = read_steps(tmp_path / "torn")
    assert len(records) == 2
    for each in (capacity, replace(records[0], columns={"adapter": NO_CHANGES})):
        append_step(tmp_path / "adapted", each)
    assert (
        main(
            [
                "replay",
                str(tmp_path / "adapted"),
                "--model",
                str(folder),
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 1
    )
    assert "step 1 has rows of images or of adapters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"debug_tensor_dump_layers": [0]},
            "debug_tensor_dump_layers: is for debug_tensor_dump_output_folder",
        ),
        (
            {"debug_tensor_dump_layers": 1, "debug_tensor_dump_output_folder": "x"},
            "1 is no list of numbers",
        ),
        (
            {"debug_tensor_dump_layers": [-1], "debug_tensor_dump_output_folder": "x"},
            "-1 is not a whole number",
        ),
        (
            {"debug_tensor_dump_layers": [3], "debug_tensor_dump_output_folder": "x"},
            "3 is none .* layers, 0 to 2",
        ),
        (
            {"debug_tensor_dump_output_folder": "/proc/none"},
            "folder: '/proc/none' can't be written: No such file",
        ),
        (
            {"enable_layerwise_nvtx_marker": True, "model_impl": "transformers"},
            "marker: .* runs by transformers' code",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_watched_is_refused_by_name(settings, problem, folder):
    with pytest.raises(ParameterError, match=problem):
        engine(folder, **SETTINGS, **settings)


@pytest.mark.parametrize("content", [None, b"", b"\0" * 7 + b"\3abc", b"{}"], ids=str)
def test_a_file_that_has_no_steps_is_refused(content, tmp_path, capsys):
    file = tmp_path / "steps"
    if content is not None:
        file.write_bytes(content)
    assert main(["replay", str(file), "--model", "none", "--out", "none"]) == 1
    assert f"steps: {file} is none: " in capsys.readouterr().err
