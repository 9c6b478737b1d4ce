"""Programs that are methods, and programs that go to other processes."""

import asyncio
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest

import sglang_lite as sgl


class Asker:
    def __init__(self, style):
        self.style = style

    @sgl.function
    def ask(self, s, question, end="?"):
        s += f"{self.style} {question}{end}" + sgl.gen("answer")
        return self

    @sgl.function
    async def ask_later(self, s, question):
        s += f"{self.style} {question}" + sgl.gen("answer")
        await s.get("answer")

    @sgl.function
    def plain(s, question):  # noqa: N805 # as SGLang has it: without an instance
        s += question + sgl.gen("answer")

    @sgl.function
    def twice(self, s, question):
        s += self.ask(question) + self.ask(question)

    @staticmethod
    @sgl.function
    def static(s, question):
        s += question + sgl.gen("answer")


@sgl.function
def program(s, question, end="?"):
    s += question + end + sgl.gen("answer")


def body(s, question):
    s += question + sgl.gen("answer")


wrapped = sgl.function(body)


def backend():
    return sgl.ScriptedBackend(default="!")


def test_a_method_keeps_its_self():
    one, other = Asker("One"), Asker("Other")
    state = one.ask.run("Why", backend=backend())
    assert state.text() == "One Why?!"
    assert state.ret_value is one
    assert other.ask("Why", end="", backend=backend()).text() == "Other Why!"  # type: ignore[call-arg]  # options in the call are SGLang's
    assert one.ask.arg_names == ["question", "end"]
    assert other.ask.bind(end=".").run("Why", backend=backend()).text() == "Other Why.!"  # type: ignore[arg-type, call-arg]  # some of them, which type checkers refuse
    assert [
        s.text() for s in one.ask.run_batch([{"question": "a"}, ("b",)], backend=backend())
    ] == [
        "One a?!",
        "One b?!",
    ]
    assert asyncio.run(one.ask_later.arun("Why", backend=backend())).text() == "One Why!"
    assert one.twice.run("Why", backend=backend()).text() == "One Why?!One Why?!"
    assert one.ask.trace(question="Why", end="?").nodes[0].text == "One Why?"


def test_a_program_in_a_class_without_self_is_as_it_is_elsewhere():
    assert Asker("One").plain.run("Why", backend=backend()).text() == "Why!"
    assert Asker.plain.run("Why", backend=backend()).text() == "Why!"
    assert Asker("One").plain is Asker.plain
    assert Asker("One").static.run("Why", backend=backend()).text() == "Why!"


def test_a_method_needs_an_instance():
    with pytest.raises(sgl.ParameterError, match="missing a required argument: 's'"):
        Asker.ask.run(question="Why", backend=backend())


def test_a_method_without_a_state_is_no_program():
    class Wrong:
        @sgl.function
        def ask(self):
            pass

    with pytest.raises(sgl.ParameterError, match="ask has no parameter for the state"):
        Wrong().ask


def test_instances_share_what_drafts_have_found():
    assert Asker("One").ask.api_drafts is Asker("Other").ask.api_drafts


PROGRAMS = {
    "program": (program, "Why?!"),
    "bound": (program.bind(end="."), "Why.!"),  # type: ignore[call-arg]  # some of them, which type checkers refuse
    "wrapped": (wrapped, "Why!"),
    "of a class": (Asker.plain, "Why!"),
    "method": (Asker("One").ask, "One Why?!"),
    "bound method": (Asker("One").ask.bind(end="."), "One Why.!"),  # type: ignore[call-arg]  # some of them, which type checkers refuse
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_pickled_by_its_name(name):
    given, text = PROGRAMS[name]
    copy = pickle.loads(pickle.dumps(given))
    assert copy.run("Why", backend=backend()).text() == text


def test_a_program_that_has_no_name_is_not_pickled():
    @sgl.function
    def inner(s):
        s += "a"

    with pytest.raises(
        sgl.ProgramError, match="'inner' can't be pickled: its module has no program of this name"
    ):
        pickle.dumps(inner)


def text_of(asked, question):
    return asked.run(question, backend=backend()).text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_in_a_pool_of_processes(name, pool):
    given, text = PROGRAMS[name]
    assert pool.submit(text_of, given, "Why").result() == text


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield executor
