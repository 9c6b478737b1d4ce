"""Python types as programs declare them: what texts are generated for is read by pydantic."""

import collections
import datetime as dt
import decimal
import enum
import fractions
import importlib.util
import ipaddress
import pathlib
import re
import typing
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypeVar

import annotated_types
import pydantic as p
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, RootModel
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.networks import IPvAnyAddress, IPvAnyInterface, IPvAnyNetwork
from typing_extensions import TypedDict

T = TypeVar("T")
DAY, MOMENT = dt.date(2024, 2, 29), dt.datetime(2024, 2, 29, 12, 30, 15, 250_000)
LATER = dt.datetime(2031, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2)))


class Colour(enum.Enum):
    RED = "red"
    BLUE = 'light "blue"'


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 20


class Level(enum.StrEnum):
    LOW = "low"
    HIGH = "high"


class Mixed(enum.Enum):
    ONE = 1
    TWO = "two"
    NONE = None


class Plain(BaseModel):
    a: int


class City(BaseModel):
    """A place."""

    name: str
    inhabitants: int = Field(ge=0)
    tags: list[str] = []
    founded: dt.date | None = None


class Inherited(City):
    mayor: str | None = None


class Named(BaseModel):
    user: str = Field(alias="userName")
    number: int = Field(validation_alias="no", serialization_alias="nr")


class ByName(BaseModel):
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=False)
    user: str = Field(alias="userName")


class EitherName(BaseModel):
    user: int = Field(validation_alias=p.AliasChoices("user", "userName"))


class Deep(BaseModel):
    first: str = Field(validation_alias=p.AliasPath("names", 0))
    third: int = Field(validation_alias=p.AliasPath("names", 2))
    city: str = Field(validation_alias=p.AliasPath("address", "city"))
    code: int | None = Field(None, validation_alias=p.AliasPath("address", "code"))


class DeepOrPlain(BaseModel):
    user: str = Field(validation_alias=p.AliasChoices(p.AliasPath("a", "b"), "user"))


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class OpenNumbers(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int] = Field(init=False)
    a: int


