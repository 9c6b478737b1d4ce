"""`sglang-lite bench` beside vllm and sglang, whose places small fakes take that accept only the
real ones' parameters.
"""

import gc
import json
import os
import select
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from sglang_lite.bench import report as reports
from sglang_lite.bench.limits import Rates
from sglang_lite.bench.peers import PeerResults
from sglang_lite.bench.report import compare_with_peers
from sglang_lite.bench.shapes import SHAPES, hf_config
from sglang_lite.bench.start import Started
from sglang_lite.bench.workloads import WORKLOADS, Workload
from sglang_lite.cli import main
from sglang_lite.runtime.loading.load_model import LoadedModel, precision
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.spec import AttentionSpec, DenseSpec
from sglang_lite.runtime.models.weights.dummy import DummySource
from tests.runtime.scripted import tokenizer

FAKES = Path(__file__).with_name("fakes")
OURS = {"decode1": (4.0, 3.5), "prefix": (1.25, 0.5)}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Makes fakes importable here and in processes; returns the file that they log to."""

    def install(*names, mishap=""):
        for name in ("fake_peer", *names):
            shutil.copy(FAKES / f"{name}.py", tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv(
            "PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
        )
        monkeypatch.setenv("FAKE_PEER_LOG", str(tmp_path / "log"))
        monkeypatch.setenv("FAKE_PEER_MISHAP", mishap)
        return tmp_path / "log"

    return install


@pytest.mark.parametrize("name", SHAPES)
def test_a_peer_gets_a_config_of_our_shape(name, tmp_path):
    ours, theirs = SHAPES[name], spec_from_config(hf_config(name), "config.json")
    (rope,), (read,) = ours.ropes, theirs.ropes
    turned = rope.rotary_dim or ours.layers[0].attention.key_size
    assert (read.theta, read.kind, read.rotary_dim) == (rope.theta, "default", turned)
    layers = tuple(
        replace(layer, attention=replace(attention, rope=read))
        for layer, attention in zip(ours.layers, ours.attentions, strict=True)
    )
    assert theirs == replace(ours, layers=layers)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(name)))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == [type(config).__name__.replace("Config", "ForCausalLM")]
    assert config.rope_parameters["rope_theta"] == rope.theta


def test_peers_run_the_same_workloads_and_stand_beside_ours(install, capfd):
    log = install("vllm", "sglang")
    compare_with_peers("qwen3-0.6b", OURS, 3, fp8=True)
    # The fakes' clock: 5 s for a warm-up, then 1, 3 and 2; and 7 for what puts shared tokens into
    # the cache.
    assert capfd.readouterr().out.splitlines() == [
        "seconds        ours    ideal     vllm   sglang",
        "decode1       4.000    3.500    2.000    2.000",
        "prefix        1.250    0.500    2.000    2.000",
        "vllm 0.33.0",
        "sglang 0.5.23",
    ]
    settings = {
        "skip_tokenizer_init": True, "dtype": "bfloat16", "quantization": "fp8", "load_format": "dummy",
        "kv_cache_dtype": "fp8_e4m3",
    }  # fmt: skip
    cold = [["flush"], ["generate", 1, 128, 256, 0.0]]
    warm = [["flush"], ["generate", 1, 2048, 1, 0.0], ["generate", 256, 2112, 64, 0.0]]
    one = [["load", 151_936, 28, settings], *cold * 4, *warm * 4]
    assert [json.loads(line) for line in log.read_text().splitlines()] == one + one


def test_without_fp8_a_peer_runs_in_bfloat16_at_the_workloads_temperature(install, capfd):
    log = install("sglang")
    compare_with_peers("llama-3.1-8b", {"w1": (1.0, 1.0)}, 1)
    assert "sglang 0.5.23\n" in capfd.readouterr().out
    (load, vocab, layers, settings), *rest = [
        json.loads(line) for line in log.read_text().splitlines()
    ]
    assert (load, vocab, layers) == ("load", 128_256, 32)
    assert settings["dtype"] == "bfloat16"
    assert settings["quantization"] is None
    assert settings["kv_cache_dtype"] == "auto"
    work = WORKLOADS["w1"]()
    assert (
        rest
        == [["flush"], ["generate", 256, work.suffix_lengths[0], work.output_lengths[0], 0.6]] * 2
    )


def test_no_peer_no_table(monkeypatch, capfd):
    monkeypatch.setattr("sglang_lite.bench.peers.find_spec", lambda name: None)
    compare_with_peers("qwen3-0.6b", OURS, 3)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("mishap", "decode", "reason"),
    [
        ("fail", "    2.000", "ValueError: out of memory"),
        ("short", "        –", "RuntimeError: 255 tokens were generated, not 256"),
        ("unflushed", "        –", "RuntimeError: the prefix cache can't be emptied"),
        ("die", "        –", "ended with status 3"),
    ],
)
def test_a_peer_that_fails_says_why_and_keeps_what_it_had(install, capfd, mishap, decode, reason):
    install("vllm", mishap=mishap)
    compare_with_peers("qwen3-0.6b", OURS, 3)
    assert capfd.readouterr().out.splitlines() == [
        "seconds        ours    ideal     vllm",
        f"decode1       4.000    3.500{decode}",
        "prefix        1.250    0.500        –",
        f"vllm 0.33.0: {reason}",
    ]


def test_a_peer_that_can_not_be_imported_says_why(install, capfd, tmp_path):
    install("vllm")
    (tmp_path / "vllm.py").write_text("import no_such_module")
    compare_with_peers("qwen3-0.6b", OURS, 3)
    assert "vllm: ModuleNotFoundError: No module named 'no_such_module'\n" in capfd.readouterr().out


def test_a_peer_that_hangs_is_ended(install, capfd):
    install("vllm", mishap="hang")
    compare_with_peers("qwen3-0.6b", {"decode1": (0.0, 0.0)}, 3, patience=0.0)
    assert "vllm: not done after 0 s\n" in capfd.readouterr().out


def test_what_a_peer_leaves_running_is_ended(install, monkeypatch, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setenv("FAKE_PEER_FIFO", str(fifo))
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    install("vllm", mishap="left")
    compare_with_peers("qwen3-0.6b", {"decode1": (1.0, 1.0)}, 1)
    assert os.read(reader, 1) == b"x"
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    assert poll.poll(10_000) == [(reader, select.POLLHUP)]  # nobody has the other end any more
    os.close(reader)


def test_peers_come_after_ours_is_closed_and_gone(monkeypatch, capfd, tmp_path):
    """The whole command, on a model that needs no GPU."""
    models = []

    def load_shape(name, *, fp8, model_impl):
        layer = SHAPES[name].layers[0]
        assert isinstance(layer.attention, AttentionSpec)
        attention = replace(layer.attention, heads=2, kv_heads=1, key_size=8, value_size=8)
        layer = replace(layer, attention=attention, feed_forward=DenseSpec(16))
        spec = replace(
            SHAPES[name], vocab_size=10_001, hidden_size=16, max_positions=64, layers=(layer,)
        )
        cpu = torch.device("cpu")
        model = Decoder(spec, DummySource(cpu), precision("float32", cpu), cpu, spec.max_positions)
        models.append(weakref.ref(model))
        return LoadedModel(
            name, model, tokenizer(), spec.vocab_size, frozenset(), spec.max_positions
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(reports, "measure_rates", lambda gpus: Rates(4e12, 8e14))
    monkeypatch.setattr(reports, "load_shape", load_shape)
    monkeypatch.setitem(WORKLOADS, "decode1", lambda: Workload(4, (3, 3), (5, 4), cached=True))
    monkeypatch.setattr(reports, "measure_first_token", lambda shape, settings: Started(1.5, 7))
    calls = []

    def peers(shape, ours, repeat, *, fp8):
        calls.append((shape, set(ours), repeat, fp8, models[0]()))
        return {"vllm": PeerResults("0.33.0", {"decode1": 2.0}, "")}

    monkeypatch.setattr(reports, "compare_with_peers", peers)
    gc.disable()
    try:
        command = ["bench", "--shape", "qwen3-14b", "--workload", "decode1", "--repeat", "2"]
        assert main([*command, "--json", str(tmp_path / "all.json")]) == 0
    finally:
        gc.enable()
    assert calls == [("qwen3-14b", {"decode1"}, 2, False, None)]
    assert "\ndecode1 " in (out := capfd.readouterr().out)
    assert "1.5 s from its start to the first token, 7 kernels compiled\n" in out
    told = json.loads((tmp_path / "all.json").read_text())
    assert told["machine"]["device"] == "a GPU"
    assert told["peers"]["vllm"]["seconds"] == {"decode1": 2.0}
    (row,) = told["rows"]
    runs = row["requests"]
    assert (row["workload"], row["tokens"], runs["count"], len(runs["seconds"])) == (
        "decode1",
        9,
        2,
        2,
    )
    assert runs["median"] == pytest.approx(sum(runs["seconds"]) / 2)
    assert runs["first"] > 0
