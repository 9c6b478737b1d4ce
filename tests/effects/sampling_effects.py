"""What shows the effect of each sampling parameter, in an answer in the form of `Engine.generate`.

Each case asks with and without its parameter. What it looks for has to be there with the parameter
only: a token, a text, an end, a number of the answer. Nothing that an answer repeats of its request
counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sglang_lite.protocol import ParameterError

Answer: TypeAlias = dict[str, Any]
Entry: TypeAlias = tuple[float, int, str | None]
# parameters by this package's names, and others of doors.py -> an answer
Ask: TypeAlias = Callable[..., Any]
A, B, EOS = 81, 82, 2  # tokens of the default model: "a", "b" and the end of sequence
PREFERRED = {A: 100, B: 80}
DRAWN: dict[str, Any] = {"temperature": 1, "seed": 7, "max_tokens": 12}
REPORTED = {"return_logprob": True, "top_logprobs_num": 4}
LETTERS = '{"type": "array", "items": {"type": "string", "pattern": "^[ab]$"}, "minItems": 6, "maxItems": 6}'


@dataclass(frozen=True)
class Effect:
    """Effect of a sampling parameter.

    Attributes:
        parameter: name of the parameter, as in its row.
        value: a value of it.
        shows: whether answers show the effect, of a function that asks for one.
        engine: engine that answers: "plain", "thinker" or "mixture" (see conftest.py).
        beside: arguments of all questions.
    """

    parameter: str
    value: object
    shows: Callable[[Ask], bool]
    engine: str
    beside: Mapping[str, Any]

    def seen(self, answer: Ask, *, given: bool) -> bool:
        """Whether answers show the effect.

        Args:
            answer: gives the answer to parameters by this package's names.
            given: whether the parameter is given.
        """
        own = {self.parameter: self.value} if given else {}
        return self.shows(
            lambda **more: answer(
                **{"temperature": 0, "max_tokens": 6, **self.beside, **own, **more}
            )
        )


EFFECTS: dict[str, list[Effect]] = {}


def effect(
    parameter: str, value: object, *, engine: str = "plain", **beside: Any
) -> Callable[[Callable[[Ask], bool]], Callable[[Ask], bool]]:
    """Adds an effect, which the function that follows looks for."""

    def add(shows: Callable[[Ask], bool]) -> Callable[[Ask], bool]:
        EFFECTS.setdefault(parameter, []).append(Effect(parameter, value, shows, engine, beside))
        return shows

    return add


# ----------------------------------------------------------------------------------- length and end


@effect("max_tokens", 3)
def has_three_tokens(ask: Ask) -> bool:
    answer = ask(return_logprob=True)
    return len(ids(answer)) == 3 and len(drawn(answer)) == 3


@effect("min_tokens", 4)
def goes_on_behind_a_stop(ask: Ask) -> bool:
    first = ids(ask(stop_token_ids=[]))[0]
    return len(ids(ask(stop_token_ids=[first]))) >= 4


@effect("n", 3)
def has_three_answers(ask: Ask) -> bool:
    answers = ask()
    return isinstance(answers, list) and len(answers) == 3


@effect("ignore_eos", True, logit_bias={EOS: 100})
def goes_on_behind_the_end(ask: Ask) -> bool:
    return ids(ask()) == [EOS] * 6


@effect("stop", "b", regex="a{3}b{3}")
def ends_before_the_text(ask: Ask) -> bool:
    return ask()["text"] == "aaa"


@effect("stop_regex", "b[b]", regex="a{3}b{3}")
def ends_before_the_pattern(ask: Ask) -> bool:
    return ask()["text"] == "aaa"


@effect("stop_token_ids", [A], logit_bias={A: 100})
def ends_at_the_token(ask: Ask) -> bool:
    answer = ask()
    return ids(answer) == [A] and answer["meta_info"]["finish_reason"] == {
        "type": "stop",
        "matched": A,
    }


@effect("include_stop", True, regex="a{3}b{3}", stop="b")
def keeps_the_stop(ask: Ask) -> bool:
    return ask()["text"] == "aaab"


# -------------------------------------------------------------------------------------------- draws


@effect("allowed_token_ids", [A, B])
def draws_only_what_is_allowed(ask: Ask) -> bool:
    return set(ids(ask())) <= {A, B}


@effect("bad_words", ["a"], logit_bias=PREFERRED)
def leaves_out_the_word(ask: Ask) -> bool:
    return ids(ask()) == [B] * 6


@effect("temperature", 0, **{**DRAWN, "temperature": None})
def takes_the_likeliest(ask: Ask) -> bool:
    return ranks(ask(**REPORTED)) == [0] * 12


@effect("temperature", 0.05, **{**DRAWN, "temperature": None})
def draws_one_of_the_likeliest(ask: Ask) -> bool:
    found = ranks(ask(**REPORTED))
    return set(found) > {0} and max(found) < 4


# enough that each of the three is drawn, on any device
@effect("top_k", 3, **{**DRAWN, "max_tokens": 60})
def draws_one_of_three(ask: Ask) -> bool:
    return set(ranks(ask(**REPORTED))) == {0, 1, 2}


@effect("top_p", 0.01, **DRAWN)
def draws_what_the_nucleus_has(ask: Ask) -> bool:
    return all(before <= 0.01 for before in mass_before(ask(**REPORTED)))


@effect("min_p", 0.5, **DRAWN)
def draws_half_as_likely_tokens(ask: Ask) -> bool:
    answer = ask(**REPORTED)
    return all(
        entry[0] >= tops[0][0] + math.log(0.5)
        for entry, tops in zip(drawn(answer), likeliest(answer))
    )


@effect("sampling_order", "sequential", top_k=4, top_p=0.3, **DRAWN)
def counts_the_mass_of_four(ask: Ask) -> bool:
    answer = ask(**REPORTED)
    shares = [before / sum(math.exp(top[0]) for top in tops)
              for before, tops in zip(mass_before(answer), likeliest(answer))]  # fmt: skip
    return all(share <= 0.3 for share in shares)


@effect("sampling_order", "joint", top_k=4, top_p=0.3, min_p=0.001, **DRAWN)
def counts_the_mass_of_all(ask: Ask) -> bool:
    return set(ranks(ask(**REPORTED))) == {0, 1, 2, 3}


@effect("seed", 7, **{**DRAWN, "seed": None})
def draws_the_same_again(ask: Ask) -> bool:
    return ids(ask()) == ids(ask())


@effect("frequency_penalty", 2.0, logit_bias=PREFERRED)
def loses_at_each_time(ask: Ask) -> bool:
    return lost(ask, "frequency_penalty", 0.0) == [0, 2, 4, 6, 8, 10]


@effect("presence_penalty", 2.0, logit_bias=PREFERRED)
def loses_once(ask: Ask) -> bool:
    return lost(ask, "presence_penalty", 0.0) == [0, 2, 2, 2, 2, 2]


@effect("repetition_penalty", 2.0, logit_bias=PREFERRED)
def loses_a_share(ask: Ask) -> bool:
    first, *others = lost(ask, "repetition_penalty", 1.0)
    return first == 0 and min(others) > 0


@effect("logit_bias", {A: 100})
def has_the_preferred_token(ask: Ask) -> bool:
    return ids(ask()) == [A] * 6


@effect("speculation", False, engine="thinker", prompt="x", max_tokens=60)
def drafts_nothing(ask: Ask) -> bool:
    return "spec_verify_ct" not in ask()["meta_info"]


@effect("lora_path", "one", engine="mixture")
def has_an_adapters_tokens(ask: Ask) -> bool:
    return ids(ask()) != ids(ask(lora_path=None))


# ----------------------------------------------------------------------------- text and constraints


@effect("skip_special_tokens", False, logit_bias={EOS: 100}, ignore_eos=True)
def spells_special_tokens(ask: Ask) -> bool:
    return ask()["text"] == "<|im_end|>" * 6


@effect("repeats", 3, json_schema=LETTERS, logit_bias={A: 100}, max_tokens=100)
def has_no_fourth_equal_item(ask: Ask) -> bool:
    items = json.loads(ask()["text"])
    return len(items) == 6 and all(len(set(items[i : i + 4])) > 1 for i in range(3))


@effect("thinking", 3, engine="thinker", prompt="x", max_tokens=40)
def ends_its_thought(ask: Ask) -> bool:
    return ask()["text"] == "<think>abcdefghij.\n</think>\n\nABC"


@effect(
    "reasoning_format",
    "qwen3",
    engine="untold thinker",
    prompt="x<think>",
    thinking=3,
    max_tokens=40,
)
def knows_the_marks_of_thoughts(ask: Ask) -> bool:
    try:
        return "</think>" in ask()["text"]
    except ParameterError:  # the template shows none
        return False


# --------------------------------------------------------------------------------- what is reported


@effect("return_logprob", True)
def reports_log_probabilities(ask: Ask) -> bool:
    found = ask()["meta_info"].get("output_token_logprobs", [])
    return len(found) == 6 and all(entry[0] < 0 for entry in found)


@effect("logprob_start_len", 4, return_logprob=True)
def scores_the_prompt(ask: Ask) -> bool:
    meta = ask()["meta_info"]
    return len(meta.get("input_token_logprobs", ())) == meta["prompt_tokens"] - 4


@effect("top_logprobs_num", 3, return_logprob=True)
def reports_three_alternatives(ask: Ask) -> bool:
    found = ask()["meta_info"].get("output_top_logprobs", [])
    return len(found) == 6 and all(len(tops) == 3 for tops in found)


@effect("token_ids_logprob", [A, B], return_logprob=True)
def reports_chosen_tokens(ask: Ask) -> bool:
    found = ask()["meta_info"].get("output_token_ids_logprobs", [])
    return len(found) == 6 and all([entry[1] for entry in chosen] == [A, B] for chosen in found)


@effect("return_text_in_logprobs", True, return_logprob=True)
def reports_texts_of_tokens(ask: Ask) -> bool:
    answer = ask()
    return "".join(entry[2] or "" for entry in drawn(answer)) == answer["text"]


@effect("return_prompt_token_ids", True)
def reports_the_prompt(ask: Ask) -> bool:
    answer = ask()
    return len(answer.get("prompt_token_ids", [])) == answer["meta_info"]["prompt_tokens"]


@effect("return_routed_experts", True, engine="mixture")
def reports_experts(ask: Ask) -> bool:
    return bool(ask()["meta_info"].get("routed_experts"))


@effect("return_hidden_states", True, engine="mixture")
def reports_hidden_states(ask: Ask) -> bool:
    return bool(ask()["meta_info"].get("hidden_states"))


@effect("confidence", True, regex="[ab]{6}", return_logprob=False)
def reports_the_models_own_choice(ask: Ask) -> bool:
    found = ask()["meta_info"].get("output_allowed_logprobs", [])
    return len(found) > 0 and max(found) < 0


@effect("exact", True, regex="a|b", return_logprob=False)
def reports_the_shares(ask: Ask) -> bool:
    shares = ask()["meta_info"].get("exact", {}).get("probs", {})
    return set(shares) == {"a", "b"} and abs(sum(shares.values()) - 1) < 1e-6


@effect("heal", True)
def spells_the_last_word_anew(ask: Ask) -> bool:
    return ask()["meta_info"].get("healed", {}).get("end") == " runs"


# ----------------------------------------------------------------------------- reading of an answer


def ids(answer: Answer) -> list[int]:
    """Ids of an answer's tokens."""
    return list(answer["output_ids"])


