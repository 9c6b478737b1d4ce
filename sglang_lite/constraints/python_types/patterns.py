"""Regular expressions for the texts of scalar types: a subset of the texts that pydantic reads, in
their usual notation.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence

from sglang_lite.constraints.json_schema.formats import CLOCK, DATE, IPV4, IPV6

# JSON's safe integers. Without a bound, a small model may write digits forever.
MAX_INT = 2**53 - 1
FLOAT = r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?"
NUMBER_DIGITS = 15  # digits of a decimal number that survive a JSON parser

TIME = CLOCK + r"(?:\.[0-9]{1,6})?"
ZONE = "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_COUNT = "[0-9]{1,6}"  # digits of a number; even 999,999 years fit a timedelta
_TIMES = f"T(?:{_COUNT}H(?:{_COUNT}M)?(?:{_COUNT}S)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_DAYS = f"(?:{_COUNT}Y(?:{_COUNT}M)?(?:{_COUNT}D)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
DURATION = f"-?P(?:{_DAYS}(?:{_TIMES})?|{_TIMES}|{_COUNT}W)"

_NUMBER = r"(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?"
COMPLEX = f"-?(?:{_NUMBER}(?:[+-]{_NUMBER}j)?|{_NUMBER}j)"
FRACTION = f"-?(?:{_NUMBER}|(?:0|[1-9][0-9]{{0,14}})/[1-9][0-9]{{0,14}})"
BYTE_SIZE = r"(?:0|[1-9][0-9]{0,11})(?:\.[0-9]{1,6})? ?(?:[kKmMgGtTpP]i?)?[bB]"

_HEX = "[0-9a-fA-F]"


def uuid_pattern(version: int) -> str:
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}"


_64 = "[A-Za-z0-9+/]"
_64_URL = "[A-Za-z0-9_-]"


def _base64_pattern(letter: str) -> str:
    """Returns the pattern of Base64 texts. The unused bits of the last letter must be zero, as
    pydantic's reader requires.
    """
    return f"(?:{letter}{{4}})*(?:{letter}[AQgw]==|{letter}{{2}}[AEIMQUYcgkosw048]=)?"


_LABEL = "[a-zA-Z0-9](?:-?[a-zA-Z0-9])*"  # excludes labels in Punycode
# a last label that begins with a digit would be read as an IPv4 address
_LETTERS = "[a-zA-Z](?:-?[a-zA-Z0-9])*"
_HOST = rf"(?:(?:{_LABEL}\.)*{_LETTERS}|{IPV4}|\[{IPV6}\])"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@(?:{_LABEL}\.)+[a-zA-Z]{{2,24}}"


def _networks_v4() -> str:
    """Returns the pattern of IPv4 networks: all bits after the prefix are zero."""
    byte = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
    texts = [f"{IPV4}(?:/32)?"]
    for bits in range(32):
        whole, more = divmod(bits, 8)
        last = "|".join(map(str, range(0, 256, 256 >> more)))
        parts = [byte] * whole + [f"(?:{last})"] + ["0"] * (3 - whole)
        texts.append(r"\.".join(parts) + f"/{bits}")
    return "(?:" + "|".join(texts) + ")"


def _networks_v6() -> str:
    """Returns the pattern of IPv6 networks. The groups of the prefix are written out, and `::`
    stands for all further groups.
    """
    texts = [f"{IPV6}(?:/128)?", "::/0"]
    for bits in range(1, 128):
        whole, more = divmod(bits, 16)
        groups = [f"{_HEX}{{1,4}}"] * whole
        if more:
            digits, rest = divmod(more, 4)
            cut = f"[{''.join(f'{d:x}' for d in range(0, 16, 16 >> rest))}]" if rest else ""
            groups.append(f"{_HEX}{{{digits}}}{cut}" + "0" * (4 - digits - bool(rest)))
        texts.append(":".join(groups) + ("::" if len(groups) < 8 else "") + f"/{bits}")
    return "(?:" + "|".join(texts) + ")"


_V4_INTERFACE = f"{IPV4}(?:/(?:[12]?[0-9]|3[0-2]))?"
_V6_INTERFACE = f"{IPV6}(?:/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8]))?"
_V4_NETWORK = _networks_v4()
_V6_NETWORK = _networks_v6()

# Patterns by the names that pydantic writes in `format`.
FORMATS = {
    "uuid1": uuid_pattern(1), "uuid3": uuid_pattern(3), "uuid4": uuid_pattern(4), "uuid5": uuid_pattern(5),
    "uuid6": uuid_pattern(6), "uuid7": uuid_pattern(7), "uuid8": uuid_pattern(8),
    "ipv4network": _V4_NETWORK, "ipv6network": _V6_NETWORK, "ipvanynetwork": f"(?:{_V4_NETWORK}|{_V6_NETWORK})",
    "ipv4interface": _V4_INTERFACE, "ipv6interface": _V6_INTERFACE,
    "ipvanyinterface": f"(?:{_V4_INTERFACE}|{_V6_INTERFACE})", "ipvanyaddress": f"(?:{IPV4}|{IPV6})",
    "fraction": FRACTION, "base64": _base64_pattern(_64), "base64url": _base64_pattern(_64_URL),
    "email": _EMAIL, "name-email": f"(?:{_EMAIL}|[A-Za-z]+(?: [A-Za-z]+)* <{_EMAIL}>)",
}  # fmt: skip

# characters that a parsed URL keeps unescaped
_ASCII = r"(?:[a-zA-Z0-9._~!$&()*+,;=:@/-]|%[0-9a-fA-F]{2})"
_MORE = r"(?:[a-zA-Z0-9._~!$&()*+,;=:@/\-\u00A1-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF]|%[0-9a-fA-F]{2})"
_LONGEST_ESCAPE = 9  # length of a character of _MORE after percent-encoding
_PORT = (
    "(?::(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?"
)
_USER = r"(?:[a-zA-Z0-9._~-]+(?::[a-zA-Z0-9._~-]*)?@)?"
_OPAQUE = "(?:data|geo|magnet|mailto|news|sms|tel|urn)"


def url_patterns(
    schemes: Sequence[str] | None, max_length: int | None, *, hosts: bool
) -> list[tuple[str, int | None]]:
    """Returns the patterns of URLs, each with the maximum length of its texts (None for no limit).

    Args:
        schemes: allowed schemes, or None for any.
        max_length: maximum length of the parsed URL, in which non-ASCII characters are
            percent-encoded.
        hosts: whether several hosts, separated by commas, are allowed.
    """
    any_scheme = schemes is None
    names = [name.replace("+", r"\+") for name in schemes or () if name != "file"]
    scheme = "[a-zA-Z][a-zA-Z0-9+.-]*" if any_scheme else f"(?:{'|'.join(names)})"
    host = f"{_HOST}{_PORT}" + (f"(?:,{_HOST}{_PORT})*" if hosts else "")

    def pattern(character: str) -> str:
        tail = rf"(?:\?(?:{character}|\?)*)?(?:#(?:{character}|\?)*)?"
        options = (
            [f"{scheme}://{_USER}{host}(?:/{character}*)?{tail}"] if any_scheme or names else []
        )
        if any_scheme:
            options.append(f"{_OPAQUE}:{character}+")
        if any_scheme or "file" in (schemes or ()):
            options.append(f"file:///{character}*")
        return "^(?:" + "|".join(options) + ")$"

    if max_length is None:
        return [(pattern(_MORE), None)]
    return [
        (pattern(_ASCII), max_length - 1),
        (pattern(_MORE), max(0, max_length // _LONGEST_ESCAPE)),
    ]


# ---------------------------------------------------------------------------------- dates and times


def date_pattern(low: datetime.date | None, high: datetime.date | None) -> str | None:
    """Returns the pattern of the dates between two bounds, both included, or None if no date is in
    range.
    """
    if (low or datetime.date.min) > (high or datetime.date.max):
        return None
    return f"^{_pattern_between((low or datetime.date.min).isoformat(), (high or datetime.date.max).isoformat())}$"


def _pattern_between(low: str, high: str) -> str:
    """Returns the pattern of the texts from `low` to `high`, both included, with digits in the
    positions where the bounds have digits.
    """
    same = next((i for i, (a, b) in enumerate(zip(low, high)) if a != b), len(low))
    if same == len(low):
        return low
    (first, after_first), (last, after_last) = (
        (text[same], text[same + 1 :]) for text in (low, high)
    )
    least = re.sub("[0-9]", "0", after_first)
    most = re.sub("[0-9]", "9", after_first)
    options = []
    if after_first != least:
        options.append(first + _pattern_between(after_first, most))
        first = chr(ord(first) + 1)
    if after_last != most:
        options.append(last + _pattern_between(least, after_last))
        last = chr(ord(last) - 1)
    if first <= last:
        options.append(f"[{first}-{last}]" + _digits_pattern(least))
    return low[:same] + "(?:" + "|".join(options) + ")"


def _digits_pattern(text: str) -> str:
    """Returns the pattern of a text with any digit in place of each digit."""
    return re.sub("[0-9]", "[0-9]", text)


def moment_pattern(*, day: bool, naive: bool, aware: bool) -> str:
    """Returns the pattern of times, or of dates with times if `day`. `naive` allows texts without a
    time zone, and `aware` allows texts with one.
    """
    zone = f"{ZONE}?" if naive and aware else ZONE if aware else ""
    return f"^{f'{DATE}T' if day else ''}{TIME}{zone}$"


def bounded_moment_pattern(
    bound: datetime.datetime | datetime.time, *, up: bool, is_open: bool
) -> str | None:
    """Returns the pattern of times, or of dates with times, that respect a bound. If `up`, they are
    not earlier than the bound, otherwise not later. `is_open` excludes the bound itself. Only local
    times are compared, without zones. Returns None if there is no such time.
    """
    text = bound.replace(tzinfo=None).isoformat(timespec="microseconds")
    seconds = text[:-7]
    fraction = text[-6:]
    options = []
    for i, digit in enumerate(seconds):
        if digit.isdigit() and digit != ("9" if up else "0"):
            span = f"[{int(digit) + 1}-9]" if up else f"[0-{int(digit) - 1}]"
            options.append(seconds[:i] + span + _digits_pattern(seconds[i + 1 :]) + ".*")
    fractions = (_second_fractions_at_least if up else _second_fractions_at_most)(
        fraction, is_open=is_open
    )
    if fractions is not None:
        options.append(f"{seconds}{fractions}{ZONE}?")
    return f"^(?:{'|'.join(options)})$" if options else None


def _second_fractions_at_least(digits: str, *, is_open: bool) -> str | None:
    """Returns the pattern of the fractions of a second that are at least 0.digits, or greater if
    `is_open`. Returns None if no fraction qualifies.
    """
    if not int(digits):
        return r"\.[0-9]*[1-9][0-9]*" if is_open else r"(?:\.[0-9]+)?"
    options = [f"{digits[:i]}[{int(d) + 1}-9][0-9]*" for i, d in enumerate(digits) if d != "9"]
    if not is_open:
        options.append(digits.rstrip("0") + "0*")
    elif len(digits.rstrip("0")) < len(digits):
        options.append(digits.rstrip("0") + "0*[1-9][0-9]*")
    return rf"\.(?:{'|'.join(options)})" if options else None


def _second_fractions_at_most(digits: str, *, is_open: bool) -> str | None:
    """Returns the pattern of the fractions of a second that are at most 0.digits, or less if
    `is_open`. Returns None if no fraction qualifies.
    """
    if not int(digits):
        return None if is_open else r"(?:\.0+)?"
    options = [f"{digits[:i]}[0-{int(d) - 1}][0-9]*" for i, d in enumerate(digits) if d != "0"]
    options += [digits[:i] for i in range(1, len(digits.rstrip("0")))]
    if not is_open:
        options.append(digits.rstrip("0") + "0*")
    return rf"(?:\.(?:{'|'.join(options)}))?"
