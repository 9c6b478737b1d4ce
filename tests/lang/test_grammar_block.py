"""`with s.grammar(G)`: literals, generations and selections that are together in one language."""

import asyncio
import itertools
import os
import random

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.constraints.matching import matches
from sglang_lite.constraints.random_texts import sample
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.program.nodes import Gen, GrammarBegin, GrammarEnd, Text
from sglang_lite.protocol import (
    Choices,
    Constraint,
    Continuation,
    Ebnf,
    Regex,
    StructuralTag,
    Tag,
)
from sglang_lite.runtime.core.engine_program import EngineProgram
from tests.constraints.random_grammars import grammar as random_grammar
from tests.constraints.test_generation import random_model
from tests.lang.fakes import Answers, line_here

COUNT = int(os.environ.get("SGLANG_LITE_RANDOM_GRAMMARS", "10"))
PNG = b"\x89PNG\r\n\x1a\n"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WORDS = Regex("([ab]{1,3}, ){0,6}end[.]")


@pytest.fixture(scope="module")
def tiny():
    """An engine of a model with random logits and 284 tokens."""
    with Engine.of(random_model()) as engine:
        yield engine


def scripted(*answers):
    return sgl.ScriptedBackend({"": list(answers)})


def run(body, backend, **options):
    return sgl.function(body).run(backend=backend, **options)


# ----------------------------------------------------------------------------------------- literals


def test_literals_and_generations_together_are_in_the_grammar():
    def body(s):
        with s.grammar(PERSON):
            s += '{"name": "' + sgl.gen("name", stop='"') + '", "age": '
            s += sgl.gen("age")
        s += "!"

    state = run(body, scripted('Bo"', "3}"))
    assert (state["name"], state["age"], state.text()) == ("Bo", "3}", '{"name": "Bo", "age": 3}!')


def test_a_generation_is_told_the_grammar_and_the_text_of_it_so_far():
    backend = scripted("ab, end.", "b", "end.")

    def body(s):
        s += "List: "
        with s.grammar(WORDS):
            s += (
                "a, "
                + sgl.gen("x", max_tokens=1)
                + " "
                + sgl.gen("y", regex="[b]")
                + ", "
                + sgl.gen("z")
            )

    run(body, backend).sync()
    assert [call.constraint for call in backend.calls] == [
        Continuation(WORDS, "a, "),
        Continuation(WORDS, "a, ab, ", Regex("[b]")),
        Continuation(WORDS, "a, ab, b, "),
    ]


def test_a_literal_that_can_not_go_on_is_refused_where_it_stands_and_can_be_replaced():
    def body(s):
        with s.grammar(WORDS):
            s += "a, "
            with pytest.raises(
                sgl.ConstraintError,
                match="does not allow 'b,c' here, from character 3 of it on, after",
            ):
                s += "b,c"
            s += "end."

    assert run(body, sgl.ScriptedBackend()).text() == "a, end."


def test_the_refusal_names_the_users_line():
    def body(s):
        with s.grammar(WORDS):
            s += "c"  # here

    with pytest.raises(
        sgl.ConstraintError, match="It continues with one of 'a', 'b', 'e'"
    ) as caught:
        run(body, sgl.ScriptedBackend())
    assert caught.value.where.line == line_here(body)


def test_a_literal_behind_a_generation_is_refused_when_that_is_known_at_its_own_line(tiny):
    def body(s):
        with s.grammar(WORDS):
            s += "a" + sgl.gen("x", regex="[ab]")
            s += "c"  # here
            s += sgl.gen("y")

    for backend in (tiny, Slow(tiny)):
        state = run(body, backend)
        assert state["x"] in ("a", "b")
        with pytest.raises(sgl.ConstraintError, match="does not allow 'c' here") as caught:
            state["y"]
        assert caught.value.where.line == line_here(body)


