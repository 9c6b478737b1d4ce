"""How fast texts are read by an embedding model.

    python benchmarks/embedding.py [--model FOLDER] [--texts 500] [--repeat 5]
    python benchmarks/embedding.py --shape bert-base [--tokens 512]

With `--shape`: random weights, texts of one length. With `--model`: the folder's own tokenizer and
weights; texts are pieces of docs/, 3 to 400 words, cut to what the model reads; beside it, in turn,
sentence-transformers where it is installed, and the least cosine between the vectors of both.
Tokens that enclose a text are counted, too. Medians of `--repeat` runs after a first one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from machine import describe

import sglang_lite as sgl
from sglang_lite.runtime.embedding.request import EncodeRequest

SHAPES: dict[str, dict[str, Any]] = {
    "bert-base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "small": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
}


def pieces(count: int) -> list[str]:
    """Texts of mixed lengths."""
    words = " ".join(
        path.read_text() for path in sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    ).split()
    # no [SEP]: it means other things elsewhere
    words = [word.replace("[", "(").replace("]", ")") for word in words]
    draw = random.Random(0)
    lengths = [min(400, max(3, int(draw.lognormvariate(3.6, 0.9)))) for _ in range(count)]
    starts = [draw.randrange(len(words) - length) for length in lengths]
    return [" ".join(words[start : start + length]) for start, length in zip(starts, lengths)]


def elapsed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def mixed(folder: str, count: int, repeat: int) -> None:
    texts = pieces(count)
    ways: dict[str, Callable[[], Any]] = {}
    with sgl.Engine(folder) as engine:
        ways["sglang_lite"] = lambda: [
            each["embedding"] for each in engine.encode(texts, truncate=True)
        ]
        tokens = sum(
            each["meta_info"]["prompt_tokens"] for each in engine.encode(texts, truncate=True)
        )
        print(engine.core.description, f"{count} texts, {tokens:,} tokens", sep="; ")
        try:
            from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found] # a peer
        except ImportError:
            pass
        else:
            peer = SentenceTransformer(folder)
            ways["sentence-transformers"] = lambda: peer.encode(texts)
        vectors = {name: np.array(work()) for name, work in ways.items()}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeat):
            for name, work in ways.items():
                found[name].append(elapsed(work))
    for name, seconds in found.items():
        print(f"{name}: {tokens / median(seconds):,.0f} tokens/s ({median(seconds):.2f} s)")
    if len(ways) > 1:
        ours, theirs = vectors.values()
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        ratio = median(a / b for a, b in zip(found["sentence-transformers"], found["sglang_lite"]))
        print(f"{ratio:.2f}x; least cosine {((ours * theirs).sum(1) / lengths).min():.7f}")


def shaped(shape: str, tokens: int, count: int, repeat: int) -> None:
    config = {
        "architectures": ["BertModel"],
        "vocab_size": 30_522,
        "max_position_embeddings": 512,
        **SHAPES[shape],
    }
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        (Path(folder) / "tokenizer.json").write_text(json.dumps(tokenizer))
        with sgl.Engine(folder, load_format="dummy", in_process=True) as engine:
            ids = np.random.default_rng(0).integers(0, 30_522, count * tokens, np.int32)
            lengths = np.full(count, tokens, np.int32)
            asked = EncodeRequest(ids, np.zeros_like(ids), lengths)

            def read() -> object:
                return engine.core.submit_call(asked).result()

            read()
            seconds = median(elapsed(read) for _ in range(repeat))
            print(engine.core.description)
    print(
        f"{shape}, {count} texts of {tokens}: {count * tokens / seconds:,.0f} tokens/s ({seconds * 1e3:.1f} ms)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print(describe(), flush=True)
    if options.shape:
        shaped(options.shape, options.tokens, options.texts, options.repeat)
    if options.model:
        mixed(options.model, options.texts, options.repeat)


if __name__ == "__main__":
    main()