def drawn(answer: Answer) -> list[Entry]:
    """(log-probability, id, text) of each token."""
    return list(answer["meta_info"]["output_token_logprobs"])


def likeliest(answer: Answer) -> list[list[Entry]]:
    """The four likeliest tokens at each position."""
    return list(answer["meta_info"]["output_top_logprobs"])


def ranks(answer: Answer) -> list[int]:
    """Rank of each token; 4 if it is none of the four likeliest."""
    found = [[top[1] for top in tops] for tops in likeliest(answer)]
    return [
        tops.index(token) if token in tops else len(tops) for token, tops in zip(ids(answer), found)
    ]


def mass_before(answer: Answer) -> list[float]:
    """Probability of the tokens that are likelier than each token; 1 if it is none of the four
    likeliest.
    """
    return [
        sum(math.exp(top[0]) for top in tops[:rank]) if rank < len(tops) else 1.0
        for rank, tops in zip(ranks(answer), likeliest(answer))
    ]


def lost(ask: Ask, penalty: str, nothing: float) -> list[float]:
    """What the logit of token A loses by a penalty at each position, compared with that of B, to
    two places.
    """
    gaps = []
    for given in ({penalty: nothing}, {}):
        pairs = likeliest(ask(**given, return_logprob=True, top_logprobs_num=2))
        assert all([a[1], b[1]] == [A, B] for a, b in pairs)
        gaps.append([a[0] - b[0] for a, b in pairs])
    return [round(free - own, 2) for free, own in zip(*gaps)]
