"""Types that the extraction texts are read into. Imports pydantic alone: instructor's environment has nothing else."""

from __future__ import annotations

import datetime
from typing import Literal

from pydantic import BaseModel, Field


class Invoice(BaseModel):
    total: float = Field(description="Amount to pay, taxes and fees included.")
    due: datetime.date | None = Field(
        None,
        description="Day by which it must be paid or on which it is collected, as YYYY-MM-DD; "
        "null if the text names no day. In dates such as 3/4/2025 the day comes first.",
    )
    order_number: str | None = Field(
        None, description="Number of the order, not of the invoice; null if the text has none."
    )


class Candidate(BaseModel):
    name: str = Field(description="Full name.")
    employer: str | None = Field(None, description="Present employer; null if there is none or the text names none.")
    years: int | None = Field(
        None, description="Years of work experience in all; null if the text doesn't state their number."
    )
    email: str | None = Field(None, description="E-mail address; null if the text has none.")


class Ticket(BaseModel):
    product: str = Field(description="Name of the product that the message is about, without its version.")
    version: str | None = Field(
        None, description="Version of the product, its number alone; null if the text has none."
    )
    urgent: bool = Field(description="true only if the writer says that it is urgent or can't wait.")


class Recipe(BaseModel):
    servings: int | None = Field(None, description="Number of people or portions; null if the text doesn't state it.")
    oven_celsius: int | None = Field(
        None, description="Temperature of the oven in degrees Celsius; null if the text has none."
    )
    minutes: int | None = Field(
        None,
        description="Minutes of baking, frying or cooking, without resting and cooling; "
        "null if the text doesn't state them.",
    )


class Week(BaseModel):
    monday: int | None = Field(
        None,
        description="Visitors on Monday: 0 if it was open and nobody came; null if it was closed or the text has no "
        "number.",
    )
    tuesday: int | None = Field(None, description="Visitors on Tuesday, likewise.")
    wednesday: int | None = Field(None, description="Visitors on Wednesday, likewise.")
    thursday: int | None = Field(None, description="Visitors on Thursday, likewise.")
    friday: int | None = Field(None, description="Visitors on Friday, likewise.")


class Event(BaseModel):
    date: datetime.date = Field(
        description="Day of the event, as YYYY-MM-DD. In dates such as 3/4/2025 the day comes first."
    )
    start: str | None = Field(
        None,
        pattern=r"^\d\d:\d\d$",
        description="Time when it begins for guests, as HH:MM in 24 hours; null if unknown.",
    )
    place: str | None = Field(
        None, description="Place as the text names it, without a preposition; null if the text names none."
    )
    fee: float | None = Field(None, description="Price for one person, 0 if it is free; null if the text doesn't say.")


class Flat(BaseModel):
    rent: int = Field(description="Monthly rent without heating and other costs.")
    rooms: float | None = Field(None, description="Number of rooms; null if the text states no number.")
    pets: bool | None = Field(None, description="Whether pets are allowed; null if the text doesn't say.")


class Shipment(BaseModel):
    status: Literal["delivered", "delayed", "lost", "damaged"] = Field(description="State of the shipment.")
    tracking: str | None = Field(None, description="Number of the shipment; null if the text has none.")
    parcels: int | None = Field(None, description="Number of parcels or boxes; null if the text states none.")


SCHEMAS: dict[str, type[BaseModel]] = {
    each.__name__.lower(): each for each in (Invoice, Candidate, Ticket, Recipe, Week, Event, Flat, Shipment)
}
