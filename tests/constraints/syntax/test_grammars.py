"""EBNF, Lark, structural tags and compositions: the engine's masks against the reference, text by
text.
"""

import itertools
import os
import random
import re

import pytest

from sglang_lite.constraints.coerce import as_constraint
from sglang_lite.constraints.emit.lexemes import split_into_lexemes
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.matching import matches
from sglang_lite.constraints.schema import json_schema
from sglang_lite.constraints.syntax import gbnf, lark
from sglang_lite.protocol import (
    Choices,
    ConstraintError,
    Ebnf,
    InOrder,
    Lark,
    OneOf,
    Regex,
    Repeated,
    StructuralTag,
    Tag,
)
from tests.constraints.engine import accepts, byte_engine
from tests.constraints.random_grammars import grammar

COUNT = int(os.environ.get("SGLANG_LITE_RANDOM_GRAMMARS", "10"))
WORDS = ["".join(word) for length in range(6) for word in itertools.product("abc", repeat=length)]


def agree(constraint, texts):
    """The engine accepts of the texts what the reference does: those."""
    compiled = byte_engine().compile(constraint)
    accepted = [text for text in texts if accepts(compiled, text)]
    assert accepted == [text for text in texts if matches(constraint, text)], constraint
    return accepted


# What a lexer that reads greedily gets wrong: longer literals, repeats before their own characters,
# nesting.
GREEDY = [
    ('root ::= [a-c] "b" | "ab" "c"', ["ab", "bb", "cb", "abc"]),
    ('root ::= "a"* "ab" root | "c"', ["c", "abc", "aabc", "aaabc", "ababc"]),
    ('root ::= "abc" | "a" root | root "bc"', ["abc", "aabc", "abcbc", "aaabc"]),
    ('root ::= ("a" | "ab") ("c" | "bc" root)', ["ac", "abc", "abcac", "abbc"[:0] or "abcabc"][:3]),
    ('root ::= s s\ns ::= "a" s "b" | "c"', ["cc", "acbc", "cacb"]),
]


@pytest.mark.parametrize(("text", "some"), GREEDY)
def test_every_derivation_counts(text, some):
    accepted = agree(Ebnf(text), WORDS)
    assert set(some) & set(WORDS) <= set(accepted)


@pytest.mark.parametrize("seeds", [range(i, i + 10) for i in range(0, COUNT, 10)])
def test_random_grammars(seeds):
    for seed in seeds:
        rng = random.Random(seed)
        constraint = Ebnf(grammar(rng))
        try:
            language_for_constraint(constraint)
            byte_engine().compile(constraint)
        # a grammar without a text is one of many; one in 1,000 is too large
        except ConstraintError as error:
            assert "contradicts itself" in str(error) or "too complex" in str(error)  # noqa: PT017
            continue
        agree(constraint, rng.sample(WORDS, 50))


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws # escapes
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


def test_llama_cpps_json_grammar():
    constraint = Ebnf(JSON)
    texts = [
        "{}",
        '{"a": [1, 2.5e3, null]}',
        '{"é\\n":{}}\n  ',
        '{"a":1,"b":"x" }',
        '{"a" 1}',
        "[1]",
        '{"a": [}]}',
    ]
    assert agree(constraint, texts) == texts[:4]
    lexemes = [
        body
        for name, body in split_into_lexemes(language_for_constraint(constraint)).rules.items()
        if name.startswith("lexeme")
    ]
    assert len(lexemes) < 12  # strings and numbers are lexemes, not characters


def test_lark():
    constraint = Lark(r"""
        // sums
        ?start: sum
        sum: sum "+" term -> add | sum "-" term | term
        term: NUMBER | "(" sum ")" | NAME | "sqrt"i "[" sum ~ 1..2 "]"
        NAME: CNAME & ~("if" | /else/)
        %import common.NUMBER
        %import common (CNAME, WS)
        %ignore WS
    """)
    texts = ["1+2", "( 1 + x )- 3.5 ", "iff", "SQRT[1]", "if", " 1", "1+", "a b", "sqrt[]"]
    assert agree(constraint, texts) == texts[:4]


