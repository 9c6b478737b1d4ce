"""What an aborted selection has used."""

import pytest

import sglang_lite as sgl
from sglang_lite.program.nodes import Program, Select
from tests.runtime.scripted import SteppedEngine


@pytest.mark.parametrize("within", ["program", "selection"])
def test_an_aborted_selection_has_used_what_a_whole_one_does(within):
    engine = SteppedEngine(max_running=8, context_length=256, max_total_tokens=1024)
    prompt, choices = "xy" * 40, ("aab", "ba", "b")
    events = []
    if within == "program":
        ticket = engine.run_program(prompt, Program((Select("s", choices),)), sink=events.append)
    else:
        ticket = engine.submit_select(prompt, choices, sink=events.append)
    engine.step()
    ticket.abort()
    engine.drain()
    engine.check_empty()
    ended = events[0].event if within == "program" else events[0]
    assert isinstance(ended, sgl.RequestAbortedError)
    events.clear()
    engine.submit_select(prompt, choices, sink=events.append)
    engine.drain()
    assert ended.partial.usage.prompt_tokens == events[0].usage.prompt_tokens > 3 * len(prompt)


def test_a_choice_without_tokens_is_named():
    engine = SteppedEngine(max_running=8, context_length=256, max_total_tokens=1024)
    with pytest.raises(sgl.ParameterError, match="choices: '§' has no tokens"):
        engine.submit_select("", ("a", "§"), sink=print)
    engine.check_empty()


def test_choices_that_end_before_the_prompt_wait_for_its_scores(caplog):
    engine, events = SteppedEngine(max_running=8, context_length=256, max_total_tokens=1024), []
    # a token each
    engine.submit_select("xy" * 40, ("a", "b"), unconditional=True, sink=events.append)
    engine.drain()
    engine.check_empty()
    assert not caplog.records
    assert all(len(score.logprobs) == 1 for score in events[0].scores)
