"""Faults that are found in a program's graph."""

import itertools
import random
import uuid
from datetime import datetime

import pytest
from pydantic import BaseModel

import sglang_lite as sgl
from tests.conformance.case import cases


def found(body, explore=20, backend=None, **arguments):
    """Codes and lines (counted from the body's first) of what is found."""
    first = body.__code__.co_firstlineno
    findings = sgl.function(body).trace(explore=explore, **arguments).graph().check(backend)
    return [(each.code, each.where.line - first) for each in findings]


def test_a_variable_that_is_read_before_it_is_there():
    def body(s, x):
        if x:
            s += sgl.gen("a")
        s += s["a"]

    findings = sgl.function(body).trace(explore=5).graph().check()
    assert [each.code for each in findings] == ["unknown-variable"]
    assert "no variable 'a'" in findings[0].message
    assert findings[0].advice.endswith("It happens where x is False.")


def test_a_variable_that_is_replaced_before_it_is_read():
    def body(s):
        s += sgl.gen("a")
        s += sgl.gen("b")
        s += s["b"]
        s += sgl.gen("b")
        s += sgl.gen("a")

    assert found(body) == [("unread-variable", 1)]


def test_a_variable_of_a_branch_that_nobody_joins():
    def body(s):
        fork = s.fork(2)
        fork += sgl.gen("a")
        other = s.fork(2)
        other += sgl.gen("b")
        other.join()
        third = s.fork(2)
        third += sgl.gen("c")
        s += third[0]["c"] + third[1]["c"]
        with s.copy() as copy:
            copy += sgl.gen("d")

    assert found(body) == [("unread-variable", 2)]


def test_branches_that_are_returned_are_read_by_others():
    def body(s):
        fork = s.fork(2)
        fork += sgl.gen("a")
        return fork

    assert found(body) == []


def test_a_loop_may_use_a_name_again():
    def body(s):
        for _ in range(3):
            s += sgl.user("more") + sgl.assistant(sgl.gen("a"))

    assert found(body) == []


def test_lines_that_no_way_comes_to():
    def body(s, x):
        s += sgl.select("a", ["yes", "no"])
        if s["a"] == "maybe":
            s += "unreachable"
        elif s["a"] == "no":
            s += "no"
            return
            s.user("unreachable")
        for word in ():
            s += word  # another list may have some
        if found is None:
            s += "and another value of a global"

    assert found(body) == [("unreachable", 3), ("unreachable", 7)]


def test_a_stop_that_its_constraint_forbids():
    def body(s):
        s += sgl.gen("a", regex="[a-z]+", stop=["\n", "b"])
        s += sgl.gen("b", json_schema={"type": "integer"}, stop="x")
        s += sgl.gen(
            "c", constraint=sgl.Grammar('root ::= "a" | "(" root ")"'), stop="x"
        )  # no regular language: not told
        with s.user():  # whose template has a stop of its own
            s += sgl.gen("d", regex="[a-z]+")

    assert found(body) == [("stop-never-comes", 1), ("stop-never-comes", 2)]


def test_a_blank_before_free_text():
    def body(s, x):
        s += "The answer is " + sgl.gen("a")
        s += "The year is " + sgl.gen("b", regex="[0-9]+")
        s += "It is " + sgl.gen("c", heal=True)
        s += "It is" + sgl.gen("d")
        s += "Then" + x + " " + sgl.gen("e")
        with s.user():
            s += "It is " + sgl.gen("f", max_tokens=3)

    assert found(body) == [("blank-before-generation", line) for line in (1, 5, 7)]


def test_a_constraint_that_can_not_be_enforced():
    def body(s):
        s += sgl.gen("a", json_schema={"type": "integer", "multipleOf": 1234577})

    assert found(body) == [("refused", 1)]


class Limited(sgl.BaseBackend):
    """Honours little."""

    capabilities = sgl.lang.backend.base_backend.Capabilities(
        frozenset({sgl.Regex}), frozenset({"max_tokens"}), select=False
    )


def test_what_a_backend_refuses():
    def body(s):
        s += sgl.gen("a", regex="a+", max_tokens=3)
        s += sgl.gen("b", json_schema={"type": "integer"})
        s += sgl.gen("c", temperature=1)
        s += sgl.gen("d", dtype=int)  # a regex there
        s += sgl.select("e", ["a", "b"])
        s += sgl.image("x.png")
        with s.grammar(sgl.Regex("a+")):
            s += sgl.gen("f")

    assert found(body) == []
    assert found(body, backend=Limited()) == [("refused", line) for line in (2, 3, 5, 6, 7)]


counting = itertools.count()


