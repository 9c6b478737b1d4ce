"""One clear exception at the right line, and the process continues."""

import asyncio
import gc
import logging
import threading
import traceback
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.lang.execution.reading import read_nothing
from tests.lang.fakes import Gated


def run(body, backend=None, **options):
    return sgl.function(body).run(backend=backend or sgl.ScriptedBackend(default="x"), **options)


def line_of(body, offset):
    return body.__code__.co_firstlineno + offset


def test_a_failing_node_fails_what_comes_after_and_keeps_what_came_before():
    backend = sgl.ScriptedBackend({"one": "1", "two": RuntimeError("down"), "three": "3"})

    def body(s):
        s += "one" + sgl.gen("a")
        s += "two" + sgl.gen("b")
        s += "three" + sgl.gen("c")

    state = run(body, backend)
    assert state["a"] == "1"
    for read in (lambda: state["b"], lambda: state["c"], state.text, state.messages, state.sync):
        with pytest.raises(sgl.ProgramError, match="RuntimeError: down") as caught:
            read()
        assert caught.value.where.line == line_of(body, 2)
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert isinstance(state.error(), sgl.ProgramError)
    state += "more" + sgl.gen("d")  # after the failure: nothing hangs
    with pytest.raises(sgl.ProgramError, match="down"):
        state["d"]
    assert len(backend.calls) == 2
    assert run(lambda s: s.__iadd__(sgl.gen("a")))["a"] == "x"  # the next program is not affected


def test_errors_of_the_package_keep_their_class():
    def body(s):
        s += sgl.gen("a", type=int)

    state = run(body, sgl.ScriptedBackend({"": "12"}, default=""))
    with pytest.raises(sgl.SglError):
        run(lambda s: s.__iadd__(sgl.gen("a", regex="b")), sgl.ScriptedBackend(lambda call: "a"))[
            "a"
        ]
    assert state["a"] == 12


def test_an_invalid_value_is_an_error_that_carries_the_text():
    def body(s):
        s += sgl.gen("a", type=list[int], max_tokens=1)

    state = run(body, sgl.ScriptedBackend(lambda call: "[1, 2]"))
    with pytest.raises(sgl.ValueValidationError, match="not JSON") as caught:
        state["a"]
    assert caught.value.text == "[1,"
    assert caught.value.where.line == line_of(body, 1)


def test_each_reader_gets_an_error_of_its_own():
    state = run(lambda s: s.__iadd__(sgl.gen("a")), sgl.ScriptedBackend(lambda call: str(1 / 0)))
    errors = []
    for _ in range(2):
        with pytest.raises(sgl.ProgramError) as caught:
            state["a"]
        errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_unknown_variables_name_the_known_ones():
    state = run(lambda s: s.__iadd__(sgl.gen("a")))
    with pytest.raises(sgl.UnknownVariableError, match=r"no variable 'b'; it has: 'a'\."):
        state["b"]
    with pytest.raises(KeyError):
        state["b"]


def test_a_name_is_unknown_whether_or_not_a_node_has_failed_yet():
    def body(s):
        s += sgl.gen("a", check=lambda text: False)
        assert isinstance(s.error(), sgl.ValueValidationError)
        s["b"]

    with pytest.raises(sgl.UnknownVariableError, match=r"no variable 'b'; it has: 'a'\."):
        run(body)


def test_reading_an_open_scope_is_an_error():
    def body(s):
        with s.var_scope("v"):
            s["v"]

    with pytest.raises(sgl.ProgramError, match="'v' is still open"):
        run(body)


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (sgl.user_end(), "a 'user' turn ends, but no turn is open"),
        (sgl.user_begin() + sgl.assistant_end(), "the open turn is 'user'"),
        (sgl.user_begin() + sgl.assistant("x"), "begins inside a 'user' turn"),
        (sgl.user(sgl.user("x")), "begins inside a 'user' turn"),
    ],
)
def test_wrong_role_nesting_is_raised_at_its_line(expr, message):
    def body(s):
        s += "fine"
        s += expr

    with pytest.raises(sgl.ProgramError, match=message) as caught:
        run(body)
    assert caught.value.where.line == line_of(body, 2)


def test_an_unknown_role_is_a_template_error():
    from sglang_lite.lang.ir import SglRoleBegin

    with pytest.raises(sgl.TemplateError, match="no role 'tool'"):
        run(lambda s: s.__iadd__(SglRoleBegin("tool")))


