"""Which recipe is right with which model: how it is judged, and what docs/models.md says."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from tests.test_examples import PRINTED, RECIPES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
# Recipes that load a model of their own: the reason why they say nothing of the one that a test
# gives.
OWN_MODEL = {
    "documents_ray": "engines on a cluster load the default model",
    "hub_model": "loads a folder of the hub, as tests/real/test_hub.py does",
}
NOT_RUN, VARIES = "–", "varies"
# What a recipe of which the page says "varies" prints at times, and what it prints at others, which
# is right.
NEAR_TIES = {"clean_csv": (",2003,SP", ",2003,ES")}
BIRDS = {
    "bird", "chicken", "crow", "dove", "duck", "eagle", "falcon", "goose", "hawk", "hen", "ostrich", "owl", "parrot", "peacock",
    "penguin", "pigeon", "raven", "robin", "rooster", "songbird", "sparrow", "swan", "turkey",
}  # fmt: skip
CAPITALS = {
    "Austria": "Vienna", "Belgium": "Brussels", "Denmark": "Copenhagen", "England": "London", "Finland": "Helsinki",
    "France": "Paris", "Germany": "Berlin", "Greece": "Athens", "Ireland": "Dublin", "Italy": "Rome", "Norway": "Oslo",
    "Poland": "Warsaw", "Portugal": "Lisbon", "Russia": "Moscow", "Spain": "Madrid", "Sweden": "Stockholm",
}  # fmt: skip


def has(*patterns: str) -> Callable[[str], bool]:
    """Returns a check that all patterns occur in what a recipe prints, in this order."""
    return lambda printed: re.search(".*".join(patterns), printed, re.DOTALL) is not None


def is_bird(printed: str) -> bool:
    return printed.rpartition("Answer: ")[2].strip() in BIRDS


def capitals_are_right(printed: str) -> bool:
    said = re.findall(r"^The capital of (\w+) is (\w+)", printed, re.MULTILINE)
    return len(said) == 3 and all(CAPITALS.get(country) == capital for country, capital in said)


def fills_the_form(printed: str) -> bool:
    """Returns True if an order is that of the page; "2 shirt" is "2 shirts"."""
    try:
        found, wanted = json.loads(printed), json.loads(shown("nested_form"))
    except json.JSONDecodeError:
        return False
    for line in (*found["lines"], *wanted["lines"]):
        line["item"] = line["item"].removesuffix("s")
    return bool(found == wanted)


def is_calibrated(printed: str) -> bool:
    """Returns True if about as many rows are right as the program is sure of."""
    found = re.search(r"calibrated +(\d+) of (\d+) right, (\d+)% sure", printed)
    if found is None:
        return False
    right, count, sure = map(int, found.groups())
    return abs(100 * right / count - sure) <= 10


def shown(name: str) -> str:
    """Returns what a recipe's page shows."""
    found = PRINTED.search(RECIPES[name].read_text())
    assert found is not None
    return found[0]


# What is right, by the recipe's own count where it has one. Of others the page shows the one right
# answer.
RIGHT: dict[str, Callable[[str], bool]] = {
    "chat": has(
        r"Italy\?\nModel: [^\n]*Rome",
        r"Spain\?\nModel: [^\n]*Madrid",
        r"make\?\nModel: [^\n]*honey",
    ),
    "calibrated": is_calibrated,
    "coding_agent": has(r"return width \* height\nOK"),
    "data_agent": has("-> 10 ", "-> 270 ", "-> 180 "),
    "evaluation": has("8 examples: 6 of 6 right"),
    "extraction": has("name +8 of 8", "age +8 of 8", "city +8 of 8"),
    "few_shot_file": has("6 of 6 are right"),
    "from_sglang": has(r"Rome[^\n]*Paris", r"Rome[^\n]*Paris", "the same: True"),
    "judge": has(r"capital of France is Paris\. \(", r"eight legs\. \(", r"drink water\. \("),
    "nested_form": fills_the_form,
    "notebook": has("Selection\\(picked='positive'"),
    "own_gguf": has("-> .*Paris"),
    "prompts_in_files": has("topic_v1: ", "topic_v2: "),  # there is no one right topic
    "rag": has(
        r"closed\?\n[^\n]*cracks", r"museum\?\n[^\n]*eight dollars", r"leave\?\n[^\n]*old harbour"
    ),
    "react": has("-> Dijon", "-> Stratford"),
    "self_consistency": has(r"insect\? no", r"mammal\? yes", r"country\? no"),
    "skeleton_of_thought": capitals_are_right,
    "support_agent": has(r"waiting: PendingCall\(refund", r"\n.*\{'A17': 40.0\} answer: [^\n]*40"),
    "three_backends": has(r"engine +City\(name='Paris', country='France'\)"),
    "tree_of_thought": is_bird,
    "web_handler": has('"positive"', '"negative"', "400"),
}


def is_right(name: str, printed: str) -> bool:
    """Returns True if what a recipe prints is right."""
    return RIGHT[name](printed) if name in RIGHT else printed == shown(name)


def verdicts(model: str) -> dict[str, str]:
    """Returns a model's column of the table, by recipe: "right", "wrong: " and what is wrong,
    "varies: " and what does, or `NOT_RUN`.
    """
    section = (
        PAGE.read_text().partition("## Which model does which recipe")[2].partition("\n## ")[0]
    )
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in section.splitlines()
        if row.startswith("| ")
    ]
    column = next(row for row in rows if f"`{model}`" in row).index(f"`{model}`")
    links = ((re.search(r"cookbook/(\w+)\.md", row[0]), row) for row in rows)
    return {link[1]: row[column] for link, row in links if link}
