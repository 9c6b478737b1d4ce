"""A nested form: an order with an address and a list of lines, filled from a message.
Run: python examples/nested_form.py"""

from typing import Literal

from pydantic import BaseModel, Field

import sglang_lite as sgl


class Line(BaseModel):
    count: int = Field(ge=1, le=20)
    color: Literal["black", "blue", "green", "red"]
    item: str = Field(max_length=20)


class Address(BaseModel):
    street: str = Field(max_length=30)
    city: str = Field(max_length=20)


class Order(BaseModel):
    lines: list[Line] = Field(min_length=1, max_length=4)
    customer: str = Field(pattern=r"^[A-Z]\w+ [A-Z]\w+$")
    address: Address


EXAMPLES = {
    "One black coat for Nils Berg, Hill Street 2, Bergen.": Order(
        lines=[Line(count=1, color="black", item="coat")],
        customer="Nils Berg",
        address=Address(street="Hill Street 2", city="Bergen"),
    ),
    "I want 4 green socks and 7 black belts. Ana Gil, Rua Nova 8, Lisbon.": Order(
        lines=[
            Line(count=4, color="green", item="socks"),
            Line(count=7, color="black", item="belts"),
        ],
        customer="Ana Gil",
        address=Address(street="Rua Nova 8", city="Lisbon"),
    ),
}
order = sgl.gen("order", type=Order, max_tokens=160, temperature=0)


@sgl.function
def fill(s: sgl.ProgramState, message: str) -> None:
    for example, answer in EXAMPLES.items():
        s += sgl.user(f"Fill in the order: {example}") + sgl.assistant(answer.model_dump_json())
    s += sgl.user(f"Fill in the order: {message}") + sgl.assistant(order)


def main() -> None:
    state = fill(
        "Please send 2 red shirts and 3 blue caps to Ines Roth, Lake Road 14, Dublin."
    ).run()
    print(state[order].model_dump_json(indent=2))


if __name__ == "__main__":
    main()
