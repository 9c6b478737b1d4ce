"""Languages of the asserted string formats. Every other `format` is an annotation, as in the
specification.

Generated strings and finished values are checked against the same language, except for
host names and regular expressions: no regular language contains all of those, so only a
subset is generated.
"""

from __future__ import annotations

from functools import lru_cache

from sglang_lite.constraints.formal.automaton import accepts
from sglang_lite.constraints.formal.nodes import (
    ANY_CHAR,
    Node,
    Repeat,
    alternation,
    concat,
    intersection,
)
from sglang_lite.constraints.json_schema import ecma_regex, idn
from sglang_lite.constraints.syntax.regex import parse

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|0[48]|[13579][26])00)"
# RFC 3339, 5.6, with the days of each month; from year 1, the first year in programs' calendars.
DATE = (
    "(?:(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-"
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_FRACTION = r"(?:\.[0-9]+)?"
_OFFSET = "[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]"


def _build_leap_second_pattern() -> str:
    """Returns the pattern of leap seconds: the last second of a day in UTC, given in a zone whose
    offset is a multiple of 15 minutes. All current zones have such an offset. For arbitrary offsets
    an automaton would have to remember 1,440 times of day.
    """
    options = [f"23:59:60{_FRACTION}[Zz]"]
    for offset in range(0, 24 * 60, 15):
        for sign, minute in (("+", offset - 1), ("-", -offset - 1)):
            hour, minute = divmod(minute % (24 * 60), 60)
            options.append(
                f"{hour:02}:{minute:02}:60{_FRACTION}[{sign}]{offset // 60:02}:{offset % 60:02}"
            )
    return "|".join(options)


_TIME = f"(?:{CLOCK}{_FRACTION}(?:[Zz]|{_OFFSET})|{_build_leap_second_pattern()})"

_DAYS = "[0-9]+D"
_SECONDS = "[0-9]+S"
_MONTHS = f"[0-9]+M(?:{_DAYS})?"
_MINUTES = f"[0-9]+M(?:{_SECONDS})?"
_DURATION_TIME = f"T(?:[0-9]+H(?:{_MINUTES})?|{_MINUTES}|{_SECONDS})"
_DURATION = f"P(?:(?:{_DAYS}|{_MONTHS}|[0-9]+Y(?:{_MONTHS})?)(?:{_DURATION_TIME})?|{_DURATION_TIME}|[0-9]+W)"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H16 = "[0-9a-fA-F]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{IPV4})"
IPV6 = (
    "(?:"
    + "|".join(
        [  # RFC 3986, 3.2.2
            f"(?:{_H16}:){{6}}{_LS32}",
            f"::(?:{_H16}:){{5}}{_LS32}",
            f"(?:{_H16})?::(?:{_H16}:){{4}}{_LS32}",
            *(
                f"(?:(?:{_H16}:){{0,{n}}}{_H16})?::{rest}"
                for n, rest in (
                    (1, f"(?:{_H16}:){{3}}{_LS32}"),
                    (2, f"(?:{_H16}:){{2}}{_LS32}"),
                    (3, f"{_H16}:{_LS32}"),
                    (4, _LS32),
                    (5, _H16),
                    (6, ""),
                )
            ),
        ]
    )
    + ")"
)

_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
# Excludes A-labels (`xn--`, RFC 5890): no automaton recognises the valid ones.
_PLAIN_LABEL = (
    "(?:[a-wyzA-WYZ0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    "|[xX](?:[a-mo-zA-MO-Z0-9]|[a-mo-zA-MO-Z0-9-][a-zA-Z0-9-]{0,60}[a-zA-Z0-9])?"
    "|[xX][nN](?:-?[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?|[a-zA-Z0-9][a-zA-Z0-9-]{59}[a-zA-Z0-9])?)"
)
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_IPV6_TAG = "[iI][pP][vV]6:"
_LITERAL = rf"\[(?:{IPV4}|{_IPV6_TAG}{IPV6})\]"
_EMAIL = rf'(?:{_ATOM}(?:\.{_ATOM})*|"(?:[ !#-\[\]-~]|\\[ -~])*")@(?:{_DOMAIN}|{_LITERAL})'
MAX_LOCAL = 64  # octets before the @ (RFC 5321, 4.5.3.1.1)
_SHORT_LOCAL = f"(?s).{{1,{MAX_LOCAL}}}@[^@]*"  # no domain has an @
# In UTF-8. Longer ones that mix characters of few and many octets are also valid, but are not
# generated.
_SHORT_IDN_LOCAL = rf"[\0-\x7f]{{1,{MAX_LOCAL}}}|[\0-\U0010ffff]{{1,{MAX_LOCAL // 4}}}"
_IDN_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~\u0080-\U0010FFFF-]+"
# RFC 6531, 3.3
_IDN_LOCAL = rf'(?:{_IDN_ATOM}(?:\.{_IDN_ATOM})*|"(?:[ !#-\[\]-~\u0080-\U0010FFFF]|\\[ -~])*")'