@pytest.mark.parametrize(
    "text",
    [lambda: datetime.now(), uuid.uuid4, random.random, lambda: next(counting), lambda: object()],
)
def test_a_text_that_changes_from_run_to_run(text):
    kept = []

    def body(s):
        s += "always the same"
        value = text()
        kept.append(value)  # so that another object has another address
        s += f"never the same: {value}"

    findings = sgl.function(body).trace().graph().check()
    assert [(each.code, each.where.line - body.__code__.co_firstlineno) for each in findings] == [
        ("changing-text", 4)
    ]


def test_the_order_in_which_branches_are_added_to_is_no_change():
    orders = itertools.cycle([[0, 1, 2], [2, 1, 0]])

    @sgl.function
    def talk(s):
        forks = s.fork(3)
        for i in next(orders):  # as threads do
            forks[i] += f"Branch {i}:" + sgl.gen("answer")
        for fork in forks:
            s += fork["answer"]

    assert talk.trace().graph().check() == ()


# Programs that are about such a fault.
FAULTS = {
    "cancel_branch": ["unread-variable", "unread-variable"],
    "cancel_fork": ["unread-variable"],
    "fork_error_in_fork": ["unread-variable"],
    "fork_error_unread": ["unread-variable", "unread-variable"],
    "fork_unread": ["unread-variable"],
    "gen_json_schema": ["hidden-fields"],
    "gen_json_schema_forms": ["hidden-fields", "hidden-fields"],
    "gen_type_model": ["hidden-fields"],
    "gen_types": ["hidden-fields", "hidden-fields"],
    "role_misuse": ["error"],
    "scope_in_scope": ["unread-variable"],
    "tools_unread": ["hidden-tools"],
}


def test_what_is_found_in_conformance_programs():
    wrong = {}
    for name, case in cases().items():
        try:
            state = case.program.trace(explore=10, **case.arguments)
        except sgl.SglError:
            continue
        codes = sorted(each.code for each in state.graph().check())
        codes = [code for code in codes if code != "blank-before-generation"]  # in many of them
        if codes:
            wrong[name] = codes
    assert wrong == FAULTS


# ------------------------------------------------------------- fields that the prompt does not name


class Invoice(BaseModel):
    invoice_number: str
    total: float
    lines: list[dict[str, str]] = []


def test_fields_that_the_prompt_names_nowhere():
    def body(s, text):
        s += sgl.system("You read bills.")
        s += sgl.user(f"Extract the data as JSON: {text}")
        s += sgl.assistant(sgl.gen("bill", type=Invoice))

    assert found(body) == [("hidden-fields", 3)]
    assert found(body, text="Invoice 12, total 30 EUR") == []  # its words are there
    assert found(body, text="No. 12, 30 EUR") == [("hidden-fields", 3)]
    (finding,) = sgl.function(body).trace().graph().check()
    assert (
        finding.message
        == "no text before 'bill' names one of its fields: invoice_number, total, lines."
    )
    assert "sgl.describe(Invoice)" in finding.advice


def test_the_advice_cures_it():
    def body(s, text):
        s += sgl.user(f"Extract the data as JSON. {sgl.describe(Invoice)}\n{text}")
        s += sgl.assistant(sgl.gen("bill", type=Invoice))

    assert found(body) == []


@pytest.mark.parametrize(
    "prompt",
    [
        "What is the number of the invoice?", "Give me the TOTALS.", "InvoiceNumber, please", '{"total": …}',
        "Welche Rechnungstotale?",
    ],
)  # fmt: skip
def test_a_prompt_that_names_a_field_in_words(prompt):
    def body(s):
        s += prompt + "\n" + sgl.gen("bill", type=Invoice)

    assert found(body) == []


@pytest.mark.parametrize("prompt", ["Read this:", "Is it of use?", "What a message, an idea!"])
def test_small_words_parts_of_words_and_templates_name_nothing(prompt):
    class Short(BaseModel):
        is_it: bool
        user: str
        age: int
        id: int

    def body(s):
        s += sgl.user(prompt)
        s += sgl.assistant(sgl.gen("short", type=Short))

    assert found(body) == [("hidden-fields", 2)]


def test_a_prompt_that_the_caller_writes_is_not_judged():
    def alone(s, prompt):
        s += sgl.user(prompt) + sgl.assistant(sgl.gen("bill", type=Invoice))

    def first(s, instructions, text):
        s += sgl.user(f"{instructions}\n\nText: {text}") + sgl.assistant(
            sgl.gen("bill", type=Invoice)
        )

    def as_system(s, instructions, text):
        s += (
            sgl.system(instructions)
            + sgl.user(f"Text: {text}")
            + sgl.assistant(sgl.gen("bill", type=Invoice))
        )

    def no_turns(s, prompt):
        s += prompt + "\n" + sgl.gen("bill", type=Invoice)

    for body in (alone, first, as_system, no_turns):
        assert found(body) == []
    assert found(alone, prompt="Read on.") == [("hidden-fields", 1)]


