"""What is added to a state after its run is streamed, also if the run was not."""

import asyncio
import threading
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.concurrency.loop import executor
from tests.lang.fakes import Pieces, within

WORDS = "one two three four"
MORE: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


@sgl.function
def program(s):
    s += "Say: "
    s += sgl.gen("a") + "; " + sgl.select("b", ["yes", "no"])


def backend(**options):
    return sgl.ScriptedBackend({"Say": WORDS, ";": "yes"}, **options)


@pytest.mark.parametrize("asks", ["a variable", "the text"])
def test_what_is_added_after_a_run_without_stream_comes_in_pieces(asks):
    model = Pieces("one", " two", stepped=True)
    state = sgl.function(lambda s: s.__iadd__("x")).run(backend=model)
    state += ": " + sgl.gen("a")
    pieces = iter(state.text_iter("a" if asks == "a variable" else None))
    model.step()
    found = []
    while "one" not in found:
        found.append(within(10, lambda: next(pieces)))
    model.step()
    assert "".join([*found, *pieces]) == ("one two" if asks == "a variable" else "x: one two")
    assert state.text() == "x: one two"


def test_a_coroutine_streams_what_is_added_after_a_run_without_stream():
    async def read():
        state = await sgl.function(lambda s: s.__iadd__("x")).arun(backend=Pieces("one", " two"))
        state += ": " + sgl.gen("a")
        texts = [piece async for piece in state.text_async_iter()]
        return texts, [piece async for piece in state.text_async_iter("a")]

    assert asyncio.run(read()) == (["x", ": ", "one", " two"], ["one", " two"])


def test_a_stream_after_a_run_ends_with_what_was_added_until_then():
    state = program.run(backend=backend())
    state += " Say: " + sgl.gen("c")
    before = state.text_iter()
    assert next(before)
    text = state.text()
    state += "!"
    assert "".join(state.text_iter()) == text + "!"


def test_a_rollback_after_a_run_takes_back_what_a_stream_showed():
    state = program.run(backend=backend())
    with state.checkpoint() as place:
        state += " Say: " + sgl.gen("c")
        assert "".join(state.text_iter()) == f"Say: {WORDS}; yes Say: {WORDS}"
        place.rollback()
    assert list(state.text_iter()) == [f"Say: {WORDS}; yes"]
    state += "!"
    assert "".join(state.text_iter()) == f"Say: {WORDS}; yes!"


def test_a_stream_after_a_run_raises_the_error_of_what_was_added():
    state = sgl.function(lambda s: s.__iadd__("x")).run(
        backend=Pieces("one", sgl.OverloadedError("down."))
    )
    state += sgl.gen("a")
    for name in (None, "a"):
        with pytest.raises(sgl.OverloadedError, match=r"down\."):
            list(state.text_iter(name))


def test_branches_that_are_forked_after_a_run_are_streamed():
    state = sgl.function(lambda s: s.__iadd__("x")).run(backend=Pieces("one", " two"))
    fork = state.fork(2)
    fork += ": " + sgl.gen("a")
    assert [list(branch.text_iter()) for branch in fork] == [["x", ": ", "one", " two"]] * 2
    fork.join("concate_and_append")
    assert list(state.text_iter()) == ["x", ": one two", ": one two"]


@pytest.mark.parametrize("push_down", [True, False])
def test_an_engine_streams_what_is_added_after_a_run_whether_its_nodes_are_played_or_not(
    folders, push_down
):
    @sgl.function
    def counting(s):
        fork = s.fork(2)
        fork += "a" + sgl.gen("x", check=lambda text: True, **MORE) + " b" + sgl.gen("y", **MORE)
        s += "c" + sgl.gen("z", retries=1, **MORE) + " d" + sgl.gen("u", **MORE)
        return fork

    def texts(state, wait):
        if wait:
            state.usage()
        state.ret_value.join("concate_and_append")
        state += " e" + sgl.gen("v", **MORE)
        state.ret_value[0] += " f" + sgl.gen("w", **MORE)
        pieces = list(state.text_iter("v")), list(state.ret_value[0].text_iter("w"))
        assert not wait or min(map(len, pieces)) > 1
        assert "".join(state.text_iter()) == state.text()
        with state.checkpoint() as place:
            for _ in range(2):
                state += sgl.gen("gone", **MORE)
                place.rollback()
        state += sgl.gen("last", **MORE)
        return state.text(), state.ret_value[0].text(), *map("".join, pieces)

    with sgl.Engine(
        folders[0], dtype="float32", threads=1, deterministic=True, in_process=True
    ) as engine:
        run = {"backend": LocalBackend(engine), "temperature": 0, "push_down": push_down}
        assert texts(counting.run(**run), wait=False) == texts(counting.run(**run), wait=True)


@pytest.mark.parametrize("what", ["an answer", "a check", "a branch"])
def test_what_is_added_while_nodes_of_the_body_are_played_comes_in_pieces(folders, what):
    added = threading.Event()
    letters = sgl.gen("y", regex="[a-z]{20}")  # more than a token, and nothing of it is forced

    @sgl.function
    def waiting(s):
        """Its `what` is only there when all has been added."""
        fork = s.fork(1)
        if what == "an answer":
            executor().post(added.wait, 60)  # the loop that takes it
        check = None if what == "an answer" else lambda text: added.wait(60)
        branch = fork[0] if what == "a branch" else s
        branch += "a" + sgl.gen("x", check=check, **MORE)
        fork.join()

    with sgl.Engine(folders[0], dtype="float32", threads=1, in_process=True) as engine:
        state = waiting.run(backend=LocalBackend(engine))
        state += " b" + letters
        branch = state.fork(1)[0]
        branch += " c" + letters
        added.set()
        for each in (state, branch):
            pieces = list(each.text_iter("y"))
            assert len(pieces) > 1
            assert "".join(pieces) == each["y"]
            assert "".join(each.text_iter()) == each.text()
