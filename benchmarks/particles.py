"""Particles beside GenLM-control's AWRS sampler on the same model, in two of its published domains:
pattern matching (regexes) and JSON (schemas).

    python benchmarks/particles.py FOLDER --peer PYTHON [--count 16] [--repeat 3]

FOLDER has a model in Hugging Face's format, and PYTHON is a Python with genlm-control. Both draw as
many particles for each of six prompts, one prompt after another, in processes of their own by turns.
Seconds are those of all prompts, without loading and a first round; `size` is the mean effective
sample size over the number of particles. GenLM's texts end with a line feed, which the prompts
suggest, and its weights include the line feed's probability; ours end where free text leaves the
language. `valid` is the share of particles with a weight whose text matches.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

MAX_TOKENS = 40
PATTERNS = (
    ("Animals, one on each line:\n dog\n horse\n", " [a-z]{3,10}"),
    ("Dates, one on each line:\n2023-04-01\n2021-12-24\n", "20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"),
    ("Telephone numbers:\n555-0134\n555-0199\n", "555-0[0-9]{3}"),
    ("Colours of flags:\n red, white and blue\n green, white and red\n", " [a-z]+, [a-z]+ and [a-z]+"),
)  # fmt: skip
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PET = {
    "type": "object",
    "properties": {"pet": {"enum": ["dog", "cat", "parrot"]}, "legs": {"type": "integer"}},
    "required": ["pet", "legs"],
    "additionalProperties": False,
}
Constraint = str | dict[str, Any]  # a regex or a schema
SCHEMAS = (
    ('People as JSON:\n{"name": "Ada", "age": 36}\n{"name": "Tom", "age": 7}\n', PERSON),
    ('Pets as JSON:\n{"pet": "dog", "legs": 4}\n{"pet": "parrot", "legs": 2}\n', PET),
)

DOMAINS: dict[str, tuple[tuple[str, Constraint], ...]] = {"patterns": PATTERNS, "JSON": SCHEMAS}


def is_valid(constraint: Constraint, text: str) -> bool:
    if isinstance(constraint, str):
        return re.fullmatch(constraint, text) is not None
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), constraint)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


class Ours:
    """Draws with `s.particles`."""

    def __init__(self, folder: str) -> None:
        import sglang_lite as sgl

        @sgl.function
        def draw(s: sgl.ProgramState, prompt: str, count: int, options: dict[str, Any]) -> Any:
            s += prompt
            p = s.particles(count, resample=0.5)
            p += sgl.gen("text", max_tokens=MAX_TOKENS, **options)
            texts = [state["text"] for state in p]
            return texts, p.weights, p.effective_size

        self._engine = sgl.Engine(folder)
        self._draw = draw

    def draw(
        self, prompt: str, constraint: Constraint, count: int
    ) -> tuple[list[str], list[float], float]:
        """Returns texts, their weights, and the effective sample size."""
        kind = "regex" if isinstance(constraint, str) else "json_schema"
        found: tuple[list[str], list[float], float] = self._draw.run(
            prompt, count, {kind: constraint}, backend=self._engine
        ).ret_value
        return found


class GenLM:
    """Draws with GenLM-control."""

    def __init__(self, folder: str) -> None:
        import asyncio

        from genlm.control import PromptedLLM  # type: ignore[import-not-found] # the peer's Python

        self._loop = asyncio.new_event_loop()
        self._model = PromptedLLM.from_name(folder, backend="hf", eos_byte_strings=[b"\n"])

    def draw(
        self, prompt: str, constraint: Constraint, count: int
    ) -> tuple[list[str], list[float], float]:
        """Returns texts, their weights, and the effective sample size."""
        from genlm.control import AWRS, BoolFSA, JsonSchema

        self._model.set_prompt_from_str(prompt)
        whole = (
            BoolFSA.from_regex(constraint)
            if isinstance(constraint, str)
            else JsonSchema(constraint)
        )
        sampler = AWRS(self._model, whole.coerce(self._model, f=b"".join))
        sequences = self._loop.run_until_complete(
            sampler.smc(n_particles=count, ess_threshold=0.5, max_tokens=MAX_TOKENS)
        )
        texts = [
            b"".join(bytes(token) for token in context[:-1]).decode(errors="replace")
            for context in sequences.contexts
        ]
        weights = [float(weight) for weight in sequences.normalized_weights]
        return texts, weights, float(sequences.ess)


def measure(way: str, folder: str, count: int) -> dict[str, Any]:
    """Draws for all prompts twice, and returns what the second round took."""
    drawer = Ours(folder) if way == "ours" else GenLM(folder)
    found: dict[str, Any] = {}
    for _ in range(2):
        for domain, cases in DOMAINS.items():
            begun = time.perf_counter()
            drawn = [drawer.draw(prompt, constraint, count) for prompt, constraint in cases]
            seconds = time.perf_counter() - begun
            valid = [
                is_valid(constraint, text)
                for (_, constraint), (texts, weights, _) in zip(cases, drawn)
                for text, weight in zip(texts, weights)
                if weight > 0
            ]
            found[domain] = {
                "seconds": seconds,
                "valid": mean(valid),
                "size": mean(size / count for *_, size in drawn),
                "texts": [texts[:3] for texts, *_ in drawn],
            }
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--peer", help="a Python with genlm-control; ours alone without it")
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--way", choices=("ours", "genlm"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.way:
        print(json.dumps(measure(options.way, options.folder, options.count)))
        return
    pythons = {"ours": sys.executable} | ({"genlm": options.peer} if options.peer else {})
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in pythons}
    for _ in range(options.repeat):
        for way, python in pythons.items():
            command = [python, __file__, options.folder, "--way", way, "--count", options.count]
            done = subprocess.run(
                list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True
            )
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
    for domain in DOMAINS:
        for way, rounds in found.items():
            own = [each[domain] for each in rounds]
            print(
                f"{domain:8} {way:6} {median(each['seconds'] for each in own):8.2f} s   "
                f"valid {mean(each['valid'] for each in own):.3f}   "
                f"size {mean(each['size'] for each in own):.2f}   {own[0]['texts']}"
            )


if __name__ == "__main__":
    main()
