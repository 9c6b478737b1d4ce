"""Extraction into plain types: how many greedy runs of the default model finish, how many fields
are right, and whether a name is invented.

    python benchmarks/extraction.py [--texts 5] [--max-tokens 160] [--hint names | shape] [--show]

The prompt names the fields, and may describe the type as `sgl.grammar.describe` does. A field is
right if it has the value of RIGHT, whatever the case and the blanks around; only fields count about
which a text leaves no doubt. A name is invented that the type does not have. Runs that don't finish
within the tokens are shown with their texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import enum
import json
import typing
from typing import Any, Literal, TypedDict

from pydantic import BaseModel

import sglang_lite as sgl


class Person(BaseModel):
    name: str
    age: int
    city: str | None = None


class Event(BaseModel):
    title: str
    date: datetime.date
    place: str | None = None


class Product(BaseModel):
    name: str
    price: float
    currency: Literal["EUR", "USD", "GBP"]
    in_stock: bool


class Mood(enum.Enum):
    GOOD = "good"
    BAD = "bad"
    MIXED = "mixed"


@dataclasses.dataclass
class Review:
    product: str
    mood: Mood
    stars: int
    summary: str


class Weather(TypedDict):
    place: str
    temperature: float
    wind_kmh: int
    conditions: str


class Ticket(BaseModel):
    subject: str
    urgent: bool
    room: str | None = None
    contact: str | None = None


class Party(BaseModel):
    title: str
    guests: list[str]


class Line(BaseModel):
    product: str
    quantity: int
    price: float


class Order(BaseModel):
    customer: str
    lines: list[Line]
    paid: bool


class Details(BaseModel):
    subject: str
    details: dict[str, str]


REVIEWS = [
    "The headphones sound great and the battery lasts for days. Five stars!",
    "This kettle leaked on the first day and smelled of plastic. One star.",
    "The tent is light and quick to pitch, but it let the rain in. 3 of 5 stars.",
    "I love the coffee grinder: quiet, fast, easy to clean. 4 stars because of the price.",
    "Terrible phone case, it broke after a week and the colour came off. 2 stars at most.",
]
TICKETS = [
    "Printer on floor 3 is out of toner. Not urgent. Model: LX-200, room: 312.",
    "URGENT: the web shop is down since 9:00, customers get error 502.",
    "I can't log in to my mail any more. Browser: Firefox. It can wait until tomorrow.",
    "The air conditioning in the server room has failed, please come at once! Temperature: 41 degrees.",
    "Could someone replace the light bulb in the hall? Type: E27, colour: warm white. Ask for Mr Lee.",
]
EVENTS = [
    "On 2024-06-12 the garden party of Ann and Bob is at Rose Cottage. Carl and Dora will come.",
    "Annual meeting: 3 March 2025, town hall of Bath. Guests: Mayor Hill, Mrs Wood, Dr Stone.",
    "Don't forget, the concert of the string quartet is on July 1st, 2026.",
    "Our wedding will take place on 2025-09-20 in Verona, with our parents and Luca.",
    "Book club, 2024-11-05, at Emma's. Emma, Fred and Gina have read the novel.",
]
PLAIN: dict[Any, list[str]] = {
    Person: [
        "My name is Clara Bauer, I turned 34 in May and I moved to Graz last year.",
        "Tom, aged 61, has been the baker of Whitby for as long as anyone can remember.",
        "Interview with Aisha Khan (27), who runs a small bicycle shop in Leeds.",
        "The new goalkeeper is Marco Rossi. He is 19 years old and comes from Turin.",
        "Yesterday 45-year-old Jean Petit of Lyon won two million euros in the lottery.",
    ],
    Event: EVENTS,
    Product: [
        "Oak desk, now only 249 EUR, five left.",
        "The red bicycle costs $399.99 and is sold out until spring.",
        "Kettle Pro: 35.50 pounds. In stock, delivery tomorrow.",
        "We have plenty of garden chairs at 24.90 euros each.",
        "Sorry, the lamp for 19 dollars is not available any more.",
    ],
    Review: REVIEWS,
    Weather: [
        "In Oslo it is -3.5 degrees with light snow, and the wind blows at 15 km/h.",
        "Cairo: sunny and dry, 38 degrees, wind of 10 km/h.",
        "Heavy rain and thunder over Singapore at 27.2 degrees; gusts reach 60 km/h.",
        "Reykjavik has fog this morning, 4 degrees, hardly any wind (5 km/h).",
        "A clear night in Denver: 12 degrees and a breeze of 20 km/h.",
    ],
    Ticket: TICKETS,
}
# Lists and names that have no end of their own, which small models repeat.
ENDLESS: dict[Any, list[str]] = {
    Party: EVENTS,
    Order: [
        "Mr Brown ordered two lamps at 35.50 each and one table for 120. He has paid.",
        "Please send Anna Weiss 3 notebooks (2.99 each). Payment is still open.",
        "Order of Paul: 10 apples at 0.30, 5 pears at 0.45, 1 melon at 2.80. Paid in cash.",
        "Lucy wants a single red bicycle for 249.00; the invoice has not been paid yet.",
        "The hotel Adler bought 40 towels for 8 euros each and 12 pillows for 15 euros each, all paid.",
    ],
    Details: TICKETS,
}


# Names of fields, and for each text their values.
RIGHT: dict[Any, tuple[tuple[str, ...], list[tuple[Any, ...]]]] = {
    Person: (("name", "age", "city"), [
        ("Clara Bauer", 34, "Graz"), ("Tom", 61, "Whitby"), ("Aisha Khan", 27, "Leeds"), ("Marco Rossi", 19, "Turin"),
        ("Jean Petit", 45, "Lyon"),
    ]),
    Event: (("date", "place"), [
        ("2024-06-12", "Rose Cottage"), ("2025-03-03", "town hall of Bath"), ("2026-07-01", None),
        ("2025-09-20", "Verona"), ("2024-11-05", "Emma's"),
    ]),
    Product: (("price", "currency", "in_stock"), [
        (249, "EUR", True), (399.99, "USD", False), (35.5, "GBP", True), (24.9, "EUR", True), (19, "USD", False),
    ]),
    Review: (("mood", "stars"), [("good", 5), ("bad", 1), ("mixed", 3), ("good", 4), ("bad", 2)]),
    Weather: (("place", "temperature", "wind_kmh"), [
        ("Oslo", -3.5, 15), ("Cairo", 38, 10), ("Singapore", 27.2, 60), ("Reykjavik", 4, 5), ("Denver", 12, 20),
    ]),
    Ticket: (("urgent", "room", "contact"), [
        (False, "312", None), (True, None, None), (False, None, None), (True, "server room", None),
        (False, "hall", "Mr Lee"),
    ]),
    Party: (("guests",), [
        (["Carl", "Dora"],), (["Mayor Hill", "Mrs Wood", "Dr Stone"],), ([],), (["our parents", "Luca"],),
        (["Emma", "Fred", "Gina"],),
    ]),
    Order: (("customer", "paid"), [
        ("Mr Brown", True), ("Anna Weiss", False), ("Paul", True), ("Lucy", False), ("hotel Adler", True),
    ]),
}  # fmt: skip


@sgl.function
def extract(s: Any, kind: Any, text: str, max_tokens: int, hint: str) -> None:
    fields = ", ".join(typing.get_type_hints(kind))
    form = f"\n\n{sgl.grammar.describe(kind)}" if hint == "shape" else ""
    s += sgl.user(f"Extract {fields} as JSON from this text:\n{text}{form}")
    s += sgl.assistant(sgl.gen("value", json_schema=kind, max_tokens=max_tokens, temperature=0))


def invented(kind: Any, value: Any) -> list[str]:
    """The names in a value of JSON that its type does not have."""
    if isinstance(value, list):
        return [name for each in value for name in invented(kind, each)]
    if not isinstance(value, dict):
        return []
    hints = typing.get_type_hints(kind)
    names = [name for name in value if name not in hints]
    if kind is Order:
        names += invented(Line, value.get("lines"))
    return names


def right(kind: Any, text: str, value: Any) -> int:
    """Number of right fields of a value."""
    names, rows = RIGHT.get(kind, ((), []))
    if not names:
        return 0
    wanted = rows[(PLAIN | ENDLESS)[kind].index(text)]
    return sum(_plain(value.get(name)) == _plain(each) for name, each in zip(names, wanted))


def _plain(value: Any) -> Any:
    return (
        [_plain(each) for each in value]
        if isinstance(value, list)
        else value
        if isinstance(value, int | float | None)
        else str(value).strip().lower()
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=5, help="how many of each type")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument(
        "--hint", choices=("names", "shape"), default="names", help="what the prompt says"
    )
    parser.add_argument("--show", action="store_true", help="all texts that were generated")
    options = parser.parse_args()
    for title, types in (("plain", PLAIN), ("with lists and dictionaries", ENDLESS)):
        given = [(kind, text) for kind, texts in types.items() for text in texts[: options.texts]]
        arguments = [
            {"kind": kind, "text": text, "max_tokens": options.max_tokens, "hint": options.hint}
            for kind, text in given
        ]
        finished, names, tokens, good = 0, 0, 0, 0
        for (kind, text), state in zip(given, extract.run_batch(arguments)):
            written, meta = state["value"], state.get_meta_info("value")
            done = meta["finish_reason"]["type"] == "stop"
            extra = invented(kind, json.loads(written)) if done else []
            good += right(kind, text, json.loads(written)) if done else 0
            finished, names, tokens = (
                finished + done,
                names + len(extra),
                tokens + meta["completion_tokens"],
            )
            if options.show or not done or extra:
                print(
                    f"{kind.__name__}: {'finished' if done else 'NOT FINISHED'} {extra or ''} {written}"
                )
        fields = sum(len(RIGHT[kind][0]) for kind, _ in given if kind in RIGHT)
        print(
            f"{title}: {finished} of {len(given)} finished, {good} of {fields} fields right, {names} names invented, "
            f"{tokens} tokens"
        )


if __name__ == "__main__":
    main()
