"""SGLang's flattened buckets in a GPU's memory, which another process shares: read without running
what a pickle asks for.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import pickle
import random
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

import sglang_lite as sgl
from sglang_lite.engine import weights
from sglang_lite.runtime.models.weights import handles
from tests.children import ROOT
from tests.runtime.core.test_weight_update import tokens
from tests.runtime.models.test_new_weights import engine, pair

ARGUMENTS = {
    "tensor_cls": torch.Tensor, "size": torch.Size([6]), "stride": (1,), "offset": 0,
    "storage_cls": torch.storage.TypedStorage, "dtype": torch.bfloat16, "device": 0, "memory": b"m" * 66, "bytes": 12,
    "start": 512, "grad": False, "file": b"/torch_12_34_0", "counter": 1, "event": b"e" * 64, "waits": True,
}  # fmt: skip


class Reduced:
    """An object that pickles as a call."""

    def __init__(self, call: Any, *args: Any) -> None:
        self._how = call, args

    def __reduce__(self) -> Any:
        return self._how


@pytest.fixture
def metadata(monkeypatch):
    """SGLang's class of metadata, in a module of its name."""

    @dataclasses.dataclass
    class FlattenedTensorMetadata:
        name: str
        shape: torch.Size
        dtype: torch.dtype
        start_idx: int
        end_idx: int
        numel: int

    module: Any = types.ModuleType("sglang.srt.weight_sync.tensor_bucket")
    FlattenedTensorMetadata.__module__, FlattenedTensorMetadata.__qualname__ = (
        module.__name__,
        "FlattenedTensorMetadata",
    )
    module.FlattenedTensorMetadata = FlattenedTensorMetadata
    for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return [FlattenedTensorMetadata("a", torch.Size([2, 3]), torch.bfloat16, 0, 6, 6)]


def pickled(metadata: Any, **changes: Any) -> bytes:
    tensor = Reduced(reductions.rebuild_cuda_tensor, *(ARGUMENTS | changes).values())
    return pickle.dumps({"flattened_tensor": tensor, "metadata": metadata})


def test_handle_and_metadata_are_read_of_a_pickle(metadata, monkeypatch):
    monkeypatch.setattr(handles, "_open_tensor", lambda handle, device: handle)
    found = handles.read_flattened_bucket(pickled(metadata), torch.device("cuda"))
    handle = found["flattened_tensor"]
    assert (handle.shape, handle.dtype, handle.memory, handle.start, handle.waits) == (
        (6,),
        "bfloat16",
        b"m" * 66,
        512,
        True,
    )
    assert found["metadata"] == [
        {"name": "a", "shape": (2, 3), "dtype": "bfloat16", "start_idx": 0, "end_idx": 6}
    ]


ran: list[str] = []


def run(text: str = "ran") -> None:
    ran.append(text)


