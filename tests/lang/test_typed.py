"""Typed values: gen(type=T) gives a T, raw() the text behind it, and while it is written, what
there is of it.
"""

import asyncio
import collections
import datetime
import enum
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, NamedTuple, Optional, TypedDict, TypeVar

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel

import sglang_lite as sgl
from sglang_lite.constraints.coerce import as_constraint
from sglang_lite.constraints.python_types.partial import partial_reader
from sglang_lite.constraints.random_texts import sample
from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.ir import REGEX_FLOAT, REGEX_INT
from sglang_lite.protocol import Choices, Generation, JsonSchema, Number, Regex, Usage
from sglang_lite.text.reasoning import FORMATS
from tests.constraints.python_types import examples

T = TypeVar("T")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


class City(BaseModel):
    name: str
    inhabitants: int = Field(ge=0)
    tags: list[str] = []


class Named(BaseModel):
    model_config = ConfigDict(extra="forbid")
    user: str = Field(alias="userName")


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


@dataclass
class Point:
    x: int
    y: float | None = None
    labels: list[str] = field(default_factory=list)


class Row(NamedTuple):
    name: str | None
    number: int | None = None


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)
    level: int


class Roots(RootModel[dict[str, Tree]]):
    pass


class Both(BaseModel, Generic[T]):
    one: T
    two: T


class ByName(BaseModel):
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=False)
    user: str = Field(alias="userName")


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Options(TypedDict):
    verbose: bool
    level: int


class Twice(TypedDict):
    a: Options
    b: Options


def generated(text, **options):
    """The state of a program that generates `text` for a typed node."""

    @sgl.function
    def program(s):
        s += "value: " + sgl.gen("x", **options)

    return program.run(backend=sgl.ScriptedBackend(lambda call: text))


VALUES = [
    (int, "-42", -42),
    (float, "2.5", 2.5),
    (bool, "false", False),
    (str, 'any "text"', 'any "text"'),
    (Colour, "blue", Colour.BLUE),
    (Size, "2", Size.LARGE),
    (Literal["yes", "no"], "no", "no"),
    (Literal[1, None, "one"], "null", None),
    (Literal[Colour.RED], "red", Colour.RED),
    (datetime.date, "2024-02-29", datetime.date(2024, 2, 29)),
    (datetime.time, "08:30:00", datetime.time(8, 30)),
    (
        datetime.datetime,
        "2024-02-29T08:30:00Z",
        datetime.datetime(2024, 2, 29, 8, 30, tzinfo=datetime.UTC),
    ),
    (list[int], "[1, 2]", [1, 2]),
    (list[datetime.date], '["2024-01-01"]', [datetime.date(2024, 1, 1)]),
    (dict[str, float], '{"a": 1.5}', {"a": 1.5}),
    (dict[str, list[Colour]], '{"a": ["red"]}', {"a": [Colour.RED]}),
    (tuple[int, str], '[1, "a"]', (1, "a")),
    (int | None, "null", None),
    (Optional[City], "null", None),  # noqa: UP045 # both spellings
    (City | int, "7", 7),
    (Annotated[int, Field(ge=1, le=5)], "5", 5),
    (Annotated[str, Field(min_length=2)], '"ab"', "ab"),
    (Annotated[list[int], Field(max_length=2)], "[1, 2]", [1, 2]),
    (City, '{"name": "Rome", "inhabitants": 3}', City(name="Rome", inhabitants=3)),
    (Point, '{"x": 1, "y": 2.5, "labels": ["a"]}', Point(1, 2.5, ["a"])),
    (Options, '{"verbose": true, "level": 3}', {"verbose": True, "level": 3}),
    (Options | None, '{"verbose": true, "level": 3}', {"verbose": True, "level": 3}),
    (list[Options], '[{"verbose": true, "level": 3}]', [{"verbose": True, "level": 3}]),
    (Annotated[list[Options], Field(max_length=1)], "[]", []),
    (list[Point], '[{"x": 1}]', [Point(1)]),
    (Named, '{"userName": "ann"}', Named(userName="ann")),
    (Tree, '{"value": 1, "children": [{"value": 2}]}', Tree(value=1, children=[Tree(value=2)])),
]


