"""Whatever is wrong with a program: one clear error of the package that names the line, soon; and
then business as usual. Each program says `# here` where the error must point.
"""

import asyncio
import gc

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.base_backend import Capabilities
from sglang_lite.lang.chat_template import ChatTemplate, get_chat_template
from tests.lang.fakes import line_here, within

BACKEND = sgl.ScriptedBackend(default="fine")


def read_all(state):
    """Text that a user reads when a program has run."""
    state.sync()
    return [state.text(), state.messages(), dict(state.stream_executor.variables)]


@pytest.fixture
def only_error(caplog, capfd):
    """Runs a program that is wrong; the error that its caller sees, which nothing else is said
    beside.
    """

    def run(body, *args, backend=BACKEND, stream=False, read=read_all):
        program = sgl.function(body)
        gc.collect()  # what programs of other tests have left to say
        caplog.clear()
        capfd.readouterr()

        def use():
            state = program.run(*args, backend=backend, stream=stream)
            if stream:
                list(state.text_iter())
            read(state)

        with pytest.raises(sgl.SglError) as caught:
            within(1, use)
        error = caught.value
        assert (error.where.file, error.where.line) == (__file__, line_here(body)), (
            f"{error} is at another line"
        )
        assert str(error.where) in str(error)
        assert caplog.text == ""
        assert capfd.readouterr() == ("", "")
        after = sgl.function(
            lambda s: s.__iadd__(sgl.user("Well?") + sgl.assistant(sgl.gen("a")))
        ).run(backend=BACKEND)
        assert within(1, lambda: after["a"]) == "fine"
        return error

    return run


STREAM_OR_NOT = pytest.mark.parametrize("stream", [False, True])


# -------------------------------------------------------------------------------------------- turns


@STREAM_OR_NOT
@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (sgl.user_end(), "a 'user' turn ends, but no turn is open"),
        (
            sgl.user_begin() + "x" + sgl.assistant_end(),
            "an 'assistant' turn ends, but the open turn is 'user'",
        ),
        (
            sgl.user_begin() + sgl.assistant_begin(),
            "an 'assistant' turn begins inside a 'user' turn",
        ),
        (sgl.system(sgl.user("x")), "a 'user' turn begins inside a 'system' turn"),
    ],
)
def test_turns_that_do_not_fit_together(only_error, turns, message, stream):
    def program(s):
        s += "text"
        s += turns  # here

    assert message in str(only_error(program, stream=stream))


def test_a_turn_inside_a_turn_in_with_blocks(only_error):
    def program(s):
        with s.user():
            s += "x"
            with s.assistant():  # here
                s += "y"

    assert "begins inside a 'user' turn" in str(only_error(program))


def test_a_turn_that_a_with_block_does_not_end_any_more(only_error):
    def program(s):
        with s.user():  # here
            s += sgl.user_end()

    assert "no turn is open" in str(only_error(program))


# ---------------------------------------------------------------------------------------- variables


@STREAM_OR_NOT
def test_a_variable_that_does_not_exist(only_error, stream):
    def program(s):
        s += sgl.gen("answer")
        s += s["anwser"]  # here

    error = only_error(program, stream=stream)
    assert "no variable 'anwser'; it has: 'answer'" in str(error)


@pytest.mark.parametrize("read", ["raw", "selection", "usage", "get_var", "text_iter"])
def test_anything_about_a_variable_that_does_not_exist(only_error, read):
    def program(s):
        s += sgl.gen("a")
        list(getattr(s, read)("b"))  # here

    assert "no variable 'b'" in str(only_error(program))


def test_a_name_that_is_read_before_it_is_set_again(only_error):
    """The first reading has the first value; what comes later does not change it."""

    @sgl.function
    def program(s):
        s += "1" + sgl.gen("a")
        first = s["a"]
        s += "2" + sgl.gen("a")
        return first, s["a"]

    assert program.run(backend=sgl.ScriptedBackend({"1": "one", "2": "two"})).ret_value == (
        "one",
        "two",
    )

    def wrong(s):
        s += s["a"]  # here
        s += sgl.gen("a")

    assert "no variable 'a'; it has: none" in str(only_error(wrong))


