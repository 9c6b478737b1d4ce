"""Quotes: strings that are spans of documents. The oracle cuts a document into pieces and joins
some of them.
"""

import json
import os
import random
import re
from itertools import combinations
from typing import Annotated

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from typing_extensions import TypedDict

import sglang_lite as sgl
from sglang_lite.constraints.byte_matcher import ByteMatcher
from sglang_lite.constraints.json_schema.allowed_values import list_quotes
from sglang_lite.constraints.python_types.value_type import value_type
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.schema import json_schema
from sglang_lite.lang.tools import tool_schemas
from sglang_lite.protocol import ConstraintError, JsonSchema, Lark, ValueValidationError
from sglang_lite.text.tool_calls import calls_constraint
from tests.constraints.engine import accepts, compiled

COUNT = int(os.environ.get("SGLANG_LITE_QUOTES", "100"))
FAMILY = "\N{MAN}\u200d\N{WOMAN}\u200d\N{GIRL}"
DOCUMENTS = [
    "the cat and the dog and the cat",
    'He said "no",\r\nthen\tleft\\went.\n\nOr not?',
    f"Eat {FAMILY} at the cafe\u0301, caf\u00e9; \u65e5\u672c\u8a9e\u3002 \U0001f600\U0001f600 a\x00b\x7f",
    "aaaa",
    " \n x \u2028 y \x1f",
    '"',
]


def spans(document, pieces, least=0):
    """All quotes of a document that is cut into these pieces."""
    assert "".join(pieces) == document
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    found = {document[a:b] for a, b in combinations(ends, 2)}
    words = {text: len(re.findall(r"[\w\u0301]+", text)) for text in found}
    return {text for text in found if text and not text[0].isspace() and words[text] >= least}


def words(document):
    """Pieces of a document, with its longer ones given."""
    return re.findall(rf"\r\n|{FAMILY}|[\w\u0301]+|(?s:.)", document)


def schema_of(annotation):
    found = value_type(annotation).constraint
    assert isinstance(found, JsonSchema)
    return found


def as_json(text, *, ascii_only=False):
    return json.dumps(text, ensure_ascii=ascii_only)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("least", [0, 1, 2])
def test_a_quote_is_a_span_of_the_document(document, least):
    allowed = spans(document, words(document), least)
    if not allowed:
        with pytest.raises(ConstraintError, match="no document has"):
            sgl.quote(document, min_words=least)
        return
    quote = sgl.quote(document, min_words=least)
    constraint = schema_of(Annotated[str, quote])
    grammar, error = compiled(constraint)
    assert error is None
    candidates = spans(document, list(document)) | {
        "",
        " ",
        document,
        document + "x",
        f"{document[:3]}x",
        "n",
        "\\",
    }
    for text in sorted(candidates):
        assert sgl.grammar.matches(constraint, as_json(text)) is (text in allowed), text
        assert accepts(grammar, as_json(text)) is (text in allowed), text
        assert sgl.grammar.matches(constraint, as_json(text, ascii_only=True)) is (
            text in allowed
        ), text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_quotes_by_characters_begin_and_end_anywhere(document):
    constraint = schema_of(Annotated[str, sgl.quote(document, by="chars")])
    allowed = spans(document, list(document))
    grammar, _ = compiled(constraint)
    for text in (*sorted(allowed), "", " ", f"x{document}"):
        assert (
            accepts(grammar, as_json(text))
            is sgl.grammar.matches(constraint, as_json(text))
            is (text in allowed)
        )


def random_document(rng, length):
    some = [
        "the",
        "cat",
        "dog",
        "a",
        "caf\u00e9",
        " ",
        " ",
        ", ",
        "\r\n",
        "\n\n",
        '"',
        "\\",
        "\t",
        "\U0001f600",
        FAMILY,
        "\x01",
    ]
    text = "".join(rng.choice(some) for _ in range(length))
    return text if text.strip() else "the"