def test_an_end_that_comes_too_early_is_an_error_with_what_is_missing():
    def body(s):
        with s.grammar(PERSON):  # here
            s += '{"name": "'

    def later(s):
        with s.grammar(PERSON):  # here
            s += '{"name": "' + sgl.gen("x", stop='"') + '", "ag'

    with pytest.raises(sgl.ConstraintError, match=r"not complete after '\{\"name\": \"'") as caught:
        run(body, sgl.ScriptedBackend())
    assert caught.value.where.line == line_here(body)
    state = run(later, sgl.ScriptedBackend({"": 'Bo"'}, latency=0.001))
    assert state["x"] == "Bo"
    with pytest.raises(
        sgl.ConstraintError, match=r"not complete after .*\"ag'. It continues with 'e\": '"
    ) as caught:
        state.text()
    assert caught.value.where.line == line_here(later)


def test_an_exception_of_the_body_counts_for_more_than_the_missing_end():
    def body(s):
        with s.grammar(PERSON):
            s += "{"
            raise LookupError

    with pytest.raises(LookupError):
        run(body, sgl.ScriptedBackend())


def test_what_best_effort_leaves_is_checked_at_the_end():
    schema = sgl.grammar.json_schema({"type": "array", "uniqueItems": True}, enforce="best_effort")

    def body(s):
        with s.grammar(schema):
            s += "[1, " + sgl.gen("x")

    assert run(body, scripted("2]")).text() == "[1, 2]"
    with pytest.raises(sgl.ValueValidationError, match="non-unique"):
        sgl.function(lambda s: literal(s, schema)).run(backend=sgl.ScriptedBackend())


def literal(s, schema):
    with s.grammar(schema):
        s += "[1, 1]"


# ------------------------------------------------------------------------- generations on an engine


class Slow(LocalBackend):
    """An engine that is asked node by node."""

    async def agenerate(self, *args, **options):
        async for event in super().agenerate(*args, **options):
            yield event


CONSTRAINTS: dict[str, Constraint] = {
    "words": WORDS,
    "choices": Choices(("ab", "abc", "b, b, b")),
    "parentheses": Ebnf('root ::= "a" | "(" root ")" | "[" root "b]"'),
    "tags": StructuralTag((Tag("fg", Regex("[a-c]{1,9}"), "?"),), ("fg",)),
    "person": sgl.grammar.json_schema(PERSON),
}


def drawn_body(draw, constraint):
    """A program that plays a random text of the grammar: pieces of it are literals, or generated by
    themselves; from somewhere on it is generated freely.
    """
    text = sample(constraint, draw)
    cuts = sorted({0, *(draw.randrange(len(text) + 1) for _ in range(4))})
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]

    def body(s):
        s += "x"
        with s.grammar(constraint):
            for i, piece in enumerate(pieces):
                own = sgl.Choices([piece[:1], piece, piece + "a"])  # type: ignore[arg-type]  # a list will do
                s += (
                    sgl.gen(f"own{i}", constraint=own, max_tokens=99)
                    if draw.random() < 0.5 and piece
                    else piece
                )
            s += sgl.gen("rest", max_tokens=200)

    return body


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_whatever_is_generated_is_in_the_grammar_or_the_program_fails(backend):
    outcomes = {"complete": 0, "error": 0}
    with Engine.of(random_model(), constraint_backend=backend) as engine:
        for seed in range(COUNT):
            draw = random.Random(seed)
            name = draw.choice([*CONSTRAINTS, "random"])
            constraint = CONSTRAINTS[name] if name in CONSTRAINTS else Ebnf(random_grammar(draw))
            try:
                body = drawn_body(draw, constraint)
            except sgl.ConstraintError:  # it contradicts itself, or has long texts alone
                continue
            state_of = random.Random(seed).getstate()
            draw.setstate(state_of)
            try:
                whole = run(body, engine, seed=seed)
            # of a grammar, one in some hundred: its line raises it
            except sgl.ConstraintError as refusal:
                assert "in too many ways" in str(refusal)  # noqa: PT017
                continue
            error = whole.error()
            draw.setstate(state_of)
            single = run(body, Slow(engine), seed=seed)
            assert str(single.error()).split("[")[0] == str(error).split("[")[0]
            if error is None:
                assert matches(constraint, whole.text()[1:])
                assert single.text() == whole.text()
                outcomes["complete"] += 1
            else:
                assert isinstance(error, sgl.ConstraintError)
                outcomes["error"] += 1
    assert outcomes["complete"] > COUNT / 2
    assert outcomes["error"] > COUNT / 20


