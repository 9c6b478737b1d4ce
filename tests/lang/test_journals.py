"""Journals: what a run has done is in a file before it goes on, and a run that was killed continues
from there. What does not fit is refused by name.
"""

import asyncio
import itertools
import json
import os
from threading import Thread

import pytest

import sglang_lite as sgl
from sglang_lite.lang.runs import files
from sglang_lite.lang.tools import SchemaTool
from tests.lang.test_approval import model
from tests.lang.test_tool_errors import results
from tests.lang.test_tool_limits import calls
from tests.lang.test_tools import answer, call

SECRET = "a secret of the tests"
made = []


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def _nothing_is_made():
    made.clear()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def pay(n: int) -> str:
    """Pays; the process is killed in the first payment of 13."""
    made.append(n)
    if n == 13 and made.count(13) == 1:
        raise Killed
    return f"paid {n}"


@sgl.function
def agent(s, question="Pay!", tools=None):
    s += sgl.user(question)
    return sgl.use_tools(s, tools or [pay], parallel_tool_calls=True)


@sgl.function
def payer(s, question="Pay!"):
    s += sgl.user(question)
    return sgl.use_tools(s, [pay], parallel_tool_calls=True)


def writes(*turns):
    """A model that writes these turns, and the numbers of the turns that it was asked for."""
    asked = []

    def write(request):
        turn = request.prompt.text.count("<|im_start|>assistant") - 1
        asked.append(turn)
        return turns[turn]

    return sgl.ScriptedBackend(write), asked


def pays(*numbers):
    return calls(*[call("pay", n=n) for n in numbers])


def kill(program, path, backend, **options):
    with pytest.raises(Killed):
        program.run(backend=backend, journal=path, **options)


# ------------------------------------------------------------------------------------ after a kill


def test_a_call_in_doubt_is_listed_and_not_repeated(path):
    backend, asked = writes(pays(1), pays(2, 13, 3), answer("ok"))
    kill(payer, path, backend)
    state = payer.run(backend=backend, journal=path)
    (doubtful,) = state.pending()
    assert doubtful.in_doubt
    assert doubtful.arguments == {"n": 13}
    assert made == [1, 2, 13]
    state = state.resume(doubtful.give_result("it was paid"))
    assert made == [1, 2, 13, 3]
    assert asked == [0, 1, 2]
    assert results(state)[1].splitlines() == [
        'Result of pay: "paid 2"',
        "Result of pay: it was paid",
        'Result of pay: "paid 3"',
    ]


@pytest.mark.parametrize(
    ("decide", "text", "times"),
    [
        (lambda waiting: waiting.approve(), '"paid 13"', 2),
        (lambda waiting: waiting.deny("look first."), "Denied: look first.", 1),
    ],
)
def test_a_call_in_doubt_is_repeated_if_someone_says_so(path, decide, text, times):
    backend, _ = writes(pays(13), answer("ok"))
    kill(payer, path, backend)
    state = payer.run(backend=backend, journal=path)
    state = state.resume([decide(state.pending()[0])])
    assert results(state) == [f"Result of pay: {text}"]
    assert made == [13] * times
    again = payer.run(backend=backend, journal=path)  # all is known
    assert again.text() == state.text()
    assert made == [13] * times


def test_a_call_that_is_killed_again_is_in_doubt_again(path):
    def always(n: int) -> str:
        """Never returns."""
        made.append(n)
        raise Killed

    @sgl.function
    def unlucky(s):
        s += sgl.user("Pay!")
        return sgl.use_tools(s, [always])

    backend, _ = writes(call("always", n=1), answer("ok"))
    kill(unlucky, path, backend)
    for times in (1, 2):
        state = unlucky.run(backend=backend, journal=path)
        assert made == [1] * times
        with pytest.raises(Killed):
            state.resume(state.pending()[0].approve())


