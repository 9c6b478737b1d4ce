"""Extraction into an object of twelve fields, on this CPU: ours with and without the constraint,
and the peers'.

    python benchmarks/constrained.py [--systems …] [--tokens 400]

Greedy; every system gets the same prompt and schema, and stops by itself. "free" writes as many
tokens as ours did, without a constraint. transformers runs with xgrammar's logits processor and
under outlines (where that is installed); llama.cpp with its own grammar for the schema.
Medians of three, each system in a process of its own, all in one run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import machine
import torch

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.models.resolve import resolve

FIELDS: dict[str, Any] = {
    "name": {"type": "string", "maxLength": 24},
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "city": {"type": "string", "maxLength": 24},
    "country": {"type": "string", "maxLength": 24},
    "profession": {"enum": ["baker", "teacher", "nurse", "engineer", "other"]},
    "employed": {"type": "boolean"},
    "married": {"type": "boolean"},
    "children": {"type": "integer", "minimum": 0, "maximum": 12},
    "language": {"enum": ["Spanish", "English", "French", "German"]},
    "moved_this_year": {"type": "boolean"},
    "contact": {"enum": ["phone", "email", "none"]},
    "confidence": {"enum": ["low", "medium", "high"]},
}
SCHEMA = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
}
PROMPT = (
    "<|im_start|>user\nMaria Lopez, who is 34 years old, moved from Lima in Peru to Madrid in Spain last spring with "
    "her husband and two children to open a bakery. She can be reached by phone. Extract the facts as JSON.<|im_end|>\n"
    "<|im_start|>assistant\n"
)


class Ours:
    def __init__(self, most: int, *, free: bool) -> None:
        self.engine = sgl.Engine(device="cpu", max_running=1)
        self.constraint = json_schema(SCHEMA)
        self.most = most
        self.tokens = self.run_once(self.constraint, most)[1]
        self.free = free

    def run_once(self, constraint: Any, most: int) -> tuple[str, int]:
        self.engine.flush_cache()
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=constraint is None)
        generation = self.engine.complete(PROMPT, params, constraint)
        return generation.text, generation.usage.completion_tokens

    def run(self) -> tuple[str, int]:
        return (
            self.run_once(None, self.tokens)
            if self.free
            else self.run_once(self.constraint, self.most)
        )


def transformers_model() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = resolve("smollm2-135m").parent, resolve("smollm2-135m").name
    model = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=name, dtype=torch.bfloat16)
    return model.eval(), AutoTokenizer.from_pretrained(str(folder), gguf_file=name)


class Transformers:
    def __init__(self, most: int) -> None:
        import xgrammar

        self.most = most
        self.model, self.tokenizer = transformers_model()
        info = xgrammar.TokenizerInfo.from_huggingface(
            self.tokenizer, vocab_size=self.model.config.vocab_size
        )
        self.grammar = xgrammar.GrammarCompiler(info).compile_json_schema(
            json.dumps(SCHEMA), any_whitespace=False, strict_mode=True
        )

    @torch.inference_mode()
    def run(self) -> tuple[str, int]:
        import xgrammar

        ids = self.tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False).input_ids
        processor = xgrammar.contrib.hf.LogitsProcessor(self.grammar)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.most, do_sample=False,
            logits_processor=[processor], pad_token_id=2,
        )[0, ids.shape[1] :]  # fmt: skip
        return self.tokenizer.decode(out, skip_special_tokens=True), len(out)


class Outlines:
    def __init__(self, most: int) -> None:
        import outlines  # type: ignore[import-not-found] # a peer, where it is installed

        self.most = most
        model, self.tokenizer = transformers_model()
        self.generate = outlines.Generator(
            outlines.from_transformers(model, self.tokenizer),
            outlines.json_schema(json.dumps(SCHEMA)),
        )

    def run(self) -> tuple[str, int]:
        text = self.generate(PROMPT, max_new_tokens=self.most, do_sample=False)
        return text, len(self.tokenizer(text).input_ids)


class LlamaCpp:
    def __init__(self, most: int, *, free: bool) -> None:
        from llama_cpp import Llama, LlamaGrammar

        self.most = most
        threads = torch.get_num_threads()
        self.model = Llama(
            str(resolve("smollm2-135m")),
            n_threads=threads,
            n_threads_batch=threads,
            n_ctx=1024,
            verbose=False,
        )
        self.grammar = (
            None if free else LlamaGrammar.from_json_schema(json.dumps(SCHEMA), verbose=False)
        )
        self.free = free

    def run(self) -> tuple[str, int]:
        self.model.reset()
        done = self.model.create_completion(
            PROMPT, max_tokens=100 if self.free else self.most, temperature=0.0, grammar=self.grammar,
            logit_bias={2: -100.0} if self.free else None,
        )  # fmt: skip
        return done["choices"][0]["text"], done["usage"]["completion_tokens"]


SYSTEMS: dict[str, Callable[[int], Any]] = {
    "sglang_lite": partial(Ours, free=False),
    "sglang_lite free": partial(Ours, free=True),
    "transformers + xgrammar": Transformers,
    "outlines": Outlines,
    "llama.cpp grammar": partial(LlamaCpp, free=False),
    "llama.cpp free": partial(LlamaCpp, free=True),
}


def measure(name: str, most: int) -> dict[str, Any]:
    system = SYSTEMS[name](most)
    system.run()
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        text, tokens = system.run()
        seconds.append(time.perf_counter() - started)
    return {"seconds": median(seconds), "tokens": tokens, "text": text}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = {
        "llama.cpp grammar": "llama_cpp",
        "llama.cpp free": "llama_cpp",
        "outlines": "outlines",
    }
    there = [name for name in SYSTEMS if name not in peers or importlib.util.find_spec(peers[name])]
    parser.add_argument("--systems", nargs="+", default=there)
    parser.add_argument("--tokens", type=int, default=400, help="most of an answer")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.tokens)))
        return
    print(machine.describe())
    print(f"{'':26}{'seconds':>9}{'tokens':>8}{'tok/s':>8}  valid")
    for name in options.systems:
        arguments = ["--child", name, "--tokens", str(options.tokens)]
        done = subprocess.run(
            [sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True
        )
        result = json.loads(done.stdout.splitlines()[-1])
        try:
            valid = "yes" if set(json.loads(result["text"])) == set(FIELDS) else "no"
        except ValueError:
            valid = "no"
        rate = result["tokens"] / result["seconds"]
        print(
            f"{name:26}{result['seconds']:9.2f}{result['tokens']:8}{rate:8.0f}  {valid}", flush=True
        )


if __name__ == "__main__":
    main()
