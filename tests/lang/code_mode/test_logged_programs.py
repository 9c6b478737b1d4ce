"""Programs of `gen(code=…)` in runs with a log: their calls are in the journal, and no call is made
twice unless somebody says so.
"""

import asyncio
import dataclasses
import subprocess
import sys
from typing import Any

import pytest

import sglang_lite as sgl
from tests.lang.code_mode.test_code_mode import Free
from tests.lang.test_tools import answer, call

made = []


@pytest.fixture(autouse=True)
def _nothing_is_made():
    made.clear()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def pay(n: int) -> int:
    """Pays; the first payment of 13 ends the run, so that nobody knows whether it was made."""
    made.append(n)
    if n == 13 and made.count(13) == 1:
        raise sgl.RequestAbortedError("killed")
    if n < 0:
        raise ValueError("no money")
    return n * 10


@sgl.function
def payer(s, tools=(pay,)):
    s += sgl.user("Pay!")
    s += sgl.assistant(sgl.gen("paid", code=list(tools)))
    return s["paid"]


def writes(*texts):
    """A model that writes these texts, one for each request."""
    left = iter(texts)
    return Free(lambda _: next(left))


def end_run(program, path, backend):
    with pytest.raises(sgl.RequestAbortedError):
        program.run(backend=backend, journal=path)


PROGRAM = "total = 0\nfor n in [1, 13, 2]:\n    total += pay(n)\nreturn total"


def test_a_killed_program_goes_on_and_no_call_is_repeated(path):
    backend = writes(PROGRAM)  # it is asked once
    end_run(payer, path, backend)
    assert made == [1, 13]
    state = payer.run(backend=backend, journal=path)
    (doubtful,) = state.pending()
    assert (doubtful.tool, doubtful.arguments, doubtful.in_doubt) == ("pay", {"n": 13}, True)
    assert made == [1, 13]
    state = state.resume(doubtful.give_result("130"))
    assert state.ret_value == 160
    assert made == [1, 13, 2]
    assert payer.run(backend=backend, journal=path).ret_value == 160
    assert made == [1, 13, 2]
    calls = state.get_meta_info("paid")["code_calls"]
    assert [each["result"] for each in calls] == [10, 130, 20]


KILLED = """
import os, sys
import sglang_lite as sgl

def pay(n: int) -> int:
    \"Pays.\"
    if n == 13:
        os._exit(9)
    return n * 10

@sgl.function
def payer(s):
    s += sgl.user("Pay!")
    s += sgl.assistant(sgl.gen("paid", code=[pay]))
    return s["paid"]

payer.run(backend=sgl.ScriptedBackend(lambda _: sys.argv[2]), journal=sys.argv[1])
"""


def test_a_process_that_was_killed_in_a_call_leaves_it_in_doubt(path):
    @sgl.function
    def payer(s):
        s += sgl.user("Pay!")
        s += sgl.assistant(sgl.gen("paid", code=[pay]))
        return s["paid"]

    ended = subprocess.run([sys.executable, "-c", KILLED, path, PROGRAM], check=False)
    assert ended.returncode == 9
    state = payer.run(backend=sgl.ScriptedBackend(lambda _: "not asked"), journal=path)
    assert [(each.arguments, each.in_doubt) for each in state.pending()] == [({"n": 13}, True)]
    assert state.resume(state.pending()[0].give_result("130")).ret_value == 160
    assert made == [2]


def test_a_call_in_doubt_is_repeated_if_someone_says_so(path):
    backend = writes(PROGRAM)
    end_run(payer, path, backend)
    state = payer.run(backend=backend, journal=path)
    assert state.resume(state.pending()[0].approve()).ret_value == 160
    assert made == [1, 13, 13, 2]


def test_the_model_reads_why_a_call_in_doubt_was_denied(path):
    backend = writes(PROGRAM, "return pay(2)")
    end_run(payer, path, backend)
    state = payer.run(backend=backend, journal=path)
    state = state.resume(state.pending()[0].deny("look first."))
    assert state.ret_value == 20
    assert "Denied: look first." in backend.calls[-1].prompt.text
    assert made == [1, 13, 2]
    assert payer.run(backend=backend, journal=path).ret_value == 20
    assert made == [1, 13, 2]


