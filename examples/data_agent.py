"""A data agent in code mode: the model writes a small program over two functions, which is checked and
run without Python's exec. Run: python examples/data_agent.py [MODEL]"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Literal

import sglang_lite as sgl

FILE = Path(__file__).with_name("data") / "sales.csv"
Region = Literal["north", "south", "west"]


@dataclass(frozen=True)
class Sale:
    day: str
    product: str
    units: int
    price: int


def list_sales(region: Region) -> list[Sale]:
    """Sales of a region, with their day, product, units and price of a unit in dollars."""
    with FILE.open() as file:
        rows = [row for row in csv.DictReader(file) if row["region"] == region]
    return [Sale(r["day"], r["product"], int(r["units"]), int(r["price"])) for r in rows]


def cost(product: str) -> int:
    """What a unit of a product costs the shop, in dollars."""
    return {"kettle": 22, "lamp": 9, "chair": 31}[product]


@sgl.function
def analyse(s: sgl.ProgramState, question: str) -> object:
    code = sgl.CodeTools([list_sales, cost], max_calls=50)
    s += sgl.system(code.describe())
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", 200, code=code, temperature=0))
    return s["answer"]


def main() -> None:
    backend = sgl.Engine(sys.argv[1]) if sys.argv[1:] else None
    for question in (
        "How many units were sold in the south?",
        "What is the revenue in the north? The revenue of a sale is units * price.",
        "What is the profit in the west? The profit of a sale is units * (price - cost).",
    ):
        state = analyse.run(question, backend=backend)
        calls = state.get_meta_info("answer")["code_calls"]
        print(question, indent(str(state.raw("answer")), "    "), sep="\n")
        print(f"-> {state.ret_value} (calls: {len(calls)})\n")


if __name__ == "__main__":
    main()
