"""Backends with SGLang's blocking hooks: called on few threads, failing where they are read, never
blocking others.
"""

import asyncio
import dataclasses
import inspect
import threading

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.choices import ChoicesDecision
from sglang_lite.lang.concurrency.pool import ThreadPool
from sglang_lite.protocol import Generation
from tests.lang.fakes import line_here, within
from tests.waiting import until


class Echo(sgl.BaseBackend):
    """Says how long the text is."""

    def generate(self, s, sampling_params):
        return f"<{len(s.text_)}>", {"prompt_tokens": len(s.text_)}


class Meeting(sgl.BaseBackend):
    """Answers when so many calls are under way at a time.

    Attributes:
        most: calls there were at a time.
    """

    def __init__(self, parties, threads=64):
        super().__init__()
        self.max_threads = threads
        self._meeting = threading.Barrier(parties)
        self._lock, self._now, self.most = threading.Lock(), 0, 0

    def generate(self, s, sampling_params):
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._meeting.wait()
        with self._lock:
            self._now -= 1
        return "x", {}


def run(*exprs, backend, **options):
    @sgl.function
    def program(s):
        for expr in exprs:
            s += expr

    return program.run(backend=backend, **options)


# ---------------------------------------------------------------------------- which hooks there are


def test_generate_is_enough_and_streams_in_one_piece():
    state = run("ab", sgl.gen("a"), "c", sgl.gen("b"), backend=Echo())
    assert (state["a"], state["b"], state.text()) == ("<2>", "<6>", "ab<2>c<6>")
    assert state.get_meta_info("a")["prompt_tokens"] == 2
    assert list(run("ab", sgl.gen("a"), backend=Echo(), stream=True).text_iter("a")) == ["<2>"]


def test_select_is_enough_for_selections():
    class Picks(sgl.BaseBackend):
        def select(self, s, choices, temperature, choices_method):
            asked.append((s.text_, choices, temperature, choices_method))
            return ChoicesDecision(choices[-1], {"why": "last"})

    asked = []
    state = run("x", sgl.select("a", ["p", "q"], temperature=0.5), ".", backend=Picks())
    assert (state["a"], state.text()) == ("q", "xq.")
    assert asked == [("x", ["p", "q"], 0.5, sgl.token_length_normalized)]
    assert state.get_meta_info("a")["why"] == "last"


@pytest.mark.parametrize("stream", [False, True])
def test_the_hook_that_is_missing_is_named_at_the_line(stream):
    class Picks(sgl.BaseBackend):
        def select(self, s, choices, temperature, choices_method):
            return ChoicesDecision(choices[0])

    @sgl.function
    def program(s, node):
        s += node  # here

    for backend, node, missing in (
        (Picks(), sgl.gen("a"), "generate"),
        (Echo(), sgl.select("a", ["x"]), "select"),
    ):
        state = program.run(node, backend=backend, stream=stream)
        with pytest.raises(sgl.CapabilityError, match=missing) as caught:
            within(5, lambda s=state: s["a"])
        assert caught.value.where.line == line_here(program)


def test_a_subclass_of_a_native_backend_may_put_hooks_over_it():
    class Over(sgl.ScriptedBackend):
        def generate(self, s, sampling_params):
            return "from the hook", {}

    assert run("x", sgl.gen("a"), backend=Over(default="from the script"))["a"] == "from the hook"


def test_all_backends_are_instances_of_the_class_with_hooks_but_show_none():
    scripted = sgl.ScriptedBackend()
    assert isinstance(scripted, sgl.BaseBackend)
    assert issubclass(sgl.OpenAI, sgl.BaseBackend)
    assert not isinstance("scripted", sgl.BaseBackend)
    assert not isinstance(scripted, Echo)
    assert {"generate", "select", "begin_program", "fork_program", "cache_prefix"}.isdisjoint(
        dir(scripted)
    )


def test_an_interface_can_be_held_in_a_head():
    own = {name: value for name, value in vars(Backend).items() if not name.startswith("_")}
    assert len([name for name, value in own.items() if inspect.isfunction(value)]) <= 15


def test_a_backend_is_told_of_events_and_answers_by_itself():
    class Told(sgl.ScriptedBackend):
        def fork_program(self, src, dst, position_ids_offset=None):
            events.append((src.text_, len(dst)))

        def end_program(self, s):
            events.append(s.text_)

    @sgl.function
    def program(s):
        s += "x"
        s.fork(2).join()
        s += sgl.gen("a")

    events, backend = [], Told(default="y")
    state = program.run(backend=backend)
    state.sync()
    until(lambda: len(events) == 2)
    assert (state["a"], events) == ("y", [("x", 2), "xy"])
    assert state.stream_executor.backend is backend