def test_idempotent_tools_are_repeated_and_keys_are_the_same(path):
    keys = []

    @sgl.idempotent
    def look(n: int) -> int:
        """Looks."""
        return pay_once(n)

    def keyed(n: int, idempotency_key: str) -> int:
        """Pays with a key."""
        keys.append((n, idempotency_key))
        return pay_once(n)

    def pay_once(n):
        made.append(n)
        if made.count(n) == 1:
            raise Killed
        return n

    @sgl.function
    def careful(s):
        s += sgl.user("Pay!")
        return sgl.use_tools(s, [look, keyed])

    backend, _ = writes(call("look", n=1), call("keyed", n=2), call("keyed", n=3), answer("ok"))
    for _ in range(3):
        kill(careful, path, backend)
    state = careful.run(backend=backend, journal=path)
    assert state.ret_value == "ok"
    assert made == [1, 1, 2, 2, 3, 3]
    (two, again), (three, _) = keys[:2], keys[2:]
    assert two == again
    assert two[1] != three[1]


def test_models_do_not_see_the_key():
    def keyed(n: int, idempotency_key: str) -> int:
        """Pays with a key."""
        return n

    from sglang_lite.lang.agent import describe
    from sglang_lite.lang.tools import tool_schemas

    assert "idempotency_key" not in json.dumps(tool_schemas([keyed])) + describe([keyed])
    assert keyed(1, "x") == 1


def test_what_came_before_the_loop_is_kept_and_the_body_is_checked(path):
    times = itertools.count()

    @sgl.function
    def clock(s, day="Monday"):
        s += f"It is {day if next(times) < 1 else 'Tuesday'}. " + sgl.gen("mood", stop=".")
        s += sgl.user("Pay!")
        return sgl.use_tools(s, [pay])

    backend = model("fine", call("pay", n=13), answer("ok"))
    kill(clock, path, backend)
    with pytest.raises(sgl.ResumeError) as caught:
        clock.run(backend=backend, journal=path)
    assert "'mood' was asked behind 'It is Monday. '" in str(caught.value)
    assert "asks for 'mood' behind 'It is Tuesday. '" in str(caught.value)


def test_a_body_that_does_not_come_to_a_call_is_told(path):
    times = itertools.count()

    @sgl.function
    def lazy(s):
        s += sgl.user("Pay!")
        return sgl.use_tools(s, [pay]) if not next(times) else None

    backend, _ = writes(call("pay", n=13), answer("ok"))
    kill(lazy, path, backend)
    with pytest.raises(sgl.ResumeError, match=r'the call pay\({"n":13}\); the body now ended'):
        lazy.run(backend=backend, journal=path)


