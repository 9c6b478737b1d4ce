"""Approval: runs stop before calls, are saved there, and are resumed with what was decided."""

import asyncio
import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, SecretStr

import sglang_lite as sgl
from tests.lang.test_tool_errors import results
from tests.lang.test_tool_limits import calls
from tests.lang.test_tools import answer, call

made = []


def look(order: str) -> str:
    """Looks at an order."""
    made.append(order)
    return "late"


def refund(order: str, amount: float = 1.0) -> str:
    """Pays back."""
    made.append((order, amount))
    return "paid"


@pytest.fixture(autouse=True)
def _nothing_is_made():
    made.clear()


@sgl.function
def agent(s, /, approve="ask", tools=(look, refund), **options):
    s += sgl.user("Refund order 7.")
    return sgl.use_tools(s, list(tools), approve=approve, **options)


@sgl.function
async def async_agent(s, /, approve="ask", tools=(look, refund), **options):
    s += sgl.user("Refund order 7.")
    return await sgl.use_tools(s, list(tools), approve=approve, **options)


@sgl.function
def shop(s):
    s += sgl.user("Refund order 7.")
    return sgl.use_tools(s, [look, refund], approve={refund: "ask"})


def model(*texts):
    left = iter(texts)
    return sgl.ScriptedBackend(lambda _: next(left))


def arun(*args, **options):
    return asyncio.run(async_agent.arun(*args, **options))


def aresume(state, decisions, **settings):
    async def resume():
        return await state.aresume(decisions, **settings)

    return asyncio.run(resume())


BOTH = pytest.mark.parametrize(
    ("play", "resume"),
    [(agent.run, sgl.ProgramState.resume), (arun, aresume)],
    ids=["plain", "async"],
)
REFUND = call("refund", order="7", amount=5)


# ------------------------------------------------------------------------------------- suspension


class Card(BaseModel):
    number: str = Field(exclude=True)
    holder: str = "me"


def charge(
    card: Card,
    pin: SecretStr,
    amount: int = 1,
    backup: SecretStr = SecretStr("0000"),  # noqa: B008 # what is tested
) -> str:
    """Charges a card."""
    made.append((card.number, pin.get_secret_value(), amount, backup.get_secret_value()))
    return "paid"


@BOTH
@pytest.mark.parametrize("changed", [{}, {"amount": 50}])
def test_arguments_are_shown_and_kept_as_the_model_wrote_them(play, resume, changed, tmp_path):
    backend = model(call("charge", card={"number": "12é"}, pin="34"), answer("done"))
    program = agent if play == agent.run else async_agent
    state = play(tools=[charge], backend=backend)
    state.save(tmp_path / "state.json")
    state = sgl.load(tmp_path / "state.json", program, types=[charge, Card], backend=backend)
    (waiting,) = state.pending()
    assert waiting.arguments == {"card": {"number": "12é"}, "pin": "34", "amount": 1}
    resume(state, waiting.approve(**changed))
    assert made == [("12é", "34", changed.get("amount", 1), "0000")]


@BOTH
def test_a_run_stops_before_a_call_and_goes_on(play, resume):
    backend = model(REFUND, answer("done"))
    state = play(backend=backend)
    assert not made
    (waiting,) = state.pending()
    assert (waiting.tool, waiting.arguments) == ("refund", {"order": "7", "amount": 5.0})
    assert not waiting.in_doubt
    assert state.ret_value is None
    state = resume(state, waiting.approve())
    assert made == [("7", 5.0)]
    assert state.ret_value == "done"
    assert not state.pending()


@BOTH
def test_a_reason_is_read_by_the_model(play, resume):
    state = play(backend=model(REFUND, answer("sorry")))
    state = resume(state, [state.pending()[0].deny("it is too late for this order.")])
    assert not made
    assert results(state) == ["Result of refund: Denied: it is too late for this order."]


@BOTH
def test_changed_arguments_are_used_and_told(play, resume):
    state = play(backend=model(REFUND, answer("done")))
    state = resume(state, [state.pending()[0].approve(amount=3)])
    assert made == [("7", 3.0)]
    assert results(state) == [
        'Result of refund: The arguments were changed to {"order":"7","amount":3}.\n"paid"'
    ]


