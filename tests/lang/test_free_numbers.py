"""Numbers of the default model: what it would write without a constraint, to where it would end."""

import sglang_lite as sgl
from sglang_lite.constraints.number_text import extract_leading_number
from sglang_lite.protocol import Number
from tests.counts import some

PROMPTS = [
    "The number of hours in a day is ", "The number of days in a week is ", "The population of Rome is ",
    "The number of minutes in an hour is ", "The number of months in a year is ", "The capital has a population of ",
    "The number of states in the USA is ", "The boiling point of water in Celsius is ", "Q: What is 2 + 2? A: ",
    "The Second World War ended in ", "The first man walked on the moon in ", "The number of planets is ",
    "The speed of light in m/s is ", "The height of Mount Everest in metres is ", "The value of pi is about ",
    "A dozen is ", "A century has this many years: ", "The number of legs of a spider is ", "The freezing point is ",
    "The number of continents is ", "The number of letters in the English alphabet is ", "A year has days: ",
    "The number of seconds in a minute is ", "The number of cards in a deck is ", "The human body has bones: ",
    "The population of Paris is ", "The population of China is ", "The distance to the moon in km is ",
    "The square root of 16 is ", "10 times 10 is ", "The atomic number of carbon is ", "Half of 50 is ",
    "The number of players in a football team is ", "The price of the book is $", "He was born in ", "Age: ",
    "Count: ", "Total: $", "The answer is ", "In a leap year February has ",
]  # fmt: skip


@sgl.function
def asks(s, prompt):
    s += prompt
    free, whole, floating = s.fork(3)
    free += sgl.gen("free", max_tokens=24)
    whole += sgl.gen("n", type=int, max_tokens=24) + " and"
    floating += sgl.gen("x", dtype=float, max_tokens=24)
    s["answers"] = [free["free"], whole["n"], floating["x"], whole.text()]


def test_a_number_is_the_one_that_free_text_begins_with(smollm):
    prompts = PROMPTS[:: some(3, 1)]
    states = asks.run_batch(
        [{"prompt": p} for p in prompts], backend=smollm, temperature=0, num_threads=len(prompts)
    )
    agree = 0
    for prompt, state in zip(prompts, states, strict=True):
        free, whole, floating, text = state["answers"]
        integer, decimal = (
            extract_leading_number(Number(kind), free) for kind in ("integer", "float")
        )
        agree += (str(whole), floating) == (integer.replace(",", ""), decimal.replace(",", ""))
        assert (
            text
            == f"{prompt}{extract_leading_number(Number('integer'), text.removeprefix(prompt))} and"
        )
    assert agree >= len(prompts) - 2