def test_failures_are_kept_as_they_were(path):
    def broken(n: int) -> str:
        """Fails."""
        made.append(n)
        raise LookupError("no row")

    @sgl.function
    def tries(s):
        s += sgl.user("Pay!")
        try:
            sgl.use_tools(s, [broken], on_tool_error="raise")
        except sgl.ToolError as error:
            s += sgl.user(error.message)
        return sgl.use_tools(s, [broken, pay], "second", max_failures=2)

    backend, asked = writes(
        *[call("broken", n=1), call("broken", n=2), call("pay", n=13), call("broken", n=3)]
    )
    kill(tries, path, backend)
    state = tries.run(backend=backend, journal=path)
    with pytest.raises(sgl.ToolError, match="broken failed 2 times in a row"):
        state.resume(state.pending()[0].give_result("paid"))
    with pytest.raises(sgl.ToolError, match="broken failed 2 times in a row"):
        tries.run(backend=backend, journal=path)
    assert made == [1, 2, 13, 3]
    assert asked == [0, 1, 2, 3]


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_that_ended_are_known_if_another_one_is_raised(path, is_async):
    ends = []

    async def fail(n: int) -> str:
        """Fails when the others have begun and have ended."""
        for end in ends:
            await asyncio.wait_for(end.wait(), 10)
        raise LookupError(f"no row {n}")

    async def save(n: int) -> str:
        """Saves, and fails for 3."""
        made.append(n)
        asyncio.get_running_loop().call_soon(ends[len(made) - 1].set)
        if n == 3:
            raise LookupError(f"no row {n}")
        return f"saved {n}"

    def begin(s):
        ends[:] = asyncio.Event(), asyncio.Event()
        s += sgl.user("Save!")

    @sgl.function
    def saver(s):
        begin(s)
        try:
            sgl.use_tools(s, [fail, save], "first", on_tool_error="raise", parallel_tool_calls=True)
        except sgl.ToolError as error:
            s += sgl.user(error.message)
        return sgl.use_tools(s, [pay], approve="ask")

    @sgl.function
    async def async_saver(s):
        begin(s)
        try:
            await sgl.use_tools(
                s, [fail, save], "first", on_tool_error="raise", parallel_tool_calls=True
            )
        except sgl.ToolError as error:
            s += sgl.user(error.message)
        return await sgl.use_tools(s, [pay], approve="ask")

    program = async_saver if is_async else saver
    turn = calls(call("fail", n=1), call("save", n=2), call("save", n=3))
    backend, _ = writes(turn, call("pay", n=1), answer("ok"))
    program.run(backend=backend, journal=path)
    state = program.run(backend=backend, journal=path)  # raises the same again
    assert state.resume(state.pending()[0].approve()).ret_value == "ok"
    assert made == [2, 3, 1]
    ended = [
        json.loads(each)["data"] for each in path.read_text().splitlines() if "LoggedResult" in each
    ]
    assert [(each.get("error"), each["text"]) for each in ended[1:3]] == [
        (None, '"saved 2"'),
        ("the tool save raised LookupError: no row 3", ""),
    ]
    assert "no row 1" in ended[0]["error"]


HALF = "\ud800"  # of a surrogate pair


@pytest.mark.parametrize(
    ("city", "policy", "text"),
    [
        (HALF, "show", "Error: the arguments of find are not valid"),
        ("x", "show", "Error: LookupError: no ?"),
        ("x", lambda call, error: f"No {error}", "No no ?"),
    ],
)
def test_halves_of_surrogate_pairs_become_failures_that_the_model_reads(path, city, policy, text):
    def find(city: str) -> str:
        """Finds a city."""
        made.append(city)
        raise LookupError(f"no {HALF}")

    @sgl.function
    def finder(s):
        s += sgl.user("Find!")
        return sgl.use_tools(s, [find, pay], on_tool_error=policy)

    backend, _ = writes(call("find", city=city), call("pay", n=13), answer("ok"))
    kill(finder, path, backend)
    state = finder.run(backend=backend, journal=path)
    state = state.resume(state.pending()[0].give_result("paid"))
    assert state.ret_value == "ok"
    assert results(state)[0].startswith(f"Result of find: {text}")
    assert made == ["x"] * (city == "x") + [13]


def test_a_tool_with_a_schema_may_get_half_of_a_surrogate_pair(path):
    tool = SchemaTool(
        "find", "Finds.", {"properties": {"city": {"type": "string"}}}, lambda given: given["city"]
    )

    @sgl.function
    def finder(s):
        s += sgl.user("Find!")
        return sgl.use_tools(s, [tool], approve="ask")

    backend, _ = writes(call("find", city=HALF), answer("ok"))
    finder.run(backend=backend, journal=path)
    state = finder.run(backend=backend, journal=path)
    (waiting,) = state.pending()
    assert waiting.arguments == {"city": HALF}
    assert results(state.resume(waiting.approve())) == ['Result of find: "?"']