def test_arguments_of_a_program_are_not_changed(path):
    backend = writes(PROGRAM)
    end_run(payer, path, backend)
    state = payer.run(backend=backend, journal=path)
    with pytest.raises(sgl.ParameterError, match="can't be changed"):
        state.resume(state.pending()[0].approve(n=5))
    state = payer.run(backend=backend, journal=path)
    assert state.resume(state.pending()[0].give_result("0")).ret_value == 30


def test_coroutines_are_resumed(path):
    @sgl.function
    async def later(s):
        s += sgl.user("Pay!")
        s += sgl.assistant(sgl.gen("paid", code=[pay]))
        return await s.get("paid")

    backend = writes(PROGRAM)
    end_run(later, path, backend)

    async def resume():
        state = await later.arun(backend=backend, journal=path)
        return await state.aresume(state.pending()[0].give_result("130"))

    assert asyncio.run(resume()).ret_value == 160
    assert made == [1, 13, 2]


def test_calls_of_a_program_that_failed_are_not_repeated(path):
    backend = writes("pay(1)\nreturn pay(-1)", "return pay(13)", "return pay(13)")
    end_run(payer, path, backend)
    assert made == [1, -1, 13]
    state = payer.run(backend=backend, journal=path)
    assert state.resume(state.pending()[0].give_result("130")).ret_value == 130
    assert made == [1, -1, 13]


@pytest.mark.parametrize("by", ["mark", "key"])
def test_idempotent_functions_are_repeated(path, by):
    keys = []

    @sgl.idempotent
    def look(n: int) -> int:
        """Looks."""
        return pay(n)

    def keyed(n: int, idempotency_key: str) -> int:
        """Pays with a key."""
        keys.append((n, idempotency_key))
        return pay(n)

    tool = look if by == "mark" else keyed

    @sgl.function
    def worker(s):
        s += sgl.user("Pay!")
        s += sgl.assistant(sgl.gen("paid", code=[tool]))
        return s["paid"]

    backend = writes(PROGRAM.replace("pay(", f"{tool.__name__}("))
    end_run(worker, path, backend)
    state = worker.run(backend=backend, journal=path)
    assert (state.ret_value, state.pending()) == (160, [])
    assert made == [1, 13, 13, 2]
    if keys:
        assert [n for n, _ in keys] == made
        assert keys[1] == keys[2]
        assert len({key for _, key in keys}) == 3


@dataclasses.dataclass
class Receipt:
    n: int


def test_a_result_that_is_no_plain_data_is_in_doubt(path):
    def receipt(n: int) -> Receipt:
        """Pays."""
        made.append(n)
        return Receipt(n)

    @sgl.function
    def shop(s):
        s += sgl.user("Pay!")
        s += sgl.assistant(sgl.gen("paid", code=[receipt]))
        n = s["paid"]
        s += sgl.user("Pay again!")
        sgl.use_tools(s, [pay], approve="ask")
        return n

    backend = writes("return receipt(1).n", call("pay", n=2), answer("ok"))
    state = shop.run(backend=backend)
    assert made == [1]
    state = state.resume(state.pending()[0].approve())
    (doubtful,) = state.pending()
    assert (doubtful.tool, doubtful.in_doubt) == ("receipt", True)
    with pytest.raises(sgl.ParameterError, match="not what receipt returns"):
        state.resume(doubtful.give_result("paid"))
    state = state.resume(doubtful.give_result('{"n": 1}'))
    assert state.ret_value == 1
    assert made == [1, 2]


