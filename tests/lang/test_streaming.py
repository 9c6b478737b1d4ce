"""Streams are replayable: any number of readers, early or late, of the text or of a variable."""

import asyncio
import itertools
import json
import random
import threading
from dataclasses import dataclass

import pytest

import sglang_lite as sgl
from sglang_lite.lang.concurrency.variables import Variable
from sglang_lite.protocol import Delta
from tests.lang.fakes import Gated, Pieces, line_here, with_logprob, within
from tests.waiting import until

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
    threads = [
        threading.Thread(target=lambda: got.append("".join(state.text_iter()))) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [f"Say: {WORDS}; yes"] * 20


def test_without_stream_the_text_comes_in_one_piece():
    state = program.run(backend=backend())
    assert list(state.text_iter()) == [f"Say: {WORDS}; yes"]
    assert list(state.text_iter("a")) == [WORDS]


def test_coroutines_read_too_and_the_loop_is_not_blocked():
    @sgl.function
    def program(s):
        s += "Say: " + sgl.gen("a") + "."

    async def main():
        backend = Pieces("one", " two", " three", stepped=True)
        state = program.run(stream=True, backend=backend)
        read = []

        async def steps():  # a piece comes only where the loop runs on while a reader waits
            backend.step()
            for count in (1, 2):
                while len(read) < count:
                    await asyncio.sleep(0)
                backend.step()

        stepping = asyncio.ensure_future(steps())
        async for piece in state.text_async_iter("a"):
            read.append(piece)
        await stepping
        whole = "".join([piece async for piece in state.text_async_iter()])
        return (
            read,
            whole,
            [pair async for pair in state.text_async_iter("a", return_meta_data=True)],
        )

    pieces, whole, meta = within(5, lambda: asyncio.run(main()))
    assert pieces == ["one", " two", " three"]
    assert whole == "Say: one two three."
    assert [text for text, _ in meta] == pieces


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
        ready.wait()
        s += sgl.gen("a")
        s["set"] = 3

    state = late.run(stream=True, backend=sgl.ScriptedBackend(default="x y"))
    got = []
    reader = threading.Thread(
        target=lambda: got.extend(
            [list(state.text_iter("a")), state["a"], list(state.text_iter("set"))]
        )
    )
    reader.start()
    ready.set()
    reader.join()
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


def test_the_stream_of_a_name_is_that_of_its_value():
    """Not of an earlier value of the name, nor of another branch's."""

    @sgl.function
    def program(s):
        s += "1" + sgl.gen("hand") + sgl.gen("copied") + sgl.gen("joined") + sgl.gen("kept")
        s["hand"] = "mine"
        with s.copy() as branch:
            branch += "2" + sgl.gen("copied")
        branches = s.fork(2)
        branches += "3" + sgl.gen("joined")
        branches.join()
        return branches[0]

    state = program.run(
        backend=sgl.ScriptedBackend({"1": "a b", "2": "c d", "3": "e"}), stream=True
    )
    assert state.error() is None
    assert list(state.text_iter("hand")) == ["mine"]
    assert list(state.text_iter("copied")) == ["c", " d"]
    assert list(state.text_iter("joined")) == ["['e', 'e']"]
    assert list(state.ret_value.text_iter("kept")) == ["a", " b"]

    async def read(name):
        return [piece async for piece in state.text_async_iter(name)]

    assert asyncio.run(read("copied")) == ["c", " d"]


def test_streams_of_a_name_that_is_set_again_or_too_late_end_with_the_failure():
    class Breaking(sgl.BaseBackend):
        async def agenerate(self, prompt, params, constraint, *, stream):
            yield Delta("begun")
            await gate.wait_async()
            raise sgl.BackendError("broken")

    @sgl.function
    def failing(s):
        s += sgl.gen("a")
        earlier = s.text_iter("a")
        pieces = [next(earlier)]
        s += sgl.gen("a")
        gate.set(None)
        with pytest.raises(sgl.BackendError, match="broken"):
            pieces.extend(earlier)
        s += sgl.gen("late")

    gate = Variable()
    state = failing.run(backend=Breaking(), stream=True)
    with pytest.raises(sgl.BackendError, match="broken"):
        within(20, lambda: list(state.text_iter("late")))


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


def test_an_exception_in_a_library_is_told_at_the_users_line():
    @sgl.function
    def failing(s):
        s += "x"
        with s.user():
            json.loads("{no JSON")  # here

    state = failing.run(stream=True, backend=sgl.ScriptedBackend())
    with pytest.raises(sgl.ProgramError, match="JSONDecodeError") as caught:
        list(state.text_iter())
    assert (caught.value.where.file, caught.value.where.line) == (__file__, line_here(failing))


def test_a_backend_that_does_not_stream_is_read_in_one_piece():
    class Whole(sgl.ScriptedBackend):
        async def agenerate(self, prompt, params, constraint, *, stream):
            async for event in super().agenerate(prompt, params, constraint, stream=False):
                yield event

    state = program.run(stream=True, backend=Whole({"Say": WORDS, ";": "no"}))
    assert list(state.text_iter("a")) == [WORDS]


@sgl.function
def saying(s, /, **options):
    s += "Say: " + sgl.gen("a", **options)


def read_all(iterator):
    async def read():
        return [item async for item in iterator]

    return within(5, lambda: asyncio.run(read()))


# ------------------------------------------------------------------------------------------ readers


def test_a_reader_sees_each_piece_when_it_comes():
    backend = Pieces("one ", "two ", "three", stepped=True)
    state = saying.run(stream=True, backend=backend)
    pieces = state.text_iter("a")
    for text in ("one ", "two ", "three"):
        backend.step()
        assert within(5, lambda: next(pieces)) == text
    assert within(5, lambda: list(pieces)) == []


def test_readers_that_come_at_any_time_get_everything_and_each_at_its_pace():
    backend = Pieces("one ", "two ", "three", stepped=True)
    state = saying.run(stream=True, backend=backend)
    early = state.text_iter("a")
    backend.step()
    assert within(5, lambda: next(early)) == "one "
    middle = state.text_iter("a")
    backend.step(2)
    assert within(5, lambda: list(middle)) == ["one ", "two ", "three"]
    assert within(5, lambda: list(early)) == ["two ", "three"]
    assert within(5, lambda: list(state.text_iter("a"))) == ["one ", "two ", "three"]


def test_threads_and_tasks_read_the_same_stream():
    backend = Pieces("one ", "two", stepped=True)
    state = saying.run(stream=True, backend=backend)
    got = []
    threads = [
        threading.Thread(target=lambda: got.append(list(state.text_iter("a")))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()

    async def main():
        async def read():
            return [piece async for piece in state.text_async_iter("a")]

        readers = [asyncio.ensure_future(read()) for _ in range(3)]
        await asyncio.sleep(0)
        backend.step(2)
        return await asyncio.gather(*readers)

    got += within(5, lambda: asyncio.run(main()))
    for thread in threads:
        thread.join()
    assert got == [["one ", "two"]] * 6


def test_a_plain_reader_works_inside_a_running_event_loop():
    async def notebook():
        return list(saying.run(stream=True, backend=Pieces("one ", "two")).text_iter("a"))

    assert within(5, lambda: asyncio.run(notebook())) == ["one ", "two"]


def test_a_reader_that_stops_early_disturbs_nobody():
    state = saying.run(stream=True, backend=Pieces("one ", "two"))
    for _ in state.text_iter("a"):
        break
    assert state["a"] == "one two"


def test_the_body_itself_can_follow_a_variable_but_not_its_own_end():
    seen = []

    @sgl.function
    def program(s):
        s += sgl.gen("a")
        seen.extend(s.text_iter("a"))
        list(s.text_iter())  # here

    state = program.run(stream=True, backend=Pieces("one ", "two"))
    with pytest.raises(sgl.ProgramError, match="ends when the program does") as caught:
        within(5, lambda: list(state.text_iter()))
    assert caught.value.where.line == line_here(program)
    assert seen == ["one ", "two"]


def test_nor_can_an_async_body_wait_for_its_own_end():
    seen = []

    @sgl.function
    async def program(s):
        s += sgl.gen("a")
        async for piece in s.text_async_iter("a"):
            seen.append(piece)
        async for piece in s.text_async_iter():  # here
            seen.append(piece)

    state = program.run(stream=True, backend=Pieces("one ", "two"))
    with pytest.raises(sgl.ProgramError, match="ends when the program does") as caught:
        within(5, lambda: list(state.text_iter()))
    assert caught.value.where.line == line_here(program)
    assert seen == ["one ", "two"]


# ------------------------------------------------------------------------------------------- values


@dataclass
class Point:
    x: int
    label: str


def test_a_typed_value_grows_while_it_is_written():
    backend = Pieces('{"x": 1', '2, "label"', ': "he', 'llo"}', stepped=True)
    state = saying.run(type=Point, stream=True, backend=backend)
    values = state.partial_iter("a")
    backend.step(3)
    growing = [within(5, lambda: next(values)) for _ in range(3)]
    assert [(value.x, value.label) for value in growing] == [(None, None), (12, None), (12, "he")]
    backend.step()
    *_, last = within(5, lambda: list(values))
    assert last == Point(12, "hello")


def test_the_text_of_a_typed_value_that_another_branch_made_is_streamed_too():
    @sgl.function
    def copying(s):
        with s.copy() as branch:
            branch += sgl.gen("x", type=Point)

    state = copying.run(stream=True, backend=Pieces('{"x": 1, "label": "a"}'))
    assert list(state.text_iter("x")) == ['{"x": 1, "label": "a"}']


def test_tasks_follow_a_typed_value_too():
    state = saying.run(type=list[int], stream=True, backend=Pieces("[1", ", 2", "2]"))
    assert read_all(state.partial_async_iter("a"))[-1] == [1, 22]


def test_a_typed_value_that_fails_fails_its_reader_after_what_came():
    state = saying.run(type=list[int], stream=True, backend=Pieces("[1, 2,", OSError("gone")))
    values = []
    with pytest.raises(sgl.ProgramError, match="OSError: gone"):
        for value in state.partial_iter("a"):
            values.append(value)
    assert values[-1] == [1, 2]


# ---------------------------------------------------------------------------------------- reasoning

THOUGHTFUL = {
    "qwen3": "<think>\nOne < two?\n</think>\n\nYes <b>.",
    "deepseek-r1": "One < two?</think>Yes <b>.",
    "kimi": "◁think▷One◁/think▷Yes.",
    "gpt-oss": "<|channel|>analysis<|message|>One<|end|><|start|>assistant<|channel|>final<|message|>Yes <|.",
    "mistral": "[THINK]never closed",
    "glm45": "no thoughts at all <",
    "gemma4": "<|channel>thought\nOne<channel|>Yes.",
    "cohere_command4": "One<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
    "inkling": "<|message_model|><|content_thinking|>One<|end_message|><|message_model|><|content_text|>Yes."
    "<|end_message|><|content_model_end_sampling|>",
    "muse": " to=self<|message|>One<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
    "beam": "<|channel|>final<|message|>Yes.",
    "k2_horizon": "One</ifm|think>Yes.",
    "kimi_k3": "One<|close|>think<|sep|>Yes.",
    "iquest_q1": "One</think>Yes.",
    "hunyuan": "<think>One</think>Yes.",
}


@pytest.mark.parametrize("model_type", THOUGHTFUL)
def test_reasoning_is_split_the_same_however_the_text_is_cut(model_type):
    text = THOUGHTFUL[model_type]
    whole = saying.run(reasoning=model_type, backend=Pieces(text))
    dice = random.Random(model_type)
    for size in (1, 2, 3, 7, len(text)):
        cuts = sorted({0, len(text), *dice.sample(range(len(text)), k=len(text) // size)})
        pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
        state = saying.run(reasoning=model_type, stream=True, backend=Pieces(*pieces))
        for name in ("a", "a_reasoning_content"):
            assert "".join(state.text_iter(name)) == state[name] == whole[name]
    assert "think" not in (whole["a"] + whole["a_reasoning_content"]).lower()
    assert "|>" not in whole["a"]


@pytest.mark.parametrize(
    ("model_type", "thought", "answer"),
    [
        ("qwen3", "One < two?\n", "Yes <b>."),
        ("deepseek-r1", "One < two?", "Yes <b>."),
        ("kimi", "One", "Yes."),
        ("gpt-oss", "One", "Yes <|."),
        ("mistral", "never closed", ""),
        ("glm45", "", "no thoughts at all <"),
        ("beam", "", "Yes."),
        *[
            (name, "One", "Yes.")
            for name, text in THOUGHTFUL.items()
            if "One<" in text and "Yes." in text
        ],
    ],
)
def test_reasoning_and_answer_of_each_kind(model_type, thought, answer):
    state = saying.run(reasoning=model_type, backend=Pieces(THOUGHTFUL[model_type]))
    assert (state["a_reasoning_content"], state["a"]) == (thought, answer)


def test_reasoning_can_be_followed_while_the_answer_is_yet_to_come():
    backend = Pieces("<think>hm", " hm</think>", "yes", stepped=True)
    state = saying.run(reasoning="qwen3", stream=True, backend=backend)
    thoughts = state.text_iter("a_reasoning_content")
    backend.step()
    assert within(5, lambda: next(thoughts)) == "hm"
    backend.step(2)
    assert within(5, lambda: list(thoughts)) == [" hm"]
    assert within(5, lambda: list(state.text_iter("a"))) == ["yes"]


def test_a_failure_while_reasoning_fails_both_readers():
    state = saying.run(reasoning="qwen3", stream=True, backend=Pieces("<think>hm", OSError("gone")))
    for name in ("a_reasoning_content", "a"):
        with pytest.raises(sgl.ProgramError, match="OSError: gone"):
            within(5, lambda n=name: list(state.text_iter(n)))


# ----------------------------------------------------------------------------------------- metadata


def tokens_of(pairs):
    return [entry[1] for _, meta in pairs for entry in meta.get("output_token_logprobs", [])]


def test_metadata_of_pieces_without_text_comes_with_the_next_text():
    pieces = [with_logprob(text, i) for i, text in enumerate(["a", "", "", "b"])]
    state = saying.run(return_logprob=True, stream=True, backend=Pieces(*pieces))
    pairs = read_all(state.text_async_iter("a", return_meta_data=True))
    assert [text for text, _ in pairs] == ["a", "b"]
    assert tokens_of(pairs) == [0, 1, 2, 3]


def test_metadata_after_the_last_text_is_not_lost():
    pieces = [with_logprob(text, i) for i, text in enumerate(["a", ""])]
    state = saying.run(return_logprob=True, stream=True, backend=Pieces(*pieces))
    assert tokens_of(read_all(state.text_async_iter("a", return_meta_data=True))) == [0, 1]
    assert list(state.text_iter("a")) == ["a"]  # and readers of text alone see no empty piece


def test_metadata_that_a_backend_only_gives_at_the_end_is_not_lost():
    class Late(Pieces):
        async def agenerate(self, *args, **options):
            async for event in super().agenerate(*args, **options):
                yield event if hasattr(event, "finish_reason") else type(event)(event.text)

    state = saying.run(
        return_logprob=True, stream=True, backend=Late(with_logprob("a", 1), with_logprob("b", 2))
    )
    assert tokens_of(read_all(state.text_async_iter("a", return_meta_data=True))) == [1, 2]


def test_metadata_of_reasoning_goes_with_the_reasoning():
    pieces = [with_logprob(text, i) for i, text in enumerate(["<think>", "hm", "</think>", "yes"])]
    state = saying.run(reasoning="qwen3", return_logprob=True, stream=True, backend=Pieces(*pieces))
    thought = read_all(state.text_async_iter("a_reasoning_content", return_meta_data=True))
    answer = read_all(state.text_async_iter("a", return_meta_data=True))
    assert [text for text, _ in thought + answer] == ["hm", "yes"]
    assert (tokens_of(thought), tokens_of(answer)) == ([0, 1], [2, 3])


def test_a_node_that_is_tried_again_is_shown_whole_with_its_metadata():
    class Second(sgl.BaseBackend):
        async def agenerate(self, *args, **options):
            backend = backends.pop(0)
            async for event in backend.agenerate(*args, **options):
                yield event

    backends = [
        Pieces("half", OSError("gone")),
        Pieces(with_logprob("all ", 1), with_logprob("of it", 2)),
    ]
    state = saying.run(return_logprob=True, retries=1, stream=True, backend=Second())
    pairs = read_all(state.text_async_iter("a", return_meta_data=True))
    assert "".join(text for text, _ in pairs) == "all of it"
    assert tokens_of(pairs) == [1, 2]


def test_a_stream_waits_for_a_name_that_comes_late_and_ends_with_the_program():
    backend = Gated("first")

    @sgl.function
    def program(s):
        s += sgl.gen("a")
        if s["a"] != "first":
            s += sgl.gen("b")

    state = program.run(stream=True, backend=backend)
    reader = state.text_async_iter("b")
    backend.open()
    with pytest.raises(sgl.UnknownVariableError, match="it has: 'a'"):
        read_all(reader)


def test_the_error_of_a_stream_is_that_of_the_whole_program():
    asked = threading.Event()

    @sgl.function
    def program(s):
        asked.wait()
        s += "a" + sgl.gen("x")
        s.sync()

    state = program.run(stream=True, backend=sgl.ScriptedBackend({"a": sgl.BackendError("down")}))
    asked.set()  # it has added nothing yet
    assert isinstance(state.error(), sgl.BackendError)
    asked.clear()
    state = program.run(stream=True, backend=sgl.ScriptedBackend(default="b"))
    asked.set()
    assert state.error() is None
    assert state["x"] == "b"

    @sgl.function
    def asks(s):
        s += "a" + sgl.gen("x")
        s["so far"] = s.error()

    assert asks.run(stream=True, backend=sgl.ScriptedBackend(default="b"))["so far"] is None


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_waits_for_a_scope_that_is_open(stream):
    opened, go = threading.Event(), threading.Event()

    @sgl.function
    def scoped(s):
        with s.var_scope("x"):
            s += sgl.gen("a")
            if stream:
                opened.set()
                go.wait()

    state = scoped.run(backend=backend(), stream=stream)
    found: list[object] = []
    if stream:
        opened.wait()
        reader = threading.Thread(target=lambda: found.append(state["x"]))
        reader.start()
        assert not found
        assert reader.is_alive()
        go.set()
        reader.join()
    else:
        found.append(state["x"])
    assert found == [state["a"]]


def test_the_body_itself_can_not_wait_for_its_open_scope():
    @sgl.function
    def scoped(s):
        with s.var_scope("x"):
            s["x"]

    with pytest.raises(sgl.ProgramError, match="the variable scope 'x' is still open"):
        scoped.run(backend=backend())


@sgl.function
def one_name_twice(s):
    s += "Say: " + sgl.gen("n", type=int)
    s += "; " + sgl.gen("n", type=int)


@pytest.mark.parametrize("reads_late", [False, True])
def test_a_name_that_is_set_twice_streams_its_first_value_to_each_kind_of_reader(reads_late):
    def start():
        state = one_name_twice.run(
            stream=True, backend=sgl.ScriptedBackend({"Say": "12", ";": "34"}, latency=0.01)
        )
        if reads_late:
            until(lambda: state.so_far().ended)
        return state

    async def collect(stream):
        return [each async for each in stream]

    assert "".join(start().text_iter("n")) == "12"
    assert "".join(asyncio.run(collect(start().text_async_iter("n")))) == "12"
    assert list(start().partial_iter("n"))[-1] == 12
    assert asyncio.run(collect(start().partial_async_iter("n")))[-1] == 12


def test_a_reader_of_the_text_so_far_does_not_change_what_the_branch_reads():
    """A piece that the branch appended while another thread joined the text was lost."""

    @sgl.function
    def program(s):
        s += "a"

    state = program.run(backend=Pieces())
    transcript = state.branch.player.transcript

    class Slow:
        @property
        def text(self):
            if transcript.pieces[-1] is self:
                transcript.pieces.append("c")
            return "b"

    transcript.pieces.append(Slow())
    assert state.so_far().text.startswith("ab")
    assert transcript.collect_text() == "abc"