def test_limits_of_time_and_tokens_are_taken_from_the_log(path):
    backend, asked = writes(pays(1), pays(13), answer("ok"))
    options = {"max_total_tokens": 100_000}
    kill(payer, path, backend, **options)
    state = payer.run(backend=backend, journal=path, **options)
    state = state.resume(state.pending()[0].give_result("x"))
    assert state.ret_value == "ok"
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_a_line_that_was_cut_short_is_dropped(path, cut, caplog):
    backend, _ = writes(pays(1), answer("ok"))
    text = payer.run(backend=backend, journal=path).text()
    path.write_bytes(path.read_bytes()[:-cut])
    assert payer.run(backend=backend, journal=path).text() == text
    assert "was cut short" in caplog.text
    assert made == [1]


def test_a_file_with_only_a_part_of_its_first_line_begins_anew(path):
    backend, _ = writes(pays(1), answer("ok"))
    path.write_bytes(b'{"version":1,"type":"Journ')
    assert payer.run(backend=backend, journal=path).ret_value == "ok"


def test_coroutines_are_resumed(path):
    async def later(n: int) -> str:
        """Pays later."""
        await asyncio.sleep(0)
        return pay(n)

    @sgl.function
    async def patient(s):
        s += sgl.user("Pay!")
        return await sgl.use_tools(s, [later])

    backend, asked = writes(call("later", n=1), call("later", n=13), answer("ok"))
    with pytest.raises(Killed):
        asyncio.run(patient.arun(backend=backend, journal=path))
    state = asyncio.run(patient.arun(backend=backend, journal=path))
    assert [each.arguments["n"] for each in state.pending()] == [13]
    state = asyncio.run(state.aresume(state.pending()[0].approve()))
    assert state.ret_value == "ok"
    assert asked == [0, 1, 2]


def test_programs_in_tools_and_bodies_are_in_the_same_journal(path):
    @sgl.function
    def clerk(s, n):
        s += sgl.user(f"Pay {n}.")
        return sgl.use_tools(s, [pay])

    def delegate(n: int) -> str:
        """Lets a clerk pay."""
        return clerk.run(n).ret_value

    @sgl.function
    def boss(s):
        first = s.call(clerk, 1).ret_value
        s += sgl.user(f"{first}. Both!")
        return sgl.use_tools(s, [delegate])

    def write(request):
        text = request.prompt.text
        if "Both!" in text:
            return answer("both") if "Result of" in text else call("delegate", n=13)
        n = int(text.split("Pay ")[1].split(".")[0])
        return answer(f"{n} is paid") if "Result of" in text else call("pay", n=n)

    backend = sgl.ScriptedBackend(write)
    kill(boss, path, backend)
    assert made == [1, 13]
    state = boss.run(backend=backend, journal=path)
    assert [(each.tool, each.in_doubt) for each in state.pending()] == [
        ("delegate", True),
        ("pay", True),
    ]
    outer, inner = state.pending()
    state = state.resume([outer.approve(), inner.give_result("it was paid")])
    assert state.ret_value == "both"
    assert made == [1, 13]


def test_suspended_runs_are_resumed_from_their_journal(path):
    @sgl.function
    def asks(s):
        s += sgl.user("Pay!")
        return sgl.use_tools(s, [pay], approve="ask")

    backend, asked = writes(call("pay", n=1), answer("ok"))
    waiting = asks.run(backend=backend, journal=path).pending()
    state = asks.run(backend=backend, journal=path)
    assert state.pending() == waiting
    assert state.resume(waiting[0].approve(), stream=True).ret_value == "ok"
    assert asks.run(backend=backend, journal=path).ret_value == "ok"
    assert made == [1]
    assert asked == [0, 1]


@sgl.function
def asking_payer(s):
    s += sgl.user("Pay!")
    return sgl.use_tools(s, [pay], approve="ask")


