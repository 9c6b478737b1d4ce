"""Right fields of extractions by a real model, and prompt tokens, for each way to show it the type.

    python benchmarks/descriptions.py MODEL.gguf [--ways none names schema describe] [--only design]
    [--show]

All ways ask for the same type with the same masks; only the system prompt differs. A field is right
if it has the value below, whatever the case; an object's fields count one by one, a list as a
whole, in any order. The rendering was chosen by the half "design"; the half "held-out" was looked
at once, afterwards.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import machine
from pydantic import BaseModel, Field

import sglang_lite as sgl

DESIGN = 3  # texts of each type by which the rendering was chosen


class Invoice(BaseModel):
    """A bill that a supplier has sent."""

    number: str
    supplier: str = Field(description="who is to be paid")
    issued: datetime.date
    due: datetime.date | None = Field(description="last day to pay, null if not stated")
    total: float = Field(description="with tax")
    currency: Literal["EUR", "USD", "GBP"]


class Ticket(BaseModel):
    """A message to a help desk."""

    device: str | None = Field(description="what it is about, in one or two words")
    severity: Literal["low", "normal", "critical"] = Field(
        description="critical: nobody can work; low: it can wait"
    )
    sender: str | None
    phone: str | None
    kind: Literal["fault", "question", "wish"]


class Candidate(BaseModel):
    """Somebody who applies for a job."""

    name: str
    born: int | None = Field(description="year")
    degree: Literal["none", "bachelor", "master", "doctorate"] = Field(description="the highest")
    languages: list[str] = Field(description="spoken, by their English names")
    experience: int | None = Field(description="years of work, null if not stated", ge=0)


class Ingredient(BaseModel):
    name: str
    grams: float | None = Field(description="null if the text has no weight")


class Recipe(BaseModel):
    dish: str
    serves: int | None = Field(description="number of people")
    minutes: int | None = Field(description="in all, an hour is 60")
    vegetarian: bool = Field(description="without meat and fish")
    ingredients: list[Ingredient]


class Leg(BaseModel):
    start: str = Field(description="city")
    end: str = Field(description="city")
    day: datetime.date


class Trip(BaseModel):
    """A booking of a journey."""

    passenger: str
    outward: Leg
    back: Leg | None = Field(description="the return, null if one way")
    seats: int
    means: Literal["train", "plane", "bus"]


# Each text with the values of its fields, in the order of the type.
CASES: dict[type[BaseModel], list[tuple[str, tuple[Any, ...]]]] = {
    Invoice: [
        ("Northwind Paper Ltd, invoice NW-2231 of 4 March 2025. Net 100.00 GBP, VAT 20.00, to pay: 120.00 GBP by "
         "3 April 2025.", ("NW-2231", "Northwind Paper Ltd", "2025-03-04", "2025-04-03", 120, "GBP")),
        ("Rechnung 77/18 von Blumen Huber, ausgestellt am 12.05.2024. Summe brutto 59,50 EUR. Dankend bar erhalten.",
         ("77/18", "Blumen Huber", "2024-05-12", None, 59.5, "EUR")),
        ("To: Baker & Sons. From: Ironclad Tools Inc. Invoice no. 5506, dated 2026-01-15, due 2026-02-14. Subtotal "
         "$1,150.00, tax $92.00, total $1,242.00.",
         ("5506", "Ironclad Tools Inc", "2026-01-15", "2026-02-14", 1242, "USD")),
        ("Facture F-903, Atelier Lumière, 2 juin 2025. Total TTC 240,00 EUR (HT 200,00). À régler avant le 30 juin "
         "2025.", ("F-903", "Atelier Lumière", "2025-06-02", "2025-06-30", 240, "EUR")),
        ("Bright Windows Cleaning billed Mrs Ortega 85 pounds on 9 October 2024, invoice 14. Paid on the spot.",
         ("14", "Bright Windows Cleaning", "2024-10-09", None, 85, "GBP")),
        ("INV-0042 | Seller: Cactus Cloud LLC | Buyer: Tom Reed | Issued 11/30/2025 | Pay within 30 days, by "
         "12/30/2025 | 400.00 + 8% = 432.00 USD",
         ("INV-0042", "Cactus Cloud LLC", "2025-11-30", "2025-12-30", 432, "USD")),
    ],
    Ticket: [
        ("Hi, Marta Silva here, ext. 4410. The whole office has no network since 8, we are all just sitting around!",
         ("network", "critical", "Marta Silva", "4410", "fault")),
        ("How do I print on both sides with the printer on floor 2? No hurry. Ben",
         ("printer", "low", "Ben", None, "question")),
        ("It would be nice to have a second monitor at my desk some day. Regards, Yuki Tanaka",
         ("monitor", "low", "Yuki Tanaka", None, "wish")),
        ("Scanner jams on every third page, please repair it this week. Call 030 5512, Olga.",
         ("scanner", "normal", "Olga", "030 5512", "fault")),
        ("THE TILL IS DOWN IN ALL SHOPS. Nobody can sell anything. - Deniz Kaya, 0171 99887",
         ("till", "critical", "Deniz Kaya", "0171 99887", "fault")),
        ("Can the projector in room 5 show films from a phone? It would be good to know before Friday.",
         ("projector", "normal", None, None, "question")),
    ],
    Candidate: [
        ("Lena Fischer, born 1990, PhD in chemistry (Basel), eight years at Novartis. Speaks German, English and "
         "French.", ("Lena Fischer", 1990, "doctorate", ["German", "English", "French"], 8)),
        ("My name is Raj Patel. I left school at 16 and have driven lorries for 12 years. I speak Hindi and English.",
         ("Raj Patel", None, "none", ["Hindi", "English"], 12)),
        ("Chiara Conti (classe 1999), laurea triennale in economia. Lingue: italiano, spagnolo.",
         ("Chiara Conti", 1999, "bachelor", ["Italian", "Spanish"], None)),
        ("Applicant: Omar Haddad. BSc 2011, MSc 2013, software developer for ten years. Arabic and English fluently.",
         ("Omar Haddad", None, "master", ["Arabic", "English"], 10)),
        ("Ich heiße Jonas Weber, Jahrgang 1985, Master in Physik, und spreche Deutsch und Polnisch.",
         ("Jonas Weber", 1985, "master", ["German", "Polish"], None)),
        ("Grace Lee, 1978, no degree, 20 years as a pastry chef in Seoul and London; Korean, English.",
         ("Grace Lee", 1978, "none", ["Korean", "English"], 20)),
    ],
    Recipe: [
        ("Pancakes for 4: 250 g flour, 3 eggs, 500 g milk. Half an hour.",
         ("pancakes", 4, 30, True, [("flour", 250), ("eggs", None), ("milk", 500)])),
        ("Tuna salad (serves two): mix 150 g tuna with 200 g beans and an onion. Ready in 10 minutes.",
         ("tuna salad", 2, 10, False, [("tuna", 150), ("beans", 200), ("onion", None)])),
        ("Beef stew. Brown 800 g beef, add 400 g carrots and 300 g potatoes, and cook for an hour and a half.",
         ("beef stew", None, 90, False, [("beef", 800), ("carrots", 400), ("potatoes", 300)])),
        ("Lentil soup for six people: 300 g lentils, 100 g celery, one lemon; simmer for 45 minutes.",
         ("lentil soup", 6, 45, True, [("lentils", 300), ("celery", 100), ("lemon", None)])),
        ("Chicken rice: 2 hours. You need a chicken and 350 g rice. Enough for five.",
         ("chicken rice", 5, 120, False, [("chicken", None), ("rice", 350)])),
        ("Apple crumble. 600 g apples, 150 g butter, 200 g sugar.",
         ("apple crumble", None, None, True, [("apples", 600), ("butter", 150), ("sugar", 200)])),
    ],
    Trip: [
        ("Please book 2 seats on the train from Vienna to Graz on 5 May 2025 for Anna Mayr, back on 7 May 2025.",
         ("Anna Mayr", ("Vienna", "Graz", "2025-05-05"), ("Graz", "Vienna", "2025-05-07"), 2, "train")),
        ("Flight confirmation: Carlos Ruiz, Madrid - Oslo, 2024-12-01, one way, 1 passenger.",
         ("Carlos Ruiz", ("Madrid", "Oslo", "2024-12-01"), None, 1, "plane")),
        ("Coach tickets for the Smith family (4 persons, booked by Jane Smith): Leeds to York on 1 August 2025, "
         "return on 3 August 2025.",
         ("Jane Smith", ("Leeds", "York", "2025-08-01"), ("York", "Leeds", "2025-08-03"), 4, "bus")),
        ("Ms Ito takes the Shinkansen from Tokyo to Kyoto on 10 March 2026. One seat, no return.",
         ("Ms Ito", ("Tokyo", "Kyoto", "2026-03-10"), None, 1, "train")),
        ("Three seats by bus: Paul Okafor, Lagos to Ibadan 2025-02-20, Ibadan to Lagos 2025-02-22.",
         ("Paul Okafor", ("Lagos", "Ibadan", "2025-02-20"), ("Ibadan", "Lagos", "2025-02-22"), 3, "bus")),
        ("Elena Popova fliegt am 3. Juli 2025 von Berlin nach Rom und am 10. Juli 2025 zurück, allein.",
         ("Elena Popova", ("Berlin", "Rome", "2025-07-03"), ("Rome", "Berlin", "2025-07-10"), 1, "plane")),
    ],
}  # fmt: skip


def shown(kind: type[BaseModel], way: str) -> str:
    """What a way's prompt says of a type."""
    if way == "none":
        return ""
    if way == "names":
        return f"\nFields: {', '.join(kind.model_fields)}"
    if way == "schema":
        return f"\nJSON schema: {json.dumps(kind.model_json_schema())}"
    return f"\n{sgl.describe(kind)}"


