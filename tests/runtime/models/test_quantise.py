"""Folders that `sglang-lite quantize` writes: read by this package and by transformers."""

import json
import resource
import signal
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

import sglang_lite as sgl
from sglang_lite.cli import main
from sglang_lite.runtime.loading.quantise import quantise
from sglang_lite.runtime.loading.save import save_sharded
from sglang_lite.runtime.models.weights.folder import open_weight_folder
from sglang_lite.runtime.models.weights.quantised_formats import read_quantisation
from sglang_lite.runtime.models.weights.source import EncodedMatrix
from tests.runtime.models.packings import FORMATS, TINY, write
from tests.runtime.models.test_fp8 import engine, expected_of, logprobs
from tests.runtime.models.tiny import randomise, save


@pytest.fixture
def folder(tmp_path):
    reference = randomise(Qwen3ForCausalLM(TINY))
    reference.save_pretrained(tmp_path / "plain", max_shard_size="40KB")
    save(reference, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer.json").rename(tmp_path / "plain" / "tokenizer.json")
    return tmp_path / "plain"


@pytest.mark.parametrize(("to", "group", "limit"), [("int4", 32, 0.13), ("int8", 16, 0.008)])
def test_what_is_written_is_the_model_with_rounded_matrices(
    folder, tmp_path, to, group, limit, capsys
):
    out = tmp_path / "new" / "small"
    assert (
        main(["quantize", str(folder), "--to", to, "--group", str(group), "--out", str(out)]) == 0
    )
    assert capsys.readouterr().out == f"written to {out}\n"
    assert len(list(out.glob("*.safetensors"))) == len(list(folder.glob("*.safetensors"))) > 2
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with engine(out, quantization="compressed-tensors") as running:
        assert logprobs(running) == pytest.approx(expected_of(theirs), abs=1e-4)
    name, source = (
        "model.layers.1.mlp.down_proj.weight",
        open_weight_folder(out, read_quantisation(out).matrices),
    )
    weight = Qwen3ForCausalLM.from_pretrained(folder).state_dict()[name]
    found = source.take_tensor(name, (64, 96))
    assert isinstance(found, EncodedMatrix)
    assert (found.decode(0, 64) - weight).norm() < limit * weight.norm()
    before, after = (
        sum(file.stat().st_size for file in each.glob("*.safetensors")) for each in (folder, out)
    )
    assert after < before * (0.6 if to == "int4" else 0.75)


def test_matrices_that_are_sensitive_stay(folder, tmp_path):
    quantise(str(folder), tmp_path / "out", group=32)
    state = {
        name: t
        for file in (tmp_path / "out").glob("*.safetensors")
        for name, t in load_file(file).items()
    }
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= state.keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == state.keys()


def test_what_can_not_be_quantised_is_named(folder, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(
        sgl.ParameterError, match=r"group: 128 does not divide the 64 inputs .*These would: 32, 64"
    ):
        quantise(str(folder), out)
    with pytest.raises(sgl.ParameterError, match=r"out: .* is there already"):
        quantise(str(folder), tmp_path, group=32)
    with pytest.raises(sgl.ParameterError, match="is below a file"):
        quantise(str(folder), folder / "config.json" / "out", group=32)
    packed, _ = write(tmp_path / "packed", FORMATS["gptq"])
    with pytest.raises(sgl.ModelError, match=r"the weights are quantised already \(gptq\)"):
        quantise(str(packed), out, group=32)
    assert not out.exists()


@pytest.mark.parametrize(
    "write", [lambda *at: quantise(*at, group=32), save_sharded], ids=["quantise", "save"]
)
def test_nothing_is_left_of_weights_that_a_disk_does_not_take(write, folder, tmp_path, monkeypatch):
    # Python would leave files of modules cut short
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    handled, (soft, hard) = (
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # of a file; the model's have more
    try:
        with pytest.raises(sgl.ModelError, match=r"out: can't be written: .*File too large"):
            write(str(folder), tmp_path / "to" / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handled)
    assert list((tmp_path / "to").iterdir()) == []


def test_nothing_is_left_of_what_fails(folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copy", full)
    with pytest.raises(sgl.ModelError, match=r"can't be written: .*No space left on device"):
        quantise(str(folder), tmp_path / "to" / "out", group=32)
    assert list((tmp_path / "to").iterdir()) == []