@pytest.mark.parametrize("decide", [lambda call: call.approve(), lambda call: call.deny()])
def test_an_old_decision_does_not_repeat_a_call_that_was_begun_meanwhile(path, decide):
    backend, _ = writes(call("pay", n=13), answer("ok"))
    old = asking_payer.run(backend=backend, journal=path)
    new = asking_payer.run(backend=backend, journal=path)
    with pytest.raises(Killed):
        new.resume(new.pending()[0].approve())
    with pytest.raises(sgl.ResumeError, match="was begun meanwhile"):
        old.resume(decide(old.pending()[0]))
    assert made == [13]
    doubtful = asking_payer.run(backend=backend, journal=path)  # the file is free again
    assert doubtful.pending()[0].in_doubt
    assert doubtful.resume(doubtful.pending()[0].approve()).ret_value == "ok"
    with pytest.raises(sgl.ResumeError, match="was begun meanwhile"):
        doubtful.resume(doubtful.pending()[0].approve())
    assert made == [13, 13]


@pytest.mark.parametrize("where", ["run", "resume"])
def test_a_run_may_go_on_with_other_retries(path, where):
    backend, _ = writes(call("pay", n=1), answer("ok"))
    asking_payer.run(backend=backend, journal=path)
    state = asking_payer.run(backend=backend, journal=path, retries=3 if where == "run" else 0)
    decision = state.pending()[0].approve()
    retries = 3 if where == "resume" else 0
    assert state.resume(decision, retries=retries).ret_value == "ok"
    assert made == [1]


# --------------------------------------------------------------------------------------- bad input


def finished(path, **options):
    backend, _ = writes(pays(1), answer("ok"))
    payer.run("Pay!", backend=backend, journal=path, **options)
    return backend


def refuse(match, program=payer, *args, **options):
    with pytest.raises((sgl.ProgramError, sgl.ParameterError), match=match):
        program.run(*args, **options)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_changed_line_is_refused_with_its_number(path, secret):
    backend = finished(path, secret=secret)
    lines = path.read_bytes().splitlines(keepends=True)
    for number in range(1, len(lines)):
        changed = lines[number].replace(b'"run":""', b'"run":"x"')
        assert changed != lines[number]
        path.write_bytes(b"".join([*lines[:number], changed, *lines[number + 1 :]]))
        refuse(f"line {number + 1}: ", backend=backend, journal=path, secret=secret)
    path.write_bytes(b"".join([*lines[:2], b"\x00" * 20 + b"\n", *lines[2:]]))
    refuse("line 3: the line is damaged", backend=backend, journal=path, secret=secret)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_lines_that_were_deleted_repeated_or_swapped_are_refused(path, secret):
    backend = finished(path, secret=secret)
    head, *lines = path.read_bytes().splitlines(keepends=True)
    for i in range(len(lines)):
        edits = [[*lines[: i + 1], *lines[i:]]]  # repeated
        if i + 1 < len(lines):
            edits += [
                [*lines[:i], *lines[i + 1 :]],
                [*lines[:i], lines[i + 1], lines[i], *lines[i + 2 :]],
            ]
        for edited in edits:
            path.write_bytes(b"".join([head, *edited]))
            refuse("was changed, or is damaged", backend=backend, journal=path, secret=secret)
    path.write_bytes(b"".join([head, *lines]))
    assert payer.run(backend=backend, journal=path, secret=secret).ret_value == "ok"
    assert made == [1]