def test_roles_without_a_template_are_an_error():
    class Bare(sgl.ScriptedBackend):
        def get_chat_template(self):
            return None

    with pytest.raises(sgl.TemplateError, match="no chat template"):
        run(lambda s: s.user("x"), Bare())


def template_error(backend):
    with pytest.raises(sgl.TemplateError, match="no chat template") as caught:
        run(lambda s: s.user("x"), backend)
    return caught.value.hint


def test_the_advice_on_a_missing_template_is_right_for_a_backend():
    from sglang_lite.lang.chat_template import get_chat_template

    class Untold(sgl.ScriptedBackend):
        def get_chat_template(self):
            return self.chat_template

    backend = Untold()
    backend.chat_template = None
    advice = template_error(backend).partition("or set ")[2]
    assert (
        advice
        == 'backend.chat_template = get_chat_template("chatml"), from sglang_lite.lang.chat_template.'
    )
    exec(
        advice.partition(", from")[0], {"backend": backend, "get_chat_template": get_chat_template}
    )
    assert run(lambda s: s.user("x"), backend).text() == "<|im_start|>user\nx<|im_end|>\n"


def test_an_exception_inside_a_turn_leaves_the_state_usable():
    def body(s):
        with pytest.raises(ZeroDivisionError), s.user():
            s += "half"
            1 / 0
        s += sgl.assistant(sgl.gen("a"))

    state = run(body)
    assert [m["role"] for m in state.messages()] == ["user", "assistant"]


def test_an_exception_in_the_body_is_raised_by_run():
    def body(s):
        s += sgl.gen("a")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(body)


@pytest.mark.parametrize("value", [None, 3, object()])
def test_what_can_not_be_added_is_refused(value):
    def body(s):
        s += value

    with pytest.raises(sgl.ParameterError, match=r"\+=") as caught:
        run(body)
    assert caught.value.where.line == line_of(body, 1)


def test_expressions_refuse_foreign_operands():
    with pytest.raises(sgl.ParameterError, match="an int can't be added"):
        sgl.gen("a") + 3  # type: ignore[operator]  # wrong on purpose


