"""Log-probabilities of the next token, of a generation of no tokens: as those of the first of a
generation of one.
"""

from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import Number, Regex, SamplingParams
from tests.engine.collector import Collector
from tests.engine.conftest import SETTINGS

PROMPT = "aquick"
ASKED: dict[str, Any] = dict(
    return_logprob=True,
    top_logprobs_num=3,
    token_ids_logprob=(5, 6),
    return_text_in_logprobs=True,
    seed=1,
)
NONE, ONE = (SamplingParams(max_tokens=count, **ASKED) for count in (0, 1))


@pytest.mark.parametrize(
    ("options", "constraint"),
    [
        ({}, None),
        ({"temperature": 0.5, "logit_bias": ((40, 3.0),), "repetition_penalty": 1.3}, None),
        ({"temperature": 0}, Regex("[c-f]{1,3}")),
        ({"temperature": 0}, Number("float")),
    ],
)
def test_no_tokens_have_the_log_probabilities_that_one_token_has(here, options, constraint):
    none, one = (
        here.complete(PROMPT, SamplingParams(max_tokens=count, **ASKED, **options), constraint)
        for count in (0, 1)
    )
    assert none.output_logprobs == one.output_logprobs != ()
    assert (none.text, none.token_ids, none.spans, none.finish_reason) == ("", (), (), "length")
    assert none.usage.completion_tokens == 0
    assert len(none.output_logprobs[0].top) == 3


def test_without_alternatives_there_is_nothing_to_report(here):
    assert (
        here.complete(PROMPT, SamplingParams(max_tokens=0, return_logprob=True)).output_logprobs
        == ()
    )


def test_streams_samples_and_several_prompts_have_them(here):
    sink = Collector(3)
    here.submit(PROMPT, SamplingParams(max_tokens=0, n=3, **ASKED), sink=sink, stream=True)
    wanted = [entry.top for entry in here.complete(PROMPT, ONE).output_logprobs]
    assert [[entry.top for entry in end.output_logprobs] for end in sink.ends()] == [wanted] * 3
    assert len(sink.events) == 3  # and no text
    answers = here.generate(
        [PROMPT, "b"],
        {"max_new_tokens": 0},
        return_logprob=True,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    assert [len(answer["meta_info"]["output_top_logprobs"][0]) for answer in answers] == [2, 2]
    assert answers[0]["meta_info"]["completion_tokens"] == 0


def test_a_program_continues_from_the_text_before(here):
    @sgl.function
    def program(s, probes):
        s += PROMPT
        if probes:
            s += sgl.gen("next", max_tokens=0, return_logprob=True, top_logprobs_num=2)
        s += sgl.gen("a", max_tokens=6, temperature=0, ignore_eos=True)
        s += "then" + sgl.gen("b", max_tokens=6, temperature=0, ignore_eos=True)

    asked, plain = (program.run(probes, backend=here) for probes in (True, False))
    assert asked.text() == plain.text()
    ((_, likeliest, _), _) = asked.get_meta_info("next")["output_top_logprobs"][0]
    assert asked["a"].startswith(here.tokenizer.decode([likeliest]))


def test_a_prompt_that_fills_the_context_has_them(folders):
    with sgl.Engine(
        folders[0], **{**SETTINGS, "max_total_tokens": 64}, context_length=32, in_process=True
    ) as small:
        ids = [*range(2, 34)]
        assert len(small.complete(ids, NONE).output_logprobs[0].top) == 3
        assert (
            small.complete(ids[:-1], NONE).output_logprobs
            == small.complete(ids[:-1], ONE).output_logprobs
        )