def test_a_new_journal_is_in_its_folder_on_the_disk_before_calls_are_made(path, monkeypatch):
    synced = []
    fsync = os.fsync

    def note(descriptor):
        synced.append((os.fstat(descriptor).st_ino, len(made)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    finished(path)
    folder = path.parent.stat().st_ino
    assert [number for number, _ in synced].count(folder) == 1
    assert (folder, 0) in synced
    finished(path)  # it is there already
    assert [number for number, _ in synced].count(folder) == 1


def test_a_line_that_could_not_be_written_does_not_break_the_chain(path, monkeypatch):
    append, failures = files.append, []

    def fail_once(file, name, line, **options):
        if b"LoggedCall" in line and not failures:
            failures.append(line)
            raise sgl.ParameterError("journal", "no room")
        append(file, name, line, **options)

    monkeypatch.setattr(files, "append", fail_once)
    backend, _ = writes(pays(1), pays(2), answer("ok"))
    text = payer.run(backend=backend, journal=path).text()
    assert failures
    assert payer.run(backend=backend, journal=path).text() == text
    assert made == [2]


def test_a_secret_has_to_be_the_same(path):
    backend = finished(path, secret=SECRET)
    refuse("written under a secret", backend=backend, journal=path)
    refuse("of another secret", backend=backend, journal=path, secret=SECRET + "!")
    assert payer.run(backend=backend, journal=path, secret=SECRET).ret_value == "ok"
    path.unlink()
    finished(path)
    refuse("written under no secret", backend=backend, journal=path, secret=SECRET)
    refuse("no effect without a journal", backend=backend, secret=SECRET)
    refuse("it has 5 characters", backend=backend, journal=path, secret="short")


def test_another_run_is_refused_with_both(path):
    backend = finished(path)
    refuse(r"question='Pay!'.*resumed with 'Go!'", payer, "Go!", backend=backend, journal=path)
    refuse(r"seed=None.*resumed with 3", backend=backend, journal=path, seed=3)
    refuse(r"temperature=None.*with 0.5", backend=backend, journal=path, temperature=0.5)
    refuse("of the program 'payer', not of 'agent'", agent, backend=backend, journal=path)
    assert payer.run(question="Pay!", backend=backend, journal=path).ret_value == "ok"


@pytest.mark.parametrize("content", [b"hello", b"hello\n", b'{"version":1}\n'])
def test_another_file_is_refused_and_unchanged(path, content):
    path.write_bytes(content)
    backend, _ = writes(answer("ok"))
    refuse("line 1: the file is not a journal", backend=backend, journal=path)
    assert path.read_bytes() == content


def test_what_cannot_be_a_journal_is_refused(path, tmp_path):
    backend, _ = writes(answer("ok"))
    refuse("3 is not a path", backend=backend, journal=3)
    refuse("can't be written", backend=backend, journal=tmp_path)
    refuse("can't be resumed later", agent, tools=object(), backend=backend, journal=path)
    with pytest.raises(sgl.ParameterError, match="journal"):
        payer.run_batch([{}], backend=backend, journal=path)


def test_a_journal_has_one_writer(path):
    backend, _ = writes(answer("ok"))

    @sgl.function
    def outer(s):
        s += "x"
        with pytest.raises(sgl.ParameterError, match="the enclosing run has one"):
            payer.run(journal=path.with_name("other.jsonl"))
        return path.exists()

    assert outer.run(backend=backend, journal=path).ret_value

    other = path.with_name("other.jsonl")

    @sgl.function
    def twice(s):
        s += "x"
        refused = Thread(target=begin_again)  # no part of this run
        refused.start()
        refused.join()

    def begin_again():
        with pytest.raises(sgl.ProgramError) as caught:
            twice.run(backend=backend, journal=other)
        errors.append(caught.value.message)

    errors = []
    twice.run(backend=backend, journal=other)
    assert errors == [f"{other} is being written by another run."]


def test_a_batch_in_a_program_with_a_journal_makes_no_calls(path):
    @sgl.function
    def outer(s):
        s += "x"
        payer.run_batch([{}], backend=backend)

    backend, _ = writes(pays(1), answer("ok"))
    with pytest.raises(sgl.BatchError) as caught:
        outer.run(backend=backend, journal=path)
    assert "a batch inside a program can't be written to its journal" in str(caught.value)
    assert not made


def test_approval_is_asked_for_once(path):
    asked = []

    def decide(waiting):
        asked.append(waiting.arguments["n"])
        return True

    @sgl.function
    def judged(s):
        s += sgl.user("Pay!")
        return sgl.use_tools(s, [pay], approve=decide)

    backend, _ = writes(call("pay", n=1), call("pay", n=13), answer("ok"))
    kill(judged, path, backend)
    state = judged.run(backend=backend, journal=path)
    state.resume(state.pending()[0].give_result("x"))
    assert asked == [1, 13]