BAD_GENS = [
    (dict(choices=[]), "choices"),
    (dict(choices="abc"), "choices"),
    (dict(choices=["a", 3]), "choices"),
    (dict(choices=["a"], regex="a"), "regex: can't be combined with choices"),
    (dict(dtype=int, regex="a"), "combined"),
    (dict(dtype="complex"), "dtype"),
    (dict(stop=[""]), "stop"),
    (dict(stop=[3]), "stop"),
    (dict(name=3), "name"),
    (dict(regex=3), "regex"),
    (dict(choices_method=sgl.token_length_normalized), "choices_method"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_GENS)
def test_bad_parameters_of_gen_are_refused_by_name(arguments, message):
    with pytest.raises(sgl.ParameterError, match=message):
        sgl.gen(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [dict(regex="("), dict(json_schema="{"), dict(json_schema={"type": 3}), dict(type=object())],
)
def test_bad_constraints_are_refused_before_anything_runs(arguments):
    with pytest.raises(sgl.ConstraintError):
        sgl.gen(**arguments)


@pytest.mark.parametrize("temperature", [-1, "hot", float("inf")])
def test_bad_parameters_of_select(temperature):
    with pytest.raises(sgl.ParameterError, match="temperature"):
        sgl.select("a", ["x"], temperature)


def test_probabilities_only_of_a_selection():
    with pytest.raises(
        sgl.ProgramError, match=r"not a selection\. Only sgl\.select has .*return_logprob=True"
    ):
        run(lambda s: s.__iadd__(sgl.gen("a"))).selection("a").probs


def test_arguments_that_do_not_fit_the_program():
    program = sgl.function(lambda s, a: None)
    backend = sgl.ScriptedBackend()
    with pytest.raises(sgl.ParameterError, match="missing a required argument: 'a'"):
        program.run(backend=backend)
    with pytest.raises(sgl.ParameterError, match="unexpected keyword argument 'b'"):
        program.run(a=1, b=2, backend=backend)
    with pytest.raises(sgl.ParameterError, match="no parameter for the state"):
        sgl.function(lambda: None)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(
        sgl.ParameterError, match="missing a required argument: 'a', and was given 'A'"
    ):
        program.run(A=1, backend=backend)
    with pytest.raises(
        sgl.ParameterError, match=r"given 'zz'\. Its arguments: a\. \(Settings of a run: help"
    ):
        program.run(zz=1, backend=backend)
    with pytest.raises(sgl.ParameterError, match="Did you mean temperature="):
        program.run(1, temprature=1, backend=backend)
    with pytest.raises(sgl.ParameterError, match=r"a str is not a backend.*sgl\.Engine\('gpt-4'\)"):
        program.run(1, backend="gpt-4")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(sgl.ParameterError, match=r"a type is not a backend.*ScriptedBackend\(…\)"):
        program.run(1, backend=sgl.ScriptedBackend)  # type: ignore[arg-type]  # wrong on purpose


def test_a_node_in_a_string_is_refused():
    """It would be its name there, and never be played."""
    for text in (
        lambda: f"Say {sgl.gen('x')}.",
        lambda: "{} {}".format("Say", sgl.select("y", ["a"]) + "!"),
    ):
        with pytest.raises(sgl.ParameterError, match=r"can't be written into a string.*s \+="):
            text()


def test_a_backend_without_hooks_says_so():
    state = run(lambda s: s.__iadd__(sgl.gen("a")), sgl.BaseBackend())
    with pytest.raises(sgl.CapabilityError, match="can't generate"):
        state["a"]
    state = run(lambda s: s.__iadd__(sgl.select("a", ["x"])), sgl.BaseBackend())
    with pytest.raises(sgl.CapabilityError, match="can't select"):
        state["a"]


def test_a_failure_that_nobody_reads_is_logged(caplog):
    with caplog.at_level(logging.ERROR, "sglang_lite"):
        state = run(
            lambda s: s.__iadd__(sgl.gen("a")),
            sgl.ScriptedBackend(lambda call: str(1 / 0)),
            use_thread=True,
        )
        state.branch.read_when_played(read_nothing).when_done(lambda: None)
        while state.branch.player.failure is None:
            pass
        del state
        gc.collect()
    assert "its error was never read" in caplog.text


def test_a_failure_that_a_batch_returns_has_been_told(caplog):
    program = sgl.function(lambda s: s.__iadd__(sgl.gen("a", check=lambda text: False)))
    with caplog.at_level(logging.ERROR, "sglang_lite"):
        (error,) = program.run_batch(
            [{}], backend=sgl.ScriptedBackend(default="a"), on_error="return"
        )
        assert isinstance(error, sgl.ValueValidationError)
        del error
        gc.collect()
    assert "its error was never read" not in caplog.text


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_reader_of_a_stream_was_told_is_not_logged(caplog, is_async):
    reading = threading.Event()

    def plain(s):
        s += "x"
        reading.wait()
        raise LookupError("mine")

    async def coroutine(s):
        plain(s)

    async def main():
        state = await sgl.function(coroutine if is_async else plain).arun(
            backend=sgl.ScriptedBackend(), stream=True
        )
        with pytest.raises(sgl.ProgramError, match="mine"):
            async for _ in state.text_async_iter():
                reading.set()

    with caplog.at_level(logging.ERROR, "sglang_lite"):
        reading.set() if is_async else None  # its body has this loop until it raises
        asyncio.run(main())
        gc.collect()
    assert not caplog.messages


@pytest.mark.parametrize("name", [None, "a"])
def test_what_a_reader_of_a_whole_text_was_told_is_not_logged(caplog, name):
    def body(s):
        s += "q" + sgl.gen("a")

    async def read(state):
        with pytest.raises(sgl.ProgramError, match="no answer") as caught:
            async for _ in state.text_async_iter(name):
                pass
        return [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)]

    def answer(_):
        raise LookupError("no answer")

    with caplog.at_level(logging.ERROR, "sglang_lite"):
        frames = asyncio.run(read(run(body, sgl.ScriptedBackend(answer))))
        gc.collect()
    assert not caplog.messages
    assert frames == ["answer"]


@pytest.mark.parametrize("name", [None, "a"])
@pytest.mark.parametrize("way", ["join", "copy"])
def test_a_failed_branch_is_logged_unless_a_variable_tells(caplog, way, name):
    def body(s):
        if way == "join":
            fork = s.fork(2)
            fork += sgl.gen(name)
            fork.join()
        else:
            with s.copy() as branch:
                branch += sgl.gen(name)
        s += "."

    with caplog.at_level(logging.ERROR, "sglang_lite"):
        state = run(body, sgl.ScriptedBackend(lambda call: str(1 / 0)))
        assert state.text() == "."
        if name is not None:
            with pytest.raises(sgl.ProgramError, match="ZeroDivisionError"):
                state[name]
        del state
        gc.collect()
    assert ("its error was never read" in caplog.text) == (name is None)