@pytest.mark.parametrize(
    ("text", "valid", "invalid"),
    [
        ('start: "a" b\n?b: "c"', ["ac"], ["a", "ab"]),
        ('start: "a" b\n!?b: "c"\n?!c: "d"', ["ac"], ["a"]),
        ('start: A b\nA: "a"\n\n// of one letter\n?b: "c"', ["ac"], ["c"]),
        ('start: b+ // many\n?b: "c"', ["c", "ccc"], [""]),
        ('start: b~2\n?b: "c"', ["cc"], ["", "c"]),
        ('start: b{2}\n?b: "c"', ["cc"], ["", "c"]),
        ('start: b -> two\n?b: "c"', ["c"], [""]),
        ('start: b->two\nb: "c"', ["c"], [""]),
        ('start: b\n%ignore " "\n?b: "c"', ["c", "c "], [""]),
        ('start: (b\n | "d")\n?b: "c"\n     | "e"', ["c", "d", "e"], [""]),
        ('start: twice{b}\n?twice{x}: x x\n?b.2: "c"', ["cc"], ["", "c"]),
        ('start: %json {"const": 1}\n?b: "c"', ["1"], [""]),
        (
            'start: b\nb: "c"\n%extend ?b.-1: "d"\n%override !b: "e"\n%extend b: "f"',
            ["e", "f"],
            ["", "c", "d"],
        ),
    ],
)
def test_a_line_of_lark_ends_what_its_signs_repeat(text, valid, invalid):
    assert agree(Lark(text), [*valid, *invalid]) == valid


def test_schemas_inside_lark():
    constraint = Lark('start: "call " %json {"type": "object", "properties": {"n": {"type": "integer"}}, '
                      '"required": ["n"], "additionalProperties": false} | "no call"')  # fmt: skip
    texts = ['call {"n": 1}', "no call", "call {}", 'call {"n": "x"}']
    assert agree(constraint, texts) == texts[:2]


def test_templates_of_lark_are_rules_for_each_use():
    constraint = Lark("""
        start: list{NUMBER, ","} | twice{list{"x"i, ";"}} | list{word, "-"} | nest{"a"}
        list{item, between}: item (between item)*
        twice{it}: "<" it it ">"
        nest{it}: "(" nest{it} ")" | it
        word: "w"
        %import common.NUMBER
    """)
    texts = ["1,2", "3", "<x;Xx>", "w-w", "((a))", "1;2", "<x>", "(a", "w,w"]
    assert agree(constraint, texts) == texts[:5]


def test_repeats_of_lark_are_no_templates():
    assert agree(Lark('start: a{2} a{1,2} a{,1}\na: "a"'), ["aaa", "aaaaa", "aa"]) == [
        "aaa",
        "aaaaa",
    ]


def test_rules_of_lark_are_extended_and_replaced():
    constraint = Lark("""
        start.2: word DIGIT+
        word: "a"
        %import common.DIGIT
        %extend word: "b" | "c"
        %override DIGIT: "7".."9"
        %declare _INDENT _DEDENT
    """)
    assert agree(constraint, ["a7", "b89", "c7", "a1", "d7"]) == ["a7", "b89", "c7"]


