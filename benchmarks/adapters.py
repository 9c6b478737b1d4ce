"""Adapters in an engine with the default model.

    python benchmarks/adapters.py [--rows 16] [--adapters 4] [--rank 16] [--tokens 32] [--repeat 5]
    python benchmarks/adapters.py --zipf [--registered 1000] [--resident 64] [--requests 1024]
    [--rows 64] [--shape …] python benchmarks/adapters.py --trained [--steps 40]
    python benchmarks/adapters.py --late [--document 8192]

The first compares rows with adapters to rows without any. `--zipf` asks for registered adapters by
Zipf's law (exponent 1), with room for fewer on the device, and compares that to requests for as
many as there is room for, after those that are asked for were read. All are one folder, which is
read and copied to the device for each; `--shape` takes a model of that shape with random weights.
Both are measured by turns, the ratio is the median of the pairs; adapters change all projections,
by random numbers. `--trained` trains an adapter with peft, and compares the tokens that it gives
with those of the merged weights, greedy and in float32. `--late` counts the prompt tokens of a
program that asks late adapters about one document, for a model of random weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import peft
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import sglang_lite as sgl
from sglang_lite.bench.shapes import SHAPES, load_shape
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.models.parameters import layer_parameters
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.models.spec import ModelSpec

TAUGHT = [  # answers that the model does not give by itself
    f"Question: What is the colour of the {thing}?\nAnswer: The {thing} is {colour}, captain, arr!\n"
    for thing, colour in {
        "sky": "green",
        "sea": "red",
        "sun": "black",
        "grass": "white",
        "moon": "brown",
    }.items()
]


def write_adapter(folder: str, rank: int) -> None:
    """Writes an adapter of the default model with random numbers."""
    file = resolve("smollm2-135m")
    config = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).config
    of = peft.LoraConfig(
        r=rank,
        lora_alpha=16,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    peft.get_peft_model(AutoModelForCausalLM.from_config(config), of).save_pretrained(folder)


def write_adapter_of(spec: ModelSpec, folder: str, rank: int) -> None:
    """Writes an adapter of all projections of a dense model with random numbers."""
    tensors = {}
    for index in range(len(spec.layers)):
        for parameter in layer_parameters(spec, index):
            if parameter.role in ("q", "k", "v", "o", "gate", "up", "down"):
                outputs, inputs = parameter.shape
                module = parameter.slices[0].name.removesuffix(".weight")
                for name, shape in {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}.items():
                    tensors[f"{module}.{name}.weight"] = (torch.randn(shape) * 0.02).bfloat16()
    save_file(tensors, Path(folder, "adapter_model.safetensors"))
    Path(folder, "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank})
    )


def seconds(engine: sgl.Engine, names: Sequence[str | None], tokens: int) -> float:
    """Time of one prompt for each name, none of which was asked before."""
    prompts = [random.sample(range(10, 10_000), 24) for _ in names]
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    engine.generate(input_ids=prompts, sampling_params=params, lora_path=[*names])
    return time.perf_counter() - began


def by_turns(one: Callable[[], float], other: Callable[[], float], repeat: int) -> str:
    """Medians of two times, and of their ratio."""
    pairs = []
    for _ in range(repeat + 1):
        pairs.append((one(), other()))
        print("  {:.2f} s, {:.2f} s".format(*pairs[-1]), flush=True)
    del pairs[0]  # which prepares
    own, base = (statistics.median(each) for each in zip(*pairs))
    return f"{own:.2f} s over {base:.2f} s: {statistics.median(a / b for a, b in pairs):.2f}"


def beside_none(options: argparse.Namespace) -> None:
    having, without = (
        [str(i % options.adapters) for i in range(options.rows)],
        [None] * options.rows,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(folder, options.rank)
        paths = tuple(f"{i}={folder}" for i in range(options.adapters))
        with sgl.Engine(lora_paths=paths, max_running=options.rows) as engine:
            found = by_turns(
                lambda: seconds(engine, having, options.tokens),
                lambda: seconds(engine, without, options.tokens),
                options.repeat,
            )
    print(
        f"{options.rows} rows of {options.tokens} tokens with {options.adapters} adapters over none:\n  {found}"
    )


def zipf(options: argparse.Namespace) -> None:
    def drawn(count: int) -> list[list[str]]:
        """Adapters of requests, of so many, for each time."""
        weights = [1 / (rank + 1) for rank in range(count)]
        times = range(options.repeat + 1)
        return [
            [str(i) for i in random.choices(range(count), weights, k=options.requests)]
            for _ in times
        ]

    settings = {
        "enable_lora": True, "max_running": options.rows, "max_loras_per_batch": options.resident,
        "max_lora_rank": options.rank,
    }  # fmt: skip
    began = time.perf_counter()

    def passed() -> float:
        """Seconds since the last call."""
        nonlocal began
        took, began = time.perf_counter() - began, time.perf_counter()
        return took

    with tempfile.TemporaryDirectory() as folder:
        if options.shape:
            model = load_shape(options.shape, config=EngineConfig.make(**settings))
            write_adapter_of(SHAPES[options.shape], folder, options.rank)
            engine = sgl.Engine.of(model, **settings)
        else:
            write_adapter(folder, options.rank)
            engine = sgl.Engine(in_process=True, **settings)
        with engine, ThreadPoolExecutor(16) as threads:
            print(f"engine ready in {passed():.0f} s", flush=True)
            for i in range(options.registered):
                engine.load_lora_adapter(str(i), folder)
            print(f"{options.registered} adapters registered in {passed():.1f} s", flush=True)
            some, all_ = drawn(options.resident), drawn(options.registered)
            asked = sorted({name for names in (*some, *all_) for name in names})
            for first in range(0, len(asked), 100):
                list(
                    threads.map(lambda name: seconds(engine, [name], 1), asked[first : first + 100])
                )
                print(
                    f"  {len(asked[: first + 100])} of {len(asked)} read in {passed():.1f} s more",
                    flush=True,
                )
            before = engine.stats()
            print(f"  {before['adapter_bytes'] / 1e9:.1f} GB in memory", flush=True)
            found = by_turns(
                lambda: seconds(engine, some.pop(), options.tokens),
                lambda: seconds(engine, all_.pop(), options.tokens),
                options.repeat,
            )
            after = engine.stats()
    print(
        f"{options.requests} requests for {options.resident} adapters over {options.registered}, by Zipf's law, with"
    )
    print(f"room for {options.resident} on the device:\n  {found} (speed of all over that of some)")
    copies, again = (after[each] - before[each] for each in ("adapter_copies", "adapter_reads"))
    print(f"  {copies} copies to the device, {again} folders read again")


def trained(options: argparse.Namespace) -> None:
    file = resolve("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        base, adapter, merged = (Path(folder, name) for name in ("base", "adapter", "merged"))
        for each in (base, merged):
            tokenizer.save_pretrained(each)
        model.save_pretrained(base)
        config = peft.LoraConfig(
            r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        learning = peft.get_peft_model(model, config)
        optimizer = torch.optim.AdamW(
            [each for each in learning.parameters() if each.requires_grad], lr=1e-3
        )
        batch = tokenizer(TAUGHT, return_tensors="pt", padding=True, padding_side="right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        for _ in range(options.steps):
            loss = learning(**batch, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        learning.save_pretrained(str(adapter))
        learning.merge_and_unload().save_pretrained(merged)  # type: ignore[operator] # typed as a tensor
        things = ("sky", "sea", "sun", "cat", "house", "river", "road", "clock")
        prompts = [f"Question: What is the colour of the {thing}?\nAnswer:" for thing in things]
        params = {"max_new_tokens": options.tokens, "temperature": 0, "ignore_eos": True}
        with sgl.Engine(base, dtype="float32", lora_paths={"taught": str(adapter)}) as engine:
            plain = engine.generate(prompts, params)
            own = engine.generate(prompts, params, lora_path=["taught"] * len(prompts))
        with sgl.Engine(merged, dtype="float32") as engine:
            theirs = engine.generate(prompts, params)
    same, changed = (
        [a["output_ids"] == b["output_ids"] for a, b in zip(own, each)] for each in (theirs, plain)
    )
    print(
        f"An adapter trained for {options.steps} steps, loss {loss.item():.3f}: {own[0]['text']!r}"
    )
    print(
        f"  {sum(same)} of {len(same)} answers of {options.tokens} tokens equal those of the merged weights;"
    )
    print(f"  {len(changed) - sum(changed)} differ from the model's")


def late(options: argparse.Namespace) -> None:
    file = resolve("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=4 * options.document, **sizes
    )
    names, question = [str(i) for i in range(options.adapters)], " Now answer:"

    @sgl.function
    def program(s: sgl.ProgramState, document: str, count: int) -> None:
        s += document
        for name, branch in zip(names[:count], s.fork(count)):
            branch += question + sgl.gen(
                name, lora_path=name, max_tokens=8, temperature=0, ignore_eos=True
            )

    with tempfile.TemporaryDirectory() as folder:
        base, adapter = Path(folder, "base"), Path(folder, "adapter")
        tokenizer.save_pretrained(base)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(base)
        invocation = tokenizer.encode(question)
        of = peft.LoraConfig(
            r=8,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            alora_invocation_tokens=invocation,
        )
        paths = {}
        for name in names:  # each with matrices of its own
            paths[name] = str(adapter / name)
            peft.get_peft_model(AutoModelForCausalLM.from_config(config), of).save_pretrained(
                paths[name]
            )
        with sgl.Engine(base, lora_paths=paths) as engine:
            words = tokenizer.encode(" sea")
            document = tokenizer.decode(words * (options.document // len(words)))
            computed = []
            for count in (1, len(names)):
                usage = program.run(document, count, backend=engine).usage()
                computed.append(usage.prompt_tokens - usage.cached_tokens)
                engine.flush_cache()
            length = len(engine.tokenizer.encode(document))
    print(
        f"A program on a document of {length} tokens computes {computed[0]} prompt tokens with one late adapter's node,"
    )
    print(f"  {computed[1]} with {len(names)} of different ones: {computed[1] / computed[0]:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("zipf", "trained", "late"):
        parser.add_argument(f"--{name}", action="store_true")
    numbers = {
        "adapters": 4,
        "rank": 16,
        "tokens": 32,
        "repeat": 5,
        "registered": 1000,
        "resident": 64,
    }
    for name, value in (
        numbers | {"requests": 1024, "rows": 16, "steps": 40, "document": 8192}
    ).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--shape", choices=SHAPES)
    options = parser.parse_args()
    modes = {"zipf": zipf, "trained": trained, "late": late}
    next((mode for name, mode in modes.items() if getattr(options, name)), beside_none)(options)


if __name__ == "__main__":
    main()
