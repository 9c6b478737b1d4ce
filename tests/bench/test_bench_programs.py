"""`sglang-lite bench` with workloads written as programs, on a small model that needs no GPU."""

import json
from functools import partial

import pytest
import torch

from sglang_lite import Engine
from sglang_lite.bench.agents import measure_agents
from sglang_lite.bench.limits import Rates, estimate_minimum_seconds
from sglang_lite.bench.programs import PROGRAMS, run_as_program
from sglang_lite.bench.shapes import SHAPES, load_shape, make_tokenizer, text_from_ids
from sglang_lite.bench.workloads import WORKLOADS, Workload, run_workload
from sglang_lite.cli import main

SMALL = {
    "fork64": lambda: Workload(640, (1,) * 6, (32,) * 6),
    "fewshot": lambda: Workload(320, (64,) * 6, (32,) * 6, cached=True),
}


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_program_s_text_has_the_tokens_of_the_requests():
    ids = [0, 1, 25, 26, 9_999, 10_239] * 500
    assert make_tokenizer(10_240).encode(text_from_ids(ids)) == ids


def test_both_columns_come_from_one_run(monkeypatch, capsys):
    for name, work in SMALL.items():
        monkeypatch.setitem(WORKLOADS, name, work)
    assert main(["bench", "--shape", "small", "--workload", *SMALL, "--repeat", "1"]) == 0
    table = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    for name in SMALL:
        # median, as program, times
        requests, program, times = (float(table[name][i]) for i in (1, 8, 9))
        assert program / requests == pytest.approx(times, rel=0.2, abs=0.01)


def test_what_a_program_generates_is_counted(monkeypatch):
    work = Workload(64, (4,) * 3, (3, 2, 4))
    with Engine.of(load_shape("small")) as engine:
        assert run_workload(engine, work).steps > 0
        for name in PROGRAMS:
            assert run_as_program(engine, name, work).steps > 0
        monkeypatch.setitem(PROGRAMS, "nothing", lambda *_: [])
        with pytest.raises(RuntimeError, match="0 tokens were generated, not 9"):
            run_as_program(engine, "nothing", work)


def test_agents_run_as_programs_and_as_requests_whose_tokens_are_counted(monkeypatch, capsys):
    monkeypatch.setattr("sglang_lite.bench.agents.TIMES_MEMORY", (1.1,))
    monkeypatch.setattr("sglang_lite.bench.agents.TOOL_S", 0.001)
    monkeypatch.setattr("sglang_lite.bench.report.measure_agents", partial(measure_agents, count=2))
    assert main(["bench", "--shape", "small", "--workload", "agents"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(memory, form) for memory, form, *_ in rows] == [
        ("1.1x", form) for form in ("programs", "requests", "tiers")
    ]
    assert all(0.9 < float(row[-1]) < 1.2 for row in rows)
    assert main(["bench", "--shape", "small", "--workload", "agents", "w1"]) == 1
    assert "name them alone" in capsys.readouterr().err


def test_large_shapes_are_refused_without_a_gpu(capsys):
    assert main(["bench", "--shape", "qwen3-14b"]) == 1
    assert "small" in capsys.readouterr().err


def test_a_shape_runs_by_transformers_code_too(capsys):
    with Engine.of(load_shape("small", model_impl="transformers")) as engine:
        assert run_workload(engine, Workload(0, (4,) * 2, (3, 2))).steps > 0
    assert main(["bench", "--shape", "small", "--model-impl", "transformers", "--fp8"]) == 1
    assert "transformers' code has no 8 bits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tp", "3"], "can't share 4 heads"), (["--tp", "2", "--ep", "2"], "has no experts"),
        (["--tp", "4", "--ep", "3"], "does not divide"), (["--tp", "0"], "is not a whole number"),
        (["--tp", "2", "--model-impl", "transformers"], "runs on one GPU"),
    ],
)  # fmt: skip
def test_devices_that_cannot_share_a_shape_are_refused(capsys, flags, problem):
    assert main(["bench", "--shape", "small", "--workload", "decode1", *flags]) == 1
    assert problem in capsys.readouterr().err


def test_two_processes_share_a_shape(capsys, tmp_path):
    command = ["bench", "--shape", "small", "--workload", "decode1", "--repeat", "1", "--tp", "2"]
    assert main([*command, "--json", str(tmp_path / "all.json")]) == 0
    assert capsys.readouterr().out.startswith("2 x CPU")
    assert json.loads((tmp_path / "all.json").read_text())["machine"]["ranks"] == 2


def test_two_gpus_take_half_the_time_and_that_of_their_sums():
    work, spec = Workload(0, (1000,) * 8, (3,) * 8), SHAPES["llama-3.1-8b"]
    one, two = (
        estimate_minimum_seconds(spec, work, Rates(n * 4e12, n * 8e14, n, 4e11)) for n in (1, 2)
    )
    tokens = 8 * (1000 + 2)  # of the prompts, and of two steps
    # a rank sends half of a sum's numbers, and then the sum of the other half
    each = 64 * 4096 * 2 / 4e11
    assert two == pytest.approx(one / 2 + tokens * each)
