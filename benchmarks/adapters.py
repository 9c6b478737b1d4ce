"""Rows with adapters in an engine with the default model, over rows without any.

    python benchmarks/adapters.py [--rows 16] [--adapters 4] [--rank 16] [--tokens 32] [--repeat 5]

The adapters change all projections, by random numbers. Both are measured by turns, the ratio is the median of the
pairs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence

import peft
from transformers import AutoModelForCausalLM

import sglang_lite as sgl
from sglang_lite.runtime.models.resolve import resolve


def write_adapter(folder: str, rank: int) -> None:
    """Writes an adapter of the default model with random numbers."""
    file = resolve("smollm2-135m")
    config = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).config
    of = peft.LoraConfig(
        r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    peft.get_peft_model(AutoModelForCausalLM.from_config(config), of).save_pretrained(folder)


def seconds(engine: sgl.Engine, names: Sequence[str | None], tokens: int) -> float:
    """Time of one prompt for each name, none of which was asked before."""
    prompts = [f"{random.random()} is a number, and" for _ in names]
    began = time.perf_counter()
    engine.generate(prompts, {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}, lora_path=[*names])
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"rows": 16, "adapters": 4, "rank": 16, "tokens": 32, "repeat": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    having, without = [str(i % options.adapters) for i in range(options.rows)], [None] * options.rows
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(folder, options.rank)
        paths = tuple(f"{i}={folder}" for i in range(options.adapters))
        with sgl.Engine(lora_paths=paths, max_running=options.rows) as engine:
            pairs = [
                tuple(seconds(engine, names, options.tokens) for names in (having, without))
                for _ in range(options.repeat + 1)
            ][1:]  # the first prepares
    own, none = (statistics.median(each) for each in zip(*pairs))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"{options.rows} rows of {options.tokens} tokens with {options.adapters} adapters over none:")
    print(f"  {own:.2f} s over {none:.2f} s: {ratio:.2f}")


if __name__ == "__main__":
    main()
