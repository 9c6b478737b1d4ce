"""Programs of `gen(code=…)` that call tools of MCP servers, with results of any JSON type."""

import pytest

import sglang_lite as sgl
from sglang_lite.lang.tools import SchemaTool
from tests.lang.code_mode.test_code_mode import Free

NUMBERS = {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "given", "result"),
    [
        (NUMBERS, "[1, 2]", [1, 2]),
        ({"type": "string"}, "one", "one"),
        ({"type": "string"}, '"one"', "one"),
        (None, "one", "one"),
        (None, "[1]", [1]),
        (NUMBERS, "[1, 2.5]", None),
        (NUMBERS, "one", None),
    ],
)
def test_results_of_calls_in_doubt_fit_the_servers_schema(tmp_path, schema, given, result):
    def end(arguments):
        raise sgl.RequestAbortedError("killed")

    tool = SchemaTool("find", "Finds.", {"type": "object"}, end, result_schema=schema)

    @sgl.function
    def coder(s):
        s += sgl.user("Do it.")
        s += sgl.assistant(sgl.gen("value", code=[tool]))
        return s["value"]

    backend, path = Free(lambda _: "return find()"), tmp_path / "run.jsonl"
    with pytest.raises(sgl.RequestAbortedError):
        coder.run(backend=backend, journal=path)
    state = coder.run(backend=backend, journal=path)
    (doubtful,) = state.pending()
    if result is None:
        with pytest.raises(sgl.ParameterError, match="is not what find returns"):
            state.resume(doubtful.give_result(given))
    else:
        assert state.resume(doubtful.give_result(given)).ret_value == result


def test_two_names_that_are_one_in_programs_are_an_error():
    tools = [SchemaTool(name, "", {"type": "object"}, dict) for name in ("look-up", "look.up")]
    with pytest.raises(sgl.ParameterError, match=r"'look-up' and 'look\.up' are both look_up in a"):
        sgl.CodeTools(tools)
