"""The formats that are asserted, against examples of their specifications."""

import itertools
import json
import random
import re

import pytest

from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.json_schema import idn
from sglang_lite.constraints.json_schema.formats import ASSERTED, format_language, is_valid
from sglang_lite.constraints.random_texts import sample
from sglang_lite.constraints.schema import json_schema
from tests.constraints.engine import accepts as engine_accepts
from tests.constraints.engine import compiled

EXAMPLES = {
    "date-time": (
        [
            "1963-06-19T08:30:06.283185Z",
            "1998-12-31T23:59:60Z",
            "1985-04-12T23:20:50.52-08:00",
            "2024-02-29t00:00:00z",
            "1985-04-12T00:59:59.999999999999999Z",
            "1998-12-31T15:59:60.123-08:00",
        ],
        [
            "1990-02-31T15:59:59.123-08:00",
            "1998-12-31T22:59:60Z",
            "1963-06-19 08:30:06Z",
            "1963-06-19T08:30:06",
        ],
    ),
    "date": (["1963-06-19", "2000-02-29"], ["1900-02-29", "2024-13-01", "0000-01-01", "24-01-01"]),
    "time": (
        [
            "08:30:06Z",
            "23:59:60+00:00",
            "08:30:06.5-01:00",
            "01:29:60+01:30",
            "23:29:60+23:30",
            "00:29:60.5-23:30",
        ],
        ["24:00:00Z", "08:30:06", "22:59:60Z", "23:59:60+01:00", "23:59:60-00:30", "08:30:06.Z"],
    ),
    "duration": (
        ["P4DT12H30M5S", "P4Y", "PT0S", "P1M", "PT36H", "P2W"],
        ["PT1D", "4DT12H", "P", "P1YT", "P2D1Y", "P1", "P1Y2W", ""],
    ),
    "email": (
        [
            "joe.bloggs@example.com",
            '"joe bloggs"@example.com',
            "te~st@example.com",
            "joe@[127.0.0.1]",
            "a@[IPv6:::1]",
            "a" * 64 + "@b.c",
            "a.b" * 21 + "c@b",
            '"' + "@" * 62 + '"@b.c',
            "a@" + "b" * 63 + ".c",
        ],
        [
            "2962",
            ".test@example.com",
            "te..st@example.com",
            "a@b@c.d",
            "",
            "a" * 65 + "@b.c",
            "a.b" * 21 + "cd@b",
            '"' + "@" * 63 + '"@b.c',
            "a@" + "b" * 64 + ".c",
            "a@[IPv6:" + "::1",
            "a" * 70 + "@[127.0.0.1]",
        ],
    ),
    "hostname": (
        [
            "www.example.com",
            "a.b-c",
            "0",
            "xn--4gbwdl.xn--wgbh1c",
            "XN--4gbwdl.com",
            "xn",
            "xnn--a",
            "a" * 63 + ".b",
        ],
        [
            "-a",
            "a-",
            "a..b",
            "a_b",
            "a." + "b" * 64,
            ".",
            "a." * 127 + "b",
            "xn--X",
            "a.xn--X.b",
            "xn--hello-txk",
            "XN--aa---o47jg78q",
            "xn--",
        ],
    ),
    "idn-hostname": (
        [
            "münchen.de",
            "실례.테스트",
            "مثال.com",
            "л-дом.1a",
            "l·l",
            "a。b",
            "नमस्ते",
            "xn--mnchen-3ya",
            "WWW.example",
            "ßς་〇",
            "α͵β",
            "א׳ב.com",
            "・ァ",
            "ب٠ب",
            "۰0",
            "क्\u200dष",
            "بي\u200cبي",
            "a．b｡c",
        ],
        [
            "",
            ".",
            "a.",
            "a_b",
            "-é",
            "é-",
            "日本--x",
            "é" * 60,
            "ab--é",
            "é." * 40 + "a",
            "aאב",
            "\u0300a",
            "xn--X",
            "l·a",
            "α͵b",
            "a׳",
            "・a",
            "ب٠۰ب",
            "a\u200db",
            "ا\u200cب",
            "Ä.de",
        ],
    ),
    "idn-email": (
        [
            "실례@실례.테스트",
            "jörg@münchen.de",
            "joe@example.com",
            '"ä b"@a.b',
            "é@[127.0.0.1]",
            "a@xn--mnchen-3ya",
            "a" * 64 + "@b.c",
            "é" * 32 + "@b",
            "례" * 21 + "@b",
            "😀" * 16 + "@b",
            "a" * 30 + "é" * 17 + "@b",
        ],
        [
            "2962",
            "@a",
            "é..b@c",
            "a@b_c",
            "a@é-",
            "é@[300.0.0.1]",
            "a" * 65 + "@b.c",
            "é" * 32 + "a@b",
            "례" * 22 + "@b",
            "😀" * 17 + "@b",
            "a" * 32 + "é" * 17 + "@b",
            "a@" + "b" * 64,
        ],
    ),
    "regex": (
        [
            "",
            "a|",
            "^[a-z]+$",
            r"\d{2,3}?",
            "(a(b|c)*){0,4}",
            r"[^\]\-&]",
            "(?=a)b(?!c)",
            r"(a)\1",
            r"(?<n>a)\k<n>",
            r"(?<!a)b",
            r"\p{L}\P{Script=Greek}",
            r"\u{1F600}\x41\cA\0",
            "[]",
            "[^]",
            "((((a))))",
            r"[A-\]]",
            "[-a-]",
        ],
        [
            "(",
            ")",
            "^(abc]",
            "*",
            "a**",
            "{",
            "a{2,1}",
            "[b-a]",
            r"\a",
            r"\-",
            "\\",
            r"\1",
            r"\k<n>",
            "(?<1>a)",
            "(?a)",
            r"[\d-z]",
            r"\01",
            r"\u{110000}",
            r"\p{}",
            "(?=a)*",
            "^*",
            "]",
            "}",
            "[a",
            "(" * 200 + ")" * 200,
        ],
    ),
    "ipv4": (["1.2.3.4", "255.255.255.255"], ["1.2.3", "256.1.1.1", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (
        [
            "::1",
            "::",
            "12:34:56:78:1:2:3:4",
            "::42:ff:1",
            "d6::",
            "1:d6::42",
            "1::d6:192.168.0.1",
            "1:2:3:4:5:6:7::",
        ],
        [
            "12345::",
            "1:2:3:4:5:6:7:8:9",
            "::laptop",
            ":2:3:4:5:6:7:8",
            "1::2::3",
            "1",
            "127.0.0.1",
            "fe80::a%eth1",
        ],
    ),
    "uri": (
        [
            "http://foo.bar/?baz=qux#quuz",
            "mailto:John.Doe@example.com",
            "urn:oasis:names",
            "http://u:p@h:80/",
            "a:",
        ],
        ["//foo.bar", "/abc", "\\\\WINDOWS", "abc", "http:// x", "http://a b"],
    ),
    "uri-reference": (
        ["/abc", "#frag", "abc", "", "//foo.bar/?x", "?q", "http://a"],
        ["\\\\W", "#frag\\ment", "a b"],
    ),
    "iri": (
        ["http://ƒøø.ßår/?∂éœ=πîx#πîüx", "http://ƒøø.ßår/\U00010300?q=\U000f0000", "a://[V1.fe]/p"],
        ["/abc", "http:// "],
    ),
    "iri-reference": (["/âππ", "#ƒrägmênt"], ["\\\\WINDOWS\\filëßåré"]),
    "uri-template": (
        ["http://example.com/{term:1}/{term}", "{+x,y*}", "", "a'b", "a\U000f0000"],
        ["http://example.com/{term", " "],
    ),
    "uuid": (
        ["2EB8AA08-AA98-11EA-B4AA-73B441D16380"],
        ["2eb8aa08-aa98-11ea-b4aa-73b441d1638", "2eb8aa08aa9811ea"],
    ),
    "json-pointer": (["", "/foo/0", "/a~1b", "/ "], ["a", "/foo/bar~", "/~2"]),
    "relative-json-pointer": (["1", "0/foo/bar", "120/foo", "0#"], ["-1", "01", "/foo", "0##"]),
}


def test_every_format_has_examples():
    assert EXAMPLES.keys() == ASSERTED


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name):
    valid, invalid = EXAMPLES[name]
    assert [text for text in valid if not is_valid(name, text)] == []
    assert [text for text in invalid if is_valid(name, text)] == []
    assert [text for text in invalid if accepts(format_language(name), text)] == []
    assert [text for text in valid if not accepts(format_language(name), text)] == [
        text for text in valid if text in NOT_GENERATED.get(name, ())
    ]


NOT_GENERATED = {
    "hostname": ["xn--4gbwdl.xn--wgbh1c", "XN--4gbwdl.com"],
    "idn-hostname": ["नमस्ते", "xn--mnchen-3ya"],
    "idn-email": ["a@xn--mnchen-3ya", "é" * 32 + "@b", "례" * 21 + "@b", "a" * 30 + "é" * 17 + "@b"],
    "regex": [
        r"[^\]\-&]", r"(a)\1", r"(?<n>a)\k<n>", r"(?<!a)b", r"\p{L}\P{Script=Greek}", r"\u{1F600}\x41\cA\0", "[]", "[^]", "((((a))))",
        r"[A-\]]", "[-a-]",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (
            {"format": "regex", "minLength": 5},
            ["^a+b$", "(a|(b))", "x{2,3}?" * 9],
            ["", "^a+$", "(a|(b)", "a**bc"],
        ),
        ({"format": "regex", "minLength": 50}, ["a" * 50, "(a|b)*" * 10], ["a" * 49, "(" * 50]),
        (
            {"format": "regex", "minLength": 5, "maxLength": 8},
            ["[a-z]+", "\\d{2,3}?"],
            ["abcd", "abcdefghi", "[a-z"],
        ),
        ({"format": "regex", "pattern": "^a.*b$"}, ["a(c|d)b", "ab"], ["a(cb", "(a)b"]),
        (
            {"format": "email", "minLength": 60},
            ["a" * 64 + "@b.c", "a@" + "b.c" * 20],
            ["a@b.c", "a" * 65 + "@b.c"],
        ),
        ({"format": "email", "maxLength": 5}, ["a@b.c"], ["a@bc.d", "abcde"]),
        (
            {"format": "idn-email", "minLength": 20},
            ["é" * 16 + "@bcdef", "a" * 64 + "@b"],
            ["é@b", "é" * 33 + "@b"],
        ),
    ],
    ids=str,
)
def test_a_format_combines_with_lengths_and_patterns(schema, valid, invalid):
    grammar, refusal = compiled(json_schema(schema))
    assert refusal is None
    assert [
        text for text in valid if not engine_accepts(grammar, json.dumps(text, ensure_ascii=False))
    ] == []
    assert [
        text for text in invalid if engine_accepts(grammar, json.dumps(text, ensure_ascii=False))
    ] == []
    assert engine_accepts(grammar, "17")


@pytest.mark.parametrize("name", ["idn-hostname", "idn-email", "regex"])
def test_what_is_generated_is_of_the_format(name):
    rng = random.Random(1)
    constraint = json_schema({"type": "string", "format": name})
    for _ in range(200):
        text = json.loads(sample(constraint, rng))
        assert is_valid(name, text), text
        if name == "regex":
            re.compile(text)


def test_every_letter_of_a_generated_host_name_is_valid_beside_any_other():
    rng = random.Random(1)
    for ranges in (idn.LEFT_TO_RIGHT, idn.RIGHT_TO_LEFT):
        letters = [chr(code) for low, high in ranges for code in range(low, high + 1)]
        rng.shuffle(letters)
        for i in range(0, len(letters), 12):
            assert idn.is_hostname("".join(letters[i : i + 12]))


def test_leap_seconds_are_the_last_of_a_day_in_utc():
    for hour, minute, sign, offset in itertools.product(
        (0, 12, 23), (14, 59), "+-", range(0, 24 * 60, 15)
    ):
        utc = (hour * 60 + minute - int(f"{sign}{offset}")) % (24 * 60)
        text = f"{hour:02}:{minute:02}:60{sign}{offset // 60:02}:{offset % 60:02}"
        assert accepts(format_language("time"), text) == (utc == 23 * 60 + 59), text
