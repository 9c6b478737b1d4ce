"""Selections by the alternatives of one token, and by biases step by step."""

import math

import pytest
from api_server import Reply
from openai.types import Completion, CompletionChoice
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai_answers import USAGE, said

import sglang_lite as sgl
from sglang_lite.lang.backend.ladder.choose import first_characters_differ

PETS = ("dog", "cat")


@sgl.function
def choose(s, choices=PETS, heat=0.0):
    s += sgl.user("Which?")
    s += sgl.assistant(sgl.select("pet", list(choices), temperature=heat))


def beginnings(**logprobs):
    """A chat completion of one token, the first one given, with alternatives."""
    top = [
        TopLogprob(token=token.replace("_", " "), logprob=value)
        for token, value in logprobs.items()
    ]
    first = ChatCompletionTokenLogprob(token=top[0].token, logprob=top[0].logprob, top_logprobs=top)
    return said(top[0].token, finish="length", logprobs=ChoiceLogprobs(content=[first]))


def test_one_token_tells_the_scores(api, openai):
    api.answers = [
        beginnings(c=math.log(0.5), ca=math.log(0.1), _dog=math.log(0.2), The=math.log(0.1))
    ]
    state = choose.run(backend=openai())
    assert state["pet"] == "cat"
    assert state.get_meta_info("pet")["normalized_prompt_logprobs"] == pytest.approx(
        [math.log(0.2), math.log(0.6)]
    )
    assert state.selection("pet").probs == pytest.approx({"dog": 0.25, "cat": 0.75})
    assert (api.last["max_completion_tokens"], api.last["logprobs"], api.last["top_logprobs"]) == (
        1,
        True,
        20,
    )
    assert api.last["messages"][-1]["content"].endswith('nothing else:\n["dog", "cat"]')
    assert "response_format" not in api.last
    meta = state.get_meta_info("pet") or {}
    assert (meta["strategy"], meta["calls"], "warnings" in meta, meta["cost"] > 0) == (
        "token_logprobs",
        1,
        False,
        True,
    )


def test_scores_of_one_token_can_be_drawn_from_and_compared(api, openai):
    api.answers = [beginnings(dog=0.0)]
    state = choose.run(PETS, 1.0, backend=openai())
    assert state["pet"] == "dog"
    assert "not among the 20 likeliest" in state.get_meta_info("pet")["warnings"][0]


def test_an_answer_that_begins_with_no_choice_is_asked_for_on_the_next_strategy(api, openai):
    api.answers = [beginnings(The=-0.1), said('{"value": "cat"}')]
    state = choose.run(backend=openai())
    assert state["pet"] == "cat"
    meta = state.get_meta_info("pet")
    assert (meta["strategy"], meta["calls"], meta["prompt_tokens"]) == ("enum", 2, 20)
    (node,) = openai().explain(choose, choices=PETS, heat=0.0).nodes
    assert (node.strategy, node.otherwise, node.calls) == ("token_logprobs", "enum", (1, 2))


def test_where_scores_are_needed_there_is_no_other_strategy(api, openai):
    api.answers = [beginnings(The=-0.1)]
    with pytest.raises(sgl.ValueValidationError, match="begins with 'The'") as caught:
        choose.run(PETS, 1.0, backend=openai())["pet"]
    assert caught.value.usage.prompt_tokens == 10
    assert len(api.requests) == 1
    (node,) = openai().explain(choose, choices=PETS, heat=1.0).nodes
    assert (node.strategy, node.otherwise, node.calls) == ("token_logprobs", "", (1, 1))


@pytest.mark.parametrize(
    ("choices", "heat", "strategy"),
    [
        (("dark", "deep"), 0.0, "enum"),
        (("dog", " dad"), 0.0, "enum"),
        (("only",), 0.0, "enum"),
        (("dog", " cat"), 0.0, "token_logprobs"),
        (("dark", "deep"), 1.0, None),
    ],
)
def test_choices_that_may_begin_with_the_same_token_fall_to_the_next_strategy(
    api, openai, choices, heat, strategy
):
    api.answers = ["cat" if strategy == "token_logprobs" else choices[0]]
    backend = openai()
    (node,) = backend.explain(choose, choices=choices, heat=heat).nodes
    if strategy is None:
        assert "the choices' probabilities" in node.refusal
        with pytest.raises(sgl.CapabilityError, match="the choices' probabilities"):
            choose.run(choices, heat, backend=backend)
        assert api.requests == []
    else:
        assert node.strategy == strategy
        assert (
            choose.run(choices, heat, backend=backend).get_meta_info("pet")["strategy"] == strategy
        )


def test_blanks_before_choices_do_not_tell_them_apart():
    assert first_characters_differ(("dog", "\ncat"))
    assert not first_characters_differ(("dog", " dad"))
    assert not first_characters_differ(("dog", " "))


