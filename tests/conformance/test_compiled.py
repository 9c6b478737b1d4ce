"""Every conformance program that can be compiled means the same compiled; of the others it is said why."""

import dataclasses

import pytest

import sglang_lite as sgl
from sglang_lite import wire
from sglang_lite.engine.engine import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.program.compiled import CompiledProgram, Filler
from sglang_lite.protocol import CompileError
from tests.conformance.case import cases, outcome, some_slow
from tests.constraints.test_generation import random_model

CASES = {name: case for name, case in cases().items() if case.engine}
FIXED = {"seed": 3, "max_new_tokens": 24}

# Programs that can't be compiled, and what they are told.
WHY = {
    "error": ("errors are only known", "backend_of_a_node_fails check_fails_then_text check_raises error_in_branch "
              "fork_error_in_fork rollback_after_error rollback_error_in_branch "
              "cancel_branch cancel_fork"),
    "look up": ("can't look it up", "sglang_react"),
    "inside": ("async program, which can't be compiled", "coroutine_calls"),
    "catches": ("catches exceptions", "coroutine_error error_caught grammar_refuses_choices image_refused"),
    "raises": ("can't be run with symbols", "error_of_the_body error_of_the_body_in_branch fork_reads fork_then_more "
               "nested_run sglang_judge"),
    "known": ("the metadata of", "gen_logprobs"),
    "through": ("can't go through it", "select_probabilities"),
    "length": ("can't tell how long it is", "read_messages read_text scope_select sglang_long_doc_qa "
               "sglang_parallel_encoding"),
    "stream": ("the stream is only there", "stream_read"),
}  # fmt: skip
NOT_COMPILED = {name: why for why, names in WHY.values() for name in names.split()}
COMPILED = [name for name in CASES if name not in NOT_COMPILED and name not in ("role_misuse", "grammar_broken")]


@pytest.fixture(scope="module")
def engine():
    with Engine.of(random_model(), max_running=64) as engine:
        yield engine


@pytest.fixture
def backend(engine):
    backend = LocalBackend(engine)
    backend.chat_template = get_chat_template("chatml")
    return backend


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", some_slow(COMPILED))
def test_a_compiled_program_means_the_same(backend, name):
    case = CASES[name]
    compiled = dataclasses.replace(case, program=case.program.compile(backend))
    assert outcome(compiled, backend, **FIXED) == outcome(case, backend, **FIXED)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", some_slow(COMPILED))
def test_a_compiled_batch_means_the_same(backend, name):
    case = CASES[name]
    settings = {key: value for key, value in {**case.settings, **FIXED}.items() if key != "use_thread"}

    def read(state):
        if isinstance(state, Exception):
            return type(state)
        try:
            return state.text(), [state[name] for name in case.variables]
        except sgl.SglError as error:
            return type(error)

    def all_of(program):
        return list(map(read, program.run_batch([case.arguments] * 3, backend=backend, on_error="return", **settings)))

    assert all_of(case.program.compile(backend)) == all_of(case.program)


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_what_can_not_be_compiled_is_told_with_its_line(backend, name):
    with pytest.raises(CompileError, match=NOT_COMPILED[name]) as error:
        CASES[name].program.compile(backend)
    assert error.value.where is not None
    assert f"programs/{name}.py" in error.value.where.file
    assert error.value.hint


@pytest.mark.parametrize("name", ["role_misuse", "grammar_broken"])
def test_misuse_is_told_when_compiling(backend, name):
    raised = CASES[name].raises
    assert raised is not None
    with pytest.raises(raised):
        CASES[name].program.compile(backend)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_program_is_data(backend, name):
    case = CASES[name]
    program = case.program.compile(backend).compiled.program
    for form in ("json", "msgpack"):
        found = wire.decode(wire.encode(program, form=form), form=form)
        assert isinstance(found, CompiledProgram)
        assert found == program
        row = Filler(found).checked(case.arguments)
        assert Filler(found)(row, 3) == Filler(program)(row, 3)