def test_one_grammar_is_compiled_once_for_all_generations_in_it(tiny):
    before = tiny.stats()["grammars_compiled"]

    def body(s):
        with s.grammar(Regex("([xyz]{1,3}, )*end[.]")):
            for i in range(6):
                s += "x" + sgl.gen(f"g{i}", stop=", ") + ", "
            s += sgl.gen("last")

    assert run(body, tiny, seed=1).text().endswith("end.")
    assert run(body, Slow(tiny), seed=2).text().endswith("end.")
    assert tiny.stats()["grammars_compiled"] == before + 1


def test_a_block_is_played_as_one_program(tiny, monkeypatch):
    nodes = []
    extend = EngineProgram.extend
    monkeypatch.setattr(EngineProgram, "extend", lambda *a: nodes.extend(a[2]) or extend(*a))

    def body(s):
        s += "x" + sgl.gen("before", max_tokens=2)
        with s.grammar(PERSON):
            s += (
                '{"name": "'
                + sgl.gen("name", stop='"')
                + '", "age": '
                + sgl.gen("age", type=int)
                + "}"
            )
        s += sgl.gen("after", max_tokens=2)

    before = tiny.stats()["programs_opened"]
    run(body, tiny, seed=3).sync()
    assert tiny.stats()["programs_opened"] == before + 1
    assert [type(node) for node in nodes] == [
        Text,
        Gen,
        GrammarBegin,
        Text,
        Gen,
        Text,
        Gen,
        Text,
        GrammarEnd,
        Gen,
    ]


def test_a_typed_generation_holds_to_the_grammar_too(tiny):
    def body(s):
        with s.grammar(PERSON):
            s += '{"name": "", "age": ' + sgl.gen("age", type=int) + "}"

    ages = [run(body, tiny, seed=seed)["age"] for seed in range(20)]
    assert all(age <= 130 for age in ages)
    assert len(set(ages)) > 5


def test_where_a_generation_ends_tokens_of_what_follows_in_the_grammar_do_not_get_in_its_way(
    engine,
):
    """The grammar forces `", "city": ` after a name, and a tokenizer would cut that within."""
    fields = {
        "city": {"enum": ["Paris", "London"]},
        "age": {"type": "integer"},
        "kind": {"const": "a b"},
    }
    schema = {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }

    def body(s):
        s += "As JSON: "
        with s.grammar(schema):
            s += "{"
            for i, (name, kind) in enumerate(fields.items()):
                s += (
                    (", " if i else "")
                    + f'"{name}": '
                    + sgl.gen(name, constraint=kind, max_tokens=30, temperature=0)
                )
            s += "}"

    texts = {
        run(body, backend).text().removeprefix("As JSON: ") for backend in (engine, Slow(engine))
    }
    assert len(texts) == 1
    assert sgl.grammar.matches(schema, *texts)


def test_what_a_generation_may_be_and_the_grammar_around_it_can_have_nothing_in_common(tiny):
    def body(s):
        with s.grammar(WORDS):
            s += "a" + sgl.gen("x", regex="[ab]c") + ", end."

    with pytest.raises(
        sgl.ConstraintError, match="the surrounding grammar does not allow the text"
    ):
        run(body, tiny)["x"]


def test_a_generation_that_runs_out_of_tokens_may_be_gone_on_with(tiny):
    def body(s):
        s += "x"
        with s.grammar(Regex("[a-c]{40}!")):
            for i in range(50):
                s += sgl.gen(f"x{i}", max_tokens=3)

    assert matches(Regex("[a-c]{40}!"), run(body, tiny, seed=1).text()[1:])


