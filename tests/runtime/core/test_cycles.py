"""Requests, programs and grammars that ended are freed as their last event is read: nothing waits
for the collector.

An engine sends few objects to the collector, and its caches slow the full collections down. So a
cycle keeps the native memory of a hundred matchers for minutes.
"""

import gc

import pytest

import sglang_lite as sgl

# compiling leaves small Python objects
PER_REQUEST = ("sglang_lite.runtime", "sglang_lite.engine", "sglang_lite.lang")
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


@sgl.function
def text(s):
    s += "Hello " + sgl.gen("a", max_tokens=4)


@sgl.function
def stopped(s):
    s += "Hello " + sgl.gen("a", max_tokens=8, stop=["e", "a"])


@sgl.function
def pattern(s, n):
    s += "Hello " + sgl.gen("a", regex=rf"[a-z]{{3,{n}}} (cat|dog)", max_tokens=12)


@sgl.function
def cut(s, n):
    s += "Hello " + sgl.gen("a", json_schema=POINT | {"title": str(n)}, max_tokens=3)


@sgl.function
def selected(s):
    s += "Hello " + sgl.select("a", ["one", "two words", "three"])


@sgl.function
def forked(s):
    s += "Hello "
    for branch in s.fork(2):
        branch += sgl.gen("a", max_tokens=3) + sgl.select("b", ["x", "yes"])


@sgl.function
def refused(s, n):
    s += "Hello " + sgl.gen("a", regex=f"(unclosed{n}", max_tokens=3)


def kinds_left(run, engine):
    """The package's classes of what only the collector would free after a run."""
    gc.collect()
    gc.disable()
    try:
        for number in range(4, 8):
            run(engine, number)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return sorted(
            {
                type(each).__qualname__
                for each in gc.garbage
                if type(each).__module__.startswith(PER_REQUEST)
            }
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def played(program, **arguments):
    def run(engine, number):
        given = dict.fromkeys(arguments, number)
        program.run(backend=engine, **given).text()

    return run


def failed(engine, number):
    with pytest.raises(sgl.SglError):
        refused.run(number, backend=engine).text()


def called(engine, number):
    """Through the engine itself, with a name."""
    engine.generate("Hello", {"max_new_tokens": number})


RUNS = {
    "text": played(text), "stopped": played(stopped), "pattern": played(pattern, n=True), "cut": played(cut, n=True),
    "selected": played(selected), "forked": played(forked), "called": called, "failed": failed,
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS.values(), ids=list(RUNS))
def test_nothing_waits_for_the_collector(run, small_engine):
    run(small_engine, 3)  # what is made once
    assert kinds_left(run, small_engine) == []
