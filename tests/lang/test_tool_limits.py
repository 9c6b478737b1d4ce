"""Limits of a loop of tools: time, calls, results, and what the run itself has left."""

import asyncio
import json
import threading

import pytest

import sglang_lite as sgl
from sglang_lite.lang import tool_loop, tool_runner
from sglang_lite.lang.tool_results import cut_middle
from tests.lang.fakes import within
from tests.lang.test_tool_errors import add, agent, broken, results, run
from tests.lang.test_tools import answer, call
from tests.waiting import until


def calls(*each):
    return json.dumps({"calls": [json.loads(text) for text in each]})


def workers():
    """Threads of tools that run now."""
    return [each for each in threading.enumerate() if each.name.startswith("sglang_lite-tool")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    until(lambda: not workers())


@pytest.fixture
def patience(monkeypatch):
    """Coroutines that were cancelled get no time to end."""
    monkeypatch.setattr(tool_runner, "_GRACE_S", 0.05)


@sgl.function
async def async_agent(s, /, tools, **options):
    s += sgl.user("2+3?")
    return await sgl.use_tools(s, tools, **options)


def arun(texts, tools, **options):
    left = iter(texts)
    backend = sgl.ScriptedBackend(lambda _: next(left))
    return asyncio.run(async_agent.arun(tools, backend=backend, **options))


BOTH = pytest.mark.parametrize("play", [run, arun], ids=["plain", "async"])


# -------------------------------------------------------------------------------------------- time


@BOTH
def test_a_function_that_does_not_end_is_left_behind_and_told(play, caplog):
    free = threading.Event()

    def hangs() -> str:
        free.wait()
        return "late"

    texts = [call("hangs"), call("add", a=1), answer("2")]
    state = play(texts, [hangs, add], tool_timeout=0.2)
    free.set()
    assert state.ret_value == "2"
    assert results(state) == [
        "Result of hangs: Error: it did not end within 0.2 s.",
        "Result of add: 2",
    ]
    assert "the tool hangs still runs, and is left behind" in caplog.text


@BOTH
def test_a_coroutine_that_does_not_end_is_cancelled(play):
    cancelled = threading.Event()

    async def hangs() -> bool:
        try:
            return await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    state = play([call("hangs"), answer("ok")], [hangs], tool_timeout=0.2)
    assert results(state) == ["Result of hangs: Error: it did not end within 0.2 s."]
    assert cancelled.wait(60)


def test_a_coroutine_that_goes_on_is_left_behind_and_told(patience, caplog):
    free = threading.Event()

    async def stays() -> str:
        while not free.is_set():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
        return "late"

    state = run([call("stays"), answer("ok")], [stays], tool_timeout=0.2)
    assert state.ret_value == "ok"
    assert "still runs after its end, and is left behind" in caplog.text
    free.set()


def test_a_tool_in_time_is_not_disturbed():
    here = []

    def works() -> str:
        here.append(threading.current_thread())
        return "ok"

    state = run([call("works"), answer("ok")], [works], tool_timeout=600)
    assert results(state) == ['Result of works: "ok"']
    run([call("works"), answer("ok")], [works])
    limited, plain = here
    assert limited.name == "sglang_lite-tool-works"
    assert plain is threading.current_thread()


@pytest.mark.parametrize("options", [{}, {"tool_timeout": 60}, {"parallel": True}])
def test_what_is_no_error_of_a_tool_passes_from_its_thread(options):
    def stops() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([call("stops")], [stops], **options)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_what_is_no_error_of_an_async_tool_passes_from_its_loop(error):
    async def stops() -> None:
        raise error

    def call_it() -> None:
        with pytest.raises(type(error)):
            run([call("stops")], [stops])

    within(30, call_it)


def test_a_tools_own_timeout_is_its_own():
    def late() -> None:
        raise TimeoutError("the database is slow")

    state = run([call("late"), answer("ok")], [late], tool_timeout=60)
    assert results(state) == ["Result of late: Error: TimeoutError: the database is slow"]


@BOTH
def test_near_the_end_of_its_time_a_run_asks_for_the_answer(play, monkeypatch):
    def works() -> str:
        return "ok"

    def takes_long() -> str:
        monkeypatch.setattr(tool_loop, "_NEARLY", 0.0)  # as if the time were over
        return "ok"

    texts = [call("works"), call("takes_long"), answer("in time")]
    state = play(texts, [works, takes_long], timeout=1000)
    assert state.ret_value == "in time"
    first, second = results(state)
    assert first == 'Result of works: "ok"'
    assert second.endswith(
        "Nearly all time or tokens for this task are used up. Answer now, with what you know."
    )


# ------------------------------------------------------------------------------------------ results


@pytest.mark.parametrize("limit", [20, 50, 100, 1000])
def test_a_long_result_loses_its_middle_and_says_so(limit):
    text = "".join(f"line {i}\n" for i in range(5000))
    cut = cut_middle(text, limit, None)
    assert len(cut.encode()) // 3 + 1 <= limit
    assert cut.startswith("line 0")
    assert cut.endswith("4999\n")
    head, tail = cut.split("\n[… ")
    count, tail = tail.split(" characters are left out …]\n")
    assert len(head) + len(tail) + int(count.replace(",", "")) == len(text)
    assert cut_middle(text, 10**6, None) == text


def test_a_cut_fits_a_models_own_tokens(engine_process):
    text = "der Fluß — 12345 — ".join(map(str, range(3000)))
    tokenizer = engine_process.tokenizer
    for limit in (40, 64, 300):
        cut = cut_middle(text, limit, tokenizer)
        assert limit // 2 < len(tokenizer.encode(cut)) <= limit
    assert cut_middle("x" * 10**7, 64, tokenizer).startswith("xx")


def test_results_of_every_kind_are_cut():
    def long() -> str:
        return "x" * 5000

    def fails() -> str:
        raise sgl.ToolError("y" * 5000)

    state = run([call("long"), call("fails"), answer("ok")], [long, fails], max_result=50)
    for result, letter in zip(results(state), "xy"):
        assert 60 < result.count(letter) < 150
        assert "characters are left out" in result
    whole = run([call("long"), answer("ok")], [long])
    assert results(whole)[0].count("x") == 5000
    assert len(results(run([call("long"), answer("ok")], [long], max_result=None))[0]) > 5000


# -------------------------------------------------------------------------------------------- calls


def test_after_the_last_call_the_model_has_to_answer():
    state = run([call("add", a=1), call("add", a=2), answer("x")], [add], max_calls=2)
    assert state.ret_value == "x"
    assert results(state)[-1] == (
        "Result of add: 3\nAll 2 calls are used up. Answer now, with what you know."
    )
    with pytest.raises(sgl.BackendError, match="does not satisfy"):
        run([call("add", a=1)] * 3, [add], max_calls=2)


def test_calls_of_a_turn_beyond_the_limit_are_not_made():
    made = []

    def note(number: int) -> int:
        made.append(number)
        return number

    texts = [calls(*[call("note", number=i) for i in range(4)]), answer("ok")]
    state = run(texts, [note], max_calls_per_turn=2, parallel_tool_calls=True)
    assert made == [0, 1]
    assert results(state)[0].splitlines() == [
        "Result of note: 0",
        "Result of note: 1",
        *["Result of note: Error: not called, as only 2 calls are made in a turn."] * 2,
    ]
    state = run(texts, [note], max_calls=3, parallel_tool_calls=True)
    assert made == [0, 1, 0, 1, 2]
    assert "Error: not called, as all 3 calls are used up." in results(state)[0]


def test_calls_that_are_not_made_are_no_failures():
    texts = [calls(*[call("add", a=1)] * 9), answer("ok")]
    options = {"max_calls_per_turn": 1, "max_failures": 1, "parallel_tool_calls": True}
    assert run(texts, [add], **options).ret_value == "ok"


def test_a_call_that_is_not_made_does_not_end_a_row_of_failures():
    texts = [calls(call("broken"), call("broken"))] * 3
    options = {"max_calls_per_turn": 1, "max_failures": 3, "parallel_tool_calls": True}
    with pytest.raises(sgl.ToolError) as caught:
        run([*texts, answer("ok")], [broken], **options)
    assert caught.value.limit == "max_failures"


# ------------------------------------------------------------------------------------------ budgets


def keeps_calling(request):
    """A model that only answers if it has to."""
    return answer("enough") if "Answer now" in request.prompt.text else call("add", a=1)


@pytest.mark.parametrize("limit", [400, 1000, 3000])
def test_a_run_that_nears_its_budget_has_room_for_the_answer(limit):
    backend = sgl.ScriptedBackend(keeps_calling)
    state = agent.run([add], max_steps=90, max_tokens=20, max_total_tokens=limit, backend=backend)
    assert state.ret_value == "enough"
    usage = state.usage()
    assert usage.prompt_tokens + usage.completion_tokens <= limit
    assert len(backend.calls) >= 2


def test_a_run_that_nears_its_cost_has_room_for_the_answer():
    backend = sgl.ScriptedBackend(keeps_calling)
    backend.price = sgl.Price(1.0, 2.0)
    state = agent.run([add], max_steps=90, max_tokens=20, max_cost=0.003, backend=backend)
    assert state.ret_value == "enough"
    assert 0 < (backend.cost(state.usage()) or 0) <= 0.003


def test_a_long_result_leaves_room_for_the_answer():
    def read() -> str:
        return "word " * 20_000

    backend = sgl.ScriptedBackend(
        lambda request: answer("enough") if "Answer now" in request.prompt.text else call("read")
    )
    state = agent.run([read], max_tokens=20, max_total_tokens=3000, backend=backend)
    assert state.ret_value == "enough"
    assert "characters are left out" in results(state)[0]


def test_a_budget_without_any_room_is_its_own_error():
    backend = sgl.ScriptedBackend(keeps_calling)
    with pytest.raises(sgl.BudgetError) as caught:
        agent.run([add], max_tokens=20, max_total_tokens=30, backend=backend)
    assert "2+3?" in caught.value.state.so_far().text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tool_timeout": 0}, "tool_timeout: 0 is not a number above 0"),
        ({"tool_timeout": "3"}, "tool_timeout: '3' is not a number above 0"),
        ({"max_calls": 0}, "max_calls: "),
        ({"max_calls_per_turn": True}, "max_calls_per_turn: "),
        ({"max_result": -1}, "max_result: "),
        ({"parallel": 1}, "parallel: 1 is not True or False"),
    ],
)
def test_a_limit_that_is_none_is_refused(options, said):
    with pytest.raises(sgl.ParameterError) as refused:
        run([], [add], **options)
    assert said in str(refused.value)
    assert refused.value.where.line == agent.func.__code__.co_firstlineno + 3