def test_a_backend_with_hooks_may_be_a_record_of_its_own():
    @dataclasses.dataclass(frozen=True)
    class Says(sgl.BaseBackend):
        text: str
        listener: str = "the user's own"

        def generate(self, s, sampling_params):
            return self.text, {}

    assert [run("x", sgl.gen("a"), backend=Says("hello"))["a"] for _ in range(2)] == ["hello"] * 2


def test_a_hook_sees_turns_images_parameters_and_template_as_sglangs_do():
    class Looks(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            seen.append(
                (
                    s.messages_,
                    s.cur_role,
                    len(s.images_),
                    s.text_,
                    sampling_params,
                    s.chat_template.name,
                )
            )
            return "yes", {}

    seen = []
    run(
        sgl.user("Q"),
        sgl.assistant("A: " + sgl.gen("a", max_tokens=5, stop="\n")),
        backend=Looks(),
        top_k=3,
    ).sync()
    messages, role, images, text, params, template = seen[0]
    assert messages == [{"role": "user", "content": "Q"}]
    assert (role, images, template) == ("assistant", 0, "default")
    assert text == "USER:Q\nASSISTANT:A: "
    assert (params.max_new_tokens, list(params.stop), params.top_k, params.temperature) == (
        5,
        ["\n"],
        3,
        1.0,
    )


def test_a_hook_that_changes_the_messages_it_sees_changes_nothing():
    class Pops(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            assert s.messages_.pop(0)["role"] == "system"
            return "x", {}

    turns = (
        sgl.system("Be brief.")
        + sgl.user("1")
        + sgl.assistant(sgl.gen("a"))
        + sgl.user("2")
        + sgl.assistant(sgl.gen("b"))
    )
    state = run(turns, backend=Pops())
    assert [m["role"] for m in state.messages()] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_several_samples_are_asked_for_and_must_come():
    class Samples(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            return [f"{i}" for i in range(sampling_params.n)], [
                {"completion_tokens": i} for i in range(sampling_params.n)
            ]

    for stream in (False, True):
        state = run("x", sgl.gen("a", n=3), backend=Samples(), stream=stream)
        assert state["a"] == ["0", "1", "2"]
        assert "".join(state.text_iter()) == "x0"
        assert [each["completion_tokens"] for each in state.get_meta_info("a")["samples"]] == [
            0,
            1,
            2,
        ]
    with pytest.raises(sgl.ProgramError, match="returned 1 of 3 samples"):
        run("x", sgl.gen("a", n=3), backend=Echo())["a"]


# ---------------------------------------------------------------------------------------- streaming


class Streams(sgl.BaseBackend):
    """Streams words, each when it is let go."""

    def __init__(self):
        super().__init__()
        self.go = threading.Semaphore(0)

    def generate_stream(self, s, sampling_params):
        for i, word in enumerate(["one ", "two ", "three"]):
            assert self.go.acquire(timeout=60)
            yield word, {"output_token_logprobs": [[-1.0, i, word]], "count": i}

    def generate(self, s, sampling_params):
        raise AssertionError("it can stream")


@pytest.mark.parametrize("options", [{}, {"timeout": 5}], ids=["by threads", "by the loop"])
def test_pieces_and_their_metadata_are_there_as_they_come_and_once(options):
    backend = Streams()
    state = run("x ", sgl.gen("a", **options), backend=backend, stream=True)
    pieces = state.text_iter("a")
    for word in ("one ", "two "):
        backend.go.release()
        assert within(5, lambda: next(pieces)) == word
    backend.go.release()
    assert within(5, lambda: list(pieces)) == ["three"]
    assert "".join(state.text_iter()) == "x one two three"

    async def read():
        return [
            (text, meta["count"])
            async for text, meta in state.text_async_iter("a", return_meta_data=True)
        ]

    assert asyncio.run(read()) == [("one ", 0), ("two ", 1), ("three", 2)]
    assert state.get_meta_info("a")["count"] == 2


def test_reasoning_is_split_off_what_a_hook_streams():
    class Thinks(sgl.BaseBackend):
        def generate_stream(self, s, sampling_params):
            yield from (("<thi", {}), ("nk>hm</th", {}), ("ink>yes", {}))

        def generate(self, s, sampling_params):
            return "<think>hm</think>yes", {}

    for stream in (False, True):
        state = run("x", sgl.gen("a", reasoning="qwen3"), backend=Thinks(), stream=stream)
        assert (state["a_reasoning_content"], state["a"]) == ("hm", "yes")
    assert list(state.text_iter("a")) == ["yes"]
    assert list(state.text_iter("a_reasoning_content")) == ["hm"]


def test_a_refused_attempt_of_a_streaming_hook_is_not_shown():
    class Improves(sgl.BaseBackend):
        def generate_stream(self, s, sampling_params):
            yield answers.pop(0), {}

        def generate(self, s, sampling_params):
            raise AssertionError("it can stream")

    answers = ["bad", "good"]
    state = run(
        "x ", sgl.gen("a", check=lambda v: v == "good", retries=1), backend=Improves(), stream=True
    )
    assert list(state.text_iter()) == ["x ", "good"]


# ------------------------------------------------------------------------------------------- errors


class Fails(sgl.BaseBackend):
    def generate(self, s, sampling_params):
        raise ConnectionError("500")

    def generate_stream(self, s, sampling_params):
        yield "half ", {}
        raise ConnectionError("500")

    def select(self, s, choices, temperature, choices_method):
        raise ConnectionError("500")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("node", [sgl.gen("a"), sgl.select("a", ["x"]), sgl.gen("a", timeout=5)])
def test_what_a_hook_raises_is_raised_where_it_is_read_with_cause_and_line(stream, node):
    @sgl.function
    def program(s):
        s += "fine "
        s += node  # here
        s += "later" + sgl.gen("b")

    state = program.run(backend=Fails(), stream=stream)
    for name in "ab":
        with pytest.raises(sgl.ProgramError, match="ConnectionError: 500") as caught:
            within(5, lambda n=name: state[n])
        assert caught.value.where.line == line_here(program)
        assert isinstance(caught.value.__cause__, ConnectionError)
    if stream and not isinstance(node, type(sgl.select("a", ["x"]))):
        pieces = []
        with pytest.raises(sgl.ProgramError):
            for piece in state.text_iter():
                pieces.append(piece)
        assert pieces == ["fine ", "half "]


@pytest.mark.parametrize("answer", [None, ("x",), "x", (5, {}), (None, {}), ([None], {})])
def test_a_hook_that_does_not_answer_as_it_should_is_an_error(answer):
    class Odd(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            return answer

    with pytest.raises(sgl.ProgramError):
        within(5, lambda: run("x", sgl.gen("a"), backend=Odd())["a"])


@pytest.mark.parametrize("decision", [None, "x", ChoicesDecision("z"), ChoicesDecision(None)])  # type: ignore[arg-type]  # wrong on purpose
def test_a_hook_that_selects_what_is_no_choice_is_an_error(decision):
    class Odd(sgl.BaseBackend):
        def select(self, s, choices, temperature, choices_method):
            return decision

    with pytest.raises(sgl.ProgramError, match="not a ChoicesDecision for one of \\['x', 'y'\\]"):
        within(5, lambda: run("x", sgl.select("a", ["x", "y"]), backend=Odd())["a"])


def test_a_hook_is_tried_again():
    class Recovers(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            failures.append(s.text_)
            if len(failures) == 1:
                raise ConnectionError("500")
            return "fine", {}

    failures = []
    assert run("x", sgl.gen("a"), backend=Recovers(), retries=1)["a"] == "fine"
    assert failures == ["x", "x"]


def test_a_time_limit_holds_although_the_hook_goes_on():
    leave = threading.Event()

    class Slow(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            leave.wait()
            return "late", {}

    state = run("x", sgl.gen("a", timeout=0.02), backend=Slow())
    with pytest.raises(sgl.RequestTimeoutError):
        within(2, lambda: state["a"])
    leave.set()


# ------------------------------------------------------------------------------------------ threads


def hook_threads():
    return [t for t in threading.enumerate() if t.name == "sglang_lite-hooks"]


@sgl.function
def forking(s, size=4, join="gather_variable"):
    s += "x"
    fork = s.fork(size)
    fork += sgl.gen("a")
    fork.join(join)
    s += "."


def test_as_many_hooks_run_at_a_time_as_threads_are_allowed_and_no_more():
    before = len(hook_threads())
    backend = Meeting(parties=4, threads=4)
    states = within(10, lambda: forking.run_batch([{}] * 24, backend=backend))
    assert [state["a"] for state in states] == [["x"] * 4] * 24
    assert backend.most == 4
    assert len(hook_threads()) - before <= 4


def test_a_thread_that_is_not_needed_any_more_ends_and_a_later_job_starts_another():
    pool, done = ThreadPool(2, "test-idle", idle=0.01), threading.Semaphore(0)
    for _ in range(2):
        pool.submit(done.release)
        assert done.acquire(timeout=60)
        for thread in threading.enumerate():
            if thread.name == "test-idle":
                thread.join()


def test_joining_texts_needs_no_thread_that_the_branches_need():
    backend = Meeting(parties=2, threads=2)
    states = within(
        10,
        lambda: forking.run_batch(
            [{"join": "concate_and_append", "size": 2}] * 16, backend=backend
        ),
    )
    assert [state.text() for state in states] == ["xxx."] * 16


def test_hooks_that_wait_for_one_another_across_programs_do_not_stop_each_other():
    states = within(10, lambda: forking.run_batch([{}] * 8, backend=Meeting(parties=32)))
    assert len(states) == 8


def test_a_hook_may_wait_for_another_program_of_the_same_backend():
    class Asks(Echo):
        def generate(self, s, sampling_params):
            if s.text_ == "outer":
                return run("inner!", sgl.gen("a"), backend=self)["a"], {}
            return super().generate(s, sampling_params)

    assert within(5, lambda: run("outer", sgl.gen("a"), backend=Asks())["a"]) == "<6>"


def test_hooks_do_not_hold_up_the_loop_that_others_need():
    entered, leave = threading.Event(), threading.Event()

    class Slow(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            entered.set()
            leave.wait()
            return "slow", {}

    slow = run("x", sgl.gen("a", timeout=30), backend=Slow())
    assert entered.wait(60)
    assert (
        within(
            2,
            lambda: run("x", sgl.gen("a"), backend=sgl.ScriptedBackend(default="y", latency=0.001))[
                "a"
            ],
        )
        == "y"
    )
    leave.set()
    assert slow["a"] == "slow"


def test_hooks_and_coroutines_mix_in_one_program():
    async_backend = sgl.ScriptedBackend(lambda call: f"({len(call.prompt.text)})", latency=0.001)
    state = run(
        "x", sgl.gen("a"), sgl.gen("b", backend=async_backend), sgl.gen("c"), backend=Echo()
    )
    assert state.text() == "x<1>(4)<7>"
    state = run(
        "x", sgl.gen("a"), sgl.gen("b", backend=Echo()), sgl.gen("c"), backend=async_backend
    )
    assert state.text() == "x(1)<4>(7)"


def test_a_coroutine_awaits_programs_on_hooks():
    async def main():
        states = await asyncio.gather(*(forking.arun(backend=Echo()) for _ in range(20)))
        return [state["a"] for state in states]

    assert within(10, lambda: asyncio.run(main())) == [["<1>"] * 4] * 20


# -------------------------------------------------------------- answers that break their constraint


def saying(text, meta=None):
    """A backend that has never heard of constraints: with blocking hooks, or with a coroutine."""

    class Hook(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            return text, meta or {}

    class Coroutine(sgl.BaseBackend):
        async def agenerate(self, prompt, params, constraint, *, stream):
            yield Generation(text, finish_reason="length" if meta else "stop")

    return [Hook(), Coroutine()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [{}, {"retries": 1}], ids=str)
@pytest.mark.parametrize(
    "constraint", [dict(regex="[0-9]+"), dict(constraint=sgl.Choices(("a", "b"))), dict(dtype=bool), dict(type=int)],
    ids=str,
)  # fmt: skip
def test_an_answer_that_breaks_its_constraint_is_an_error(constraint, options, stream):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", **constraint, **options)  # here

    for backend in saying("oh no"):
        state = program.run(backend=backend, stream=stream)
        with pytest.raises(sgl.ValueValidationError) as caught:
            state["a"]
        assert caught.value.text == "oh no"
        assert caught.value.where.line == line_here(program)


def test_an_answer_that_keeps_its_constraint_or_was_cut_is_none():
    for backend in saying("12"):
        assert run("x", sgl.gen("a", regex="[0-9]+"), backend=backend)["a"] == "12"
    for backend in saying("12, 1", {"finish_reason": {"type": "length"}}):
        assert run("x", sgl.gen("a", regex="[0-9]+(, [0-9]+)*"), backend=backend)["a"] == "12, 1"
    for backend in saying("12,"):
        assert (
            run("x", sgl.gen("a", regex="[0-9]+(, [0-9]+)*", stop=" "), backend=backend)["a"]
            == "12,"
        )