def _build_uri_patterns(more: str, query: str = "") -> tuple[str, str]:
    """Returns the patterns of a URI and a URI reference (RFC 3986, appendix A). Characters in
    `more` may stand unescaped in addition to ASCII (RFC 3987).
    """
    unreserved = rf"a-zA-Z0-9._~{more}\-"
    subs = "!$&'()*+,;="
    escaped = "%[0-9a-fA-F]{2}"
    pchar = f"(?:[{unreserved}{subs}:@]|{escaped})"
    host = rf"(?:\[(?:{IPV6}|[vV][0-9a-fA-F]+\.[a-zA-Z0-9._~{subs}:\-]+)\]|(?:[{unreserved}{subs}]|{escaped})*)"
    authority = f"(?:(?:[{unreserved}{subs}:]|{escaped})*@)?{host}(?::[0-9]*)?"
    abempty = f"(?:/{pchar}*)*"
    rootless = f"{pchar}+(?:/{pchar}*)*"
    noscheme = f"(?:[{unreserved}{subs}@]|{escaped})+(?:/{pchar}*)*"
    tail = rf"(?:\?(?:{pchar}|[/?{query}])*)?(?:#(?:{pchar}|[/?])*)?"
    rooted = f"//{authority}{abempty}|/(?:{rootless})?"
    return (
        f"[a-zA-Z][a-zA-Z0-9+.-]*:(?:{rooted}|{rootless}|){tail}",
        f"(?:{rooted}|{noscheme}|){tail}",
    )


# RFC 3987, 2.2: ucschar and iprivate
_UCS = r"\u00A0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF" + "".join(
    f"\\U{plane:04X}{'1000' if plane == 14 else '0000'}-\\U{plane:04X}FFFD"
    for plane in range(1, 15)
)
_PRIVATE = r"\uE000-\uF8FF\U000F0000-\U000FFFFD\U00100000-\U0010FFFD"
_URI, _URI_REFERENCE = _build_uri_patterns("")
_IRI, _IRI_REFERENCE = _build_uri_patterns(_UCS, query=_PRIVATE)

_VARIABLE = r"(?:[a-zA-Z0-9_]|%[0-9a-fA-F]{2})(?:\.?(?:[a-zA-Z0-9_]|%[0-9a-fA-F]{2}))*(?::[1-9][0-9]{0,3}|\*)?"
_URI_TEMPLATE = (  # RFC 6570, 2, with the apostrophe of its erratum 6937
    rf"(?:[!#$&-;=?-\[\]_a-z~{_UCS}{_PRIVATE}]|%[0-9a-fA-F]{{2}}"
    rf"|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)
_POINTER = "(?:/(?:[^/~]|~[01])*)*"  # RFC 6901

_FORMATS = {
    "date-time": f"{DATE}[Tt]{_TIME}",
    "date": DATE,
    "time": _TIME,
    "duration": _DURATION,  # RFC 3339, appendix A
    "email": _EMAIL,  # RFC 5321, 4.1.2
    "hostname": rf"{_PLAIN_LABEL}(?:\.{_PLAIN_LABEL})*",  # RFC 1123, 2.1
    "ipv4": IPV4,
    "ipv6": IPV6,
    "uri": _URI,
    "uri-reference": f"(?:{_URI}|{_URI_REFERENCE})",
    "iri": _IRI,
    "iri-reference": f"(?:{_IRI}|{_IRI_REFERENCE})",
    "uri-template": _URI_TEMPLATE,
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",  # RFC 4122
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}


# only a part of the valid strings is generated
GENERATED_IN_PART = frozenset({"hostname", "idn-hostname", "idn-email", "regex"})
ASSERTED = frozenset({*_FORMATS, *GENERATED_IN_PART})


@lru_cache(maxsize=len(ASSERTED))
def format_language(name: str) -> Node:
    """Returns a node for the strings of an asserted format. For formats in `GENERATED_IN_PART`,
    returns only the subset that is generated.
    """
    match name:
        case "email":
            return intersection(parse(_EMAIL), parse(_SHORT_LOCAL))
        case "hostname":
            return intersection(parse(_FORMATS[name]), Repeat(ANY_CHAR, 1, 253))
        case "idn-hostname":
            return idn.build_hostname_language()
        case "idn-email":
            local = intersection(parse(_IDN_LOCAL), parse(_SHORT_IDN_LOCAL))
            return concat(
                local, parse("@"), alternation([idn.build_hostname_language(), parse(_LITERAL)])
            )
        case "regex":
            return ecma_regex.patterns()
    return parse(f"(?s){_FORMATS[name]}")


def is_valid(name: str, text: str) -> bool:
    """Returns True if a text is valid in an asserted format."""
    match name:
        case "hostname":
            return accepts(format_language(name), text) or _is_punycode_hostname(text)
        case "idn-hostname":
            return idn.is_hostname(text)
        case "idn-email":
            local, _, domain = text.rpartition("@")
            valid_domain = idn.is_hostname(domain) or accepts(parse(_LITERAL), domain)
            return (
                valid_domain
                and _count_utf8_bytes(local) <= MAX_LOCAL
                and accepts(parse(_IDN_LOCAL), local)
            )
        case "regex":
            return ecma_regex.is_pattern(text)
    return accepts(format_language(name), text)


def _count_utf8_bytes(text: str) -> int:
    """Returns the length of a text in UTF-8. Lone surrogates count as if they could be encoded."""
    return len(text.encode("utf-8", "surrogatepass"))


def _is_punycode_hostname(text: str) -> bool:
    """Returns True if a text is a host name with at least one label in Punycode."""
    labels = text.split(".")
    if not any(map(_is_punycode_label, labels)):
        return False
    plain = ".".join("x" * len(label) if _is_punycode_label(label) else label for label in labels)
    return accepts(format_language("hostname"), plain) and all(
        map(idn.is_hostname, filter(_is_punycode_label, labels))
    )


def _is_punycode_label(label: str) -> bool:
    return label[:4].lower() == "xn--"
