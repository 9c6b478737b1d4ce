"""Programs of `gen(code=…)` that call tools of MCP servers, with results of any JSON type."""

import asyncio

import pytest

import sglang_lite as sgl
from sglang_lite.lang.tools import SchemaTool
from tests.lang.code_mode.test_code_mode import Free


def run_code(text, tools, **options):
    @sgl.function
    def coder(s):
        s += sgl.user("Do it.")
        s += sgl.assistant(sgl.gen("value", code=sgl.CodeTools(list(tools))))
        return s["value"]

    texts = iter([text] * 3)
    return coder.run(backend=Free(lambda _: next(texts)), **options)


def test_programs_call_tools_of_a_server_and_get_their_values(raw):
    state = run_code(
        "found = numbers(count=4)\n"
        "if is_even(value=len(found)):\n"
        '    parts = row(name=shout(text="a"))["parts"]\n'
        "    return total(values=found + parts)\n"
        "return 0",
        raw,
    )
    assert state["value"] == 9
    calls = state.get_meta_info("value")["code_calls"]
    assert [each["tool"] for each in calls] == ["numbers", "is_even", "shout", "row", "total"]


def test_programs_in_coroutines_and_python_functions_beside_a_servers_tools(raw):
    def double(x: int) -> int:
        """Doubles."""
        return 2 * x

    @sgl.function
    async def coder(s):
        s += sgl.user("Do it.")
        s += sgl.assistant(sgl.gen("value", code=[*raw, double]))
        return await s.get("value")

    program = "return [double(each) for each in numbers(count=3)]"
    backend = Free(lambda _: program)
    assert asyncio.run(coder.arun(backend=backend)).ret_value == [0, 2, 4]


def test_models_see_the_types_of_results(raw):
    shown = sgl.CodeTools(list(raw)).describe()
    for line in (
        "def words(*, text: str) -> any:",
        "def row(*, name: str) -> {'name': str, 'parts': list[int]}:",
        "def numbers(*, count: int) -> list[int]:",
        "def total(*, values: list[int]) -> int:",
        "def find(*, value: int) -> int | None:",
    ):
        assert line in shown


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ('return numbers(count=3) + "x"', "type", "list[int]"),
        ("return total(values=numbers(count=3)).upper()", "type", "int"),
        ('return row(name="x")["size"]', "type", "size"),
        ('return total(values=["one"])', "type", "total"),
        ("return find(value=1) + 1", "type", "None"),
        ("return lies()", "tool", "'three' is not of type 'integer'"),
        ("return refuses()", "tool", "not today"),
        ("return numbers(3)", "type", "numbers() takes its arguments by name"),
    ],
)
def test_programs_that_misuse_a_servers_results_are_refused(raw, text, kind, said):
    with pytest.raises(sgl.CodeError) as refused:
        run_code(text, raw)
    assert refused.value.kind == kind
    assert said in refused.value.message
    assert "mcp_raw_server" not in refused.value.message


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


@pytest.mark.parametrize(
    ("members", "shown"),
    [
        ({}, "{'name': str, 'near': list[any]}"),
        ({f"p{i}": {"$ref": "#/$defs/place"} for i in range(99)}, None),
        ({f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(99)}, "any"),
    ],
)
def test_types_of_results_have_a_limit(members, shown):
    place = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "near": {"type": "array", "items": {"$ref": "#/$defs/place"}},
            **members,
        },
    }
    all_of_them = {"type": "object", "properties": members}
    schema = {
        "$ref": "#/$defs/place",
        "$defs": {"place": place, **{f"d{i}": all_of_them for i in range(99)}},
    }
    tool = SchemaTool("find", "Finds.", {"type": "object"}, dict, result_schema=schema)
    line = sgl.CodeTools([tool]).describe().splitlines()[3]
    assert len(line) < 2000
    if shown is not None:
        assert line == f"def find() -> {shown}:"


MEMBERS = {"a": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "result", "program", "value"),
    [
        (
            {"type": "object", "properties": MEMBERS},
            {"a": 1, "b": 2},
            'r = t()\nreturn r["a"] + r["b"]',
            3,
        ),
        (
            {"type": "object", "properties": MEMBERS, "patternProperties": {"^b": {}}},
            {"a": 1, "b": 2},
            'return t()["b"]',
            2,
        ),
        (
            {"type": "object", "patternProperties": {"^b": {}}, "additionalProperties": MEMBERS},
            {"b": 2},
            'return t()["b"] + 1',
            3,
        ),
        (
            {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}},
            ["x", 1],
            'return t()[0] + "y"',
            "xy",
        ),
        (
            {
                "type": "object",
                "properties": MEMBERS,
                "additionalProperties": False,
                "allOf": [{"required": ["a"]}],
            },
            {"a": 1},
            'return t()["a"]',
            1,
        ),
        ({"$ref": "#"}, 3, "return t()", 3),
    ],
)
def test_results_with_odd_schemas_reach_programs(schema, result, program, value):
    tool = SchemaTool("t", "", {"type": "object"}, lambda _: result, result_schema=schema)
    assert sgl.CodeTools([tool]).describe()
    assert run_code(program, [tool])["value"] == value


def test_arguments_may_have_members_that_an_open_object_does_not_name():
    schema = {"type": "object", "properties": {"x": {"type": "object", "properties": MEMBERS}}}
    tool = SchemaTool("t", "", schema, lambda given: given["x"])
    assert run_code('return t(x={"a": 1, "b": 2})', [tool])["value"] == {"a": 1, "b": 2}
