"""Tools that the cases offer: those of the tool choices, which do nothing, and those of the agents, which change a
world of notes, stock and calendar.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from copy import deepcopy
from typing import Annotated, Any, Literal

from pydantic import Field

Currency = Literal["EUR", "USD", "GBP", "JPY"]
Clock = Annotated[str, Field(pattern=r"^[0-2][0-9]:[0-5][0-9]$", description="HH:MM in 24 hours")]
Tool = Callable[..., Any]


def weather(city: str, day: Literal["today", "tomorrow"]) -> None:
    """Weather forecast for a city."""


def convert(amount: float, source: Currency, target: Currency) -> None:
    """Converts an amount of money from one currency to another."""


def set_timer(minutes: int) -> None:
    """Starts a timer that rings after this many minutes."""


def call_contact(name: str) -> None:
    """Phones a person from the user's contacts."""


def book_table(restaurant: str, people: int, time: Clock) -> None:
    """Books a table at a restaurant for tonight."""


def set_volume(percent: int) -> None:
    """Sets the volume of the speakers, from 0 to 100 percent."""


def set_light(room: Literal["kitchen", "bedroom", "hall"], on: bool) -> None:
    """Switches the light of a room on or off."""


def translate(word: str, language: Literal["German", "Spanish", "French"]) -> None:
    """Looks an English word or phrase up in a dictionary of another language."""


def search_trains(origin: str, destination: str, date: datetime.date) -> None:
    """Finds trains between two cities on a day (YYYY-MM-DD)."""


def distance(origin: str, destination: str) -> None:
    """Distance by road between two cities."""


def add_item(item: str, quantity: int) -> None:
    """Puts a quantity of an item on the shopping list."""


TOOLS: dict[str, Tool] = {
    tool.__name__: tool
    for tool in (
        weather, convert, set_timer, call_contact, book_table, set_volume, set_light, translate, search_trains,
        distance, add_item,
    )
}  # fmt: skip


def world_tools(world: dict[str, Any]) -> list[Tool]:
    """Tools that read and change the parts that a world has. A call that can't be done returns what is wrong."""
    made = {"notes": _note_tools, "stock": _stock_tools, "calendar": _calendar_tools}
    return [tool for part in made if part in world for tool in made[part](world[part])]


def _note_tools(notes: dict[str, str]) -> list[Tool]:
    def read_notes() -> dict[str, str]:
        """All notes: their titles and texts."""
        return deepcopy(notes)

    def write_note(title: str, text: str) -> str:
        """Writes a note, in place of one with the same title."""
        notes[title] = text
        return "done"

    def delete_note(title: str) -> str:
        """Deletes a note."""
        return "no such note" if notes.pop(title, None) is None else "done"

    return [read_notes, write_note, delete_note]


def _stock_tools(stock: dict[str, int]) -> list[Tool]:
    def read_stock() -> dict[str, int]:
        """All items in stock and how many there are of each."""
        return deepcopy(stock)

    def change_stock(item: str, change: int) -> str:
        """Adds to the stock of an item, or takes from it if the change is negative."""
        if item not in stock:
            return f"no such item; there are {', '.join(stock)}"
        stock[item] += change
        return f"{stock[item]} left"

    return [read_stock, change_stock]


def _calendar_tools(calendar: dict[str, str]) -> list[Tool]:
    def read_calendar() -> dict[str, str]:
        """All events: their titles, days and times."""
        return deepcopy(calendar)

    def add_event(title: str, date: str, time: str) -> str:
        """Adds an event, in place of one with the same title. The date is YYYY-MM-DD and the time HH:MM."""
        if not re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", f"{date} {time}"):
            return "the date must be YYYY-MM-DD and the time HH:MM"
        calendar[title] = f"{date} {time}"
        return "done"

    def delete_event(title: str) -> str:
        """Deletes an event."""
        return "no such event" if calendar.pop(title, None) is None else "done"

    return [read_calendar, add_event, delete_event]
