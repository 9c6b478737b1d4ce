"""The formats that are asserted, against examples of their specifications."""

import itertools

import pytest

from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.json_schema.formats import ASSERTED, is_valid, language_of

pytestmark = pytest.mark.slow

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
        ["1990-02-31T15:59:59.123-08:00", "1998-12-31T22:59:60Z", "1963-06-19 08:30:06Z", "1963-06-19T08:30:06"],
    ),
    "date": (["1963-06-19", "2000-02-29"], ["1900-02-29", "2024-13-01", "0000-01-01", "24-01-01"]),
    "time": (
        ["08:30:06Z", "23:59:60+00:00", "08:30:06.5-01:00", "01:29:60+01:30", "23:29:60+23:30", "00:29:60.5-23:30"],
        ["24:00:00Z", "08:30:06", "22:59:60Z", "23:59:60+01:00", "23:59:60-00:30", "08:30:06.Z"],
    ),
    "duration": (
        ["P4DT12H30M5S", "P4Y", "PT0S", "P1M", "PT36H", "P2W"],
        ["PT1D", "4DT12H", "P", "P1YT", "P2D1Y", "P1", "P1Y2W", ""],
    ),
    "email": (
        ["joe.bloggs@example.com", '"joe bloggs"@example.com', "te~st@example.com", "joe@[127.0.0.1]", "a@[IPv6:::1]"],
        ["2962", ".test@example.com", "te..st@example.com", "a@b@c.d", ""],
    ),
    "hostname": (
        ["www.example.com", "a.b-c", "0", "xn--4gbwdl.xn--wgbh1c", "XN--4gbwdl.com", "xn", "xnn--a", "a" * 63 + ".b"],
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
    "ipv4": (["1.2.3.4", "255.255.255.255"], ["1.2.3", "256.1.1.1", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (
        ["::1", "::", "12:34:56:78:1:2:3:4", "::42:ff:1", "d6::", "1:d6::42", "1::d6:192.168.0.1", "1:2:3:4:5:6:7::"],
        ["12345::", "1:2:3:4:5:6:7:8:9", "::laptop", ":2:3:4:5:6:7:8", "1::2::3", "1", "127.0.0.1", "fe80::a%eth1"],
    ),
    "uri": (
        ["http://foo.bar/?baz=qux#quuz", "mailto:John.Doe@example.com", "urn:oasis:names", "http://u:p@h:80/", "a:"],
        ["//foo.bar", "/abc", "\\\\WINDOWS", "abc", "http:// x", "http://a b"],
    ),
    "uri-reference": (["/abc", "#frag", "abc", "", "//foo.bar/?x", "?q", "http://a"], ["\\\\W", "#frag\\ment", "a b"]),
    "iri": (
        ["http://ƒøø.ßår/?∂éœ=πîx#πîüx", "http://ƒøø.ßår/\U00010300?q=\U000f0000", "a://[V1.fe]/p"],
        ["/abc", "http:// "],
    ),
    "iri-reference": (["/âππ", "#ƒrägmênt"], ["\\\\WINDOWS\\filëßåré"]),
    "uri-template": (
        ["http://example.com/{term:1}/{term}", "{+x,y*}", "", "a'b", "a\U000f0000"],
        ["http://example.com/{term", " "],
    ),
    "uuid": (["2EB8AA08-AA98-11EA-B4AA-73B441D16380"], ["2eb8aa08-aa98-11ea-b4aa-73b441d1638", "2eb8aa08aa9811ea"]),
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
    assert [text for text in valid if not accepts(language_of(name), text)] == [
        text for text in valid if "xn--" in text.lower() and name == "hostname"
    ]


def test_leap_seconds_are_the_last_of_a_day_in_utc():
    for hour, minute, sign, offset in itertools.product((0, 12, 23), (14, 59), "+-", range(0, 24 * 60, 15)):
        utc = (hour * 60 + minute - int(f"{sign}{offset}")) % (24 * 60)
        text = f"{hour:02}:{minute:02}:60{sign}{offset // 60:02}:{offset % 60:02}"
        assert accepts(language_of("time"), text) == (utc == 23 * 60 + 59), text