def test_an_answer_before_it_has_named_the_fields():
    def body(s, text):
        s += sgl.user(f"Read this: {text}")
        s += sgl.assistant(sgl.gen("first", type=Invoice))
        s += sgl.user("Another one, please.") + sgl.assistant(sgl.gen("second", type=Invoice))

    assert found(body) == [("hidden-fields", 2)]


def test_branches_see_what_came_before_them():
    def named(s, text):
        s += sgl.user(f"Give totals of this: {text}")
        branches = s.fork(2)
        branches += sgl.assistant(sgl.gen("bill", type=list[Invoice]))
        branches.join()

    def elsewhere(s, text):
        branches = s.fork(2)
        branches[0] += f"Total of {text}:" + sgl.gen("total", max_tokens=5)
        branches[1] += f"Read {text}: " + sgl.gen("bill", type=Invoice)
        branches.join()

    assert found(named) == []
    assert found(elsewhere) == [("hidden-fields", 3)]


def test_what_has_no_fields_hides_none():
    def body(s, text):
        s += f"Read {text}: " + sgl.gen("a", type=int) + sgl.gen("b", type=list[str], max_tokens=20)
        s += sgl.gen("c", type=dict[str, int], max_tokens=20) + sgl.gen(
            "d", json_schema={"type": "object"}, max_tokens=9
        )

    assert found(body) == []


def test_fields_of_a_schema_and_of_what_it_refers_to():
    schema = {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}], "$defs": {"a/b": {
        "type": "object", "properties": {"weight": {"type": "number"}, "next": {"$ref": "#/$defs/a~1b"}}}}}  # fmt: skip

    def body(s, text):
        s += f"Read {text}: " + sgl.gen("a", json_schema=schema, max_tokens=40)

    def named(s, text):
        s += f"Which weight has {text}? " + sgl.gen("a", json_schema=schema, max_tokens=40)

    assert found(body) == [("hidden-fields", 1)]
    assert found(named) == []
    (finding,) = sgl.function(body).trace().graph().check()
    assert "sgl.describe(…)" in finding.advice


def test_a_backend_that_sends_the_schema_shows_the_fields():
    def body(s, text):
        s += sgl.user(f"Read this: {text}") + sgl.assistant(sgl.gen("bill", type=Invoice))

    class Api(sgl.ScriptedBackend):
        enforces = False

    assert found(body, backend=Api({})) == []


# --------------------------------------------------------------------- tools that a prompt loses


def look(city: str) -> str:
    """Looks."""
    return city


def dropped(body):
    """Lines of a body, counted from its first, that drop tools."""
    findings = sgl.function(body).trace().graph().check()
    assert {each.code for each in findings} <= {"dropped-tools"}
    return [each.where.line - body.__code__.co_firstlineno for each in findings]


def test_a_generation_that_drops_the_tools_of_an_earlier_one():
    def body(s):
        s += sgl.user("?")
        s += sgl.assistant(sgl.gen("call", tools=[look]))
        s += sgl.user("So?")
        s += sgl.assistant(sgl.gen("sum"))
        fork = s.fork(1)[0]
        fork += sgl.user("And?") + sgl.assistant(sgl.gen("more"))
        s += fork["more"]

    assert dropped(body) == [4, 6]
    state = sgl.function(body).trace()
    (first, _) = state.graph().check()
    assert "'sum' drops the tools that 'call' shows" in first.message


def test_a_loop_of_tools_and_a_summary():
    def body(s):
        s += sgl.user("?")
        sgl.use_tools(s, [look])
        s += sgl.user("In one line?")
        s += sgl.assistant(sgl.gen("line", max_tokens=20))

    assert dropped(body) == [4]


def test_tools_that_are_shown_again_are_not_dropped():
    def body(s):
        s += sgl.user("?")
        s += sgl.assistant(sgl.gen("first"))
        s += sgl.user("??") + sgl.assistant(sgl.gen("call", tools=[look]))
        s += sgl.user("So?") + sgl.assistant(sgl.gen("sum", tools=[look], tool_choice="none"))

    def apart(s):
        first, second = s.fork(2)
        first += sgl.user("?") + sgl.assistant(sgl.gen("call", tools=[look]))
        second += sgl.user("?") + sgl.assistant(sgl.gen("text"))
        s += first["call"] + second["text"]

    assert dropped(body) == dropped(apart) == []