@pytest.mark.parametrize("seed", range(10))
def test_generated_quotes_are_where_the_metadata_says(seed):
    rng = random.Random(seed)

    documents = [random_document(rng, 60), random_document(rng, 9) + "!"]

    class Answer(BaseModel):
        claims: list[Annotated[str, sgl.quote(*documents)]]
        one: dict[str, Annotated[str, sgl.quote(documents[1], by="chars")] | None]

    constraint = schema_of(Answer)
    grammar, error = compiled(constraint)
    assert error is None
    for _ in range(COUNT // 10):
        text = sample(constraint, rng)
        assert accepts(grammar, text), text
        value = json.loads(text)
        found = list_quotes(constraint, value)
        one = [text for text in value["one"].values() if text is not None]
        assert len(found) == len(value["claims"]) + len(one)
        for quote, expected in zip(found, (*value["claims"], *one)):
            sources = documents if quote["pointer"].startswith("/claims/") else documents[1:]
            assert sources[quote["source"]][quote["start"] : quote["end"]] == expected


def test_the_first_location_of_a_repeated_quote_is_reported():
    constraint = schema_of(list[Annotated[str, sgl.quote("x cat", "the cat, the cat")]])
    assert list_quotes(constraint, ["cat", "the cat", "cat,"]) == [
        {"pointer": "/0", "source": 0, "start": 2, "end": 5},
        {"pointer": "/1", "source": 1, "start": 0, "end": 7},
        {"pointer": "/2", "source": 1, "start": 4, "end": 8},
    ]


def test_invented_quotes_are_no_values_of_the_type():
    quote = sgl.quote("The answer is 42.")
    read = value_type(list[Annotated[str, quote]]).parse
    assert read('["answer is"]') == ["answer is"]
    with pytest.raises(ValueValidationError, match="'the answer' is not a quote from the document"):
        read('["the answer"]')
    with pytest.raises(ValidationError, match="is not a quote"):
        TypeAdapter(Annotated[str, quote]).validate_python("answers")


def test_a_document_is_written_once_in_a_schema():
    document = "A rather long document."
    quoted = Annotated[str, sgl.quote(document)]
    constraint = schema_of(
        tuple[quoted, list[quoted], Annotated[str, sgl.quote(document, by="chars")]]
    )
    assert constraint.schema.count(document) == 1
    assert value_type(quoted).checked == ()


def test_the_keyword_of_schemas():
    schema = json_schema(
        {"properties": {"a": {"type": "string", "x-quote": "one two"}}, "required": ["a"]}
    )
    assert sgl.grammar.matches(schema, '{"a": "two"}')
    assert not sgl.grammar.matches(schema, '{"a": "tw"}')
    assert sgl.grammar.check(json.loads(schema.schema)).enforced == ("/properties", "/required", "/properties/a/type",
                                                                     "/properties/a/x-quote")  # fmt: skip
    shared = {
        "x-quote": {"sources": [{"$ref": "#/x-sources/d"}], "by": "chars"},
        "x-sources": {"d": "one"},
    }
    assert sgl.grammar.matches(json_schema(shared), '"ne"')
    assert sgl.grammar.matches(json_schema(shared), "5"), "a quote demands nothing of other types"
    narrow = {
        "allOf": [
            {"type": "string", "x-quote": "a b c"},
            {"maxLength": 3},
            {"not": {"const": "a b"}},
        ]
    }
    grammar, _ = compiled(json_schema(narrow))
    assert [text for text in ("a", "b c", "a b", "a b c") if accepts(grammar, as_json(text))] == [
        "a",
        "b c",
    ]
    outside = {"type": "string", "not": {"x-quote": "a b"}, "maxLength": 3}
    grammar, _ = compiled(json_schema(outside))
    assert [text for text in ("a", "a b", "ab", "") if accepts(grammar, as_json(text))] == [
        "ab",
        "",
    ]


@pytest.mark.parametrize(
    ("arguments", "options", "problem"),
    [
        ((), {}, "no document"),
        (("a", ""), {}, "document 1 is empty"),
        ((" \n\u00a0",), {}, "document 0 is blank"),
        (("a", "b", "a"), {}, "document 2 repeats document 0"),
        ((b"a",), {}, "not a string"),
        (("a\ud800",), {}, "lone surrogate"),
        (("one two", "three"), {"min_words": 3}, "no document has 3 words: the longest has 2"),
        (("a",), {"min_words": -1}, "whole number"),
        (("a",), {"min_words": True}, "whole number"),
        (("a",), {"by": "lines"}, 'neither "words" nor "chars"'),
        (("a" * 200_000, "b" * 200_001), {}, "400,001 characters, the limit is 400,000"),
    ],
)
def test_what_can_not_be_quoted_is_refused(arguments, options, problem):
    with pytest.raises(ConstraintError, match=problem):
        sgl.quote(*arguments, **options)


@pytest.mark.parametrize(
    ("keyword", "problem"),
    [
        (7, "no document"),
        ({"by": "words"}, "no document"),
        ({"sources": ["a"], "most": 3}, "no document"),
        ({"sources": [3]}, "no text"),
        ({"sources": [{"$ref": "#/x-sources/b"}]}, "the schema has no '#/x-sources/b'"),
        ({"sources": ["a b"], "min_words": 3}, "no document has 3 words"),
        ("", "document 0 is empty"),
    ],
)
def test_faulty_keywords_are_refused_with_their_pointer(keyword, problem):
    schema = {"items": {"type": "string", "x-quote": keyword}, "x-sources": {"a": "b"}}
    ((pointer, reason),) = sgl.grammar.check(schema).refused
    assert pointer == "/items/x-quote"
    assert problem in reason


def test_quotes_of_many_words_from_a_long_document():
    rng = random.Random(0)
    document = " ".join(rng.choice("abcdefghij") * rng.randint(1, 3) for _ in range(20_000))
    constraint = schema_of(list[Annotated[str, sgl.quote(document, min_words=9)]])
    grammar, error = compiled(constraint)
    assert error is None
    quote = document[document.index(" ", 5_000) + 1 : document.index(" ", 5_040)]
    short = " ".join(quote.split()[:8])
    texts = [f'["{text}"]' for text in (quote, quote + "x", short)]
    assert [accepts(grammar, text) for text in texts] == [True, False, False]
    assert [sgl.grammar.matches(constraint, text) for text in texts] == [True, False, False]


def test_too_many_words_of_a_long_document_are_refused():
    schema = {"type": "string", "x-quote": {"sources": ["a " * 25_000], "min_words": 17}}
    ((pointer, reason),) = sgl.grammar.check(schema).refused
    assert pointer == "/x-quote"
    assert (
        "min_words=17 of documents of 50,000 words and other characters takes too much work: at most 16"
        in reason
    )


def test_all_of_a_long_document_can_be_quoted_in_turns():
    """One lexer keeps the states of all texts, and had room for 250,000."""
    rng = random.Random(0)
    document = " ".join("".join(rng.choices("abcdefghijklmnop", k=100)) for _ in range(2_600))
    start = ByteMatcher(schema_of(Annotated[str, sgl.quote(document)]))
    for at in range(0, len(document), 30 * 101):
        matcher = start.copy()
        matcher.push(as_json(document[at : at + 30 * 101].strip()))
        matcher.check_complete()


def test_long_substrings_of_lark_grammars():
    words = " ".join(f"w{i}" for i in range(3_000))
    constraint = Lark(f'start: "<" X ">"\nX: %regex {json.dumps({"substring_words": words})}')
    grammar, error = compiled(constraint)
    assert error is None
    texts = ["<w7 w8 w9>", "<>", f"<{words}>", "<w7 w9>", "<w7 w>"]
    allowed = [True, True, True, False, False]
    assert [sgl.grammar.matches(constraint, text) for text in texts] == allowed
    assert [accepts(grammar, text) for text in texts] == allowed


DOCUMENT = 'She said: "Go\\home"\nand <left>.'


class Arguments(TypedDict):
    evidence: Annotated[str, sgl.quote(DOCUMENT)]


def report(evidence: Annotated[str, sgl.quote(DOCUMENT)]) -> str:
    """Reports."""
    return evidence


@pytest.mark.parametrize(
    ("family", "call"),
    [
        (
            "qwen",
            '<tool_call>\n{{"name": "report", "arguments": {{"evidence": {json}}}}}\n</tool_call>',
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=report>\n<parameter=evidence>\n{text}\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_arguments_of_tools_are_quotes(family, call):
    (shown,) = tool_schemas([report])
    assert "She said" not in json.dumps(shown)
    assert "copied from the text" in json.dumps(shown)
    schemas = {"report": schema_of(Arguments)}
    constraint = calls_constraint(family, schemas, "required", parallel=False)
    grammar, error = compiled(constraint)
    assert error is None
    texts = ['"Go\\home"\nand', "<left>.", "said", "aid", "She left", " said", ""]
    calls = [call.format(text=text, json=as_json(text)) for text in texts]
    assert [text for text, each in zip(texts, calls) if accepts(grammar, each)] == texts[:3]
    assert [
        text for text, each in zip(texts, calls) if sgl.grammar.matches(constraint, each)
    ] == texts[:3]