def test_a_scope_that_is_read_while_it_is_open(only_error):
    def program(s):
        with s.var_scope("part"):
            s += "x"
            s["part"]  # here

    assert "'part' is still open" in str(only_error(program))


# ------------------------------------------------------------------------------------ bad arguments


@STREAM_OR_NOT
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(choices=[]), "choices: [] is not a list of at least one string"),
        (dict(regex="("), "("),
        (dict(json_schema='{"type": "strin"}'), "strin"),
        (dict(type=asyncio.Event), "Event"),
        (dict(dtype="complex"), "dtype"),
        (dict(stop=""), "stop"),
        (dict(regex="a", choices=["a"]), "can't be combined"),
        (dict(tools=[]), "tools"),
        (dict(reasoning="nothing-known"), "nothing-known"),
        (dict(retries=-1), "retries"),
        (dict(timeout=0), "timeout"),
        (dict(backend="gpt-4"), "a str is not a backend"),
        (dict(check=True), "check"),
    ],
)
def test_a_generation_that_makes_no_sense(only_error, arguments, message, stream):
    def program(s):
        s += "text"
        s += sgl.gen("a", **arguments)  # here

    assert message in str(only_error(program, stream=stream))


@pytest.mark.parametrize("what", [None, 3, b"bytes", ["a", "list"], object()])
def test_what_is_no_text_and_no_expression(only_error, what):
    def program(s):
        s += what  # here

    assert "can't be added to a program" in str(only_error(program))


def test_an_expression_plus_a_number(only_error):
    def program(s):
        s += sgl.gen("a") + 3  # type: ignore[operator]  # here

    assert "an int can't be added" in str(only_error(program))


def test_an_image_that_is_not_there(only_error):
    def program(s):
        s += sgl.user("Look: " + sgl.image("/nowhere.png"))  # here

    assert "/nowhere.png" in str(only_error(program))


@pytest.mark.parametrize("fork", [lambda s: s.fork(0), lambda s: s.fork(2, [1])])
def test_a_fork_that_makes_no_sense(only_error, fork):
    def program(s):
        fork(s)

    with pytest.raises(sgl.ParameterError) as caught:
        sgl.function(program).run(backend=BACKEND)
    assert caught.value.where.file == __file__


def test_a_list_of_the_wrong_length_for_a_group(only_error):
    def program(s):
        fork = s.fork(2)
        fork += ["a", "b", "c"]  # here

    assert "3 items for 2 branches" in str(only_error(program))


# --------------------------------------------------------------------------- backends and templates


class Modest(sgl.ScriptedBackend):
    capabilities = Capabilities(
        constraints=frozenset(), params=frozenset({"max_tokens"}), select=False
    )


@STREAM_OR_NOT
@pytest.mark.parametrize(
    ("node", "what"),
    [
        (sgl.gen("a", top_k=5), "top_k"),
        (sgl.gen("a", regex="x+"), "a regex"),
        (sgl.select("a", ["x", "y"]), "select"),
        (sgl.image(b"\x89PNG\r\n\x1a\n"), "images"),
    ],
)
def test_what_the_backend_can_not_honour(only_error, node, what, stream):
    def program(s):
        s += "text"
        s += node  # here

    error = only_error(program, backend=Modest(), stream=stream)
    assert f"can't honour {what}" in str(error)
    assert isinstance(error, sgl.CapabilityError)


class Breaks:
    name, default_system_prompt, stop_str = "breaks", None, ()

    def get_prefix_and_suffix(self, role, hist_messages):
        raise KeyError("no such thing")


JINJA = "{% for m in messages %}{% if m.role == 'user' %}{{ raise_exception('users are not welcome') }}{% endif %}{% endfor %}"


def jinja_template():
    from sglang_lite.text.chat_template import JinjaTemplate

    return JinjaTemplate(JINJA)