@sgl.function
def extract(s: sgl.ProgramState, kind: Any, text: str, way: str) -> None:
    s += sgl.system(f"Extract the {kind.__name__.lower()} from the text as JSON.{shown(kind, way)}")
    s += sgl.user(text)
    s += sgl.assistant(sgl.gen("value", type=kind, temperature=0, max_tokens=300, shortened="keep"))


def leaves(value: Any, wanted: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each field of an object with its right value; a missing object's fields are missing."""
    if isinstance(wanted, tuple):
        found = list(value.values()) if isinstance(value, dict) else []
        for at, each in enumerate(wanted):
            yield from leaves(found[at] if at < len(found) else "(missing)", each)
    else:
        yield value, wanted


def plain(value: Any) -> str:
    """Form in which values are compared: fields of objects by position, text without case."""
    if isinstance(value, list):
        return repr(sorted(map(plain, value)))
    if isinstance(value, dict | tuple):
        return repr(
            [plain(each) for each in (value.values() if isinstance(value, dict) else value)]
        )
    return (
        str(float(value)) if isinstance(value, int | float) else str(value).strip(" .").casefold()
    )


def right(
    state: sgl.ProgramState, kind: type[BaseModel], wanted: tuple[Any, ...], *, show: bool
) -> tuple[int, int]:
    """Numbers of right fields and of all fields."""
    value = state["value"]
    value = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    pairs = list(leaves({name: value.get(name) for name in kind.model_fields}, wanted))
    wrong = [(found, each) for found, each in pairs if plain(found) != plain(each)]
    if show and wrong:
        print(f"  {kind.__name__}: {wrong}", flush=True)
    return len(pairs) - len(wrong), len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--ways", nargs="+", default=["none", "names", "schema", "describe"])
    parser.add_argument("--only", choices=("design", "held-out"), help="one half of the texts")
    parser.add_argument("--show", action="store_true", help="wrong fields, as (found, right)")
    options = parser.parse_args()
    print(machine.describe(), options.model, flush=True)
    cases = [
        (kind, text, wanted, "design" if i < DESIGN else "held-out")
        for kind, rows in CASES.items()
        for i, (text, wanted) in enumerate(rows)
        if options.only in (None, "design" if i < DESIGN else "held-out")
    ]
    with sgl.Engine(options.model, max_total_tokens=8192) as engine:
        for way in options.ways:
            start = time.perf_counter()
            states = extract.run_batch(
                [(kind, text, way) for kind, text, *_ in cases], backend=engine
            )
            counts: dict[str, list[tuple[int, int]]] = {}
            for state, (kind, _, wanted, half) in zip(states, cases):
                counts.setdefault(half, []).append(right(state, kind, wanted, show=options.show))
            usage = [state.usage("value") for state in states]
            found = ", ".join(
                f"{half} {sum(good for good, _ in each)} of {sum(every for _, every in each)}"
                for half, each in counts.items()
            )
            prompt, answer = (
                sum(tokens) / len(usage)
                for tokens in zip(*((u.prompt_tokens, u.completion_tokens) for u in usage))
            )
            print(
                f"{way}: right fields: {found}; tokens a prompt {prompt:.0f}, an answer {answer:.0f}; "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