@pytest.mark.parametrize(
    ("pieces", "valid", "invalid"),
    [
        ('{"substring_chars": "abca"}', ["", "a", "bca", "abca"], ["ac", "abcab"]),
        (
            '{"substring_words": "the quick,brown fox"}',
            ["", "the", "quick,brown", " quick"],
            ["he", "the fox"],
        ),
        ('{"substring_chunks": ["ab", "", "cd", "ab"]}', ["", "ab", "cdab", "abcd"], ["a", "abab"]),
    ],
)
def test_substrings_of_a_text(pieces, valid, invalid):
    texts = [f"[{text}]" for text in (*valid, *invalid)]
    assert agree(Lark(f'start: "[" X "]"\nX: %regex {pieces}'), texts) == texts[: len(valid)]
    assert agree(Lark(f'start: "[" %regex {pieces} "]"'), texts) == texts[: len(valid)]


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        ('x[suffix=";"]: /[ab;]*/', "[ab;]*;"),
        ('x[lazy]: /[ab;]*/ END\nEND: ";"', "[ab;]*;"),
        ('x[suffix=END, lazy]: A | "b"\nA: /a+/\nEND: /b+;?/', "(a+|b)b+;?"),
        ("x[suffix=/[;\\]]/]: /b*a?/", "b*a?[;\\]]"),
        ("x[lazy]: /[ab]+/", "[ab]+"),
        ("x[lazy]: /[ab]*/", "[ab]*"),
    ],
)
def test_lazy_rules_of_lark_have_their_shortest_texts(rule, pattern):
    texts = ["".join(each) for count in range(5) for each in itertools.product("ab;", repeat=count)]
    matching = {text for text in texts if re.fullmatch(pattern, text)}
    shortest = [
        t for t in texts if t in matching and not any(t[:end] in matching for end in range(len(t)))
    ]
    grammar = Lark(f'start: "<" x ">"\n{rule}')
    assert agree(grammar, [f"<{text}>" for text in texts]) == [f"<{text}>" for text in shortest]


@pytest.mark.parametrize(
    "constraint",
    [Ebnf("root ::= <think> [a-z]+ </think>"), Lark("start: <think> /[a-z]+/ </think>")],
)
def test_marks_of_thoughts_are_their_text(constraint):
    assert agree(constraint, ["<think>so</think>", "so", "<think>so"]) == ["<think>so</think>"]


def test_json_of_any_shape_has_names():
    assert agree(as_constraint("json"), ["1", '{"a": [null]}', "a"]) == ["1", '{"a": [null]}']
    assert agree(as_constraint("json_object"), ["{}", '{"a": 1}', "[1]"]) == ["{}", '{"a": 1}']


BROKEN = [
    (gbnf.parse, 'root ::= "a', "no end", 9),
    (gbnf.parse, "root ::= foo", "no rule 'foo'", 9),
    (gbnf.parse, "root ::= [z-a]", "bad character range", 11),
    (gbnf.parse, 'root ::= <|eot|> "a"', "the only supported special tokens are <think>", 9),
    (gbnf.parse, 'root ::= !<think> "a"', "the only supported special tokens are <think>", 9),
    (gbnf.parse, 'root ::= <[1000]> "a"', "the only supported special tokens are <think>", 9),
    (gbnf.parse, "root ::= (a", "closing parenthesis", 11),
    (gbnf.parse, 'root ::= "a"{3,1}', "repetition", 12),
    (gbnf.parse, r'root ::= "\q"', "no escape", 10),
    (gbnf.parse, "", "the grammar is empty", 0),
    (gbnf.parse, 'a ::= "a"\na ::= "b"', "defined twice", 0),
    (lark.parse, 'start: "a" x', "no rule 'x'", 11),
    (lark.parse, 'start[max_tokens=3]: "a"', "'max_tokens' how it is generated", 6),
    (lark.parse, 'start[lazy, capture="x"]: "a"', "'capture' how it is generated", 12),
    (lark.parse, 'start[stop="x"]: "a"', "'stop' how it is generated", 6),
    (lark.parse, 'start[temperature=0.5]: "a"', "'temperature' how it is generated", 6),
    (lark.parse, 'start[greedy]: "a"', "the attribute 'greedy' is not supported", 6),
    (lark.parse, 'start[lazy]: x\nx: "a"', "lazy rule, refers to the rule x", 13),
    (lark.parse, 'start: A\nA[lazy]: "a"', "no terminal and no template", 1),
    (lark.parse, 'start: many{"a"}', "there is no template 'many'", 7),
    (lark.parse, 'many{x, y}: x y\nstart: many{"a"}', "takes 2 arguments, not 1", 7),
    (lark.parse, 'many{x, x}: x\nstart: many{"a"}', "parameters of many", 0),
    (lark.parse, 'more{x}: x more{(x "a")} | "b"\nstart: more{"c"}', "more than 1,000 rules", None),
    (lark.parse, '%extend x: "a"\nstart: "b"', "there is no 'x' to extend", 0),
    (lark.parse, 'start: %regex {"regex": "a"}', "substring_chars", 7),
    (lark.parse, "start: %regex {", "no JSON after %regex", 7),
    (lark.parse, r'start: %regex {"substring_chars": "\ud800"}', "a lone surrogate", 7),
    (lark.parse, "start: /a(?=b)/", "lookahead", 7),
    (lark.parse, "start: A\nA: B\nB: A", "refers to itself", None),
    (lark.parse, "start: A\nA: b\nb: A", "refers to the rule b", None),
    (lark.parse, "%declare X\nstart: X", "X is declared", 7),
    (lark.parse, "%nothing X\nstart: X", "only %ignore, %import", 0),
    (lark.parse, "start: <|eot|>", "the only supported special tokens are <think>", 7),
    (lark.parse, "start: %json {", "no JSON", 7),
    (lark.parse, "%import common.NOPE\nstart: NOPE", "no NOPE", 0),
    (lark.parse, 'start: X\nX: "a"\n%import common.INT -> X', "'X' is defined twice", 0),
    (lark.parse, 'start: "a"\n?', "a name, a string", 0),
    (lark.parse, 'start: "a"\n+ "b"', "a name, a string", 0),
    (lark.parse, 'start: "a" b: "c"', "a name, a string", 12),
    (lark.parse, 'x: "a"', "no rule 'start'", 0),
]