@pytest.mark.parametrize(("kind", "text", "value"), VALUES, ids=lambda v: str(v)[:30])
def test_the_variable_is_a_value_of_the_type_and_raw_is_its_text(kind, text, value):
    state = generated(text, type=kind)
    assert state["x"] == value
    assert type(state["x"]) is type(value)
    assert state.raw("x") == text
    assert state.text() == "value: " + text


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Annotated[int, Field(ge=1, le=5)], "6", 6),
        (list[int], '["a"]', ["a"]),
        (City, '{"name": "Rome", "inhabitants": -1}', {"name": "Rome", "inhabitants": -1}),
    ],
)
def test_a_value_that_breaks_the_type_is_an_error_with_text_and_value(kind, text, value):
    class Careless(sgl.ScriptedBackend):
        """Generates as if there were no constraint."""

        def answer_now(self, prompt, params, constraint):
            return super().answer_now(prompt, params, None)

    def body(s):
        s += sgl.gen("x", type=kind)

    state = sgl.function(body).run(backend=Careless(lambda call: text))
    with pytest.raises(sgl.ValueValidationError) as caught:
        state["x"]
    assert (caught.value.text, caught.value.value) == (text, value)
    assert caught.value.where.line == body.__code__.co_firstlineno + 1


@pytest.mark.parametrize("kind", [bool, Colour, Literal["yes"], datetime.date, City])
def test_a_text_that_is_cut_short_is_an_error_with_the_text(kind):
    state = generated("- ,", type=kind, max_tokens=1)
    with pytest.raises(sgl.TruncatedError) as caught:
        state["x"]
    assert (caught.value.text, caught.value.value, caught.value.left_out) == ("-", None, ("",))


def test_a_member_that_is_none_is_told_with_those_there_are():
    state = generated("green ,", type=Colour, max_tokens=1)
    with pytest.raises(sgl.ValueValidationError, match="'green' is none of 'red', 'blue'"):
        state["x"]


def test_samples_are_values_and_their_texts_are_kept():
    state = generated("7", type=int, n=2)
    assert (state["x"], state.raw("x")) == ([7, 7], ["7", "7"])


@pytest.mark.parametrize(
    ("kind", "model_type", "text", "value"),
    [
        (int, "qwen3", "<think>well, 3 < 4 </thin so</think>\n\n34", 34),
        (int, "qwen3", "34", 34),
        (int, "deepseek-r1", "well, so </think>34", 34),
        (Point, "gpt-oss", '<|channel|>analysis<|message|>a b<|end|><|start|>assistant<|channel|>final<|message|>{"x": 1, "y": 2}',
         Point(1, 2)),
        (Point, "kimi_k3", '<|open|>think<|sep|>a<|close|>think<|sep|>{"x": 1, "y": 2}', Point(1, 2)),
    ],
)  # fmt: skip
def test_the_answer_is_of_the_type_and_the_reasoning_is_free(kind, model_type, text, value):
    assert generated(text, type=kind, reasoning=model_type)["x"] == value


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", list(FORMATS))
def test_whatever_the_kind_of_reasoning_its_answer_is_of_the_type(model_type):
    """The scripted backend draws any text that satisfies the constraint: here reasoning, or none,
    and a number.
    """

    @sgl.function
    def program(s):
        s += sgl.gen("x", type=int, reasoning=model_type)
        assert isinstance(s["x"], int)
        return s["x_reasoning_content"]

    states = program.run_batch([{}] * 20, backend=sgl.ScriptedBackend(seed=3))
    assert any(state.ret_value for state in states)


@pytest.mark.parametrize("text", ["</think>x", "<think>3</think>x", "3</think>4"])
def test_an_answer_after_reasoning_that_breaks_the_type_could_not_have_been_generated(text):
    with pytest.raises(sgl.BackendError, match="does not satisfy"):
        generated(text, type=int, reasoning="qwen3").sync()


def test_branches_gather_values_and_texts():
    @sgl.function
    def program(s):
        fork = s.fork(2)
        fork += lambda i: f"{i}: " + sgl.gen("x", type=int)
        fork.join()

    state = program.run(backend=sgl.ScriptedBackend({"0: ": "10", "1: ": "11"}))
    assert (state["x"], state.raw("x")) == ([10, 11], ["10", "11"])


@pytest.mark.parametrize("end", [" ", "\n", ",", ";", ":", ")", ".", ". ", "st", "-", "²"])
def test_a_number_ends_where_text_goes_on(end):
    state = generated(f"42{end}and so on", type=int)
    assert (state["x"], state.raw("x")) == (42, "42")
    state = generated(f"4.5{end}and so on", type=float, include_stop=True)
    assert (state["x"], state.raw("x")) == (4.5, "4.5")