def test_a_state_is_no_list():
    state = run(lambda s: s.__iadd__("x"))
    with pytest.raises(TypeError, match="'ProgramState' object is not iterable"):
        list(state)


def test_an_interrupted_program_fails_its_readers():
    states = []

    def body(s):
        states.append(s)
        s += sgl.gen("a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(body, Gated())
    with pytest.raises(sgl.RequestAbortedError, match="KeyboardInterrupt"):
        states[0]["a"]


def test_a_cancelled_backend_call_fails_the_branch():
    class Cancelling(sgl.ScriptedBackend):
        async def agenerate(self, *args, **options):
            raise asyncio.CancelledError
            yield

    state = run(lambda s: s.__iadd__(sgl.gen("a")), Cancelling())
    with pytest.raises(sgl.RequestAbortedError):
        state["a"]


def test_a_variable_that_a_failed_stream_never_made_raises_what_it_failed_with():
    @sgl.function
    def program(s):
        s += "x"
        s += sgl.gen("a", temperature="hot")  # type: ignore[call-overload]  # wrong on purpose

    state = program.run(stream=True, backend=sgl.ScriptedBackend())
    with pytest.raises(sgl.ParameterError, match="temperature") as caught:
        state["a"]
    assert caught.value.where.line == program.func.__code__.co_firstlineno + 3
    with pytest.raises(sgl.ParameterError, match="temperature"):
        list(state.text_iter("a"))


# ---------------------------------------------------------------------- statements of several lines

ASK_LATER = sgl.gen("elsewhere")


def lines_of(program, *names):
    """Lines of the errors of variables, counted from that of the program's `def`."""

    def down(_):
        raise sgl.BackendError("down")

    state = program.run(backend=sgl.ScriptedBackend(down))
    first, found = program.func.__code__.co_firstlineno + 1, []
    for name in names:
        with pytest.raises(sgl.SglError) as caught:
            state[name]
        found.append(caught.value.where.line - first)
    return found


def test_a_node_in_a_later_line_of_a_statement_names_its_own_line():
    @sgl.function
    def summed(s):
        s += (
            "x"
            + sgl.select("way", ["a", "b"])
            + "y"
        )  # fmt: skip

    @sgl.function
    def turns(s):
        s += sgl.user("hi") + sgl.assistant(
            "I say "
            + sgl.gen("a", max_tokens=3)
        )  # fmt: skip

    @sgl.function
    def method(s):
        s.user(
            "x"
            + sgl.gen("a", regex="[0-9]")
        )  # fmt: skip

    @sgl.function
    def forked(s):
        group = s.fork(2)
        group += lambda i: (
            f"{i}"
            + sgl.gen("a")
        )  # fmt: skip
        group.join()

    assert lines_of(summed, "way") == [3]
    assert lines_of(turns, "a") == [3]
    assert lines_of(method, "a") == [3]
    assert lines_of(forked, "a") == [4]


def test_a_node_that_was_made_before_its_statement_names_the_statement():
    @sgl.function
    def program(s):
        later = sgl.gen("later")
        s += (
            "x"
            + ASK_LATER
        )  # fmt: skip
        s += later

    @sgl.function
    def early(s):
        later = (
            sgl.gen("a", regex="a")
        )  # fmt: skip
        s += later

    assert lines_of(program, "elsewhere") == [2]
    assert lines_of(early, "a") == [4]


def test_an_image_in_a_later_line_names_its_own_line():
    @sgl.function
    def program(s):
        s += (
            "x"
            + sgl.image("/no/such/file.png")
        )  # fmt: skip

    with pytest.raises(sgl.SglError) as caught:
        program.run(backend=sgl.ScriptedBackend())
    assert caught.value.where.line == program.func.__code__.co_firstlineno + 4


def test_lines_of_nodes_change_no_digest(tmp_path):
    def of(lines):
        space: dict[str, Any] = {"sgl": sgl, "__name__": "moved"}
        exec(
            f"{lines}ask = sgl.gen('a')\npicture = sgl.image('x')\ndef program(s):\n    s += ask",
            space,
        )
        return sgl.function(space["program"])

    for lines in ("", "\n\n\n"):
        (state,) = of(lines).run_batch(
            [{}], backend=sgl.ScriptedBackend(default="x"), checkpoint=tmp_path / "run"
        )
        assert state["a"] == "x"
    assert sgl.gen("a") == sgl.gen("a")
