"""A model with short convolutions beside one with attention alone and as many weights.

    python benchmarks/convolutions.py [--shape 350m] [--rows 1 8] [--prompt 256] [--new 64] [--repeat 5]

Shapes of LFM2, with random weights; in the other model, each convolution is attention, and the
feed-forward beside it is larger by what attention has fewer weights. Milliseconds of a decoding step,
by turns, and the tokens of prompts that are computed by a few-shot batch, by turns of a chat and by
the branches of a fork.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.windows import load
from sglang_lite import Engine
from sglang_lite.protocol import Delta, Generation, SamplingParams, SglError
from sglang_lite.runtime.models.spec import (
    AttentionSpec,
    ConvSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)

VOCABULARY = 65_536
WITH_ATTENTION = (2, 5, 8, 10, 12, 14)  # of 16 layers
SHAPES = {"350m": (1024, 16, 4608), "1.2b": (2048, 32, 8192)}  # hidden size, heads, feed-forward


def with_convolutions(shape: str) -> ModelSpec:
    hidden, heads, size = SHAPES[shape]
    attention = AttentionSpec(heads, 8, 64, 64, 0.125, RopeSpec(theta=1e6), qk_norm="head")
    mixers = [attention if i in WITH_ATTENTION else ConvSpec(hidden, 3) for i in range(16)]
    layers = tuple(LayerSpec(mixer, DenseSpec(size)) for mixer in mixers)
    return ModelSpec("lfm2", VOCABULARY, hidden, 32_768, 1e-5, layers=layers, tied_embeddings=True)


def with_attention_alone(spec: ModelSpec) -> ModelSpec:
    hidden = spec.hidden_size
    (attention, *_) = spec.attentions
    layers = []
    for layer in spec.layers:
        fewer = layer.attention.weight_elements(hidden) - attention.weight_elements(hidden)
        assert isinstance(layer.feed_forward, DenseSpec)
        size = layer.feed_forward.size + fewer // (3 * hidden) // 32 * 32
        layers.append(LayerSpec(attention, DenseSpec(size)))
    return replace(spec, layers=tuple(layers))


def draw_tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def submit(engine: Engine, ids: list[int], params: SamplingParams) -> Future[Generation]:
    future: Future[Generation] = Future()

    def receive(event: Delta | Generation | SglError) -> None:
        assert isinstance(event, Generation), event
        future.set_result(event)

    engine.submit(ids, params, sink=receive)
    return future


def complete(engine: Engine, prompts: Sequence[list[int]], new: int) -> tuple[float, int]:
    """Returns the seconds of a batch, and the number of prompt tokens that were computed."""
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    begun = time.perf_counter()
    answers = [each.result() for each in [submit(engine, ids, params) for ids in prompts]]
    took = time.perf_counter() - begun
    computed = sum(each.usage.prompt_tokens - each.usage.cached_tokens for each in answers)
    return took, computed


def step_ms(engine: Engine, rows: int, prompt: int, new: int) -> float:
    prompts = [draw_tokens(prompt, seed) for seed in range(rows)]
    short, _ = complete(engine, prompts, 1)
    short, _ = complete(engine, prompts, 1)  # from the cache
    long, _ = complete(engine, prompts, new + 1)
    return (long - short) / new * 1000


def count_computed(engine: Engine) -> dict[str, int]:
    """Returns how many prompt tokens some batches compute."""
    shared = draw_tokens(512, 100)
    found = {}
    _, found["few-shot, 64 rows"] = complete(
        engine, [shared + draw_tokens(20, 200 + i) for i in range(64)], 1
    )
    history = draw_tokens(50, 300)
    found["chat, 8 turns"] = 0
    for turn in range(8):
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        answer = submit(engine, history, params).result()
        found["chat, 8 turns"] += answer.usage.prompt_tokens - answer.usage.cached_tokens
        history = [*history, *answer.token_ids, *draw_tokens(30, 400 + turn)]
    stem = draw_tokens(1000, 500)
    complete(engine, [stem], 1)
    branches = [stem + draw_tokens(1, 600 + i) for i in range(16)]
    _, found["fork, 16 branches"] = complete(engine, branches, 4)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="350m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args(arguments)
    own = with_convolutions(options.shape)
    specs = {"convolutions": own, "attention alone": with_attention_alone(own)}
    engines = {
        name: Engine.of(load(spec), max_running=64, max_total_tokens=200_000)
        for name, spec in specs.items()
    }
    for rows in options.rows:
        took: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(options.repeat + 1):
            for name, engine in engines.items():
                took[name].append(step_ms(engine, rows, options.prompt, options.new))
        for name, times in took.items():
            print(f"{name:16} {rows:3} rows {median(times[1:]):8.3f} ms a step")
        first, second = (median(times[1:]) for times in took.values())
        print(f"{'speed':16} {rows:3} rows {second / first:8.2f} of attention alone")
    for name, engine in engines.items():
        print(f"{name:16} computes {count_computed(engine)}")
        engine.close()


if __name__ == "__main__":
    main()
