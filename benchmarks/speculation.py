"""Speculation: tokens that a step gives a row, and time, with and without drafts; time of a step by
its tokens; time of a guess.

    python benchmarks/speculation.py [--only tokens | times | steps | guesses | quotes] [--work NAME
    …] …

"tokens" runs one request after another with drafts of full length, and does not depend on the load
of the machine: tokens of the answers over the steps of the engine. "times" is of the same work with
drafts as long as they pay, medians of pairs by turns, and of free chats all at once. "steps" is
of one row whose drafts are always wrong, so that each step gives one token. All with the default
model. Where a step has more tokens, bfloat16 is rounded otherwise, so the number of equal answers
is told, too. "guesses" is of each drafter after 10,000 outputs of 500 tokens, in processor time of
its thread. "quotes" is of lists of passages from a text in the prompt, in processor time of the
process, by turns with `gen(speculation=False)`, each with a new engine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import machine
import numpy as np

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema
from sglang_lite.protocol import Constraint, Generation, SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.drafting.drafting import StepCost
from sglang_lite.runtime.drafting.guess import Guess, Guesser
from sglang_lite.runtime.drafting.registry import DRAFTERS
from sglang_lite.runtime.requests.output_builder import DraftProgress

FIELDS = {
    "full_name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "home_city": {"type": "string", "maxLength": 30}, "occupation": {"type": "string", "maxLength": 30},
    "is_married": {"type": "boolean"}, "preferred_contact": {"enum": ["email", "phone", "letter"]},
}  # fmt: skip
PERSON = json_schema(
    {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
)
FIRST = [
    "Maria",
    "Tom",
    "Aisha",
    "Jean",
    "Clara",
    "Marco",
    "Ingrid",
    "Wei",
    "Olu",
    "Priya",
    "Lars",
    "Elena",
]
LAST = [
    "Lopez",
    "Baker",
    "Khan",
    "Petit",
    "Bauer",
    "Rossi",
    "Lindqvist",
    "Zhang",
    "Adeyemi",
    "Sharma",
    "Olsen",
    "Popova",
]
CITIES = [
    "Graz",
    "Leeds",
    "Turin",
    "Lyon",
    "Oslo",
    "Bath",
    "Porto",
    "Ghent",
    "Utrecht",
    "Kiel",
    "Lagos",
    "Pune",
]
JOBS = [
    "baker",
    "nurse",
    "teacher",
    "carpenter",
    "software engineer",
    "goalkeeper",
    "violinist",
    "bus driver",
]
FORMS = [
    "{first} {last}, {age}, is a {job} from {city}. {pronoun} is {married} and wants to be reached by {contact}.",
    "Interview with {first} {last} ({age}), who works as a {job} in {city}. Contact by {contact}; {married}.",
    "The {job} {first} {last} moved to {city} last year. At {age}, {pronoun} is {married}. Write by {contact}.",
    "In {city} lives a {job} named {first} {last}. {pronoun} turned {age} in May, is {married}, prefers {contact}.",
]
STORY = (
    "The lighthouse on the northern cape was built in 1873 by Henrik Dahl, a mason from Bergen. For ninety years its "
    "lamp was tended by the same family, who lived in the stone cottage below. In winter the road was closed for "
    "weeks, and supplies came by boat whenever the sea allowed it. Today the lamp is electric, the cottage is a small "
    "museum, and visitors climb the spiral stairs to see the whales pass in spring."
)
CHANGES = [
    ("Henrik Dahl", "Peter Holm"),
    ("1873", "1901"),
    ("Bergen", "Tromso"),
    ("whales", "ships"),
]
QUESTIONS = [
    "What is a heat pump?", "Write a short poem about rain.", "Name three uses of salt.", "Why is the sky blue?",
    "How do I boil an egg?", "What did the Romans eat?", "Tell me a joke about cats.", "How far away is the moon?",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """A question, and how it is answered."""

    prompt: str
    params: SamplingParams
    constraint: Constraint | None = None


def documents(count: int) -> list[str]:
    """Short texts about people, the same in each run."""
    dice, found = random.Random(5), list[str]()
    for i in range(count):
        pronoun = dice.choice(["He", "She"])
        found.append(FORMS[i % len(FORMS)].format(
            first=dice.choice(FIRST), last=dice.choice(LAST), age=dice.randrange(18, 90), job=dice.choice(JOBS),
            city=dice.choice(CITIES), married=dice.choice(["married", "single"]), pronoun=pronoun,
            contact=dice.choice(["email", "phone", "letter"]),
        ))  # fmt: skip
    return found


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def extraction(temperature: float, count: int) -> list[Ask]:
    return [
        Ask(chat(f"Extract the person as JSON: {text}"), params(temperature, seed, 200), PERSON)
        for seed, text in enumerate(documents(count))
    ]


def rewriting(count: int) -> list[Ask]:
    return [
        Ask(
            chat(f"{STORY}\n\nRepeat this text word for word, but write {new} instead of {old}."),
            params(0, 0, 160),
        )
        for old, new in CHANGES[:count]
    ]


def chats(temperature: float, first_seed: int, count: int, answer: int) -> list[Ask]:
    asked = [
        QUESTIONS[i % len(QUESTIONS)] + f" Answer number {i // len(QUESTIONS) + 1}."
        for i in range(count)
    ]
    return [
        Ask(chat(text), params(temperature, first_seed + i, answer)) for i, text in enumerate(asked)
    ]


def passages(count: int, *, drafts: bool) -> list[Ask]:
    """Lists of passages of a text, each a little different from the others."""
    found = []
    for old, new in CHANGES[:count]:
        text = STORY.replace(old, new)
        quote = {"type": "string", "x-quote": text}
        schema = json_schema({"type": "array", "items": quote, "minItems": 3, "maxItems": 4})
        prompt = chat(f"{text}\n\nQuote the sentences of this text as a JSON list.")
        found.append(
            Ask(
                prompt,
                SamplingParams(temperature=0, seed=0, max_tokens=200, speculation=drafts),
                schema,
            )
        )
    return found


def params(temperature: float, seed: int, tokens: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens)


# ------------------------------------------------------------------------------------------ running


@dataclass(frozen=True, slots=True)
class Run:
    """Answers, and what they took. `steps` is of one row at a time."""

    answers: list[Generation]
    steps: int
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(answer.usage.completion_tokens for answer in self.answers)


def run(engine: sgl.Engine, asked: Sequence[Ask], *, together: bool = False) -> Run:
    """Runs questions one after another, or all at once."""
    for each in asked:
        if each.constraint is not None:
            engine.compile_grammar(each.constraint)
    before, began = engine.stats()["steps"], time.perf_counter()
    if together:
        futures: list[Future[Any]] = [Future() for _ in asked]
        for each, future in zip(asked, futures):
            engine.submit(each.prompt, each.params, each.constraint, sink=future.set_result)
        answers = [future.result() for future in futures]
    else:
        answers = [engine.complete(each.prompt, each.params, each.constraint) for each in asked]
    seconds = time.perf_counter() - began
    return Run(answers, engine.stats()["steps"] - before, seconds)


def tokens(
    work: Mapping[str, Sequence[Ask]],
    settings: Mapping[str, Any],
    drafted: Mapping[str, Any],
    *,
    again: Sequence[str],
) -> None:
    """Prints tokens a step. Work named in `again` comes after that before it, on the same engine."""
    print(
        "| work | tokens a step | with drafts | equal answers "
        "| again, node, state, prompt, grammar: right / drafted |\n"
        "|---|---|---|---|---|"
    )
    off = sgl.Engine(**settings)
    on: sgl.Engine | None = None
    for name, asked in work.items():
        if on is None or name not in again:
            if on is not None:
                on.shutdown()
            on = with_all_drafts(**settings, **drafted)
        plain = run(off, asked)
        before, found, after = on.stats()["drafters"], run(on, asked), on.stats()["drafters"]
        counts = [
            " / ".join(
                str(after[name][what] - before[name][what]) for what in ("accepted", "drafted")
            )
            for name in after
        ]
        same = sum(a.token_ids == b.token_ids for a, b in zip(plain.answers, found.answers))
        rates = [each.tokens / each.steps for each in (plain, found)]
        print(
            f"| {name} | {rates[0]:.2f} | {rates[1]:.2f} | {same} of {len(asked)} | {', '.join(counts)} |",
            flush=True,
        )
    off.shutdown()
    if on is not None:
        on.shutdown()


def with_all_drafts(**settings: Any) -> sgl.Engine:
    """Engine that computes drafts of full length, whether they pay or not: what pays depends on the
    machine's load.
    """
    engine = sgl.Engine(**settings, in_process=True)
    engine.core.scheduler.drafts.drafting.cost = Free()  # type: ignore[attr-defined]  # in this process
    return engine


def times(
    work: Mapping[str, Sequence[Ask]],
    rounds: int,
    settings: Mapping[str, Any],
    drafted: Mapping[str, Any],
) -> None:
    """Prints the time without drafts over that with them. Each pair has new engines, which remember
    nothing.
    """
    print("| work | time without / with drafts, by pairs |\n|---|---|")
    for name, asked in work.items():
        ratios = []
        for i in range(rounds):
            seconds = {}
            for extra in (({}, drafted), (drafted, {}))[i % 2]:
                with sgl.Engine(**settings, **extra) as engine:
                    run(engine, [Ask("Hello", params(0, 0, 8))])
                    seconds[bool(extra)] = run(engine, asked, together="at once" in name).seconds
            ratios.append(seconds[False] / seconds[True])
        each = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
        print(f"| {name} | {statistics.median(ratios):.2f} ({each}) |", flush=True)


def quotes(count: int, rounds: int, settings: Mapping[str, Any]) -> None:
    """Prints the processor time of quotes without drafts over that with them, and tokens a step."""
    ratios: list[float] = []
    runs: dict[bool, Run] = {}
    for i in range(rounds):
        seconds = {}
        for drafts in ((False, True), (True, False))[i % 2]:
            with sgl.Engine(**settings, in_process=True) as engine:
                run(engine, [Ask("Hello", params(0, 0, 8))])
                began = time.process_time()
                runs[drafts] = run(engine, passages(count, drafts=drafts))
                seconds[drafts] = time.process_time() - began
        ratios.append(seconds[False] / seconds[True])
    same = sum(a.token_ids == b.token_ids for a, b in zip(runs[False].answers, runs[True].answers))
    each = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
    print(
        "| work | processor time without / with drafts, by pairs | tokens a step, without | with | equal answers |\n"
        "|---|---|---|---|---|\n"
        f"| quotes | {statistics.median(ratios):.2f} ({each}) | {runs[False].tokens / runs[False].steps:.2f} "
        f"| {runs[True].tokens / runs[True].steps:.2f} | {same} of {len(runs[True].answers)} |"
    )


class Wrong:
    """A drafter that is always wrong, as far as the default model is concerned."""

    name = "prompt"

    def can_draft(self, *_: object) -> bool:
        return True

    def make_guesser(self, *_: object) -> Guesser:
        return lambda text, state: Guess(11, 0)

    def learn_tokens(self, *_: object) -> None:
        pass


class Free(StepCost):
    """Cost of steps that drafts add nothing to, so that all are computed."""

    def estimate_seconds(self, tokens: int) -> float:
        return 1.0


def steps(rounds: int, settings: Mapping[str, Any]) -> None:
    """Prints the time of a step of several tokens of one row, over that of one token."""
    print("| tokens of a row | step / step of one token, by rounds |\n|---|---|")
    asked = [Ask(chat(QUESTIONS[0]), params(0, 0, 64))]
    seconds: dict[int, list[float]] = {1: [], 4: [], 8: []}
    for i in range(rounds):
        for count in sorted(seconds, reverse=i % 2 == 1):
            drafted: dict[str, Any] = (
                {} if count == 1 else {"speculation": "prompt", "draft_tokens": count - 1}
            )
            make = partial(sgl.Engine, in_process=True) if count == 1 else with_all_drafts
            with (
                mock.patch.dict(DRAFTERS, prompt=lambda _: Wrong()),
                make(**settings, **drafted) as engine,
            ):
                run(engine, asked)
                taken = run(engine, asked)
            assert taken.tokens == taken.steps == 64
            seconds[count].append(taken.seconds)
    for count in (4, 8):
        ratios = sorted(several / one for several, one in zip(seconds[count], seconds[1]))
        print(
            f"| {count} | {statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)}) |"
        )


def guesses(outputs: int = 10_000, length: int = 500) -> None:
    """Prints the time of a guess of each drafter, which has seen outputs made of 400 pieces of 25
    tokens.
    """
    dice = random.Random(0)
    pieces = [[dice.randrange(50_000) for _ in range(25)] for _ in range(400)]
    texts = [
        [token for _ in range(length // 25) for token in dice.choice(pieces)]
        for _ in range(outputs)
    ]
    print(
        "| drafter | us to take note of a token | us a proposal | asked for | made |\n|---|---|---|---|---|"
    )
    for name, make in DRAFTERS.items():
        drafter, asked, made, seconds = make(EngineConfig()), 0, 0, 0.0
        output = SimpleNamespace(
            draft=DraftProgress(), origin="node", matcher=SimpleNamespace(state_key=1)
        )
        request: Any = SimpleNamespace(
            output=output, space=SimpleNamespace(namespace=""),
            tokens=np.zeros(1, dtype=np.int32), prompt_len=1,
        )  # fmt: skip
        began = time.thread_time()
        for text in texts:
            drafter.learn_tokens(request, text, 0)
        learned = (time.thread_time() - began) / (outputs * length)
        for text in texts[-200:]:
            for at in range(20, length, 40):
                known = np.array(text[:at], dtype=np.int32)
                began = time.thread_time()
                guesser, tail = (
                    drafter.make_guesser(request, known, lambda _: 0.5),
                    text[at - 16 : at],
                )
                for _ in range(8):
                    asked += 1
                    if (guess := guesser(tail, 1)) is None:
                        break
                    tail.append(guess.token)
                    made += 1
                seconds += time.thread_time() - began
        print(
            f"| {name} | {1e6 * learned:.1f} | {1e6 * seconds / asked:.1f} | {asked:,} | {made:,} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["tokens", "times", "steps", "guesses", "quotes"])
    parser.add_argument("--work", nargs="*", default=["extraction", "rewriting", "again"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--answer", type=int, default=96, help="tokens of an answer to a question")
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(machine.describe(), end="\n\n")
    count, settings = options.requests, {"dtype": options.dtype, "device": "cpu"}
    drafted = {"speculation": "auto", "draft_tokens": options.draft_tokens}
    work: dict[str, list[Ask]] = {}
    if "extraction" in options.work:
        work |= {f"extraction, T {t:g}": extraction(t, count) for t in (0, 0.8)}
    if "rewriting" in options.work:
        work["rewriting"] = rewriting(count)
    again = {
        "chats, T 0.3": chats(0.3, 0, count, options.answer),
        "chats again, other seeds": chats(0.3, 1000, count, options.answer),
        "chats again, same seeds": chats(0.3, 0, count, options.answer),
    }
    if options.only in (None, "tokens"):
        everything = work | again if "again" in options.work else work
        tokens(everything, settings, drafted, again=[*again][1:])
    if options.only in (None, "times"):
        at_once = {f"{count} chats at once": chats(0.8, 0, count, options.answer)}
        times(work | at_once, options.rounds, settings, drafted)
    if options.only in (None, "steps"):
        steps(options.rounds, settings)
    if options.only in (None, "guesses"):
        guesses()
    if options.only in (None, "quotes"):
        quotes(options.requests, options.rounds, settings | {"draft_tokens": options.draft_tokens})


if __name__ == "__main__":
    main()