class Forbidding(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int


class Stripping(BaseModel):
    model_config = ConfigDict(str_strip_whitespace=True, str_min_length=2)
    a: str


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    a: int
    b: float
    c: dt.date
    d: decimal.Decimal
    e: uuid.UUID
    f: tuple[int, str]
    g: Colour
    h: set[int]


class Checked(BaseModel):
    a: int
    b: str

    @p.field_validator("a")
    @classmethod
    def check_a(cls, value):
        if value % 2:
            raise ValueError("odd")
        return value


class CheckedWhole(BaseModel):
    a: int
    b: int

    @p.model_validator(mode="after")
    def check(self):
        if self.a > self.b:
            raise ValueError("a is larger than b")
        return self


class Computed(BaseModel):
    a: int

    @p.computed_field
    @property
    def double(self) -> int:
        return 2 * self.a


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Pair(BaseModel, Generic[T]):
    one: T
    two: T


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Numbers(RootModel[list[int]]):
    pass


@dataclass
class Point:
    x: int
    y: float | None = None
    labels: list[str] = field(default_factory=list)


@dataclass
class Private:
    x: int
    hidden: int = field(default=0, init=False)


@dataclass(kw_only=True, frozen=True, slots=True)
class Keyword:
    x: decimal.Decimal


@pydantic_dataclass
class Validated:
    x: Annotated[int, Field(gt=3)]
    y: Point


class Options(TypedDict):
    verbose: bool
    level: NotRequired[int]


class Partial(TypedDict, total=False):
    a: dt.date
    b: Options


class Row(NamedTuple):
    name: str
    count: int = 0  # type: ignore[assignment]  # hides tuple.count


def even(value):
    if value % 2:
        raise ValueError("odd")
    return value


# Types that a grammar holds: every text of it is a value.
class Coded(BaseModel):
    model_config = ConfigDict(val_json_bytes="base64")
    a: bytes


HELD: list[Any] = [
    Coded, p.condecimal(max_digits=2, decimal_places=2), list[Literal[Colour.RED, Size.SMALL, Level.LOW, "k"]],
    dict[Literal["1", 2], int],
    int, float, bool, str, None, Any,
    dt.date, dt.time, dt.datetime, dt.timedelta,
    Colour, Size, Level, Mixed,
    Literal["a", "b"], Literal[1, "two", None, True], Literal[Colour.RED],
    decimal.Decimal, fractions.Fraction, complex, uuid.UUID, bytes, pathlib.Path, pathlib.PurePosixPath,
    ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network,
    ipaddress.IPv4Interface, ipaddress.IPv6Interface, IPvAnyAddress, IPvAnyNetwork, IPvAnyInterface,
    p.UUID1, p.UUID3, p.UUID4, p.UUID5,
    p.PositiveInt, p.NonNegativeInt, p.NegativeFloat, p.StrictInt, p.StrictStr, p.StrictBool, p.FiniteFloat,
    p.conint(ge=3, lt=10, multiple_of=2), p.confloat(gt=0.5, le=2), p.constr(min_length=2, max_length=4),
    p.constr(pattern=r"^[A-Z]{2}\d{3}$"), p.constr(strip_whitespace=True, min_length=1), p.constr(to_upper=True),
    p.constr(strip_whitespace=True, pattern=r"^a|b$"),
    p.condecimal(max_digits=5, decimal_places=2), p.condecimal(max_digits=3), p.condecimal(decimal_places=1),
    p.condecimal(gt=decimal.Decimal("0.1"), le=decimal.Decimal("12.345")), p.condecimal(multiple_of=decimal.Decimal("0.25")),
    p.condecimal(max_digits=2, decimal_places=4),
    p.conlist(int, min_length=1, max_length=3), p.conset(int, max_length=3), p.conbytes(min_length=2, max_length=3),
    p.HttpUrl, p.AnyUrl, p.AnyHttpUrl, p.FileUrl, p.FtpUrl, p.AnyWebsocketUrl, p.PostgresDsn, p.RedisDsn, p.MongoDsn,
    p.Base64Bytes, p.Base64UrlBytes, p.ByteSize, p.SecretStr, p.SecretBytes, p.Secret[int],
    p.NaiveDatetime, p.AwareDatetime, p.condate(ge=DAY), p.condate(gt=DAY, le=dt.date(2031, 12, 31)),
    Annotated[dt.datetime, Field(ge=MOMENT)], Annotated[dt.datetime, Field(lt=MOMENT)],
    Annotated[p.NaiveDatetime, Field(gt=MOMENT, le=dt.datetime(2024, 3, 1))],
    Annotated[dt.time, Field(ge=dt.time(9), lt=dt.time(17, 30))],
    list, dict, tuple, set, list[int], list[list[str]], list[dt.date], tuple[int, str], tuple[int, ...], tuple[()],
    set[int], frozenset[str], set[Literal["a", "b", "c"]], collections.deque[int], Sequence[int], Iterable[int],
    typing.Iterable[str], collections.OrderedDict[str, int], collections.defaultdict[str, list[int]], collections.Counter[str],
    dict[str, int], dict[int, str], dict[float, int], dict[bool, int], dict[dt.date, int], dict[uuid.UUID, str],
    dict[Colour, int], dict[Size, int], dict[Literal["x", "y"], float], dict[decimal.Decimal, int],
    dict[Annotated[str, Field(pattern="^[a-c]{1,3}$")], int], dict[Annotated[str, Field(min_length=2, max_length=3)], int],
    dict[str, dict[int, list[float]]], dict[int | dt.date, int], Mapping[str, bool], p.conlist(dict[str, Any], max_length=2),
    int | str, int | None, City | int, Plain | City, Annotated[Cat | Dog, Field(discriminator="kind")],
    Annotated[int, annotated_types.Interval(ge=1, le=5)], Annotated[str, annotated_types.Len(1, 3)],
    Plain, City, Inherited, Named, ByName, EitherName, Deep, DeepOrPlain, Open, OpenNumbers, Forbidding, Stripping,
    Strict, Computed, Tree, Pair[int], Pair[City], Numbers, RootModel[dict[int, Plain]],
    Point, Private, Keyword, Validated, Options, Partial, Row, list[Row], list[Options] | None,
]  # fmt: skip

# Types of whose values more is asked than a grammar holds: what is read is checked.
CHECKED: list[Any] = [
    Checked, CheckedWhole, list[Checked], Annotated[int, AfterValidator(even)], Annotated[int, BeforeValidator(even)],
    Annotated[int, annotated_types.Predicate(even)],
    p.Json, p.Json[list[int]], p.Base64Str, re.Pattern, p.PastDate, p.FutureDate, p.PastDatetime, p.FutureDatetime,
    Annotated[dt.datetime, Field(ge=LATER)], Annotated[dict[int, str], Field(min_length=2)], set[Plain], Annotated[dt.timedelta, Field(le=dt.timedelta(days=3))],
    Annotated[dict[str, int], Field(min_length=2)], p.conset(int, min_length=2), p.FilePath, p.DirectoryPath, p.ImportString,
]  # fmt: skip
if importlib.util.find_spec("email_validator"):
    CHECKED += [p.EmailStr, p.NameEmail]

# Texts that people write of them.
USUAL: list[tuple[Any, str]] = [
    (Coded, '{"a": "QQ=="}'), (Coded, '{"a": "QUI="}'), (p.condecimal(max_digits=2, decimal_places=2), "-0.50"),
    (list[Literal[Colour.RED, Size.SMALL, "k"]], '["k", 1]'), (dict[Literal["1", 2], int], '{"1": 1}'),
    (decimal.Decimal, "12.99"), (p.condecimal(max_digits=5, decimal_places=2), "123.45"),
    (uuid.UUID, '"123e4567-e89b-12d3-a456-426614174000"'), (p.UUID4, '"123e4567-e89b-42d3-a456-426614174000"'),
    (p.HttpUrl, '"https://example.com"'), (p.HttpUrl, '"http://www.example.co.uk:8080/a/b.html?x=1&y=%20#top"'),
    (p.HttpUrl, '"https://de.wikipedia.org/wiki/Köln"'), (p.HttpUrl, '"http://127.0.0.1:8000/"'), (p.HttpUrl, '"http://[::1]/"'),
    (p.AnyUrl, '"mailto:ann@example.com"'), (p.AnyUrl, '"s3://bucket/key"'), (p.AnyUrl, '"file:///etc/hosts"'),
    (p.PostgresDsn, '"postgresql+asyncpg://me:pw@db.local:5432,db2/app"'), (p.RedisDsn, '"redis://localhost:6379/0"'),
    (ipaddress.IPv4Network, '"10.0.0.0/8"'), (ipaddress.IPv4Network, '"192.168.16.0/20"'), (IPvAnyNetwork, '"2001:db80::/29"'),
    (ipaddress.IPv6Network, '"fe80::/10"'), (ipaddress.IPv4Interface, '"192.168.1.7/24"'), (IPvAnyAddress, '"::1"'),
    (dict[int, str], '{"1": "a", "-20": "b"}'), (dict[dt.date, int], '{"2024-02-29": 1}'), (dict[Size, int], '{"20": 1}'),
    (p.NaiveDatetime, '"2024-02-29T12:00:00"'), (p.AwareDatetime, '"2024-02-29T12:00:00+02:00"'),
    (list[dt.datetime], '["2024-02-29T12:00:00", "2024-02-29T12:00:00.5Z"]'), (p.PastDate, '"1999-12-31"'),
    (p.condate(gt=DAY, le=dt.date(2031, 12, 31)), '"2024-03-01"'), (p.condate(gt=DAY, le=dt.date(2031, 12, 31)), '"2031-12-31"'),
    (Annotated[dt.datetime, Field(ge=MOMENT)], '"2024-02-29T12:30:15.25"'),
    (Annotated[dt.datetime, Field(lt=MOMENT)], '"2024-02-29T12:30:15.2499"'),
    (Annotated[dt.time, Field(ge=dt.time(9), lt=dt.time(17, 30))], '"17:29:59"'),
    (Deep, '{"names": ["Ann", null, 3], "address": {"city": "Rome"}}'), (p.Base64Bytes, '"aGVsbG8="'),
    (p.ByteSize, '"1.5 GiB"'), (p.ByteSize, "1024"), (complex, '"1.5-2j"'), (fractions.Fraction, '"-1/3"'), (dt.timedelta, '"P1DT12H"'),
    (p.constr(strip_whitespace=True, min_length=1), '"two words"'), (Strict, (
        '{"a": 1, "b": 2.5, "c": "2024-01-01", "d": 1.5, "e": "123e4567-e89b-12d3-a456-426614174000", '
        '"f": [1, "x"], "g": "red", "h": [1, 2]}'
    )), (OpenNumbers, '{"a": 1, "b": 2}'), (Open, '{"a": 1, "b": "x"}'), (ByName, '{"user": "x"}'), (DeepOrPlain, '{"user": "x"}'),
]  # fmt: skip

# Texts that none of these has.
WRONG: list[tuple[Any, str]] = [
    (Coded, '{"a": "QR=="}'), (Coded, '{"a": "QUJ="}'), (p.condecimal(max_digits=2, decimal_places=2), "0"),
    (list[Literal[Colour.RED, "k"]], '["red"]'), (dict[Literal["1", 2], int], '{"2": 1}'),
    (decimal.Decimal, '"CU9"'), (p.condecimal(max_digits=5, decimal_places=2), "1234"), (p.condecimal(max_digits=3), "1.234"),
    (p.UUID4, '"123e4567-e89b-12d3-a456-426614174000"'), (p.HttpUrl, '"ftp://example.com"'), (p.HttpUrl, '"http://a:70000"'),
    (p.AnyUrl, '"example.com"'), (ipaddress.IPv4Network, '"10.0.0.1/8"'), (ipaddress.IPv6Network, '"fe81::/10"'),
    (dict[int, str], '{"a": "b"}'), (p.NaiveDatetime, '"2024-02-29T12:00:00Z"'), (p.AwareDatetime, '"2024-02-29T12:00:00"'),
    (p.condate(gt=DAY, le=dt.date(2031, 12, 31)), '"2024-02-29"'), (p.condate(gt=DAY, le=dt.date(2031, 12, 31)), '"2032-01-01"'),
    (p.FutureDate, '"2024-01-01"'), (p.PastDatetime, '"9000-01-01T00:00:00"'), (Annotated[dt.datetime, Field(ge=MOMENT)], '"2024-02-29T12:30:15.24"'),
    (Annotated[dt.datetime, Field(lt=MOMENT)], '"2024-02-29T12:30:15.25"'), (p.Base64Bytes, '"abc"'), (p.ByteSize, '"1 cat"'),
    (complex, '"x"'), (p.constr(strip_whitespace=True, min_length=1), '" a"'), (Plain, '{"a": 1, "b": 2}'),
    (Point, '{"x": 1, "z": 1}'), (Options, '{"verbose": true, "x": 1}'), (OpenNumbers, '{"a": 1, "b": "x"}'),
    (Deep, '{"first": "Ann", "third": 3, "city": "Rome"}'),
]  # fmt: skip
