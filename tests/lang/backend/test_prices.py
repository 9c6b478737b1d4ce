"""Usage and prices: the same fields from every provider, and no price where one is not known."""

import tomllib
from pathlib import Path

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import Usage
from sglang_lite.testing import Say

FILE = Path(sgl.__file__).parent / "lang/backend/profiles/prices.toml"


@sgl.function
def program(s):
    s += sgl.user("Where is the Louvre?")
    s += sgl.assistant(sgl.gen("city"))


@pytest.mark.parametrize(
    ("kind", "model", "regex"),
    [
        (sgl.OpenAI, "gpt-4o", None),
        (sgl.OpenAI, "gpt-5", r"[a-z]+ [A-Z][a-z]+"),
        (sgl.Anthropic, "claude-opus-5", None),
    ],
    ids=["chat", "responses", "messages"],
)
def test_every_api_tells_reasoning_cached_and_written_tokens(api, connected, kind, model, regex):
    api.answers = Say("in Paris", thinking="France it is.", cached=2, written=1)
    backend = connected(kind, model, path="/v1" if kind is sgl.OpenAI else "")

    @sgl.function
    def twice(s):
        for name in "ab":
            s += sgl.user("Where is the Louvre?")
            s += sgl.assistant(sgl.gen(name, regex=regex))

    state = twice.run(backend=backend)
    for usage, times in ((state.usage("a"), 1), (state.usage(), 2)):
        assert (usage.cached_tokens, usage.written_tokens) == (2 * times, times)
        assert (usage.reasoning_tokens, usage.completion_tokens) == (3 * times, 5 * times)


def test_a_price_is_of_each_kind_of_token():
    usage = Usage(1000, 400, 50, written_tokens=100)
    assert sgl.Price(2.0, 10.0, cached=1.0, written=4.0).of(usage) == pytest.approx(0.0023)
    assert sgl.price(usage, "claude-opus-5") == pytest.approx(
        (500 * 5 + 400 * 0.5 + 100 * 6.25 + 50 * 25) / 1e6
    )


def test_what_is_not_known_is_none_and_never_nothing():
    usage = Usage(1000, 400, 50, written_tokens=100)
    assert sgl.price(usage, "gpt-nobody-has") is None
    # another provider's price of the same name may be another
    assert sgl.price(usage, "my/gpt-4o") is None
    assert sgl.Price(2.0, 10.0, cached=1.0).of(usage) is None
    assert sgl.Price(2.0, 10.0, cached=1.0, written=1.0, up_to=999).of(usage) is None
    assert sgl.Price(2.0, 10.0).of(Usage(10, 0, 5)) == pytest.approx(70e-6)
    assert (
        sgl.price(Usage(10, 0, 5), "openai/gpt-4o")
        == sgl.price(Usage(10, 0, 5), "gpt-4o")
        == pytest.approx(75e-6)
    )


def test_a_price_of_ones_own_wins(connected):
    backend = connected(sgl.OpenAI, "gpt-4o")
    assert backend.cost(Usage(10, 0, 5)) == pytest.approx(75e-6)
    backend.price = sgl.Price(1.0, 1.0)
    assert backend.cost(Usage(10, 0, 5)) == pytest.approx(15e-6)
    assert sgl.ScriptedBackend().cost(Usage(10, 0, 5)) is None


def test_the_file_is_dated_has_its_source_and_sane_prices():
    found = tomllib.loads(FILE.read_text())
    assert found.pop("read").year >= 2026
    assert found.pop("source")
    for models in found.values():
        for name, prices in models.items():
            assert (
                {"input", "output"}
                <= prices.keys()
                <= {"input", "output", "cached", "written", "up_to"}
            ), name
            assert 0 < prices["input"] <= prices["output"], name
            assert 0 < prices.get("cached", 0.001) <= prices["input"], name
            assert prices.get("written", prices["input"]) >= prices["input"], name