@pytest.mark.parametrize(("text", "whole", "floating"), [
    ("2,873,000.", 2_873_000, 2_873_000.0), ("1, 2 and 3", 1, 1.0), ("-1,250.75 m", -1250, -1250.75), ("+7", 7, 7.0),
    ("007", 7, 7.0), ("3e8 m/s", 3, 3e8),
])  # fmt: skip
def test_the_commas_of_grouped_thousands_are_read_and_dropped(text, whole, floating):
    for kind, value in ((int, whole), (float, floating)):
        state = generated(text, type=kind)
        assert (state["x"], type(state["x"])) == (value, kind)
        assert text.startswith(state.raw("x"))
        plain = generated(text, dtype=kind)
        assert plain["x"] == state.raw("x").replace(",", "")
        assert kind(plain["x"]) == value
        assert plain.raw("x") == state.raw("x")


@pytest.mark.parametrize("text", ["", "-", "about 5", "None"])
def test_what_is_no_number_is_an_error(text):
    from sglang_lite.constraints.python_types.value_type import value_type

    for kind in (int, float):
        with pytest.raises(sgl.ValueValidationError):
            value_type(kind).parse(text)
    with pytest.raises(sgl.ValueValidationError):
        value_type(int).parse("9" * 5000)  # more than Python reads


class RegexOnly(BaseBackend):
    """Knows regexes and no numbers: the interface before there were any."""

    def __init__(self, text):
        super().__init__()
        self.text, self.asked = text, []

    async def agenerate(self, prompt, params, constraint, *, stream):
        self.asked.append((params, constraint))
        yield Generation(self.text)


@pytest.mark.parametrize(
    ("kind", "pattern", "text"), [(int, REGEX_INT, "42\n"), (float, REGEX_FLOAT, "4.5 ")]
)
def test_a_backend_that_knows_no_numbers_is_given_a_pattern(kind, pattern, text):
    for how in ("type", "dtype"):
        backend = RegexOnly(text)
        state = sgl.function(
            lambda s, how=how: s.__iadd__(sgl.gen("x", **{how: kind}, stop="."))
        ).run(backend=backend)
        assert state["x"] == (kind(text) if how == "type" else text.strip())
        ((params, constraint),) = backend.asked
        assert constraint == Regex(pattern)
        assert {".", " ", "\n"} == set(params.stop)


@pytest.mark.parametrize(
    ("kind", "constraint"),
    [
        (int, Number),
        (float, Number),
        (bool, Choices),
        (Colour, Choices),
        (City, JsonSchema),
        (int | None, JsonSchema),
    ],
)
def test_the_backend_is_given_a_constraint(kind, constraint):
    script = sgl.ScriptedBackend()
    sgl.function(lambda s: s.__iadd__(sgl.gen("x", type=kind))).run(backend=script).sync()
    assert type(script.calls[0].constraint) is constraint


def test_whole_numbers_are_bounded_where_the_type_says_nothing():
    import json

    schema = json.loads(sgl.gen("x", type=Annotated[int, Field(gt=2)]).node.constraint.schema)  # type: ignore[arg-type]  # a schema
    assert (schema["exclusiveMinimum"], schema["maximum"]) == (2, 2**53 - 1)
    schema = json.loads(sgl.gen("x", type=Annotated[int, Field(lt=2)]).node.constraint.schema)  # type: ignore[arg-type]  # a schema
    assert (schema["minimum"], schema["exclusiveMaximum"]) == (-(2**53) + 1, 2)


def test_json_schema_takes_a_model_and_leaves_text():
    state = generated('{"name": "Rome", "inhabitants": 3}', json_schema=City)
    assert state["x"] == '{"name": "Rome", "inhabitants": 3}'


class Odd(enum.Enum):
    THING = object()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Literal["1", 1], "'1' and 1 are both written '1'"),
        (Odd, "can't be written"),
        (len, "is a function"),
        (list["Nowhere"], "has no JSON schema"),  # type: ignore[name-defined] # noqa: F821 # on purpose
        (type("Foreign", (), {}), "can't be generated"),
        (BaseModel | type("Foreign", (), {}), "can't be generated"),
    ],
)
def test_types_without_a_text_are_refused_where_they_are_written(kind, message):
    with pytest.raises(sgl.ConstraintError, match=message):
        sgl.gen("x", type=kind)


def test_types_with_unhashable_parts_work():
    kind = Annotated[int, {"unhashable": []}]
    assert generated("3", type=kind)["x"] == 3


# ------------------------------------------------------------------------------ while it is written

