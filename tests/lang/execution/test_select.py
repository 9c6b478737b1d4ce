"""Selections in programs: the three rules, temperatures, probabilities, several answers."""

import math
from collections import Counter

import pytest

import sglang_lite as sgl
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from sglang_lite.protocol import Generation, SamplingParams
from tests.lang.fakes import Scored, line_here

# As in SGLang's test of its rules, with numbers of our own: "organ" is the start of "organism", and
# the long word is certain once it has begun. [(token, with the prompt, without it)]
WORDS = {
    "organ": [(1, -0.7, None)],
    "organism": [(1, -0.7, None), (2, -0.9, -4.0)],
    "antidisestablishmentarianism": [
        (3, -1.6, None),
        *((i, -0.02, -0.02) for i in range(4, 10)),
        (2, -0.02, -0.02),
    ],
}
RULES = {
    "token length": sgl.token_length_normalized,
    "greedy": sgl.greedy_token_selection,
    "unconditional": sgl.unconditional_likelihood_normalized,
}


def choose(table, backend=None, seed=None, **options):
    @sgl.function
    def program(s):
        s += "The word is " + sgl.select("word", list(table), **options) + "."

    return program.run(backend=backend or Scored(table), seed=seed)


@pytest.mark.parametrize(
    ("rule", "picked"),
    [
        ("token length", "antidisestablishmentarianism"),
        ("greedy", "organ"),
        ("unconditional", "organism"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_each_rule_picks_its_word_in_whatever_order_they_stand(rule, picked, turned):
    words = dict(reversed(WORDS.items())) if turned else WORDS
    state = choose(words, choices_method=RULES[rule])
    assert state["word"] == picked
    assert state.text() == f"The word is {picked}."


def test_the_rules_report_what_they_compared():
    meta = choose(WORDS, choices_method=RULES["greedy"]).get_meta_info("word")
    matrix = meta["greedy_logprob_matrix"]
    assert matrix[0] == [-0.7] * 8  # its own mean continues it
    assert matrix[1] == pytest.approx([-0.7, -0.9] + [-0.8] * 6)
    meta = choose(WORDS, choices_method=RULES["unconditional"]).get_meta_info("word")
    assert meta["normalized_unconditional_prompt_logprobs"] == pytest.approx([-0.7, 1.2, -0.2])
    meta = choose(WORDS).get_meta_info("word")
    assert meta["normalized_prompt_logprobs"] == pytest.approx([-0.7, -0.8, -1.74 / 8])


def test_probabilities_come_from_all_tokens_and_add_up_to_one():
    state = choose(
        {"a": [(1, math.log(0.3), None)], "b": [(2, math.log(0.5), None), (3, math.log(0.2), None)]}
    )
    assert state.selection("word").probs == {"a": pytest.approx(0.75), "b": pytest.approx(0.25)}


def test_every_score_can_be_looked_at():
    scores = choose(WORDS).selection("word").scores
    assert [score.text for score in scores] == list(WORDS)
    assert scores[1].token_ids == (1, 2)
    assert scores[1].logprobs == (-0.7, -0.9)


# ------------------------------------------------------------------------------------- temperatures

EVEN = {"a": [(1, math.log(0.8), None)], "b": [(2, math.log(0.2), None)]}


def shares(temperature, draws=2000, **options):
    found = Counter(
        choose(EVEN, seed=seed, temperature=temperature, **options)["word"] for seed in range(draws)
    )
    return {choice: count / draws for choice, count in found.items()}


def test_at_temperature_one_choices_are_drawn_by_their_probability():
    assert shares(1.0)["a"] == pytest.approx(0.8, abs=0.03)


def test_a_temperature_sharpens_and_flattens():
    assert shares(0.5)["a"] == pytest.approx(0.8**2 / (0.8**2 + 0.2**2), abs=0.03)
    assert shares(100.0)["a"] == pytest.approx(0.5, abs=0.04)


def test_greedy_draws_walk_the_tree_of_tokens():
    """ "organ" and "organism" share the first token, so together they are as likely as it is."""
    table = {
        "x": [(1, math.log(0.5), None), (2, math.log(0.9), None)],
        "y": [(3, math.log(0.5), None)],
    }
    draws = Counter(
        choose(table, seed=seed, temperature=1.0, choices_method=RULES["greedy"])["word"]
        for seed in range(1000)
    )
    assert draws["x"] / 1000 == pytest.approx(0.5, abs=0.05)  # 0.9 is not compared with anything


def test_a_seed_repeats_the_draws_and_none_does_not():
    def drawn(seed):
        return [choose(EVEN, seed=seed, temperature=5.0)["word"] for _ in range(30)]

    assert len(set(drawn(1))) == 1
    assert len(set(drawn(None))) == 2


def test_draws_in_one_run_are_independent():
    @sgl.function
    def program(s):
        for i in range(30):
            s += sgl.select(f"w{i}", ["a", "b"], temperature=5.0)

    state = program.run(backend=Scored(EVEN), seed=1)
    assert len({state[f"w{i}"] for i in range(30)}) == 2


# ---------------------------------------------------------------------------------- several answers


class Steps(sgl.BaseBackend):
    """Scores as many choices as there are by the text so far: the likeliest is what `best` says
    after it.
    """

    def __init__(self, best):
        super().__init__()
        self._best = best
        self.asked = []

    async def aselect(self, prompt, choices, *, unconditional):
        self.asked.append((prompt.text, tuple(choices)))
        table = {
            c: [(i, -0.1 if c == self._best[prompt.text] else -5.0, -1.0)]
            for i, c in enumerate(choices)
        }
        return await Scored(table).aselect(prompt, choices, unconditional=unconditional)


def several(best, **options):
    @sgl.function
    def program(s):
        s += (
            "Pets: "
            + sgl.select("pets", ["cat", "dog", "owl"], **options)
            + sgl.gen("after", backend=after)
        )

    after = sgl.ScriptedBackend(default="!")
    backend = Steps(best)
    return program.run(backend=backend), backend


ONE_BY_ONE = {"Pets: ": "dog", "Pets: dog": ", cat", "Pets: dog, cat": "\n"}


@pytest.mark.parametrize("rule", RULES)
def test_several_choices_are_taken_until_the_end_is_likelier(rule):
    state, backend = several(ONE_BY_ONE, multi=True, choices_method=RULES[rule])
    assert state["pets"] == ["dog", "cat"]
    assert state.text() == "Pets: dog, cat!"
    assert backend.asked == [
        ("Pets: ", ("cat", "dog", "owl")),
        ("Pets: dog", (", cat", ", owl", "\n")),
        ("Pets: dog, cat", (", owl", "\n")),
    ]


def test_all_choices_may_be_taken():
    state, _ = several(ONE_BY_ONE | {"Pets: dog, cat": ", owl"}, multi=True)
    assert state["pets"] == ["dog", "cat", "owl"]
    assert state.raw("pets") == ["dog", "cat", "owl"]


def test_several_choices_report_every_step():
    state, _ = several(ONE_BY_ONE, multi=True)
    assert [
        len(step["normalized_prompt_logprobs"]) for step in state.get_meta_info("pets")["samples"]
    ] == [3, 3, 2]
    assert state.usage("pets").completion_tokens == 0


def test_several_choices_stream():
    @sgl.function
    def program(s):
        s += "Pets: " + sgl.select("pets", ["cat", "dog", "owl"], multi=True) + "."

    state = program.run(backend=Steps(ONE_BY_ONE), stream=True)
    assert "".join(state.text_iter("pets")) == "dog, cat"
    assert "".join(state.text_iter()) == "Pets: dog, cat."


def test_each_of_several_draws_has_a_seed_of_its_own():
    """With one seed for all steps, a first draw from the left end would make every draw one from
    the left end.
    """

    class Even(sgl.BaseBackend):
        async def aselect(self, prompt, choices, *, unconditional):
            return await Scored({c: [(i, -1.0, None)] for i, c in enumerate(choices)}).aselect(
                prompt, choices, unconditional=unconditional
            )

    @sgl.function
    def program(s):
        s += sgl.select("x", [str(i) for i in range(8)], temperature=1.0, multi=True)

    places = []
    for seed in range(60):
        left = [str(i) for i in range(8)]
        for taken in program.run(backend=Even(), seed=seed)["x"]:
            places.append(left.index(taken) / len(left))
            left.remove(taken)
    steps = [abs(a - b) for a, b in zip(places[::2], places[1::2])]
    assert sum(steps) / len(steps) > 0.15


# ------------------------------------------------------------------------------- rules and refusals


def test_a_rule_of_ones_own_decides():
    class Longest(ChoicesSamplingMethod):
        def __call__(self, *, choices, **_):
            return ChoicesDecision(max(choices, key=len), {"rule": "longest"})

    state = choose(EVEN | {"longer": [(4, -9.0, None)]}, choices_method=Longest())
    assert state["word"] == "longer"
    assert state.get_meta_info("word")["rule"] == "longest"


def test_a_rule_that_decides_for_what_is_no_choice_is_an_error():
    class Inventive(ChoicesSamplingMethod):
        def __call__(self, **_):
            return ChoicesDecision("something else")

    with pytest.raises(sgl.ProgramError, match="something else"):
        choose(EVEN, choices_method=Inventive())["word"]


def test_a_rule_that_raises_is_an_error_at_the_line():
    class Broken(ChoicesSamplingMethod):
        def __call__(self, **_):
            raise ZeroDivisionError("mine")

    @sgl.function
    def program(s):
        s += sgl.select("a", ["x"], choices_method=Broken())  # here

    state = program.run(backend=Scored({"x": [(1, -1.0, None)]}))
    with pytest.raises(sgl.ProgramError, match="ZeroDivisionError: mine") as caught:
        state["a"]
    assert caught.value.where.line == line_here(program)


@pytest.mark.parametrize(
    "options",
    [dict(temperature=0.5), dict(multi=True), dict(choices_method=sgl.greedy_token_selection)],
)
def test_what_needs_scores_is_refused_where_there_are_none(options):
    from sglang_lite.lang.backend.base_backend import Capabilities

    class OnlyPicks(sgl.BaseBackend):
        capabilities = Capabilities(scores=False)

        async def agenerate(self, prompt, params, constraint, *, stream):
            yield Generation("x")

    @sgl.function
    def program(s):
        s += sgl.select("a", ["x", "y"], **options)  # here

    with pytest.raises(sgl.CapabilityError, match="picks a choice without scores") as caught:
        program.run(backend=OnlyPicks())
    assert caught.value.where.line == line_here(program)


@pytest.mark.parametrize("of_run", [False, True])
def test_an_adapter_is_refused_where_selections_take_none(of_run):
    @sgl.function
    def program(s, adapter):
        s += sgl.user("Which?")
        s += sgl.assistant(sgl.select("a", ["x", "y"], lora_path=adapter))  # here

    given = {"adapter": None, "lora_path": "planner"} if of_run else {"adapter": "planner"}
    own = Scored({})
    own.chat_template = get_chat_template("chatml")
    for backend in (own, sgl.OpenAI("gpt-4o", api_key="key")):
        with pytest.raises(sgl.CapabilityError, match="can't honour lora_path") as caught:
            program.run(**given, backend=backend)
        assert caught.value.where.line == line_here(program)
    of_all = SamplingParams(lora_path=("planner",)) if of_run else SamplingParams()
    found = sgl.OpenAI("gpt-4o", api_key="key").explain(
        program, params=of_all, adapter=given["adapter"]
    )
    assert found.nodes[0].refusal.startswith("lora_path")
    assert (
        program.run(adapter=[], lora_path="planner", backend=sgl.ScriptedBackend({"a": "y"}))["a"]
        == "y"
    )
    if not of_run:
        assert "lora_path=('planner',)" in str(program.trace(adapter="planner").graph())


def test_one_choice_is_still_scored():
    state = choose({"only": [(1, -2.0, None)]})
    assert state["word"] == "only"
    assert state.selection("word").probs == {"only": 1.0}


def test_choices_that_begin_alike_can_all_be_picked(engine):
    """A rule that goes token by token must not let the shorter one always win."""

    @sgl.function
    def program(s, sentence, options):
        s += sentence + sgl.select("a", options)

    state = program.run("The opposite of hot is", [" cold", " cold water", " warm"], backend=engine)
    assert state["a"] in (" cold", " cold water")
    assert sum(state.selection("a").probs.values()) == pytest.approx(1)
    probs = state.selection("a").probs
    assert probs[" cold"] > probs[" cold water"]  # a text is at least as likely as a longer one
