"""JSON schemas of numbers, times and texts with a format, made from pydantic's core schemas."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, TypeAlias

from sglang_lite.constraints.python_types import patterns
from sglang_lite.constraints.python_types.marks import Json, add_mark

CoreNode: TypeAlias = Any  # one of about fifty TypedDicts of pydantic, distinguished by "type"
_NO_VALUE: Json = {"not": {}}


def _decimal_schema(schema: CoreNode) -> Json:
    low, low_open = _tighter_bound(schema.get("ge"), schema.get("gt"), max)
    high, high_open = _tighter_bound(schema.get("le"), schema.get("lt"), min)
    options = []
    for before, after in _digit_limits(schema.get("max_digits"), schema.get("decimal_places")):
        most = 10**before
        option: Json = {
            "type": "number",
            "multipleOf": float(Decimal(1).scaleb(-after)) if after else 1,
        }
        least_open = low is None or low < -most or low_open
        most_open = high is None or high > most or high_open
        option["exclusiveMinimum" if least_open else "minimum"] = _to_int_or_float(
            -most if low is None else max(low, -most)
        )
        option["exclusiveMaximum" if most_open else "maximum"] = _to_int_or_float(
            most if high is None else min(high, most)
        )
        if before == 0:  # the digit of a 0 before the point counts
            option["not"] = {"const": 0}
        options.append(option)
    found = options[0] if len(options) == 1 else {"anyOf": options}
    step = schema.get("multiple_of")
    return found if step is None else {"allOf": [found, {"multipleOf": _to_int_or_float(step)}]}


def _tighter_bound(closed: Any, open_: Any, tighter: Callable[[Any, Any], Any]) -> tuple[Any, bool]:
    """Returns the tighter of two bounds, and whether the bound is open."""
    if closed is None or open_ is None:
        return (open_, True) if closed is None else (closed, False)
    return tighter(closed, open_), tighter(closed, open_) == open_


def _digit_limits(digits: int | None, decimals: int | None) -> Iterator[tuple[int, int]]:
    """Yields the allowed pairs of digit counts: the maximum number of digits before the point, and
    after it.
    """
    most = min(digits or patterns.NUMBER_DIGITS, patterns.NUMBER_DIGITS)
    before_all = max(0, digits - decimals) if digits is not None and decimals is not None else most
    last = min(most, patterns.NUMBER_DIGITS if decimals is None else decimals)
    for after in range(last + 1):
        before = min(before_all, most - after)
        if after == last or before != min(before_all, most - after - 1):
            yield before, after


def _to_int_or_float(value: Any) -> int | float:
    return int(value) if value == int(value) else float(value)


def _complex_schema(schema: CoreNode) -> Json:
    return {"type": "string", "pattern": f"^{patterns.COMPLEX}$"}


def _uuid_schema(schema: CoreNode) -> Json:
    version = schema.get("version")
    return {"type": "string", "format": f"uuid{version}" if version else "uuid"}


def _url_schema(schema: CoreNode, *, hosts: bool) -> Json:
    found = [
        {"type": "string", "pattern": pattern}
        if longest is None
        else {"type": "string", "pattern": pattern, "maxLength": longest}
        for pattern, longest in patterns.url_patterns(
            schema.get("allowed_schemes"), schema.get("max_length"), hosts=hosts
        )
    ]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _json_string_schema(schema: CoreNode) -> Json:
    return add_mark({"type": "string"}, "that the string is JSON")


def _date_schema(schema: CoreNode) -> Json:
    low = schema.get("ge")
    high = schema.get("le")
    today = datetime.date.today()
    day = datetime.timedelta(days=1)
    now = schema.get("now_op")
    lows = [
        low,
        schema["gt"] + day if schema.get("gt") else None,
        today + day if now == "future" else None,
    ]
    highs = [
        high,
        schema["lt"] - day if schema.get("lt") else None,
        today - day if now == "past" else None,
    ]
    low = max((each for each in lows if each is not None), default=None)
    high = min((each for each in highs if each is not None), default=None)
    found: Json = {"type": "string", "format": "date"}
    if low is not None or high is not None:
        pattern = patterns.date_pattern(low, high)
        found = {**found, "pattern": pattern} if pattern else _NO_VALUE
    return add_mark(found, "that it is before or after the day of the check") if now else found


def _datetime_schema(schema: CoreNode) -> Json:
    zone = schema.get("tz_constraint")
    aware_only = zone == "aware" or isinstance(zone, int)
    found: Json = {
        "type": "string",
        "pattern": patterns.moment_pattern(day=True, naive=True, aware=zone != "naive"),
    }
    if aware_only:  # the format allows leap seconds, Python does not
        found = {"type": "string", "format": "date-time", "pattern": "^.{17}[0-5]"}
    if isinstance(zone, int):
        found = add_mark(found, f"that the offset is {zone} seconds")
    return _limit_moments(found, schema, naive=zone == "naive")


def _time_schema(schema: CoreNode) -> Json:
    zone = schema.get("tz_constraint")
    found: Json = {
        "type": "string",
        "pattern": patterns.moment_pattern(day=False, naive=zone != "aware", aware=zone != "naive"),
    }
    return _limit_moments(found, schema, naive=zone == "naive")


def _limit_moments(found: Json, schema: CoreNode, *, naive: bool) -> Json:
    """Adds the limits of a core schema to the JSON schema of times, or of dates with times. Limits
    of dates that have a time zone or are relative to now are loosened by a day. Limits of times
    with a time zone are not enforced.
    """
    now = datetime.datetime.now()
    limits = [
        (schema.get(name), name[0] == "g", name[1] == "t") for name in ("ge", "gt", "le", "lt")
    ]
    if schema.get("now_op"):
        limits.append((now, schema["now_op"] == "future", False))
    more: list[str] = []
    for bound, up, is_open in limits:
        if bound is None:
            continue
        if bound is now or (bound.tzinfo is not None and not naive):
            found = add_mark(
                found, "that it is before or after now" if bound is now else "limits in other zones"
            )
            if isinstance(bound, datetime.time) or bound.year in (
                datetime.MINYEAR,
                datetime.MAXYEAR,
            ):
                continue
            bound += datetime.timedelta(days=-1 if up else 1)
        pattern = patterns.bounded_moment_pattern(bound, up=up, is_open=is_open)
        if pattern is None:
            return _NO_VALUE
        more.append(pattern)
    return add_required_patterns(found, more)


def _timedelta_schema(schema: CoreNode) -> Json:
    found: Json = {"type": "string", "pattern": f"^{patterns.DURATION}$"}
    bounded = any(schema.get(name) is not None for name in ("ge", "gt", "le", "lt"))
    return add_mark(found, "the limits of durations") if bounded else found


def add_required_patterns(found: Json, more: list[str]) -> Json:
    if not more:
        return found
    if "pattern" not in found and len(more) == 1:
        return {**found, "pattern": more[0]}
    return {**found, "allOf": [{"pattern": pattern} for pattern in more]}


# Functions that convert a core schema to a JSON schema, by its type.
SCALARS: Mapping[str, Callable[[CoreNode], Json]] = {
    "decimal": _decimal_schema,
    "complex": _complex_schema,
    "uuid": _uuid_schema,
    "url": partial(_url_schema, hosts=False),
    "multi-host-url": partial(_url_schema, hosts=True),
    "json": _json_string_schema,
    "date": _date_schema,
    "datetime": _datetime_schema,
    "time": _time_schema,
    "timedelta": _timedelta_schema,
}