@pytest.mark.parametrize(("parse", "text", "message", "column"), BROKEN)
def test_a_broken_grammar_is_refused_with_its_place(parse, text, message, column):
    with pytest.raises(ConstraintError, match=re.escape(message)) as caught:
        parse(text)
    caret = caught.value.message.splitlines()[-1]
    assert caret.strip() == "^"
    assert column is None or len(caret) - 3 == column


@pytest.mark.parametrize("text", ['root ::= "a" root', 'root ::= x\nx ::= "(" x ")"'])
def test_a_grammar_without_a_text_is_refused(text):
    with pytest.raises(ConstraintError, match="contradicts itself"):
        language_for_constraint(Ebnf(text))


def test_left_recursion_circles_and_unreachable_rules_do_no_harm():
    assert agree(Ebnf('root ::= root "a" | "b"'), ["b", "baa", "a"]) == ["b", "baa"]
    assert agree(Ebnf('root ::= root | "a" | root root | ""'), ["", "aaa", "b"]) == ["", "aaa"]
    assert agree(Ebnf('root ::= "a"\nx ::= "b" x'), ["a", "b"]) == ["a"]


def test_groups_nest_as_deep_as_the_limit_allows():
    groups = Ebnf("root ::= " + "(" * 99 + 'x "a"' + ' | "b")?' * 99 + '\nx ::= "(" x ")" | "c"')
    assert agree(groups, ["ca", "((c))a", "b", "", "(ca", "bb"]) == ["ca", "((c))a", "b", ""]
    assert agree(Lark("start: T\nT: " + "~(" * 98 + '"a"' + ")" * 98), ["a", "b"]) == ["a"]


def test_deep_grammars_are_compiled_or_refused_in_time():
    rules = [f'r{i} ::= "(" r{i + 1} ")" | "c"' for i in range(300)]
    assert agree(Ebnf("\n".join(["root ::= r0", *rules, 'r300 ::= "x"'])), ["((c))", "((c)"]) == [
        "((c))"
    ]
    rules = [f'r{i} ::= "(" r{i + 1} ")" | r{i + 2}? "c"' for i in range(700)]
    with pytest.raises(ConstraintError, match="too deeply"):
        byte_engine().compile(
            Ebnf("\n".join(["root ::= r0", *rules, 'r700 ::= "x"', 'r701 ::= "y"']))
        )


# ----------------------------------------------------------------------- constraints of constraints

