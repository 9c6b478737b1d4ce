"""Streams are replayable: any number of readers, early or late, of the text or of a variable."""

import asyncio
import threading

import pytest

import sglang_lite as sgl

WORDS = "one two three four"


@sgl.function
def program(s):
    s += "Say: "
    s += sgl.gen("a") + "; " + sgl.select("b", ["yes", "no"])


def backend(**options):
    return sgl.ScriptedBackend({"Say": WORDS, ";": "yes"}, **options)


def test_the_whole_text_and_a_variable_arrive_in_pieces():
    state = program.run(stream=True, backend=backend(latency=0.01))
    assert list(state.text_iter("a")) == ["one", " two", " three", " four"]
    assert "".join(state.text_iter()) == f"Say: {WORDS}; yes"
    assert list(state.text_iter("b")) == ["yes"]
    assert list(state.text_iter("a")) == ["one", " two", " three", " four"]  # again, and late


def test_many_readers_in_threads_all_get_everything():
    state = program.run(stream=True, backend=backend(latency=0.02))
    got = []
    threads = [threading.Thread(target=lambda: got.append("".join(state.text_iter()))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert got == [f"Say: {WORDS}; yes"] * 20


def test_without_stream_the_text_comes_in_one_piece():
    state = program.run(backend=backend())
    assert list(state.text_iter()) == [f"Say: {WORDS}; yes"]
    assert list(state.text_iter("a")) == [WORDS]


def test_coroutines_read_too_and_the_loop_is_not_blocked():
    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        state = program.run(stream=True, backend=backend(latency=0.1))
        pieces = [piece async for piece in state.text_async_iter("a")]
        whole = "".join([piece async for piece in state.text_async_iter()])
        meta = [pair async for pair in state.text_async_iter("a", return_meta_data=True)]
        ticking.cancel()
        return pieces, whole, meta, ticks

    pieces, whole, meta, ticks = asyncio.run(main())
    assert pieces == ["one", " two", " three", " four"]
    assert whole == f"Say: {WORDS}; yes"
    assert [text for text, _ in meta] == pieces
    assert ticks > 5


def test_coroutines_without_stream():
    async def main():
        state = program.run(backend=backend())
        return (
            [p async for p in state.text_async_iter()],
            [p async for p in state.text_async_iter("a")],
            [p async for p in state.text_async_iter("a", return_meta_data=True)],
        )

    whole, one, meta = asyncio.run(main())
    assert (whole, one) == ([f"Say: {WORDS}; yes"], [WORDS])
    assert meta[0][1]["completion_tokens"] == 4


def test_a_name_that_is_declared_later_is_waited_for():
    ready = threading.Event()

    @sgl.function
    def late(s):
        ready.wait(5)
        s += sgl.gen("a")
        s["set"] = 3

    state = late.run(stream=True, backend=sgl.ScriptedBackend(default="x y"))
    got = []
    reader = threading.Thread(
        target=lambda: got.extend([list(state.text_iter("a")), state["a"], list(state.text_iter("set"))])
    )
    reader.start()
    ready.set()
    reader.join(5)
    assert got == [["x", " y"], "x y", ["3"]]


def test_a_name_that_never_comes_ends_in_an_error():
    state = sgl.function(lambda s: s.__iadd__("x")).run(stream=True, backend=backend())
    with pytest.raises(sgl.UnknownVariableError):
        state["nothing"]
    with pytest.raises(sgl.UnknownVariableError):
        list(state.text_iter("nothing"))


def test_a_failure_is_raised_after_what_came_before_it():
    @sgl.function
    def failing(s):
        s += "fine " + sgl.gen("a") + "then" + sgl.gen("b")

    script = sgl.ScriptedBackend({"fine": "text", "then": OSError("gone")})
    state = failing.run(stream=True, backend=script)
    pieces = []
    with pytest.raises(sgl.ProgramError, match="OSError: gone"):
        pieces.extend(state.text_iter())
    pieces = []
    with pytest.raises(sgl.ProgramError, match="gone"):
        for piece in state.text_iter():
            pieces.append(piece)
    assert "".join(pieces) == "fine textthen"
    assert list(state.text_iter("a")) == ["text"]
    with pytest.raises(sgl.ProgramError, match="gone"):
        list(state.text_iter("b"))


def test_an_exception_in_a_streaming_body_is_raised_where_it_is_read():
    @sgl.function
    def failing(s):
        s += "x" + sgl.gen("a")
        s["a"]
        raise LookupError("mine")

    state = failing.run(stream=True, backend=sgl.ScriptedBackend(default="y"))
    with pytest.raises(sgl.ProgramError, match="LookupError: mine") as caught:
        list(state.text_iter())
    assert caught.value.where.line == failing.func.__code__.co_firstlineno + 4
    assert state["a"] == "y"
    assert isinstance(state.error(), sgl.ProgramError)


def test_a_backend_that_does_not_stream_is_read_in_one_piece():
    class Whole(sgl.ScriptedBackend):
        async def agenerate(self, prompt, params, constraint, *, stream):
            async for event in super().agenerate(prompt, params, constraint, stream=False):
                yield event

    state = program.run(stream=True, backend=Whole({"Say": WORDS, ";": "no"}))
    assert list(state.text_iter("a")) == [WORDS]