def test_a_result_can_be_given():
    state = agent.run(backend=model(REFUND, answer("done")))
    state = state.resume([state.pending()[0].give_result("paid by hand")])
    assert not made
    assert results(state) == ["Result of refund: paid by hand"]


def test_a_turn_waits_as_a_whole_until_all_its_calls_are_decided():
    turn = calls(call("look", order="7"), REFUND, call("refund", order="8"))
    state = agent.run(
        {"refund": "ask"}, parallel_tool_calls=True, backend=model(turn, answer("done"))
    )
    first, second = state.pending()
    assert not made
    state = state.resume(second.deny("no."))
    assert state.pending() == [first]
    assert not made
    state = state.resume(first.approve())
    assert made == ["7", ("7", 5.0)]
    assert results(state)[0].splitlines() == [
        'Result of look: "late"',
        'Result of refund: "paid"',
        "Result of refund: Denied: no.",
    ]


def test_earlier_calls_and_answers_are_not_repeated():
    asked = []
    left = iter([call("look", order="7"), REFUND, answer("done")])

    def write(request):
        asked.append(request.prompt.text)
        return next(left)

    state = shop.run(backend=sgl.ScriptedBackend(write))
    assert made == ["7"]
    state = state.resume(state.pending()[0].approve())
    assert made == ["7", ("7", 5.0)]
    assert len(asked) == 3
    assert state.usage().prompt_tokens > 0


@pytest.mark.parametrize("streams", [False, True])
def test_the_state_is_saved_there_and_resumed_elsewhere(tmp_path, streams):
    path = tmp_path / "state.json"
    state = shop.run(backend=model(call("look", order="7"), REFUND), stream=streams)
    state.pending()
    state.save(path)
    loaded = sgl.load(path, shop, backend=model(answer("done")))
    assert loaded.pending() == state.pending()
    assert loaded.text() == state.text()
    resumed = loaded.resume([each.approve() for each in loaded.pending()], stream=streams)
    assert resumed.ret_value == "done"
    assert made == ["7", ("7", 5.0)]


def test_copies_and_pickles_are_suspended_too():
    state = shop.run(backend=model(REFUND, answer("sorry")))
    for other in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert other.pending() == state.pending()
    resumed = copy.copy(state).resume(state.pending()[0].deny())
    assert results(resumed) == ["Result of refund: Denied: it was not approved."]


def test_what_is_missing_says_that_the_run_is_suspended():
    state = agent.run(backend=model(REFUND))
    with pytest.raises(sgl.UnknownVariableError, match=r"suspended: decide about state\.pending"):
        state["answer"]


def test_a_streamed_run_ends_where_it_is_suspended():
    state = agent.run(backend=model(REFUND, answer("done")), stream=True)
    text = "".join(state.text_iter())
    assert text.rstrip().endswith(f"{REFUND}<|im_end|>")
    assert [event.kind for event in state.events()] == ["turn"]
    state = state.resume(state.pending()[0].approve(), stream=True)
    assert [event.kind for event in state.events()] == ["turn", "call", "result", "turn", "answer"]


# ---------------------------------------------------------------------------------------- approvers


@BOTH
def test_a_function_decides_at_once(play, resume):
    verdicts = iter([True, False])
    seen = []

    def decide(waiting):
        seen.append(waiting.arguments)
        return next(verdicts)

    state = play(decide, backend=model(REFUND, call("look", order="9"), answer("done")))
    assert state.ret_value == "done"
    assert made == [("7", 5.0)]
    assert seen == [{"order": "7", "amount": 5.0}, {"order": "9"}]
    assert results(state)[1] == "Result of look: Denied: it was not approved."


@BOTH
def test_a_function_may_change_deny_or_ask(play, resume):
    def decide(waiting):
        amount = waiting.arguments["amount"]
        if amount > 100:
            return "ask"
        return waiting.approve(amount=10) if amount > 10 else waiting.deny("too little")

    turns = [call("refund", order="7", amount=each) for each in (20, 2, 200)]
    state = play({"refund": decide}, backend=model(*turns, answer("done")))
    assert made == [("7", 10.0)]
    (waiting,) = state.pending()
    assert waiting.arguments["amount"] == 200
    state = resume(state, waiting.approve())
    assert made == [("7", 10.0), ("7", 200.0)]
    assert "Denied: too little" in results(state)[1]


