"""Variables that are read by the generation or selection that was added, or with a type; calls with
their options.
"""

import inspect
import logging

import numpy as np
import pytest
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite.lang.batches.batch import BATCH_OPTIONS, BatchOptions
from sglang_lite.lang.run_options import RUN_OPTIONS, run_keywords
from tests.lang.fakes import line_here


class Person(BaseModel):
    name: str
    age: int


ADA = Person(name="Ada", age=36)
BACKEND = sgl.ScriptedBackend({"Person": ADA.model_dump_json(), "Group": "b"}, default="text")
person = sgl.gen("person", type=Person)
free = sgl.gen("free")
group = sgl.select("group", ["a", "b"])
tags = sgl.select("tags", ["a", "b"], multi=True)


@sgl.function
def program(s):
    s += "Person " + person + " Text " + free + " Group " + group


@pytest.mark.parametrize("push_down", [True, False])
def test_a_variable_is_read_by_its_generation(push_down):
    state = program.run(backend=BACKEND, push_down=push_down)
    assert (state[person], state[free], state[group]) == (ADA, state["free"], "b")
    assert state.raw(person) == ADA.model_dump_json()
    assert state.selection(group).picked == "b"
    assert "".join(state.text_iter(person)) == state.raw("person")


def test_the_state_of_the_body_reads_so_too_and_symbols_stay_symbols():
    @sgl.function
    def asks(s):
        s += "Person " + person
        s += f" {s[person]}"

    assert asks.run(backend=BACKEND)[person] == ADA
    assert "person" in asks.trace().variables


def test_a_saved_state_is_read_so_too(tmp_path):
    program.run(backend=BACKEND).save(tmp_path / "state")
    state = sgl.load(tmp_path / "state", backend=BACKEND, types=[Person])
    assert (state[person], state[group], state.value("free", str)) == (ADA, "b", state["free"])


def test_a_value_of_another_type_is_told():
    @sgl.function
    def other(s):
        s += "Text " + sgl.gen("person")

    state = other.run(backend=BACKEND)
    with pytest.raises(sgl.ProgramError, match=r"'person' is '.*', which is no Person") as told:
        state[person]  # here
    assert told.value.where.line == line_here(test_a_value_of_another_type_is_told)
    assert "s[name]" in told.value.hint
    assert state["person"] == state.raw(person)


def test_samples_that_the_run_asks_for_are_no_single_value():
    state = program.run(backend=BACKEND, n=2)
    assert state["person"] == [ADA, ADA]
    assert state.value("person", list[Person]) == [ADA, ADA]
    with pytest.raises(sgl.ProgramError, match="which is no Person"):
        state[person]
    assert program.run(backend=BACKEND)[sgl.gen("free", n=1)]
    with pytest.raises(sgl.ProgramError, match=r"which is no list\[str\]"):
        program.run(backend=BACKEND)[sgl.gen("free", n=2)]


@pytest.mark.parametrize(
    ("value", "right", "wrong"),
    [
        (3, int, str), (3, int | None, str | None), (None, int | None, int), ([1], list[int], list[str]),
        ({"a": ADA}, dict[str, Person], dict[str, str]), (ADA, Person, dict), (np.zeros(1), np.ndarray, list),
        ([np.zeros(1)], list[np.ndarray], list[int]), ("3", str, int), ((1, "a"), tuple[int, str], tuple[str, int]),
    ],
)  # fmt: skip
def test_a_value_is_of_the_type_or_refused(value, right, wrong):
    @sgl.function
    def sets(s):
        s["x"] = value

    state = sets.run(backend=BACKEND)
    assert state.value("x", right) is value
    with pytest.raises(sgl.ProgramError, match="'x' is "):
        state.value("x", wrong)


def test_a_generation_without_a_name_and_one_that_was_not_added_are_told():
    state = program.run(backend=BACKEND)
    with pytest.raises(sgl.ParameterError, match="name: None is not a string"):
        state[sgl.gen()]
    with pytest.raises(sgl.UnknownVariableError, match="tags"):
        state[tags]


def test_a_call_runs_when_it_is_read_or_told_to():
    runs = []

    @sgl.function
    def counted(s, seed, word="w"):
        runs.append((seed, word))
        s += word + free

    call = counted(3)
    assert runs == []
    assert call.run(backend=BACKEND, seed=7, max_new_tokens=1).branch.run.settings.seed == 7
    assert call.run(backend=BACKEND)[free] == "text"
    assert runs == [(3, "w")] * 2  # the argument of an option's name is not the option
    sgl.set_default_backend(BACKEND)
    assert (call[free], call.text()) == ("text", "wtext")
    assert runs == [(3, "w")] * 3


def test_a_call_outside_of_programs_that_does_not_run_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING, "sglang_lite"):
        program()
    (message,) = caplog.messages
    assert "program(…) was neither added" in message


def test_wrong_arguments_and_options_of_a_call_are_told_at_its_line():
    with pytest.raises(sgl.ParameterError, match="program: too many positional") as told:
        program(1)  # type: ignore[call-arg]  # wrong on purpose
    assert told.value.where.file == __file__
    with pytest.raises(
        sgl.ParameterError, match=r"backnd: run has no such argument. Did you mean backend=\?"
    ):
        program().run(backnd=BACKEND)  # type: ignore[call-arg]  # wrong on purpose
    with pytest.raises(sgl.ParameterError, match="temperature"):
        program().run(backend=BACKEND, temperature="hot")  # type: ignore[arg-type]  # wrong on purpose


def test_arguments_are_bound_in_order_too():
    @sgl.function
    def joins(s, first, *more, second="2"):
        s += first + second + "".join(more)

    bound = joins.bind("1", second="3")
    assert bound.run(backend=BACKEND).text() == "13"
    with pytest.raises(sgl.ParameterError, match="only arguments with a name"):
        joins.bind("1", "2")
    with pytest.raises(sgl.ParameterError, match="multiple values for argument 'first'"):
        joins.bind("1", first="2")


def test_options_for_type_checkers_are_those_of_run_and_run_batch():
    of_run = inspect.signature(run_keywords).parameters.keys() - {"self", "args", "kwargs"}
    assert of_run == RUN_OPTIONS
    assert BatchOptions.__annotations__.keys() == BATCH_OPTIONS - {
        "on_error",
        "generator_style",
        "ordered",
    }
