"""Names that no schema lists are written once in an object, token by token."""

import json
import random

import pytest

import sglang_lite as sgl
from sglang_lite.runtime.structured_output import ruled_grammar
from sglang_lite.runtime.structured_output.base import next_mask
from sglang_lite.runtime.structured_output.ruled_grammar import (
    extract_mask_rules,
    pack_mask_rules,
    unpack_mask_rules,
)

INTEGERS = {"type": "object", "additionalProperties": {"type": "integer"}}
NESTED = {"type": "object", "additionalProperties": {"items": INTEGERS, "type": "array"}}
LISTED = {**INTEGERS, "properties": {"aa": {"type": "integer"}}}
FEW = {**INTEGERS, "propertyNames": {"pattern": "^[ab]{1,2}$"}}  # which can run out


def twice(pairs):
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names), names
    return dict(pairs)


def walk(engine, grammar, usual, rng, tokens=150):
    """The text of a random way through the masks, which goes where names come again if it may, and
    then to an end.
    """
    matcher, text = grammar.matcher(), b""
    for step in range(tokens):
        if matcher.finished:
            break
        mask = next_mask(matcher)
        allowed = [
            t for t in usual if mask[t >> 5] >> (t & 31) & 1 and t not in engine.tokenizer.eos_ids
        ]
        if not allowed:
            words = [w for w in range(len(mask)) if mask[w]]
            word = rng.choice(words)
            allowed = [32 * word + bit for bit in range(32) if mask[word] >> bit & 1]
        ends = [t for t in allowed if engine.tokenizer.token_bytes[t][:1] in (b"}", b"]", b'"')]
        token = rng.choice(ends if ends and step > 50 else allowed)
        if token in engine.tokenizer.eos_ids:
            break
        assert matcher.accept(token)
        text += engine.tokenizer.token_bytes[token]
    return text.decode(), matcher.complete


@pytest.mark.parametrize("schema", [INTEGERS, NESTED, LISTED], ids=["integers", "nested", "listed"])
def test_no_way_through_the_masks_writes_a_name_twice(engine, schema):
    grammar = engine.compile_grammar(sgl.grammar.json_schema(schema))
    usual = sorted({*engine.tokenizer.encode('{"a": 1, "a": 2, "aa": [{"a": 3}, {"b": 4}], "b": {}}'),
                    *engine.tokenizer.encode('{"aa": 1, "ab": 2, "b": 3}'),
                    *map(engine.tokenizer.token_bytes.index, (b"]", b"]}", b"}"))})  # fmt: skip
    whole = members = 0
    for seed in range(30):
        text, complete = walk(engine, grammar, usual, random.Random(seed))
        if complete:
            value = json.loads(text, object_pairs_hook=twice)
            whole, members = whole + 1, max(members, len(value))
    assert whole > 5
    assert members > 1


def test_where_names_run_out_the_finished_value_is_refused(engine):
    grammar = engine.compile_grammar(sgl.grammar.json_schema({**FEW, "minProperties": 1}))
    usual = engine.tokenizer.encode('{"a": 1, "b": 2}')
    texts = [walk(engine, grammar, usual, random.Random(seed))[0] for seed in range(20)]
    assert all(text.startswith("{") for text in texts)  # there is always a token
    with pytest.raises(sgl.ValueValidationError, match="written twice"):
        sgl.grammar.validate(FEW, '{"a": 1, "a": 2}')


def test_what_lists_all_names_is_left_alone():
    closed = sgl.grammar.json_schema(
        {"properties": {"a": {"type": "integer"}}, "type": "object"}, closed=True
    )
    assert extract_mask_rules(closed) is None
    assert extract_mask_rules(sgl.grammar.json_schema(INTEGERS)) == ()
    assert extract_mask_rules(sgl.grammar.json_schema(True)) == ()
    assert extract_mask_rules(sgl.Regex("a")) is None


@pytest.mark.parametrize("found", [None, ()])
def test_what_there_is_to_watch_crosses_to_another_process(found):
    assert unpack_mask_rules(pack_mask_rules(found)) == found


def test_a_schema_that_a_process_of_its_own_has_prepared_is_not_read_again(engine, monkeypatch):
    """To find whether its names are open, in Python, on a thread beside the loop."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1_000)}}

    def refuse(_):
        raise AssertionError("the schema was read by the engine's process")

    monkeypatch.setattr(ruled_grammar, "names_are_open", refuse)
    monkeypatch.setattr(ruled_grammar, "normalise", refuse)
    grammar = engine.compile_grammar(sgl.grammar.json_schema(schema))
    assert isinstance(grammar, ruled_grammar.RuledGrammar)


def test_a_generation_that_repeats_itself_has_other_names(engine):
    @sgl.function
    def program(s):
        s += 'Numbers: {"a": 1, "a": 1, "a": 1, "a": 1, "a": 1}\nNumbers: '
        s += sgl.gen("x", type=dict[str, int], max_tokens=24, temperature=0)

    try:
        state = program.run(backend=engine)
        names = list(state["x"])
    except sgl.ValueValidationError as error:  # which has not come to an end
        names = [part.split('"')[1] for part in error.text.split(", ") if part.count('"') == 2]
    assert len(names) == len(set(names))