ROME = '{"name": "Rome", "inhabitants": 3, "tags": ["old", "big"]}'


def prefixes(kind, text):
    """Values that a reader gives of each beginning of the text, without repeats."""
    read, seen = partial_reader(kind), []
    for end in range(len(text) + 1):
        value = read(text[:end])
        if value is not None and value not in seen[-1:]:
            seen.append(value)
    return seen


def test_a_model_grows_field_by_field():
    seen = [(v.name, v.inhabitants, v.tags) for v in prefixes(City, ROME)]
    assert seen[0] == (None, None, None)
    assert seen[-1] == ("Rome", 3, ["old", "big"])
    assert ("Ro", None, None) in seen
    assert ("Rome", 3, ["ol"]) in seen


def test_a_number_is_shown_when_it_is_whole():
    assert [v["n"] for v in prefixes(dict[str, int], '{"n": 1234}') if v] == [1234]
    assert prefixes(list[float], "[1.5, -20]") == [[], [1.5], [1.5, -20.0]]


def test_digits_in_a_text_are_shown_as_they_come():
    assert prefixes(list[str], '["in 1989", "a \\"1"]')[1:6] == [
        [""],
        ["i"],
        ["in"],
        ["in "],
        ["in 1"],
    ]
    assert ["in 1989", 'a "1'] in prefixes(list[str], '["in 1989", "a \\"1"]')


def test_dataclasses_typed_dicts_and_unions_grow_too():
    assert [(v.x, v.y) for v in prefixes(Point, '{"x": 1, "y": 2.5}')] == [
        (None, None),
        (1, None),
        (1, 2.5),
    ]
    assert prefixes(Options, '{"verbose": true, "level": 3}') == [
        {}, {"verbose": True}, {"verbose": True, "level": 3}
    ]  # fmt: skip
    assert prefixes(list[Options] | None, '[{"verbose": true') == [[], [{}], [{"verbose": True}]]


def test_names_that_json_has_under_another_name_grow():
    assert [v.user for v in prefixes(Named, '{"userName": "ab"}')] == [None, "", "a", "ab"]


def test_a_type_inside_itself_grows():
    seen = prefixes(Tree, '{"value": 1, "children": [{"value": 2}]}')
    assert [(type(child).__name__, child.value) for child in seen[-1].children] == [
        ("PartialTree", 2)
    ]
    assert [child.value for child in seen[-2].children] in ([], [None])


def test_a_member_is_shown_when_it_is_whole():
    assert [v["c"] for v in prefixes(dict[str, Colour], '{"c": "red"}') if v] == [Colour.RED]


def test_tuples_have_what_has_come_and_named_tuples_none_for_the_rest():
    assert prefixes(tuple[int, str, Options], '[1, "ab", {"verbose": true}]') == [
        (), (1,), (1, ""), (1, "a"), (1, "ab"), (1, "ab", {}), (1, "ab", {"verbose": True}),
    ]  # fmt: skip
    assert prefixes(list[Row], '[["a", 2]]') == [
        [],
        [Row(None)],
        [Row("")],
        [Row("a")],
        [Row("a", 2)],
    ]


def test_containers_of_every_kind_grow():
    assert prefixes(set[str], '["a", "b"]')[-1] == {"a", "b"}
    assert [v.level for v in prefixes(frozenset[Frozen], '[{"level": 1}]')[-1]] == [1]
    assert [v.level for v in prefixes(collections.deque[Frozen], '[{"level": 1}]')[-1]] == [1]
    assert [v.level for v in prefixes(Sequence[Frozen], '[{"level": 1}, {"lev')[-1]] == [1, None]
    assert prefixes(Iterable[int], "[1, 2]") == [[], [1], [1, 2]]
    assert prefixes(collections.defaultdict[str, list[int]], '{"a": [1]}')[-1] == {"a": [1]}


