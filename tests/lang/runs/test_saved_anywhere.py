"""Random programs that are cut at a random line: what is saved, pickled or copied there is what was
there, and goes on as it would have gone on.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import decimal
import itertools
import os
import pickle
import uuid
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import pytest

import sglang_lite as sgl
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.text.chat_template import JinjaTemplate

COUNT = int(os.environ.get("SGLANG_LITE_CUTS", "150"))
NAMES = ("a", "b", "c", "d")
ROLES = ("user", "assistant", "system")
KINDS = ("text", "gen", "several", "thought", "select", "hand", "turn", "begin", "fork", "copy", "lost", "scope",
         "grammar", "inner", "image")  # fmt: skip
JINJA = "{% for m in messages %}[{{ m.role }}{{ loop.index }}]{{ m.content }}[/{{ m.role }}{{ loop.index }}]{% endfor %}"
JINJA += "{% if add_generation_prompt %}[assistant{{ messages|length + 1 }}]{% endif %}"
TEMPLATES = (
    get_chat_template("chatml"), get_chat_template("llama-2-chat"), get_chat_template("llama-3-instruct"),
    JinjaTemplate(JINJA),
)  # fmt: skip


class CutError(Exception):
    """The line at which a program is cut."""


class Point(NamedTuple):
    x: int
    y: decimal.Decimal


@dataclass
class Part:
    n: int
    double: int = field(init=False)

    def __post_init__(self) -> None:
        self.double = 2 * self.n


@dataclass
class Whole:
    parts: list[Part]
    at: Point


VALUES = (
    1, 2**80, -0.5, None, "é", "", [1, ["x"]], {"$type": "x"}, {1: (2, {3})}, b"\0\xff", Part(3),
    Whole([Part(1), Part(2)], Point(1, decimal.Decimal("2.50"))), datetime.timedelta(days=-1, microseconds=3),
    datetime.datetime(2026, 11, 28, tzinfo=datetime.UTC), uuid.UUID(int=7), Path("a/b"), 1 + 2j,
)  # fmt: skip


def answer(call: Any) -> str:
    """An answer that depends on all of the prompt, and on the seed."""
    number = zlib.crc32(repr((call.prompt.text, call.params and call.params.seed)).encode())
    if call.choices is not None:
        return str(call.choices[number % len(call.choices)])
    if call.constraint is not None:
        return "ab"
    return (
        f"<think>{number % 7}</think>{number}"
        if "think" in call.prompt.text[-6:]
        else f"<{number}>"
    )


class Cutting:
    """Plays random lines until the one at which the program is cut.

    Args:
        line: number of that line.
    """

    def __init__(self, draw: Random, line: int, at_cut: Any) -> None:
        self.draw, self.left, self.at_cut = draw, line, at_cut
        self.done = False

    def play(self, s: Any, depth: int = 0, turn: bool = False, within: str = "") -> None:
        for _ in range(self.draw.randint(1, 5) if depth else 12):
            if self.left == 0:
                self.done = True
                self.at_cut(s, within)
                raise CutError
            self.left -= 1
            self.step(s, self.draw.choice(KINDS), depth, turn, within)

    def step(self, s: Any, kind: str, depth: int, turn: bool, within: str) -> None:
        draw = self.draw
        name = draw.choice(NAMES)
        match kind:
            case _ if within == "grammar":
                s += sgl.gen(name, regex="ab")
            case "gen":
                s += sgl.gen(name)
            case "several":
                s += sgl.gen(name, n=2)
            case "thought":
                s += "think" + sgl.gen(name, reasoning="qwen3")
            case "select":
                s += sgl.select(name, ["left", "right"])
            case "hand":
                s[name] = draw.choice(VALUES)
            case "image":
                s += sgl.image(b"\x89PNG\r\n\x1a\n")
            case ("turn" | "begin") as how if not turn:
                role = draw.choice(ROLES[:2]) if s.messages() else draw.choice(ROLES)
                if how == "turn":
                    with getattr(s, role)():
                        self.play(s, depth + 1, turn=True, within=within)
                else:
                    s += getattr(sgl, f"{role}_begin")()
                    self.play(s, depth + 1, turn=True, within=within)
                    s += getattr(sgl, f"{role}_end")()
            case ("fork" | "copy" | "lost" | "scope" | "inner" | "grammar") as how if depth < 3:
                self.block(s, how, name, depth, turn, within)
            case _:
                s += draw.choice(("x ", "é", "<|im_end|>", "\n"))

    def block(self, s: Any, how: str, name: str, depth: int, turn: bool, within: str) -> None:
        match how:
            case "fork":
                group = s.fork(self.draw.randint(1, 3))
                for branch in group:  # a scope is its own branch's
                    self.play(branch, depth + 1, turn)
                if not turn:
                    group.join(self.draw.choice(("gather_variable", "concate_and_append")))
            case "copy":
                with s.copy() as branch:
                    self.play(branch, depth + 1, turn)
            case "lost":
                with s.checkpoint() as place:
                    self.play(s, depth + 1, turn, within)
                    place.rollback()
            case "scope":
                with s.var_scope(name):
                    self.play(s, depth + 1, turn, "scope")
            case "inner":
                s += inner(self, depth + 1, turn, within)
            case "grammar" if not turn:
                with s.grammar(sgl.Regex("(ab)*")):
                    self.play(s, depth + 2, True, "grammar")


@sgl.function
def inner(s, cutting, depth, turn, within):
    cutting.play(s, depth, turn, within)


@sgl.function
def program(s, cutting):
    cutting.play(s)
    cutting.at_cut(s, "")


def shown(state: Any) -> tuple[Any, ...]:
    """All that is read of a state."""

    def value(name: str) -> Any:
        try:
            return state[name], state.get_meta_info(name)
        except sgl.SglError as error:
            return str(error)

    names = list(state.branch.names.variables)
    return state.text(), state.messages(), [(name, value(name)) for name in names], state.ret_value


def go_on(state: Any, role: str | None) -> tuple[Any, ...]:
    """Adds to a state, and returns what is there then, and what its last call asked: but for a hint
    to caches, as a state that was saved no longer knows which turns its siblings have.
    """
    state += " more"
    if role is not None:
        state += sgl.gen("more")
        state += getattr(sgl, f"{role}_end")()
    state += sgl.user("And?") + sgl.assistant(sgl.gen("last"))
    last, asked = state["last"], state.branch.backend.calls[-1]
    return last, shown(state), msgspec.structs.replace(asked.prompt, shared=()), asked.params


def backend(template: Any) -> Any:
    found = sgl.ScriptedBackend(answer)
    found.chat_template = template
    return found


def states(state: Any, path: Path, template: Any, whole: Any) -> dict[str, Any]:
    """The state by each way of saving and copying. Those whose name has a star have a backend.

    Args:
        whole: the state's program, or None if it belongs to none.
    """
    state.save(path)
    found = {
        "load": sgl.load(path, types=[Whole]),
        "load*": sgl.load(path, types=[Whole], backend=backend(template)),
    }
    if whole is not None:
        found |= {
            "program": sgl.load(path, whole),
            "program*": sgl.load(path, whole, backend=backend(template)),
        }
    found |= {
        "pickle": pickle.loads(pickle.dumps(state)),
        "copy*": copy.copy(state),
        "deep*": copy.deepcopy(state),
    }
    for name in ("load", "pickle"):
        again = path.with_suffix(f".{name}")
        found[name].save(again)
        found[f"{name}, load*"] = sgl.load(again, whole, types=[Whole], backend=backend(template))
    found["load, pickle"] = pickle.loads(pickle.dumps(found["load"]))
    return found


def check(
    state: Any, within: str, path: Path, template: Any, counts: Counter[str], whole: Any = program
) -> None:
    """Compares the ways of saving a state, at the line at which its program is cut."""
    if within:
        for save in (
            lambda: state.save(path),
            lambda: pickle.dumps(state),
            lambda: copy.deepcopy(state),
        ):
            with pytest.raises(
                sgl.ProgramError, match=f"the state can't be saved while .*{within}.*is open"
            ):
                save()
        counts[within] += 1
        return
    if whole is not None:
        check_fork(state, path, template, counts)
    before, turn = shown(state), state.branch.player.transcript.turn
    role = turn and turn[0]
    found = states(state, path, template, whole)
    for way, other in found.items():
        assert shown(other) == before, way
        assert other.restored == "text" or way.startswith(("copy", "deep")), way
    ways = [(way, other, go_on(other, role)) for way, other in found.items() if way.endswith("*")]
    after = go_on(state, role)
    for way, _, gone_on in ways:
        assert gone_on == after, way
    suffix = "" if role is None else template.get_prefix_and_suffix(role, before[1])[1]
    for way, other in found.items():
        if not way.endswith("*"):
            other += " more"
            if role is not None:
                other += getattr(sgl, f"{role}_end")()
            assert other.text() == f"{before[0]} more{suffix}", way
            other += sgl.gen("never")
            with pytest.raises(sgl.CapabilityError, match=r"loaded without a backend.*backend=…"):
                other["never"]
    counts[f"{role} open" if role else "no turn open"] += whole is not None


def check_fork(state: Any, path: Path, template: Any, counts: Counter[str]) -> None:
    """Does so for a state that continues from an earlier node, too."""
    for name in NAMES:
        with contextlib.suppress(sgl.ParameterError):  # no node of the text set it
            (earlier,) = state.fork_at(name)
            state.save(path)
            (loaded,) = sgl.load(path, types=[Whole]).fork_at(name)
            assert shown(loaded) == shown(earlier)
            check(earlier, "", path, template, counts, None)
            with pytest.raises(
                sgl.ProgramError, match=r"belongs to no program, .* Load it without a program"
            ):
                sgl.load(path, program)
            counts["forks"] += 1
            return


@pytest.mark.parametrize("part", range(5))
def test_what_is_cut_anywhere_is_what_it_was(part, tmp_path):
    counts = Counter[str]()
    for seed in range(part, COUNT, 5):
        draw = Random(seed)
        template, numbers = draw.choice(TEMPLATES), itertools.count()

        def at_cut(s, within, template=template, seed=seed, numbers=numbers):
            check(s, within, tmp_path / f"{seed}-{next(numbers)}.json", template, counts)

        cutting = Cutting(draw, draw.randint(0, 20), at_cut)
        settings = {"seed": draw.choice((None, 3)), "backend": backend(template)}
        try:
            with contextlib.suppress(CutError):
                program.run(cutting, **settings)
        except Exception as error:
            raise AssertionError(f"the program of seed {seed}") from error
    assert counts.pop("forks") > 3
    assert sum(counts.values()) == len(range(part, COUNT, 5))
    assert len(counts) > 3
