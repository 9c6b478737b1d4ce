"""Damaged model files and adapters: an error of ours, or the answers that other readers give of the
same file.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import random
import struct
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save
from transformers import LlamaConfig, LlamaForCausalLM

import sglang_lite as sgl
from sglang_lite.protocol import SglError
from tests.children import in_a_child
from tests.damage import STRANGE, damaged, examine, in_file, strangely
from tests.runtime.models.adapters import Adapted
from tests.runtime.models.test_families import ask
from tests.runtime.models.test_hostile_files import (
    CONFIG,
    METADATA,
    SETTINGS,
    TINY,
    gguf_names,
    gguf_string,
    gguf_value,
)
from tests.runtime.models.tiny import randomise, tiny_tokenizer

EXAMPLES = int(os.environ.get("SGLANG_LITE_DAMAGED_FILES", "24"))  # of each kind: CONTRIBUTING.md
PROMPT = [5, 9, 30, 7, 61, 2, 44]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "max_running": 2, "max_total_tokens": 64, "step_tokens": 16, "threads": 1,
}  # fmt: skip


def quiet() -> None:
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def answered(folder: Path, **settings: Any) -> torch.Tensor:
    """Our log-probabilities [tokens, vocabulary] of the prompt, by the engine in a folder or file."""
    name = "made" if "lora_paths" in settings else None
    with sgl.Engine(model=str(folder), **OPTIONS, **settings, in_process=True) as engine:
        if name is not None:
            return rows_of(asked_of(engine, name))
        return rows_of(ask(engine, PROMPT, most=1).result(timeout=60))


def asked_of(engine: sgl.Engine, adapter: str) -> Any:
    from tests.runtime.models.test_lora import ask as ask_adapter

    return ask_adapter(engine, PROMPT, adapter, most=1).result(timeout=60)


def rows_of(answer: Any) -> torch.Tensor:
    if isinstance(answer, Exception):
        raise answer
    entries = [*answer.prompt_logprobs, *answer.output_logprobs]
    return torch.tensor(
        [[value for value, _, _ in sorted(each.top, key=lambda top: top[1])] for each in entries]
    )


def compared(ours: torch.Tensor, theirs: Callable[[], Any]) -> tuple[str, str]:
    """Outcome of a file that was read, and how its answers differ from another reader's."""
    try:
        with torch.no_grad():
            rows = theirs()(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    except Exception as error:  # of other packages, of all kinds
        return (
            "read, refused by others",
            f"others: {type(error).__name__}: {error!s:.200}" if STRICT else "",
        )
    if ours.shape != rows.shape or not torch.allclose(
        ours, rows, atol=2e-3, rtol=1e-3, equal_nan=True
    ):
        away = (ours - rows).abs().max().item() if ours.shape == rows.shape else "another shape"
        return "read otherwise", f"answers differ by {away}"
    return "read", ""


STRICT = bool(os.environ.get("DAMAGED_STRICT"))  # also report what others refuse


def tiny_tensors() -> dict[str, torch.Tensor]:
    model = randomise(LlamaForCausalLM(LlamaConfig(**TINY)))
    return {name: each.contiguous() for name, each in model.state_dict().items()}


# --------------------------------------------------------------------------------------------- GGUF

_KINDS = {"F32": 0, "F16": 1, "Q8_0": 8, "Q4_0": 2, "BF16": 30}


class Gguf:
    """Contents of a GGUF file, as they can be damaged one by one.

    Attributes:
        metadata: metadata by key.
        tensors: [name, shape in PyTorch's order, type, offset or None for the next place, data].
    """

    def __init__(self, tensors: dict[str, torch.Tensor], kind: str = "F32") -> None:
        import gguf

        self.metadata: dict[str, Any] = copy.deepcopy(METADATA)
        self.version, self.counts, self.alignment = 3, [0, 0], 32
        self.tensors: list[list[Any]] = []
        for name, each in gguf_names(tensors).items():
            own = "F32" if each.ndim == 1 else kind
            data = gguf.quants.quantize(
                each.float().numpy(), gguf.GGMLQuantizationType(_KINDS[own])
            ).tobytes()
            self.tensors.append([name, list(each.shape), _KINDS[own], None, data])

    def write(self) -> tuple[bytes, int]:
        """The file, and the length of its header."""
        keys = []
        for key, value in self.metadata.items():
            with contextlib.suppress(Exception):  # what has no type in such files
                keys.append(gguf_string(key) + gguf_value(value))
        counts = len(self.tensors) + self.counts[0], len(keys) + self.counts[1]
        head = (
            b"GGUF"
            + struct.pack("<IQQ", self.version, *(each % 2**64 for each in counts))
            + b"".join(keys)
        )
        data = b""
        for name, shape, kind, offset, own in self.tensors:
            place = len(data) if offset is None else offset
            sizes = struct.pack(
                f"<I{len(shape)}Q", len(shape), *(each % 2**64 for each in reversed(shape))
            )
            head += gguf_string(name) + sizes + struct.pack("<IQ", kind, place)
            data += own + bytes(-len(own) % self.alignment)
        return head + bytes(-len(head) % self.alignment) + data, len(head)


def damage_gguf(draw: random.Random, file: Gguf) -> None:
    """Damages what a file says."""
    at = draw.randrange(len(file.tensors))
    tensor, other = file.tensors[at], draw.choice(file.tensors)
    match draw.randrange(14):
        case 0:
            file.metadata[draw.choice(list(file.metadata))] = draw.choice(STRANGE)
        case 1:
            del file.metadata[draw.choice(list(file.metadata))]
        case 2:
            file.metadata = strangely(draw, file.metadata)
        case 3:
            tensor[0] = draw.choice(
                (other[0], "x", "", tensor[0] + ".weight", "blk.7.attn_q.weight")
            )
        case 4:
            tensor[1] = draw.choice(
                (
                    list(reversed(tensor[1])),
                    [*tensor[1], 1],
                    tensor[1][:-1],
                    [0],
                    [2**63, 2],
                    other[1],
                )
            )
        case 5:
            tensor[2] = draw.choice((0, 1, 2, 3, 8, 12, 24, 25, 26, 27, 28, 30, 39, 200))
        case 6:
            tensor[3] = draw.choice((0, 32, 1, 7, 2**40, 2**64 - 1, 64))
        case 7:
            del file.tensors[at]
        case 8:
            file.tensors.insert(at, list(other))
        case 9:
            tensor[4] = tensor[4][: draw.randrange(len(tensor[4]))]
        case 10:
            place = draw.randrange(max(len(tensor[4]) // 4, 1)) * 4
            number = np.float32(draw.choice((np.nan, np.inf, -np.inf, 1e30, 0))).tobytes()
            tensor[4] = tensor[4][:place] + number + tensor[4][place + 4 :]
        case 11:
            tensor[4] = draw.choice((bytes(len(tensor[4])), other[4], b"\xff" * len(tensor[4])))
        case 12:
            file.counts[draw.randrange(2)] = draw.choice((-1, 1, 2**40, 2**63))
        case 13:
            file.version = draw.choice((0, 1, 2, 4, 2**31))


def ggufs(first: int, count: int) -> dict[str, Any]:
    """Damaged GGUF files, and answers of those that are read."""
    quiet()
    tensors = tiny_tensors()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"

        def case(draw: random.Random) -> tuple[str, str]:
            file = Gguf(tensors, draw.choice([*_KINDS]))
            by_bytes = draw.random() < 0.4
            for _ in range(0 if by_bytes else draw.randrange(1, 3)):
                damage_gguf(draw, file)
            data, header = file.write()
            path.write_bytes(damaged(draw, data, header) if by_bytes else data)
            try:
                ours = answered(path)
            except SglError as error:
                return "refused", told(error, "m.gguf")
            return compared(
                ours,
                lambda: LlamaForCausalLM.from_pretrained(
                    folder, gguf_file="m.gguf", dtype=torch.float32
                ),
            )

        return examine(first, count, case)


def told(error: SglError, *names: str) -> str:
    """What is wrong with an error; one about numbers that are none is of the model, not of a file."""
    return "" if "NaN or infinite" in str(error) and error.hint else in_file(error, *names)


# ------------------------------------------------------------------------------------------ folders

FILES: dict[str, Any] = {
    "config.json": CONFIG, "tokenizer.json": tiny_tokenizer(96), "tokenizer_config.json": SETTINGS,
    "generation_config.json": {"eos_token_id": [1]},
}  # fmt: skip


def damage_tensors(draw: random.Random, data: bytes) -> bytes:
    """A safetensors file whose header or numbers are damaged."""
    length = int.from_bytes(data[:8], "little")
    header, numbers = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    names = [name for name in header if name != "__metadata__"]
    name, other = draw.choice(names), draw.choice(names)
    match draw.randrange(9):
        case 0:
            header = strangely(draw, header)
        case 1:
            header[name], header[other] = header[other], header[name]
        case 2:
            header[name]["data_offsets"] = header[other]["data_offsets"]
        case 3:
            header[name]["dtype"] = draw.choice(("F16", "BF16", "I32", "F64", "F8_E4M3", "U8", "X"))
        case 4:
            header[name]["shape"] = draw.choice(
                (header[name]["shape"][::-1], [*header[name]["shape"], 1], [0], [], [1 << 40])
            )
        case 5:
            header[name + draw.choice(("x", "_scale", ".bias"))] = (
                header.pop(name) if draw.random() < 0.5 else header[name]
            )
        case 6:
            at = draw.randrange(len(numbers) // 4) * 4
            numbers[at : at + 4] = struct.pack(
                "<f", draw.choice((float("nan"), float("inf"), 1e30, -1e30))
            )
        case 7:
            start, end = header[name]["data_offsets"]
            numbers[start:end] = draw.choice((bytes(end - start), b"\xff" * (end - start)))
        case 8:
            return damaged(draw, data, 8 + length)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + numbers


def folders(first: int, count: int) -> dict[str, Any]:
    """Damaged folders of safetensors, and answers of those that are read."""
    quiet()
    whole = save(tiny_tensors())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)

        def case(draw: random.Random) -> tuple[str, str]:
            for each in folder.iterdir():
                each.unlink()
            for name, content in FILES.items():
                (folder / name).write_text(json.dumps(content))
            (folder / "model.safetensors").write_bytes(whole)
            match draw.randrange(6):
                case 0:
                    (folder / "config.json").write_text(json.dumps(strangely(draw, CONFIG)))
                case 1:
                    name = draw.choice([*FILES])
                    (folder / name).write_bytes(damaged(draw, (folder / name).read_bytes()))
                case 2:
                    index = {"weight_map": dict.fromkeys(tiny_names(), "model.safetensors")}
                    text = json.dumps(strangely(draw, index))
                    (folder / "model.safetensors.index.json").write_text(text)
                case _:
                    (folder / "model.safetensors").write_bytes(damage_tensors(draw, whole))
            load_format = draw.choice(("auto", "safetensors", "auto"))
            try:
                ours = answered(folder, load_format=load_format)
            except SglError as error:
                return "refused", told(error, folder.name)
            return compared(ours, lambda: theirs(folder))

        return examine(first, count, case)


def tiny_names() -> list[str]:
    return [*tiny_tensors()]


def theirs(folder: Path) -> Any:
    """transformers' reading of a folder, unless it makes up numbers."""
    model, report = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"], f"made up: {report['missing_keys']}"
    assert not report["mismatched_keys"], f"made up: {report['mismatched_keys']}"
    return model.eval()


# ----------------------------------------------------------------------------------------- adapters


def adapters(first: int, count: int) -> dict[str, Any]:
    """Damaged folders of adapters, and answers of those that are read."""
    import peft

    quiet()
    with tempfile.TemporaryDirectory() as made:
        base, folder = Path(made) / "base", Path(made) / "adapter"
        reference = randomise(LlamaForCausalLM(LlamaConfig(**TINY)))
        reference.save_pretrained(base)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (base / name).write_text(json.dumps(FILES[name]))
        settings = {"r": 4, "rank_pattern": {"up_proj": 8}, "alpha_pattern": {"k_proj": 3}}
        source = Adapted(reference, Path(made) / "adapters", {"plain": settings}).folders["plain"]
        config = json.loads((source / "adapter_config.json").read_text())
        tensors = (source / "adapter_model.safetensors").read_bytes()
        folder.mkdir()
        plain = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)

        def case(draw: random.Random) -> tuple[str, str]:
            for each in folder.iterdir():
                each.unlink()
            (folder / "adapter_config.json").write_text(json.dumps(config))
            (folder / "adapter_model.safetensors").write_bytes(tensors)
            match draw.randrange(4):
                case 0:
                    (folder / "adapter_config.json").write_text(json.dumps(strangely(draw, config)))
                case 1:
                    data = json.dumps(config).encode()
                    (folder / "adapter_config.json").write_bytes(damaged(draw, data))
                case 2:
                    (folder / "adapter_model.safetensors").write_bytes(
                        damage_tensors(draw, tensors)
                    )
                case _:
                    file = folder / "adapter_model.safetensors"
                    if draw.random() < 0.5:
                        torch.save(load_file(file), folder / "adapter_model.bin")
                        file.unlink()
                        file = folder / "adapter_model.bin"
                    file.write_bytes(damaged(draw, file.read_bytes(), 2000))
            try:
                ours = answered(base, lora_paths=[f"made={folder}"])
            except SglError as error:
                return "refused", told(error, folder.name)

            def with_adapter() -> Any:
                found = peft.PeftModel.from_pretrained(copy.deepcopy(plain), folder)
                return found.eval()

            return compared(ours, with_adapter)

        return examine(first, count, case)


KINDS = {"GGUF files": ggufs, "folders": folders, "adapters": adapters}


def every_kind(first: int, count: int) -> dict[str, Any]:
    """Outcomes and problems of each kind."""
    return {kind: damage(first, count) for kind, damage in KINDS.items()}


@cache
def found_in(part: int, count: int) -> dict[str, Any]:
    """What one process finds, since to import what a kind needs takes longer than its cases."""
    found: dict[str, Any] = in_a_child(every_kind, 250 * part, count)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(-(-EXAMPLES // 250)))
def test_damaged_files_are_refused_by_name_or_answer_as_others_read_them(
    kind: str, part: int
) -> None:
    count = min(EXAMPLES - 250 * part, 250)
    found = found_in(part, count)[kind]
    assert found["problems"] == [], found["outcomes"]
    assert sum(found["outcomes"].values()) == count
    assert found["outcomes"].get("read", 0) >= count // 20, found["outcomes"]
    assert found["outcomes"].get("refused", 0) >= count // 5, found["outcomes"]
