"""Requests with images, beside transformers' own model of the same shape with the same precision.
Weights are random.

    python benchmarks/images.py [--shape smolvlm-256m] [--tiles 1] [--requests 64] [--questions 10]
    [--tokens 32]
        [--repeat 3] [--only unique branches questions waiting streams text] [--no-peer]

- `unique`: requests, each with an image of its own; transformers takes them as one batch. Decoding
  of the files and preparing of the pixels count on both sides.
- `questions`: questions about one image; transformers takes one after the other, and all as a
  batch.
- `branches`: questions about one image as branches of a program, and as requests of an image each
  without a cache.
- `waiting`: share of the time of `unique` that pixels prepared beforehand save: that is what the
  device waits for.
- `streams`: longest pause of eight streams of text while four images arrive a second, and without
  them.
- `text`: seconds of the same decoder's text requests in this model over those in the text model, by
  turns.

Medians of `--repeat` runs after a first one, with images that were not seen before.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
from machine import describe
from PIL import Image as Picture

import sglang_lite as sgl
from sglang_lite.protocol import Delta, Media, Prompt, SamplingParams, Span
from sglang_lite.runtime.loading.model_files import open_model_files
from sglang_lite.runtime.media.prepare import MediaPreparer
from sglang_lite.runtime.tokens.image_options import ImageOptions

GPU = torch.cuda.is_available()
MEASURED = ("unique", "questions", "branches", "waiting", "streams", "text")
_SPECIAL = 64  # ids at the end of a vocabulary for names as "<image>"
_CLIP = {"model_type": "clip_vision_model", "projection_dim": 768, "vocab_size": 32_000}


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": inner, "vocab_size": vocab, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "tie_word_embeddings": False, "hidden_act": "silu", "head_dim": hidden // heads,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "dtype": "bfloat16",
    }  # fmt: skip


def _vision(
    hidden: int, layers: int, heads: int, inner: int, size: int, patch: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner,
        "image_size": size, "patch_size": patch,
    }  # fmt: skip


def _llava(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    side = vision["image_size"]
    return {
        "config": {
            "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text,
            "vision_config": _CLIP | vision, "vision_feature_layer": -2,
            "image_token_index": text["vocab_size"] - _SPECIAL,
            "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu", "tie_word_embeddings": False,
        },
        "preprocessor": {
            "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side},
            "crop_size": {"height": side, "width": side},
        },
    }  # fmt: skip


def _smolvlm(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    return {
        "config": {
            "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "text_config": text,
            "vision_config": {"model_type": "smolvlm_vision"} | vision, "scale_factor": 4,
            "image_token_id": text["vocab_size"] - _SPECIAL,
            "tie_word_embeddings": False, "pad_token_id": 0,
        },
        "preprocessor": {
            "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 4 * vision["image_size"]},
            "max_image_size": {"longest_edge": vision["image_size"]},
        },
    }  # fmt: skip


def _qwen(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    first = text["vocab_size"] - _SPECIAL
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    return {
        "config": {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
            "text_config": text | {"model_type": "qwen2_5_vl_text", "rope_parameters": rope}, "vision_config": vision,
            "image_token_id": first, "video_token_id": first + 1, "vision_start_token_id": first + 2,
            "vision_end_token_id": first + 3, "tie_word_embeddings": False,
        },
        "preprocessor": {
            "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2,
            "temporal_patch_size": 2, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        },
    }  # fmt: skip


_QWEN_VISION = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-7b": _qwen(_llama(3584, 28, 28, 4, 18_944, 152_064), _QWEN_VISION),
    "llava-7b": _llava(
        _llama(4096, 32, 32, 32, 11_008, 32_064), _vision(1024, 24, 16, 4096, 336, 14)
    ),
    "smolvlm-256m": _smolvlm(
        _llama(576, 30, 9, 3, 1536, 49_280), _vision(768, 12, 12, 3072, 512, 16)
    ),
    "small": _llava(_llama(64, 2, 4, 2, 96, 320), _vision(32, 2, 2, 64, 28, 7)),
}
SIZES = {
    "qwen2.5-vl-7b": (1120, 700),
    "llava-7b": (1120, 700),
    "smolvlm-256m": (512, 512),
    "small": (56, 28),
}  # of the images
_TILED = (2048, 1536)  # 13 tiles of SmolVLM
_NAMES = ["<image>", "<fake_token_around_image>", "<global-img>"]


def save(shape: str, tiles: int, folder: Path) -> None:
    """Writes the folder of a model without weights: every character of a prompt is a token."""
    made = json.loads(json.dumps(SHAPES[shape]))
    if shape.startswith("smolvlm"):
        made["preprocessor"]["do_image_splitting"] = tiles > 1
    places = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    special = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    words = made["config"]["text_config"]["vocab_size"] - _SPECIAL
    added = [
        {"id": words + i, "content": name, **special} for i, name in enumerate(_NAMES + places)
    ]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "vocab": {chr(33 + i) if i < 94 else f"w{i}": i for i in range(words)}, "merges": []},
    }  # fmt: skip
    for name, content in (
        ("config", made["config"]),
        ("preprocessor_config", made["preprocessor"]),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = folder / "text"
    text.mkdir()
    alone = made["config"]["text_config"]
    if alone["model_type"] == "qwen2_5_vl_text":
        alone |= {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "rope_parameters": None,
        }
    (text / "config.json").write_text(json.dumps(alone))
    (text / "tokenizer.json").write_text(json.dumps(tokenizer))


def pictures(size: tuple[int, int]) -> Iterator[bytes]:
    """JPEG files of smooth random images."""
    for seed in count():
        coarse = np.random.default_rng(seed).integers(0, 255, (12, 16, 3), dtype=np.uint8)
        file = io.BytesIO()
        Picture.fromarray(coarse).resize(size).save(file, "JPEG", quality=90)
        yield file.getvalue()


class Ours:
    """The engine, and questions to it."""

    def __init__(self, folder: Path, tokens: int, **config: Any) -> None:
        self.sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        self.engine = sgl.Engine(
            str(folder), load_format="dummy", dtype="bfloat16", in_process=True, max_running=64, log_level="error",
            **({"mem_fraction": 0.85} if GPU else {"max_total_tokens": 32_768}) | config,
        )  # fmt: skip

    def ask(self, images: Sequence[bytes], questions: Sequence[str]) -> object:
        return self.engine.generate(
            questions, self.sampling, image_data=[[image] for image in images]
        )


class Theirs:
    """transformers' model, with its image processor and greedy generation."""

    def __init__(self, folder: Path, tokens: int) -> None:
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText
        from transformers.initialization import no_init_weights

        device = torch.device("cuda" if GPU else "cpu")
        with torch.device(device), no_init_weights():
            self.model: Any = AutoModelForImageTextToText.from_config(
                AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="sdpa"
            ).eval()
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.normal_(std=0.02)
        self.processor: Any = AutoImageProcessor.from_pretrained(folder)
        self.tokens, self.device, self.folder = tokens, device, folder

    @torch.inference_mode()
    def ask(self, images: Sequence[bytes], ids: Sequence[Sequence[int]]) -> object:
        pixels = self.processor(
            images=[[Picture.open(io.BytesIO(each)).convert("RGB")] for each in images],
            return_tensors="pt",
        )
        inputs = {
            name: value.to(self.device) for name, value in pixels.items() if torch.is_tensor(value)
        }
        inputs = {
            name: value.bfloat16() if value.is_floating_point() else value
            for name, value in inputs.items()
        }
        given = torch.tensor(ids, device=self.device)
        found = self.model.generate(
            input_ids=given, attention_mask=torch.ones_like(given), **inputs, **self.types(given),
            do_sample=False, pad_token_id=0,
            max_new_tokens=self.tokens, min_new_tokens=self.tokens,
        )  # fmt: skip
        return found.tolist()

    def types(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Which tokens are an image's, for models whose positions depend on it."""
        image = self.model.config.image_token_id
        return (
            {"mm_token_type_ids": (ids == image).int()}
            if "qwen" in self.model.config.model_type
            else {}
        )


class Benchmark:
    """Measurements of a shape, each printed as it ends."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        size = _TILED if options.tiles > 1 else SIZES[options.shape]
        self.images = pictures(size)
        self.ours = Ours(folder, options.tokens)
        # what to compare with, when there is memory for it
        self.peers: list[Callable[[Theirs], None]] = []
        print(self.ours.engine.core.description, f"image {size[0]} x {size[1]}", sep="; ")
        print(
            f"a prompt with an image: {len(self.ids(self.take(1), [question(0)])[0])} tokens",
            flush=True,
        )

    def take(self, number: int) -> list[bytes]:
        """Images that were not seen before."""
        return [image for _, image in zip(range(number), self.images)]

    def ids(self, images: Sequence[bytes], questions: Sequence[str]) -> list[list[int]]:
        """Token ids of prompts, as transformers' model takes them."""
        asked = {"max_new_tokens": 1}
        answers = self.ours.engine.generate(
            list(questions),
            asked,
            image_data=[[each] for each in images],
            return_prompt_token_ids=True,
        )
        return [each["prompt_token_ids"] for each in answers]

    def seconds(self, work: Callable[[], Callable[[], object]]) -> float:
        """Median time of what `work` makes, after a first one."""
        times = []
        for _ in range(self.options.repeat + 1):
            run = work()
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return median(times[1:])

    def told(self, name: str, ours: float, other: float, what: str) -> None:
        print(f"{name}: {ours:.3f} s; {what} {other:.3f} s: {other / ours:.2f}x", flush=True)

    def unique(self) -> None:
        number = self.options.requests
        asked = [question(i) for i in range(number)]
        ours, ids = (
            self.seconds(lambda: partial(self.ours.ask, self.take(number), asked)),
            self.ids(self.take(number), asked),
        )
        print(f"unique: {number / ours:.1f} requests/s ({ours:.3f} s)", flush=True)

        def compare(theirs: Theirs) -> None:
            other = self.seconds(lambda: partial(theirs.ask, self.take(number), ids))
            self.told("unique", ours, other, f"transformers, a batch of {number}")

        self.peers.append(compare)

    def questions(self) -> None:
        number = self.options.questions
        asked = [question(i) for i in range(number)]
        ours = self.seconds(lambda: partial(self.ours.ask, self.take(1) * number, asked))
        ids = self.ids(self.take(1) * number, asked)
        print(f"questions: {number} in {ours:.3f} s", flush=True)

        def compare(theirs: Theirs) -> None:
            def one_by_one() -> Callable[[], object]:
                images = self.take(1)
                return lambda: [theirs.ask(images, [each]) for each in ids]

            self.told(
                "questions", ours, self.seconds(one_by_one), "transformers, one after the other"
            )
            batch = self.seconds(lambda: partial(theirs.ask, self.take(1) * number, ids))
            self.told("questions", ours, batch, f"transformers, a batch of {number}")

        self.peers.append(compare)

    def branches(self) -> None:
        number = self.options.requests
        asked = [question(i).removeprefix("<image>") for i in range(number)]

        @sgl.function
        def look(s: sgl.ProgramState, image: bytes) -> None:
            s += sgl.image(image)
            branches = s.fork(number)
            for branch, text in zip(branches, asked):
                branch += text + sgl.gen(
                    "answer", max_tokens=self.options.tokens, temperature=0, ignore_eos=True
                )
            branches.join()

        def ask() -> Callable[[], object]:
            call = look(*self.take(1))
            return lambda: call.run(backend=self.ours.engine)["answer"]

        ours = self.seconds(ask)
        self.reopen(prefix_cache=False)
        asked = [question(i) for i in range(number)]
        apart = self.seconds(lambda: partial(self.ours.ask, self.take(number), asked))
        self.told("branches", ours, apart, f"{number} requests without a cache")
        self.reopen()

    def reopen(self, **config: Any) -> None:
        """Replaces the engine by another."""
        self.ours.engine.close()
        self.ours = Ours(self.folder, self.options.tokens, **config)

    def waiting(self) -> None:
        number = self.options.requests
        asked = [question(i) for i in range(number)]
        ours = self.seconds(lambda: partial(self.ours.ask, self.take(number), asked))
        media = open_model_files(self.folder).media
        assert media is not None
        preparer, prepare = (
            MediaPreparer(self.folder, media, ImageOptions(), pinned=GPU),
            MediaPreparer.prepare,
        )
        ready: dict[bytes, Any] = {}

        def prepared() -> Callable[[], object]:
            images = self.take(number)
            ready.update(
                {
                    each: prepare(preparer, media.media_item(Media(each, "image/jpeg")))
                    for each in images
                }
            )
            return partial(self.ours.ask, images, asked)

        MediaPreparer.prepare = lambda _, item: ready.pop(item.medium.data)  # type: ignore[assignment,method-assign] # what is compared
        try:
            without = self.seconds(prepared)
        finally:
            MediaPreparer.prepare = prepare  # type: ignore[method-assign] # as before
        print(f"waiting: {1 - without / ours:.1%} of {ours:.3f} s", flush=True)

    def streams(self) -> None:
        rate, length = self.options.rate, self.options.stream_tokens
        for images in (self.take(self.options.arriving), []):
            pauses = self.pauses(images, rate, length)
            print(
                f"streams: longest pause {max(pauses) * 1e3:.0f} ms, median {median(pauses) * 1e3:.1f} ms, "
                f"{len(images)} images, {rate} a second", flush=True,
            )  # fmt: skip

    def pauses(self, images: Sequence[bytes], rate: float, length: int) -> list[float]:
        """Times between two pieces of a stream while images arrive."""
        engine, ended = self.ours.engine, threading.Semaphore(0)
        times: list[list[float]] = [[] for _ in range(8)]

        def sink(at: list[float], event: object) -> None:
            at.append(time.perf_counter())
            if not isinstance(event, Delta):
                ended.release()

        for i, at in enumerate(times):
            params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
            engine.submit(f"tell.{i}", params, sink=partial(sink, at), stream=True)
        for i, image in enumerate(images):
            time.sleep(1 / rate)
            prompt = Prompt((Span(question(i)),), images=(Media(image, "image/jpeg"),))
            params = SamplingParams(max_tokens=self.options.tokens, temperature=0, ignore_eos=True)
            engine.submit(prompt, params, sink=lambda _: None)
        for _ in times:
            ended.acquire()
        return [after - before for at in times for before, after in pairwise(at)]

    def text(self) -> None:
        self.reopen(**({"mem_fraction": 0.45} if GPU else {}))
        # in the rest of the memory
        engines = self.ours, Ours(self.folder / "text", self.options.tokens)
        found: tuple[list[float], list[float]] = ([], [])
        for i in range(2 * self.options.repeat + 1):
            for at, each in zip(found, engines):
                asked = [f"{i}.{j}." * 32 for j in range(self.options.requests)]
                began = time.perf_counter()
                each.engine.generate(asked, each.sampling)
                at.append(time.perf_counter() - began)
        ratio = median(text / seeing for seeing, text in zip(found[0][1:], found[1][1:]))
        print(
            f"text: {median(found[0][1:]):.3f} s, the text model {median(found[1][1:]):.3f} s: {ratio:.3f}x",
            flush=True,
        )
        engines[1].engine.close()


def question(i: int) -> str:
    return f"<image>what.is.this.part.{i:03}?"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="smolvlm-256m")
    parser.add_argument("--tiles", type=int, choices=(1, 13), default=1)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--arriving", type=int, default=12)
    parser.add_argument("--rate", type=float, default=4)
    parser.add_argument("--stream-tokens", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=MEASURED, default=MEASURED)
    parser.add_argument("--no-peer", action="store_true")
    options = parser.parse_args()
    print(describe(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save(options.shape, options.tiles, Path(folder))
        measured = Benchmark(options, Path(folder))
        for name in options.only:
            getattr(measured, name)()
        measured.ours.engine.close()
        if measured.peers and not options.no_peer:
            theirs = Theirs(Path(folder), options.tokens)
            for compare in measured.peers:
                compare(theirs)


if __name__ == "__main__":
    main()