def test_a_coroutine_function_is_awaited():
    async def decide(waiting):
        await asyncio.sleep(0)
        return waiting.deny("no")

    state = arun(decide, backend=model(REFUND, answer("done")))
    assert results(state) == ["Result of refund: Denied: no"]


def test_calls_that_cannot_be_made_need_no_approval():
    def strict(order: str) -> str:
        return look(order)

    state = agent.run(
        {"refund": "ask"}, (strict, refund), backend=model(call("strict", order="1"), answer("x"))
    )
    assert not state.pending()


# ------------------------------------------------------------------------------- programs in tools


@sgl.function
def clerk(s, order):
    s += sgl.user(f"Refund {order}.")
    return sgl.use_tools(s, [refund], approve="ask")


def delegate(order: str) -> str:
    """Lets a clerk do it."""
    return clerk.run(order).ret_value


@sgl.function
def boss(s):
    s += sgl.user("Refund 7 and 8.")
    return sgl.use_tools(s, [delegate, look], parallel_tool_calls=True)


def write_for_both(request):
    text = request.prompt.text
    if "and 8." in text:
        turn = calls(*[call("delegate", order=each) for each in "78"], call("look", order="9"))
        return turn if "Result of" not in text else answer("both")
    order = text.split("Refund ")[1][0]
    return call("refund", order=order) if "Result of" not in text else answer(f"{order} is paid")


def test_an_agent_in_a_tool_suspends_the_whole(tmp_path):
    path = tmp_path / "state.json"
    backend = sgl.ScriptedBackend(write_for_both)
    state = boss.run(backend=backend)
    (first,) = state.pending()
    assert first.arguments["order"] == "7"
    state.save(path)
    state = sgl.load(path, boss, backend=backend).resume(first.approve())
    (second,) = state.pending()
    assert second.arguments["order"] == "8"
    assert made == [("7", 1.0)]  # plain functions wait for those before them
    state = state.resume(second.deny("no"))
    assert made == [("7", 1.0), "9"]
    assert results(state)[0].splitlines()[0] == 'Result of delegate: "7 is paid"'


@sgl.function
def twins(s):
    s += sgl.user("Refund order 7.")
    left, right = s.fork(2)
    for branch in (left, right):
        sgl.use_tools(branch, [refund], approve="ask")
    return left["answer"], right["answer"]


def test_forks_are_suspended_one_after_another():
    backend = sgl.ScriptedBackend(
        lambda request: answer("done") if "Result of" in request.prompt.text else REFUND
    )
    state = twins.run(backend=backend)
    for _ in range(2):
        (waiting,) = state.pending()
        state = state.resume(waiting.approve())
    assert state.ret_value == ("done", "done")
    assert made == [("7", 5.0)] * 2


def test_items_of_a_batch_are_suspended_by_themselves():
    backend = sgl.ScriptedBackend(
        lambda request: answer("done") if "Result of" in request.prompt.text else REFUND
    )
    states = shop.run_batch([{}, {}], backend=backend)
    assert [len(state.pending()) for state in states] == [1, 1]
    assert states[1].resume(states[1].pending()[0].approve()).ret_value == "done"
    assert made == [("7", 5.0)]


def test_a_tool_of_a_server_is_approved():
    server = Path(__file__).with_name("mcp_demo_server.py")
    with sgl.mcp([sys.executable, str(server)]) as tools:
        backend = model(call("add", a=2, b=2), answer("4"))
        state = agent.run({"add": "ask"}, tuple(tools), backend=backend)
        assert state.pending()[0].arguments == {"a": 2, "b": 2}
        state = state.resume(state.pending()[0].approve(b=5))
        assert results(state)[0].endswith('{"result": 7}')


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("approve", "problem"),
    [
        ("always", "'always' approves no calls"),
        ({"refnd": "ask"}, "'refnd' is not one of the tools"),
        ({"refund": "ask", refund: lambda call: True}, "it has the tool 'refund' twice"),
        ({refund: 3}, "3 approves no calls"),
        (lambda _: None, "the function returned None"),
        (lambda _: "no", "the function returned 'no'"),
    ],
)
def test_what_approves_nothing_is_refused(approve, problem):
    with pytest.raises(sgl.ParameterError, match=f"^approve: {problem}"):
        agent.run(approve, backend=model(REFUND))