@STREAM_OR_NOT
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (Breaks, "KeyError: 'no such thing'"),
        (jinja_template, "users are not welcome"),
        (
            lambda: ChatTemplate("small", None, {"system": ("", "")}),
            "no role 'user'; it has: system",
        ),
        (lambda: get_chat_template("mistral"), None),
    ],
    ids=["raises", "refuses", "lacks the role", "works"],
)
def test_a_template_that_fails(only_error, template, message, stream):
    backend = sgl.ScriptedBackend(default="x")
    backend.chat_template = template()

    def program(s):
        s += sgl.user("Hello")  # here

    if message is None:
        sgl.function(program).run(backend=backend).sync()
    else:
        assert message in str(only_error(program, backend=backend, stream=stream))


def raising(error, kind):
    """A backend that raises it: from a coroutine, a hook, or where the node is added."""

    class Coroutine(sgl.BaseBackend):
        async def agenerate(self, prompt, params, constraint, *, stream):
            raise error
            yield

    class Hook(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            raise error

    def answer(call):
        raise error

    return {"coroutine": Coroutine, "hook": Hook, "at once": lambda: sgl.ScriptedBackend(answer)}[
        kind
    ]()


@pytest.mark.parametrize(
    "error", [OSError("down"), StopIteration(), SystemExit(3), GeneratorExit()], ids=repr
)
@pytest.mark.parametrize("kind", ["coroutine", "hook", "at once"])
@pytest.mark.parametrize("options", [{}, {"timeout": 5}], ids=["plain", "watched"])
def test_whatever_a_backend_raises(only_error, error, kind, options):
    def program(s):
        s += "text" + sgl.gen("a", **options)  # here

    backend = raising(error, kind)
    if kind == "at once" and not options and not isinstance(error, Exception):
        with pytest.raises(type(error)):  # as it was raised in the body
            sgl.function(program).run(backend=backend)
    else:
        assert type(error).__name__ in str(only_error(program, backend=backend))


# --------------------------------------------------------------------------- tools, bodies, returns


def test_a_tool_that_raises(only_error):
    def divide(a: int, b: int) -> float:
        """Divides."""
        return a / b

    def program(s):
        s += sgl.user("7 / 0?")
        sgl.use_tools(s, [divide], on_tool_error="raise")  # here

    backend = sgl.ScriptedBackend({"7 / 0?": '{"tool": "divide", "arguments": {"a": 7, "b": 0}}'})
    error = only_error(program, backend=backend)
    assert isinstance(error, sgl.ToolError)
    assert "divide" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_program_that_returns_early_is_fine_until_something_is_read_that_never_came(only_error):
    def program(s):
        with s.user():
            s += "Hello"
            return "early"
        s += sgl.gen("a")
        return "late"

    state = sgl.function(program).run(backend=BACKEND)
    assert state.ret_value == "early"
    assert [m["content"] for m in state.messages()] == ["Hello"]

    def reader():
        state["a"]  # here

    with pytest.raises(sgl.UnknownVariableError, match="no variable 'a'; it has: none") as caught:
        within(1, reader)
    assert caught.value.where.line == line_here(reader)


@STREAM_OR_NOT
def test_a_stream_of_a_program_that_returns_early_ends(stream):
    def program(s):
        s += sgl.gen("a")
        return

    state = sgl.function(program).run(backend=BACKEND, stream=stream)
    assert within(1, lambda: "".join(state.text_iter())) == "fine"


@STREAM_OR_NOT
@pytest.mark.parametrize("scope", ["user", "var_scope", "copy", "checkpoint"])
def test_a_body_that_raises_inside_a_with_block(only_error, scope, stream):
    """The caller sees what was raised, as it is; readers of a stream see it as an error of the
    package.
    """

    def program(s):
        with getattr(s, scope)(*(["part"] if scope == "var_scope" else [])):
            s += "half"
            raise LookupError("mine")  # here

    if stream:
        error = only_error(program, stream=True)
        assert "LookupError: mine" in str(error)
        assert isinstance(error.__cause__, LookupError)
    else:
        with pytest.raises(LookupError, match="mine"):
            within(1, lambda: sgl.function(program).run(backend=BACKEND))


def test_what_a_body_raises_is_not_hidden_by_the_turn_it_left_broken():
    @sgl.function
    def program(s):
        with s.user():
            s += sgl.user_end()
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        program.run(backend=BACKEND)


def test_an_error_in_an_async_body(only_error):
    async def program(s):
        s += sgl.gen("a")
        await s.get("b")  # here

    assert "no variable 'b'" in str(only_error(program))


def test_an_error_of_a_node_that_only_a_batch_reads():
    @sgl.function
    def program(s, i):
        s += f"{i}" + sgl.gen("a")  # here

    backend = sgl.ScriptedBackend({"1": OSError("down")}, default="fine")
    results = within(
        2,
        lambda: program.run_batch([{"i": i} for i in range(3)], backend=backend, on_error="return"),
    )
    assert [isinstance(result, sgl.SglError) for result in results] == [False, True, False]
    assert results[1].where.line == line_here(program)


# -------------------------------------------------------------------------------- calling a program


def calls():
    program = sgl.function(lambda s, question: s.__iadd__(question))
    return [
        lambda: program.run(backend=BACKEND),
        lambda: program.run("a", "b", backend=BACKEND),
        lambda: program.run(qestion="a", backend=BACKEND),
        lambda: program.run("a", backend=3),  # type: ignore[arg-type]  # wrong on purpose
        lambda: program.run("a", backend=BACKEND, timeout=-1),
        lambda: program.run("a", backend=BACKEND, retries=1.5),  # type: ignore[arg-type]  # wrong on purpose
        lambda: program.run("a", backend=BACKEND, stop=[3]),  # type: ignore[list-item]  # wrong on purpose
        lambda: program.run_batch([("a",)], backend=BACKEND, num_threads=0),
        lambda: program.run_batch([("a",)], backend=BACKEND, on_error="ignore"),  # type: ignore[call-overload]  # wrong on purpose
        lambda: program.bind(qestion="a"),  # type: ignore[call-arg]  # wrong on purpose
    ]  # here


@pytest.mark.parametrize("number", range(len(calls())))
def test_a_call_that_makes_no_sense_is_refused_before_anything_runs(number):
    with pytest.raises(sgl.ParameterError) as caught:
        within(1, calls()[number])
    assert caught.value.where.line == line_here(calls) - len(calls()) + number


def test_a_refused_awaited_call_is_an_error_too():
    async def main():
        await sgl.function(lambda s, a: None).arun(backend=BACKEND)

    with pytest.raises(sgl.ParameterError, match="missing a required argument: 'a'"):
        asyncio.run(main())


# -------------------------------------------------------------------- bodies that would run nothing


def test_a_body_with_a_yield_is_refused_where_it_is_decorated():
    def plain(s):
        s += "x"
        yield s

    async def coroutine(s):
        s += "x"
        yield s

    def decorate():
        for body in (plain, coroutine):
            with pytest.raises(sgl.ParameterError, match="contains `yield`") as caught:
                sgl.function(body)  # here
            assert caught.value.where.line == line_here(decorate)

    decorate()


def test_a_plain_body_that_returns_a_coroutine_is_an_error():
    async def forgotten(s):
        s += "x"

    def program(s):  # here
        return forgotten(s)

    for call in (
        lambda: sgl.function(program).run(backend=BACKEND),
        lambda: asyncio.run(sgl.function(program).arun(backend=BACKEND)),
        lambda: sgl.function(lambda s: s.__iadd__(sgl.function(program)())).run(backend=BACKEND),
    ):
        with pytest.raises(
            sgl.ProgramError, match="returned a coroutine that is never awaited"
        ) as caught:
            call()
        assert caught.value.where.line == line_here(program)
