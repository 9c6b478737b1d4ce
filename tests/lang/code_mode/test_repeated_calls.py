"""What makes a program run again, after it has made calls: a CodeError and a refusal of its value, of
which the model is told. Anything else would make the calls twice for nothing.
"""

import asyncio
import threading

import pytest

import sglang_lite as sgl
from tests.lang.code_mode.test_code_mode import Free
from tests.waiting import until


class Killed(BaseException):
    """An error that is no Exception."""


def run(tools, text, **options):
    """Runs a program as often as it is tried. Returns the prompts and the error."""
    prompts = []

    def write(request):
        prompts.append(request.prompt.text)
        return text

    @sgl.function
    def program(s):
        s += sgl.user("Pay.")
        s += sgl.assistant(sgl.gen("value", code=tools, **options))

    with pytest.raises(sgl.SglError) as caught:
        program.run(backend=Free(write))["value"]
    return prompts, caught.value


def make_pay(error=None):
    paid = []

    def pay(amount: int) -> int:
        paid.append(amount)
        if error is not None:
            raise error
        return amount

    return paid, pay


@pytest.mark.parametrize("error", [SystemExit(3), Killed()], ids=lambda error: type(error).__name__)
def test_what_is_no_exception_ends_the_program(error):
    paid, pay = make_pay(error)
    _, raised = run([pay], "return pay(5)")
    assert paid == [5]
    assert raised.__cause__ is error


def test_an_interrupt_of_a_tool_is_one_of_the_program():
    paid, pay = make_pay(KeyboardInterrupt("stop"))
    with pytest.raises(KeyboardInterrupt, match="stop"):
        run([pay], "return pay(5)")
    assert paid == [5]


def interrupt(n: int) -> int:
    """Is interrupted."""
    raise KeyboardInterrupt("stop")


async def interrupt_later(n: int) -> int:
    """Is interrupted."""
    raise KeyboardInterrupt("stop")


@pytest.mark.parametrize("tool", [interrupt, interrupt_later])
@pytest.mark.parametrize("style", ["run", "arun"])
def test_an_interrupt_in_an_async_body_leaves_the_backend_working(tool, style):
    @sgl.function
    async def payer(s, tool):
        s += sgl.user("Pay.")
        s += sgl.assistant(sgl.gen("value", code=[tool]))
        return await s.get("value")

    def number(n: int) -> int:
        """Gives a number."""
        return n

    def play(tool):
        if style == "run":
            return payer.run(tool, backend=backend)
        return asyncio.run(payer.arun(tool, backend=backend))

    texts = iter([f"return {tool.__name__}(5)", "return number(5)"])
    backend = Free(lambda _: next(texts))
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt, match="stop"):
        play(tool)
    assert play(number).ret_value == 5
    left = set(threading.enumerate()) - before
    until(lambda: not any(each.name == "sglang_lite-code" and each.is_alive() for each in left))


@pytest.mark.parametrize(
    "error",
    [RuntimeError("handler"), sgl.CodeError("no", text="other"), sgl.BackendError("down")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_on_tool_error_ends_the_program(error):
    def handle(call, failure):
        raise error

    paid, pay = make_pay(OSError("no"))
    with_handler = sgl.CodeTools([pay], on_tool_error=handle)
    _, raised = run(with_handler, "return pay(5)")
    assert paid == [5]
    assert type(error).__name__ in f"{type(raised).__name__} {raised}"


def test_a_timeout_ends_the_program():
    paid, pay = make_pay()

    async def wait() -> int:
        await asyncio.Event().wait()
        return 1

    _, raised = run([pay, wait], "x = pay(5)\nreturn wait()", timeout=0.2)
    assert paid == [5]
    assert isinstance(raised, sgl.RequestTimeoutError)


def test_a_check_that_fails_ends_the_program():
    def check(value):
        raise RuntimeError("check")

    paid, pay = make_pay()
    run([pay], "return pay(5)", check=check)
    assert paid == [5]


def test_the_model_is_told_of_the_calls_of_a_value_that_a_check_refuses():
    paid, pay = make_pay()
    prompts, _ = run([pay], "x = pay(5)\nreturn pay(x)", check=lambda value: False)
    assert paid == [5, 5] * 3
    assert len(prompts) == 3
    assert "2 calls were made already (pay)." in prompts[1]