@pytest.mark.parametrize(
    "result",
    [{1: "one"}, (1, 2), {"rows": [(1,)]}, {None: 1}, 2**70, "\ud800", "\ud83d\ude00"],
    ids=repr,
)
def test_a_result_that_json_changes_is_in_doubt(path, result):
    def charge(n: int) -> Any:
        """Pays."""
        made.append(n)
        return result

    @sgl.function
    def charger(s):
        s += sgl.user("Pay!")
        s += sgl.assistant(sgl.gen("paid", code=[charge, pay]))
        return s["paid"]

    backend = writes("a = charge(1)\npay(13)\nreturn 7")
    end_run(charger, path, backend)
    state = charger.run(backend=backend, journal=path)
    assert [each.tool for each in state.pending()] == ["charge", "pay"]
    assert made == [1, 13]


@pytest.mark.parametrize(
    "result", [{"a": [1, None, 2.5, True]}, {3, 1, 2}, [float("inf")], "é", []]
)
def test_a_result_that_json_keeps_is_known_again(path, tmp_path, result):
    def charge(n: int) -> Any:
        """Pays."""
        made.append(n)
        return result

    @sgl.function
    def charger(s):
        s += sgl.user("Pay!")
        s += sgl.assistant(sgl.gen("paid", code=[charge, pay]))
        return s["paid"]

    backend = writes("a = charge(1)\npay(13)\nreturn a")
    end_run(charger, path, backend)
    state = charger.run(backend=backend, journal=path)
    (doubtful,) = state.pending()
    state = state.resume(doubtful.give_result("130"))
    assert state.ret_value == (list(result) if isinstance(result, set) else result)
    assert made == [1, 13]
    state.save(tmp_path / "state.json")


def test_a_result_is_recorded_as_it_was_before_the_program_changed_it():
    def rows(n: int) -> list[int]:
        """Lists rows."""
        made.append(n)
        return [n]

    backend = writes("a = rows(1)\na.append(5)\nreturn a")
    state = payer.run([rows], backend=backend)
    assert state.ret_value == [1, 5]
    assert [each["result"] for each in state.get_meta_info("paid")["code_calls"]] == [[1]]


def test_a_suspended_run_makes_no_call_of_its_programs_again(tmp_path):
    @sgl.function
    def shop(s):
        s += sgl.user("Pay!")
        s += sgl.assistant(sgl.gen("first", code=[pay]))
        s += sgl.user("Ask!")
        sgl.use_tools(s, [pay], approve="ask")
        s += sgl.user("Pay!")
        s += sgl.assistant(sgl.gen("last", code=[pay]))
        s += sgl.user("Ask again!")
        sgl.use_tools(s, [pay], "end", approve="ask")
        return s["first"], s["last"]

    asks = call("pay", n=2), answer("ok")
    backend = writes("return pay(1)", *asks, "return pay(3)", *asks)
    state = shop.run(backend=backend)
    for _ in range(2):
        state.save(tmp_path / "state.json")
        state = sgl.load(tmp_path / "state.json", shop, backend=backend)
        state = state.resume(state.pending()[0].approve())
    assert state.ret_value == (10, 30)
    assert made == [1, 2, 3, 2]


def test_a_program_in_a_function_can_not_be_suspended(path):
    @sgl.function
    def clerk(s):
        s += sgl.user("Pay!")
        return sgl.use_tools(s, [pay], approve="ask")

    def delegate() -> str:
        """Lets a clerk pay."""
        return clerk.run().ret_value

    backend = writes("return delegate()", call("pay", n=1))
    with pytest.raises(sgl.ToolError, match="delegate has run a program that waits") as caught:
        payer.run([delegate], backend=backend)
    assert "use_tools" in caught.value.hint
    assert not made


@pytest.mark.parametrize("nested", [False, True])
def test_a_batch_in_a_program_with_a_journal_runs_no_program(path, nested):
    @sgl.function
    def item(s):
        if nested:
            payer.run()
        else:
            s += sgl.user("Pay!")
            s += sgl.assistant(sgl.gen("paid", code=[pay]))

    @sgl.function
    def outer(s):
        s += "x"
        item.run_batch([{}])

    with pytest.raises(sgl.BatchError, match="can't be written to its journal"):
        outer.run(backend=writes("return pay(1)"), journal=path)
    assert not made