def test_a_coroutine_function_needs_a_coroutine():
    async def decide(waiting):
        return True

    with pytest.raises(sgl.ParameterError, match="'decide' is a coroutine function"):
        agent.run(decide, backend=model(REFUND))


def test_decisions_are_about_calls_that_wait():
    state = agent.run(backend=model(REFUND, answer("done")))
    other = sgl.ScriptedBackend(lambda _: answer("x"))
    (waiting,) = state.pending()
    wrongs: list[Any] = [[], [True], [waiting.approve(), waiting.deny()]]
    for wrong in wrongs:
        with pytest.raises(sgl.ParameterError, match=r"^decisions: "):
            state.resume(wrong)
    with pytest.raises(sgl.ProgramError, match="not suspended"):
        agent.run(backend=other).resume(waiting.approve())


@pytest.mark.parametrize("resume", [sgl.ProgramState.resume, aresume], ids=["plain", "async"])
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tiemout": 3}, "resume has no such argument. Did you mean timeout=?"),
        ({"temperature": 0}, "a resumed run keeps what the suspended run had."),
        ({"backend": None}, "a resumed run keeps what the suspended run had."),
        ({"journal": "x"}, "a resumed run keeps what the suspended run had."),
        ({"timeout": "soon"}, "'soon' is not"),
        ({"wind_down": 2}, "it has no effect without a timeout"),
        ({"stream": 1}, "1 is not True or False."),
        ({"max_total_tokens": -1}, "-1"),
    ],
)
def test_settings_of_a_resumed_run_are_checked(resume, settings, problem):
    state = agent.run(backend=model(REFUND, answer("done")))
    decision = state.pending()[0].approve()
    with pytest.raises(sgl.ParameterError) as caught:
        resume(state, decision, **settings)
    assert caught.value.parameter == next(iter(settings))
    assert problem in str(caught.value)
    assert "test_approval.py" in str(caught.value.where)
    assert resume(state, decision).ret_value == "done"


def test_limits_of_a_resumed_run_are_its_own_or_those_before():
    state = agent.run(backend=model(REFUND, answer("done")), max_total_tokens=100_000, timeout=60)
    decision = state.pending()[0].approve()
    with pytest.raises(sgl.BudgetError):
        state.resume(decision, max_total_tokens=1)
    state = agent.run(backend=model(REFUND, answer("done")), max_total_tokens=100_000)
    assert state.resume(state.pending()[0].approve(), timeout=60).ret_value == "done"


def test_changed_arguments_have_to_fit_and_can_be_changed_again():
    state = agent.run(backend=model(REFUND, answer("done")))
    with pytest.raises(sgl.ParameterError, match="changed arguments of refund are not valid"):
        state.resume(state.pending()[0].approve(amount="much"))
    assert state.resume(state.pending()[0].approve(amount=2)).ret_value == "done"
    assert made == [("7", 2.0)]


def test_a_body_that_catches_everything_is_told():
    @sgl.function
    def greedy(s):
        s += sgl.user("Refund order 7.")
        try:
            sgl.use_tools(s, [refund], approve="ask")
        except BaseException:
            return "caught"

    with pytest.raises(sgl.ProgramError, match="went on after its run was suspended"):
        greedy.run(backend=model(REFUND))


def test_a_state_without_its_program_is_not_resumed(tmp_path):
    path = tmp_path / "state.json"
    shop.run(backend=model(REFUND)).save(path)
    state = sgl.load(path)
    assert len(state.pending()) == 1
    with pytest.raises(sgl.ProgramError, match="no program to resume"):
        state.resume(state.pending()[0].approve())


def test_changed_tools_are_named_with_both_forms(tmp_path):
    def refund(order: str, total: int) -> str:
        """Pays back."""
        return "paid"

    tools = [globals()["refund"]]

    @sgl.function
    def changing(s):
        s += sgl.user("Refund order 7.")
        return sgl.use_tools(s, tools, approve="ask")

    state = changing.run(backend=model(REFUND))
    tools[:] = [refund]
    with pytest.raises(sgl.ResumeError, match=r'refund was .*"amount".*is now .*"total"'):
        state.resume(state.pending()[0].approve())
