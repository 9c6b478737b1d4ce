"""A model with linear attention beside one of the same shape with attention alone.

    python benchmarks/states.py [--parts reuse decode prefill] [--layers 8] [--chunk 8192]
        [--page-size 16] [--grid 512]

"reuse" counts, with a tiny model, the prompt tokens that a tree of thought, few-shot rows and chats
compute: where states are kept by what programs do, on a grid of tokens alone, and without states.
"decode" and "prefill" time the shape of Qwen3.5-35B-A3B with fewer layers and random weights, by
turns; a prompt is read in chunks of so many tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.convolutions import complete, draw_tokens, step_ms, submit
from benchmarks.windows import load
from sglang_lite import Engine
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.models.spec import (
    AttentionSpec,
    DeltaSpec,
    DenseSpec,
    ExpertsSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)

EVERY = 4  # of so many layers one has attention
VOCABULARY = 65_536


def tiny(*, states: bool) -> ModelSpec:
    """A model whose arithmetic takes no time: only what it computes is counted."""
    attention = AttentionSpec(2, 1, 16, 16, 0.25, RopeSpec())
    mixers = (DeltaSpec(1, 2, 16, 16, 4, 1e-6) if states else attention, attention)
    layers = tuple(LayerSpec(mixer, DenseSpec(32)) for mixer in mixers)
    return ModelSpec("qwen3_5", VOCABULARY, 32, 32_768, 1e-6, layers=layers, tied_embeddings=True)


def shape(layers: int) -> ModelSpec:
    """Qwen3.5-35B-A3B with so many layers."""
    rope = RopeSpec(theta=1e7, rotary_dim=64)
    attention = AttentionSpec(16, 2, 256, 256, 1 / 16, rope, qk_norm="head", output_gate=True)
    delta = DeltaSpec(16, 32, 128, 128, 4, 1e-6)
    experts = ExpertsSpec(256, 8, 512, normalise=True, shared_size=512, shared_gate=True)
    mixers = [attention if (i + 1) % EVERY == 0 else delta for i in range(layers)]
    return ModelSpec(
        "qwen3_5_moe",
        VOCABULARY,
        2048,
        65_536,
        1e-6,
        layers=tuple(LayerSpec(mixer, experts) for mixer in mixers),
        norm_offset=1.0,
    )


def with_attention_alone(spec: ModelSpec) -> ModelSpec:
    (attention, *_) = spec.attentions
    return replace(spec, layers=tuple(replace(layer, attention=attention) for layer in spec.layers))


def grow_tree(engine: Engine, depth: int, width: int) -> int:
    """Tree of thought: each thought is continued by several. Returns the prompt tokens computed."""
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    texts = [draw_tokens(300, 1)]
    computed = 0
    for level in range(depth):
        asked = [
            text + draw_tokens(12, 1000 * level + 10 * i + branch)
            for i, text in enumerate(texts)
            for branch in range(width)
        ]
        answers = [each.result() for each in [submit(engine, ids, params) for ids in asked]]
        computed += sum(each.usage.prompt_tokens - each.usage.cached_tokens for each in answers)
        texts = [[*ids, *answer.token_ids] for ids, answer in zip(asked, answers)]
    return computed


def count_computed(engine: Engine) -> dict[str, int]:
    """Returns how many prompt tokens each workload computes."""
    found = {"tree of thought, depth 3, fork 4": grow_tree(engine, 3, 4)}
    shared = draw_tokens(2048, 2)
    rows = [shared + draw_tokens(40 + i % 40, 3000 + i) for i in range(256)]
    _, found["256 few-shot rows on 2,048 tokens"] = complete(engine, rows, 1)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    system = draw_tokens(200, 4)
    histories = [system + draw_tokens(50, 5000 + i) for i in range(200)]
    computed = 0
    for turn in range(8):
        answers = [each.result() for each in [submit(engine, ids, params) for ids in histories]]
        computed += sum(each.usage.prompt_tokens - each.usage.cached_tokens for each in answers)
        histories = [
            [*ids, *answer.token_ids, *draw_tokens(30, 10_000 + 1000 * turn + i)]
            for i, (ids, answer) in enumerate(zip(histories, answers))
        ]
    found["200 chats of 8 turns"] = computed
    return found


def compare_reuse(page_size: int, grid: int) -> None:
    settings = {"max_running": 64, "max_total_tokens": 400_000, "page_size": page_size}
    ways = {
        "attention alone": (tiny(states=False), {}),
        "states": (tiny(states=True), {}),
        f"a grid of {grid}": (tiny(states=True), {"mamba_track_interval": grid}),
    }
    counts = {}
    for name, (spec, more) in ways.items():
        with Engine.of(load(spec), **settings, **more) as engine:
            if name.startswith("a grid"):
                keep_no_states_but_the_grid(engine)
            counts[name] = count_computed(engine)
            found = engine.stats()
        kept = found.get("states_kept", 0)
        print(f"{name:16} {kept:5} states kept, {found['cached_tokens']:,} tokens cached")
    for workload, fewest in counts["attention alone"].items():
        each = ", ".join(
            f"{name} {found[workload]:,} ({found[workload] / fewest:.2f}x)"
            for name, found in counts.items()
        )
        print(f"{workload}: {each}")


def keep_no_states_but_the_grid(engine: Engine) -> None:
    """Makes an engine keep states as one would that does not know where texts are continued."""
    states = engine.core.scheduler.store.states
    assert states is not None
    states.want_states = lambda slot, ends: None  # type: ignore[method-assign]  # for comparison
    states.keep_current = lambda slot, pages: None  # type: ignore[method-assign]  # likewise


def compare_steps(engines: dict[str, Engine], rows: int, prompt: int, repeat: int) -> None:
    took: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(repeat + 1):
        for name, engine in engines.items():
            took[name].append(step_ms(engine, rows, prompt, 32))
    first, second = (median(times[1:]) for times in took.values())
    each = ", ".join(f"{time:.2f}" for time in took["linear attention"])
    print(
        f"decode {rows:3} rows at {prompt:6,}: {first:7.3f} ms, attention alone {second:7.3f}: "
        f"{first / second:.2f}x the time (each {each})",
        flush=True,
    )


def compare_times(parts: list[str], layers: int, chunk: int, repeat: int) -> None:
    spec = shape(layers)
    engines = {
        name: Engine.of(load(each), max_running=64, max_total_tokens=2_300_000, step_tokens=chunk)
        for name, each in (
            ("linear attention", spec),
            ("attention alone", with_attention_alone(spec)),
        )
    }
    if "decode" in parts:
        for rows, prompt in ((1, 1000), (64, 1000)):
            compare_steps(engines, rows, prompt, repeat)
    if "prefill" in parts:
        for name, engine in engines.items():
            times = []
            for i in range(repeat + 1):
                text = draw_tokens(32_768, 70 + i)
                begun = time.perf_counter()
                complete(engine, [text], 1)
                times.append(time.perf_counter() - begun)
            print(f"prefill of 32,768: {median(times[1:]) * 1000:8.1f} ms, {name}", flush=True)
    if "decode" in parts:
        for rows, prompt in ((64, 16_000), (64, 32_000)):
            compare_steps(engines, rows, prompt, repeat)
    for engine in engines.values():
        engine.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["reuse", "decode", "prefill"]
    parser.add_argument("--parts", choices=parts, nargs="+", default=["reuse"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--grid", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    if "reuse" in options.parts:
        compare_reuse(options.page_size, options.grid)
    if {"decode", "prefill"} & {*options.parts}:
        compare_times(options.parts, options.layers, options.chunk, options.repeat)


if __name__ == "__main__":
    main()