OBJECT = json_schema(
    {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
)
INTEGER = json_schema({"type": "integer"})


@pytest.mark.parametrize(
    ("constraint", "valid", "invalid"),
    [
        (InOrder((Regex("a*"), Regex("ab?c"))), ["ac", "abc", "aaabc"], ["a", "aab"]),
        (
            InOrder((Regex("x*"), OBJECT, Choices(("", "x")))),
            ["{}", 'xx{"n": 1}x'],
            ["", "x", "{}xx"],
        ),
        (InOrder((INTEGER, Regex("[0-9]{2}"))), ["123", "-123"], ["12", "1"]),
        (InOrder((INTEGER, Choices((" EUR",)))), ["12 EUR"], ["12", "x EUR"]),
        (OneOf((OBJECT, Regex(".*"))), ["", "{", '{"n": 1}', '{"n": x'], ["\n"]),
        (OneOf((OBJECT, Regex("x.*"))), ["{}", "x{"], ["{", ""]),
        (OneOf((OBJECT, json_schema({"type": "array"}))), ["{}", "[{}]"], ['{"a": 1}']),
        (Repeated(OBJECT, 1, 2), ["{}", '{"n": 1}{}'], ["", "{}{}{}"]),
        (Repeated(Regex("ab?")), ["", "aab"], ["b"]),
        (
            InOrder((Ebnf('root ::= "(" root ")" | ""'), Lark('start: "!"'))),
            ["(())!", "!"],
            ["()", "(!"],
        ),
        (InOrder(()), [""], ["a"]),
    ],
)
def test_compositions(constraint, valid, invalid):
    assert agree(constraint, [*valid, *invalid]) == valid


def test_structural_tags():
    tags = Tag("<f=a>", OBJECT, "</f>"), Tag("<f=b>", Regex("[0-9]+"), "</f>")
    valid = ["", "hello <f", 'a <f=a>{"n": 3}</f> b', "<f=b>12</f><f=a>{}</f>", "<", "<<f=b>1</f>>"]
    invalid = ["x <f=c>", "x <f=a>{", "<f=b>1</f", "<f=b></f>", '<f=a>{"n": "x"}</f>']
    constraint = StructuralTag(tags, ("<f=",))
    assert agree(constraint, [*valid, *invalid]) == valid
    assert constraint != StructuralTag(tags, ("<f",))
    assert agree(StructuralTag(tags, ("<f=a", "<f")), [*valid, *invalid]) == [
        t for t in valid if t != "hello <f"
    ]


def test_a_structural_tag_may_say_how_many_there_are_and_what_is_not_in_text():
    tags, one = (Tag("<a>", Regex("[0-9]+"), "</a>"),), "<a>1</a>"
    texts = ["", "x", one, "x" + one, one + "x", f"{one} {one}", "?", "?" + one]
    for at_least_one, once, valid in (
        (False, False, texts),
        (True, False, [t for t in texts if one in t]),
        (False, True, [t for t in texts if not t.startswith(one) or t == one]),
        (True, True, [one, "x" + one, "?" + one]),
    ):
        assert agree(StructuralTag(tags, ("<a",), at_least_one, once), texts) == valid
        free = [t for t in valid if "?" not in t]
        assert agree(StructuralTag(tags, ("<a",), at_least_one, once, ("?",)), texts) == free


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (StructuralTag((Tag("<a>", Regex("x"), "</a>"),), ("<b",)), "no trigger begins"),
        (StructuralTag((), ()), "`triggers` needs at least one string"),
        (Repeated(Regex("a"), 3, 2), "not possible"),
        (InOrder((Regex("("),)), "missing )"),
        (Choices(("\ud800",)), "lone surrogate"),
        (Choices(()), "contradicts itself"),
        (
            InOrder((json_schema({"type": "array", "uniqueItems": True}, enforce="best_effort"),)),
            "nothing is left to be checked",
        ),
    ],
)
def test_broken_compositions_are_refused(constraint, message):
    with pytest.raises(ConstraintError, match=re.escape(message)):
        language_for_constraint(constraint)


@pytest.mark.parametrize(
    ("options", "others"),
    [
        (("a", "ab", "abc", "a"), ["", "abcd", "b"]),
        (("\0", "\x7f\u2028😀", 'q"\\/', "a\nb"), ["", "a"]),
        (tuple(f"value {i}" for i in range(3000)), ["value 3000", "value"]),
    ],
)
def test_choices(options, others):
    texts = list(dict.fromkeys(options[-20:]))
    assert agree(Choices(options), [*texts, *others]) == texts