def test_several_answers_need_scores_that_one_token_does_not_tell(openai):
    @sgl.function
    def several(s):
        s += sgl.user("Which?")
        s += sgl.assistant(sgl.select("pets", ["dog", "cat"], multi=True))

    (node,) = openai().explain(several).nodes
    assert "the choices' probabilities" in node.refusal
    with pytest.raises(sgl.CapabilityError, match="the choices' probabilities"):
        several.run(backend=openai())


def test_a_model_that_may_reason_first_is_asked_for_one_token_only_where_scores_are_needed(openai):
    backend = openai("local", profile="vllm")
    assert backend.explain(choose, choices=PETS, heat=0.0).nodes[0].strategy == "structured_outputs"
    assert backend.explain(choose, choices=PETS, heat=1.0).nodes[0].strategy == "token_logprobs"
    backend = openai("local", profile="vllm", reasoning_effort="low")
    assert backend.explain(choose, choices=PETS, heat=1.0).nodes[0].mode == "refused"


# ------------------------------------------------------------------------------------------- biases


class Letters:
    """Tokens that are two letters each, or one at the end."""

    def encode(self, text):
        return [
            sum(ord(c) * 256**i for i, c in enumerate(text[at : at + 2]))
            for at in range(0, len(text), 2)
        ]

    def decode(self, tokens):
        return "".join(chr(t % 256) + (chr(t // 256) if t >= 256 else "") for t in tokens)


def completed(text):
    choice = CompletionChoice.construct(index=0, text=text, finish_reason="length", logprobs=None)
    return Reply(
        Completion(
            id="c", choices=[choice], created=1, model="m", object="text_completion", usage=USAGE
        )
    )


@sgl.function
def complete(s, choices, heat=0.0):
    s += "The word is" + sgl.select("word", list(choices), temperature=heat)
    s += "."


def base(openai, **options):
    return openai("davinci-002", tokenizer=Letters(), **options)


def test_a_bias_at_each_step_leaves_the_choices_tokens_alone(api, openai):
    choices = (" undo", " unit", " untie", " other")
    api.answers = [completed(" u"), completed("nt")]
    state = complete.run(choices, backend=base(openai))
    assert state["word"] == " untie"
    assert state.text() == "The word is untie."
    first, second = (request.body for request in api.requests)
    assert first["logit_bias"] == {str(Letters().encode(token)[0]): 100 for token in (" u", " o")}
    assert (first["prompt"], first["max_tokens"]) == ("The word is", 1)
    assert second["prompt"] == "The word is u"
    assert sorted(second["logit_bias"]) == sorted(
        str(Letters().encode(t)[0]) for t in ("nd", "ni", "nt")
    )
    meta = state.get_meta_info("word")
    assert (meta["strategy"], meta["calls"], meta["prompt_tokens"]) == ("logit_bias_steps", 2, 20)
    (node,) = base(openai).explain(complete, choices=choices, heat=0.0).nodes
    assert (node.mode, node.strategy, node.calls) == ("native", "logit_bias_steps", (1, 3))


def test_a_token_that_all_choices_share_is_not_asked_for(api, openai):
    api.answers = [completed("re")]
    state = complete.run([" great", " grape"], backend=base(openai))
    assert state["word"] == " great"
    assert len(api.requests) == 1
    assert api.last["prompt"] == "The word is g"


def test_one_choice_needs_no_call(api, openai):
    state = complete.run([" this"], backend=base(openai))
    assert (state["word"], api.requests, state.get_meta_info("word")["calls"]) == (" this", [], 0)


def test_an_answer_that_no_choice_goes_on_with_is_an_error(api, openai):
    api.answers = [completed("zz")]
    with pytest.raises(sgl.ValueValidationError, match="'zz' followed"):
        complete.run([" a", " b"], backend=base(openai))["word"]


@pytest.mark.parametrize(
    ("choices", "heat", "told"),
    [
        ((" in", " into"), 0.0, "begins with another"),
        ((" a", " b"), 1.0, "the choices' probabilities"),
    ],
)
def test_what_biases_do_not_do_is_refused_before_a_call(api, openai, choices, heat, told):
    with pytest.raises(sgl.CapabilityError, match=told):
        complete.run(choices, heat, backend=base(openai))
    assert told in base(openai).explain(complete, choices=choices, heat=heat).nodes[0].refusal
    assert api.requests == []


def test_without_a_tokenizer_a_base_model_can_not_choose(openai):
    with pytest.raises(sgl.CapabilityError, match="can't honour select") as caught:
        complete.run([" a", " b"], backend=openai("davinci-002"))
    assert "tokenizer=" in caught.value.hint
    with pytest.raises(sgl.ParameterError, match="no encode and decode"):
        openai("davinci-002", tokenizer=3)