def test_several_samples_each_go_on_in_the_grammar_and_the_first_one_is_the_text(tiny):
    def body(s):
        with s.grammar(WORDS):
            s += "a, " + sgl.gen("x", n=4, max_tokens=100)

    state = run(body, tiny, seed=5)
    assert len(set(state["x"])) > 1
    assert all(matches(WORDS, "a, " + text) for text in state["x"])
    assert state.text() == "a, " + state["x"][0]


def test_streamed_text_is_the_text(tiny):
    def body(s):
        with s.grammar(PERSON):
            s += '{"name": "' + sgl.gen("name", stop='"') + '", ' + sgl.gen("rest")

    state = run(body, tiny, seed=7, stream=True)
    text = "".join(state.text_iter())
    assert text == state.text()
    assert matches(sgl.grammar.json_schema(PERSON), text)


# --------------------------------------------------------------------------------------- selections


def test_choices_that_can_not_go_on_are_no_choices(tiny):
    def body(s):
        with s.grammar(WORDS):
            s += "a" + sgl.gen("g", regex=", ")
            s += sgl.select("x", ["c, ", "ab, ", "end", "end. "], temperature=1.0) + sgl.gen("rest")

    for backend in (tiny, Slow(tiny), scripted(", ", "ab, ", "end.")):
        state = run(body, backend, seed=2)
        assert list(state.selection("x").probs) == ["ab, ", "end"]
        assert matches(WORDS, state.text())


def test_without_a_choice_that_can_go_on_the_program_fails(tiny):
    def body(s):
        with s.grammar(WORDS):
            s += "a" + sgl.gen("g", regex=", ")
            s += sgl.select("x", ["c", "d"])  # here

    for backend in (tiny, Slow(tiny), scripted(", ")):
        with pytest.raises(sgl.ConstraintError, match=r"'c', 'd'") as caught:
            run(body, backend)["x"]
        assert caught.value.where.line == line_here(body)


# ---------------------------------------------------------------------------- the program around it


def test_branches_go_on_in_the_grammar_and_need_not_complete_it():
    def body(s):
        with s.grammar(WORDS):
            s += "a, "
            one, two = s.fork(2)
            one += "b, end."
            with pytest.raises(sgl.ConstraintError, match="It is complete"):
                one += "more"
            two += sgl.gen("x", max_tokens=1)
            with pytest.raises(sgl.ProgramError, match="already open"), two.grammar(WORDS):
                pass
            s += "end."
        return one.text(), two.text()

    state = run(body, scripted("ab, end."))
    assert state.ret_value == ("a, b, end.", "a, ab,")
    assert state.text() == "a, end."


def test_joined_texts_have_to_go_on_too():
    def body(s, first):
        with s.grammar(WORDS):
            group = s.fork(2)
            group += [first, "end."]
            group.join("concate_and_append")

    program = sgl.function(body)
    assert program.run("a, ", backend=sgl.ScriptedBackend()).text() == "a, end."
    with pytest.raises(
        sgl.ConstraintError,
        match=r"does not allow 'end\.' here, from character 1 of it on, after 'end",
    ):
        program.run("end.", backend=sgl.ScriptedBackend()).text()


def test_going_back_takes_the_grammar_back():
    def body(s):
        with s.checkpoint() as outside:
            with s.grammar(WORDS):
                s += "a, "
                with s.checkpoint() as c:
                    s += "b, "
                    c.rollback()
                    s += sgl.gen("x", max_tokens=1) + " "
                    s["x"]
                    c.rollback()
                s += "end."
            outside.rollback()
            with s.grammar(PERSON):
                s += "{"
                outside.rollback()
            s += "free"

    assert run(body, scripted("bb, end.")).text() == "free"


def test_a_failed_walk_works_again_after_going_back(tiny):
    def body(s):
        s += "x"
        with s.grammar(WORDS):
            with s.checkpoint() as c:
                s += sgl.gen("x", regex="a") + "c" + sgl.gen("y")
                assert isinstance(s.error(), sgl.ConstraintError)
                c.rollback()
            s += "end."

    assert run(body, tiny).text() == "xend."


