"""Cleaning of a CSV file: each messy cell becomes what its column's regex allows.
Run: python examples/clean_csv.py"""

import csv
import sys
from pathlib import Path

import sglang_lite as sgl

PRICE = "$ 12 = 12.00\n7,50 EUR = 7.50\n3 dollars = 3.00\nEUR 20,- = 20.00\n"
YEAR = "5 May 1998 = 1998\nsummer of 2012 = 2012\nJan. 2007 = 2007\n10/2015 = 2015\n"
COUNTRY = "Deutschland = DE\nU.S.A. = US\nEspaña = ES\nItalia = IT\nFrance = FR\n"
COLUMNS = {
    "price": (PRICE, r" \d{1,4}\.\d\d"),
    "year": (YEAR, r" (19|20)\d\d"),
    "country": (COUNTRY, " [A-Z]{2}"),
}


@sgl.function
def clean(s: sgl.ProgramState, column: str, cell: str) -> None:
    examples, regex = COLUMNS[column]
    s += f"{examples}{cell} =" + sgl.gen("clean", regex=regex, max_tokens=8, temperature=0)


def main() -> None:
    with Path(__file__).with_name("data").joinpath("orders.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    cells = [(row, column) for row in rows for column in COLUMNS]
    states = clean.run_batch([{"column": column, "cell": row[column]} for row, column in cells])
    for (row, column), state in zip(cells, states):
        row[column] = state["clean"].strip()
    table = csv.DictWriter(sys.stdout, rows[0], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)


if __name__ == "__main__":
    main()