def test_models_of_every_kind_grow():
    roots = prefixes(Roots, '{"a": {"value": 1}}')
    assert roots[0].root == {}
    assert roots[-1].root["a"].value == 1
    both = prefixes(Both[Point], '{"one": {"x": 1}')[-1]
    assert (both.one.x, both.two) == (1, None)
    assert prefixes(ByName, '{"user": "a"}')[-1].user == "a"
    assert prefixes(Open, '{"a": 1, "more": "te')[-1].more == "te"
    dog = prefixes(Annotated[Cat | Dog, Field(discriminator="kind")], '{"kind": "dog"}')[-1]
    assert type(dog).__name__ == "PartialDog"
    assert prefixes(Twice, '{"a": {"level": 1}, "b": {"level": 2}}')[-1] == {
        "a": {"level": 1},
        "b": {"level": 2},
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", examples.HELD, ids=str)
def test_a_text_of_any_type_is_read_at_every_place(kind):
    constraint = as_constraint(kind)
    if not isinstance(constraint, JsonSchema):
        return
    text = sample(constraint, random.Random(1))
    seen = prefixes(kind, text)
    if text[0] in '[{"':
        assert seen, text


def test_scalars_have_no_beginnings_and_text_is_its_own():
    assert prefixes(int, "123") == prefixes(Colour, "red") == []
    assert prefixes(str, "abc") == ["a", "ab", "abc"]


def test_partial_iter_ends_with_the_value_itself():
    @sgl.function
    def program(s):
        s += sgl.gen("x", type=City)

    script = sgl.ScriptedBackend(lambda call: ROME)
    state = program.run(stream=True, backend=script)
    *parts, last = state.partial_iter("x")
    assert last == City(name="Rome", inhabitants=3, tags=["old", "big"])
    assert type(parts[0]).__name__ == "PartialCity"
    assert parts[0].inhabitants is None

    async def read():
        return [
            value
            async for value in program.run(stream=True, backend=script).partial_async_iter("x")
        ]

    assert asyncio.run(read()) == [*parts, last]


def test_partial_values_need_a_type():
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("x"))).run(
        stream=True, backend=sgl.ScriptedBackend()
    )
    with pytest.raises(sgl.ProgramError, match="'x' has no type"):
        list(state.partial_iter("x"))


def test_a_type_that_pydantic_can_not_take_is_refused_for_partial_values_too():
    with pytest.raises(sgl.ConstraintError):
        partial_reader(Any | type("Foreign", (), {}))


def test_a_value_that_max_tokens_cuts_short_says_so():
    program = sgl.function(lambda s: s.__iadd__(sgl.gen("x", type=City, max_tokens=2)))
    with pytest.raises(
        sgl.TruncatedError, match=r"'x' was cut after 2 tokens: .*not JSON.* Set max_tokens=1024"
    ):
        program.run(backend=sgl.ScriptedBackend({"x": ROME}))["x"]


@pytest.mark.parametrize(
    ("limit", "named"), [({}, "the default of max_tokens"), ({"max_tokens": 2}, "max_tokens")]
)
def test_json_that_a_limit_cuts_is_a_warning(caplog, limit, named):
    """It is text without a type, so nothing parses it."""
    words = " ".join(["word"] * 200)
    schema = json.dumps({"type": "array", "items": {"type": "string"}})
    program = sgl.function(lambda s: s.__iadd__(sgl.gen("x", json_schema=schema, **limit)))
    state = program.run(backend=Cut(f'["{words}"]', limit.get("max_tokens", 128)))
    assert not state["x"].endswith("]")
    (warning,) = state.get_meta_info("x")["warnings"]
    assert warning.startswith(f"{named} cut 'x' after {limit.get('max_tokens', 128)} tokens")
    assert [warning in record.getMessage() for record in caplog.records] == [True]


def test_log_probabilities_of_more_tokens_without_any_are_a_warning(caplog):
    asked: dict[str, Any] = {"top_logprobs_num": 2, "return_text_in_logprobs": True}

    def warnings(gen, **options):
        state = sgl.function(lambda s: s.__iadd__(gen)).run(
            backend=sgl.ScriptedBackend(default="a"), **options
        )
        assert state["x"] == "a"
        return state.get_meta_info("x").get("warnings")

    told = "top_logprobs_num, return_text_in_logprobs: has no effect without return_logprob=True"
    assert warnings(sgl.gen("x", **asked)) == [told]
    assert [told in record.getMessage() for record in caplog.records] == [True]
    assert warnings(sgl.gen("x", **asked, return_logprob=True)) is None
    assert warnings(sgl.gen("x", **asked), return_logprob=True) is None
    assert warnings(sgl.gen("x", top_logprobs_num=0)) is None


class Cut(sgl.BaseBackend):
    """A backend whose answers end after so many words."""

    def __init__(self, text, words):
        super().__init__()
        self._words = text.split(" ")[:words]

    async def agenerate(self, prompt, params, constraint, *, stream):
        usage = Usage(prompt_tokens=1, completion_tokens=len(self._words))
        yield Generation(" ".join(self._words), finish_reason="length", usage=usage)