def test_another_attempt_starts_from_the_same_place():
    backend = scripted("ab, end.", "b, end.")

    def body(s):
        with s.grammar(WORDS):
            s += "a, " + sgl.gen("x", check=lambda text: text.startswith("b"), retries=1)

    assert run(body, backend).text() == "a, b, end."
    assert {call.constraint.text for call in backend.calls} == {"a, "}


def test_a_program_inside_goes_on_in_the_grammar():
    @sgl.function
    def inner(s):
        s += "b, "
        s += sgl.gen("x")

    def body(s):
        with s.grammar(WORDS), s.var_scope("all"):
            s += "a, "
            s += inner()

    assert run(body, scripted("end."))["all"] == "a, b, end."


def test_async_programs_and_batches(tiny):
    @sgl.function
    async def program(s, word):
        with s.grammar(WORDS):
            s += word + ", " + sgl.gen("x", max_tokens=100)
        return await s.get("x")

    state = asyncio.run(program.arun("ab", backend=tiny, seed=1))
    assert matches(WORDS, "ab, " + state.ret_value)
    for seed in range(5):
        states = program.run_batch(
            [{"word": word} for word in ("a", "b", "ba")], backend=tiny, seed=seed
        )
        assert all(matches(WORDS, state.text()) for state in states)
    with pytest.raises(sgl.BatchError) as caught:
        program.run_batch([{"word": word} for word in ("a", "c")], backend=tiny, seed=1)
    assert [isinstance(result, sgl.ConstraintError) for result in caught.value.results] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (lambda s: s.grammar(WORDS).__enter__(), "a grammar is already open"),
        (lambda s: s.__iadd__(sgl.user("x")), "a 'user' turn begins inside a grammar"),
        (lambda s: s.__iadd__(sgl.image(PNG)), "an image can't be part"),
        (lambda s: s.__iadd__(sgl.select("x", ["a"], multi=True)), "select one by one"),
    ],
)
def test_what_has_no_place_in_a_grammar_is_refused_where_it_stands(inside, message):
    def body(s):
        with s.grammar(WORDS):
            with pytest.raises(sgl.SglError, match=f"(?i){message}"):
                inside(s)
            s += "end."

    assert run(body, sgl.ScriptedBackend()).text() == "end."


def test_a_turn_that_began_outside_does_not_end_inside():
    def body(s):
        s += sgl.assistant_begin()
        with s.grammar(WORDS):
            s += "end."
            with pytest.raises(sgl.ProgramError, match="turn ends inside a grammar"):
                s += sgl.assistant_end()
        s += sgl.assistant_end()

    assert run(body, sgl.ScriptedBackend()).messages()[-1] == {
        "role": "assistant",
        "content": "end.",
    }


@pytest.mark.parametrize(
    "constraint", ["a+", Regex("a("), {"type": "integer", "multipleOf": 1234577}, False, 3]
)
def test_what_is_no_constraint_is_refused_at_the_start(constraint):
    def body(s):
        with pytest.raises(sgl.ConstraintError), s.grammar(constraint):
            pass
        s += "x"

    assert run(body, sgl.ScriptedBackend()).text() == "x"


def test_a_backend_that_takes_single_constraints_refuses_and_says_what_would_do():
    def body(s):
        with s.grammar(WORDS):  # here
            s += "a"

    with pytest.raises(
        sgl.CapabilityError, match=r"a grammar over several nodes\. Write all of it with one gen"
    ) as caught:
        run(body, Answers(lambda prompt: "x"))
    assert caught.value.where.line == line_here(body)

    def elsewhere(s):
        with s.grammar(WORDS):
            s += sgl.gen("x", backend=Answers(lambda prompt: "x"))

    with pytest.raises(sgl.CapabilityError, match="can't honour a grammar over several nodes"):
        run(elsewhere, sgl.ScriptedBackend())


def test_tracing_records_the_grammar():
    def body(s, word):
        with s.grammar(WORDS):
            s += word + ", " + sgl.gen("x")

    trace = sgl.function(body).trace()
    assert [repr(node).split("(")[0] for node in trace.flatten_nodes()] == [
        "GrammarBegin", "Argument", "Text", "Gen", "GrammarEnd",
    ]  # fmt: skip