HOSTILE = {
    "a call": lambda m: pickle.dumps(Reduced(run)),
    "a shell": lambda m: pickle.dumps(Reduced(os.system, "touch /tmp/ran")),
    "eval": lambda m: pickle.dumps({"flattened_tensor": Reduced(eval, "run()"), "metadata": m}),
    "a part of torch": lambda m: pickle.dumps(Reduced(torch.load, "/dev/null")),
    "a call of a name": lambda m: pickled([Reduced(run)]),
    "metadata of others": lambda m: pickled([{"name": "a"}]),
    "a text": lambda m: pickled("abc"),
    "a tensor of a CPU": lambda m: pickle.dumps({"flattened_tensor": torch.ones(3), "metadata": m}),
    "no handle": lambda m: pickle.dumps({"flattened_tensor": 3, "metadata": m}),
    "too few arguments": lambda m: pickle.dumps(Reduced(reductions.rebuild_cuda_tensor, 1, 2)),
    "a kind": lambda m: pickled(m, size="abc"),
    "a dtype": lambda m: pickled([dataclasses.replace(m[0], dtype="save")]),
    "no pickle": lambda m: b"abc",
    "nothing": lambda m: b"",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_of_another_pickle_is_run(case, metadata):
    with pytest.raises(
        sgl.ParameterError, match="serialized_named_tensors: is no flattened bucket of a GPU"
    ):
        handles.read_flattened_bucket(HOSTILE[case](metadata), torch.device("cuda"))
    assert ran == []


def test_a_pickle_changes_nothing_for_the_next_one(metadata, monkeypatch):
    monkeypatch.setattr(handles, "_open_tensor", lambda handle, device: handle)
    expected = handles.read_flattened_bucket(pickled(metadata), torch.device("cuda"))
    for name in ("a\nFlattenedTensorMetadata\n", "torch\nrebuild_cuda_tensor\n"):
        # sets an attribute of what has the name
        setting = f"c{name}N}}V__setstate__\nI1\ns\x86b.".encode("latin-1")
        with pytest.raises(sgl.ParameterError):
            handles.read_flattened_bucket(setting, torch.device("cuda"))
    assert handles.read_flattened_bucket(pickled(metadata), torch.device("cuda")) == expected


def test_a_changed_pickle_is_refused_or_read(metadata, monkeypatch):
    monkeypatch.setattr(handles, "_open_tensor", lambda handle, device: handle)
    draw, whole = random.Random(1), pickled(metadata)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        with contextlib.suppress(sgl.ParameterError):
            handles.read_flattened_bucket(bytes(data), torch.device("cuda"))
    assert ran == []


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "another GPU": ({"device": "another"}, "is of GPU another"),
    "a file": ({"file": b"/etc/passwd"}, "the handle is damaged"),
    "a counter": ({"counter": 10_000}, "the handle is damaged"),
    "before its memory": ({"offset": -1}, "the handle is damaged"),
    "behind its memory": ({"bytes": 11}, "larger than its memory"),
    "another tensor's memory": ({}, "can't be opened"),
}


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_damaged_handle_is_refused_before_it_is_opened(case, metadata):
    changes, why = DAMAGED[case]
    with pytest.raises(sgl.ParameterError, match=why):
        handles.read_flattened_bucket(pickled(metadata, **changes), torch.device("cuda:0"))


def test_an_engine_on_a_cpu_refuses_handles(metadata, tmp_path):
    with engine(pair("llama-biases", tmp_path)[0], device="cpu") as running:
        before = tokens(running)
        with pytest.raises(sgl.ParameterError, match="a GPU's memory is for an engine on that GPU"):
            weights.update_from_handle(running, pickled(metadata))
        assert tokens(running) == before


SENDER = """
import base64, dataclasses, io, sys, types
import torch
from multiprocessing.reduction import ForkingPickler
from safetensors.torch import load_file
import torch.multiprocessing

@dataclasses.dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int

tensors = {name: each.cuda() for name, each in load_file(sys.argv[1]).items()}
flat, metadata, at = torch.cat([each.flatten() for each in tensors.values()]), [], 0
for name, each in tensors.items():
    metadata.append(FlattenedTensorMetadata(name, each.shape, each.dtype, at, at + each.numel(), each.numel()))
    at += each.numel()
out = io.BytesIO()
ForkingPickler(out).dump({"flattened_tensor": flat, "metadata": metadata})
print(base64.b64encode(out.getvalue()).decode(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("in_process", [True, False])
def test_an_engine_takes_a_bucket_of_another_process(in_process, tmp_path):
    old, new = pair("llama-biases", tmp_path)
    settings: dict[str, Any] = dict(
        dtype="float32", max_running=4, max_total_tokens=8192, in_process=in_process
    )
    with sgl.Engine(str(new), **settings) as other:
        expected = tokens(other)
    command = [sys.executable, "-c", SENDER, str(new / "model.safetensors")]
    with (
        sgl.Engine(str(old), **settings) as running,
        subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1) as sender,
    ):
        assert sender.stdin is not None
        assert sender.stdout is not None
        assert tokens(running) != expected
        weights.update_from_handle(
            running, base64.b64decode(sender.stdout.readline()), weight_version="sent"
        )
        assert tokens(running) == expected
        assert running.get_model_info()["weight_version"] == "sent"
        sender.stdin.close()
