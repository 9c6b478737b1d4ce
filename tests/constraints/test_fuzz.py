"""Whatever is given as a constraint gets an answer: it is taken, or refused by an error of ours,
within its limits.

SGLANG_LITE_FUZZ=10000 takes so many mutations.
"""

import contextlib
import os
import random
import signal
from functools import lru_cache

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import SglError
from tests.children import in_a_child
from tests.constraints import mutations

COUNT = int(os.environ.get("SGLANG_LITE_FUZZ", "150"))
LIMIT_S = 20  # on the CPU: what is compiled and looked at several times, each within an engine's 10
PART = 500  # of a process
LONGEST = 200  # of the texts that are walked: each of their characters may take a millisecond

TEXTS = [
    "",
    "1",
    "a",
    '"a"',
    "null",
    "[]",
    '{"a": 1}',
    "[1, 1]",
    "1" * 400,
    "[" * 950 + "]" * 950,
    '"\\ud800"',
]


@lru_cache(maxsize=1)
def schemas():
    return mutations.schemas()


def answered(constraint, rng):
    report = sgl.grammar.check(constraint)
    texts = [*rng.sample(TEXTS, 3), (report.example or "")[:LONGEST]]
    for text in texts:
        for ask in (sgl.grammar.matches, sgl.grammar.validate):
            with contextlib.suppress(SglError):
                ask(constraint, text)


@pytest.mark.parametrize("part", range(-(-COUNT // PART)))
def test_every_mutation_gets_an_answer(part):
    in_a_child(every_mutation_gets_an_answer, part * PART, min(COUNT, (part + 1) * PART))


def every_mutation_gets_an_answer(first, last):
    """In a child: the clock's signal interrupts it."""
    signal.signal(signal.SIGPROF, too_long)
    for seed in range(first, last):
        rng = random.Random(seed)
        constraint = None
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            constraint = mutations.mutated(rng, schemas())
            answered(constraint, rng)
        except SglError:
            pass
        except BaseException as error:
            raise AssertionError(
                f"{seed}: {error!r} for {mutations.printable(constraint)}"
            ) from error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def too_long(*_):
    raise TimeoutError
