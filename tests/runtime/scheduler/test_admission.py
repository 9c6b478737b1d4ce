"""Which requests wait for tokens that another is about to compute."""

import pytest

from sglang_lite.protocol import Generation, SamplingParams
from tests.runtime.scripted import SteppedEngine, ended

LONG = "forty letters and more are what is alike: "
ENDS = ("one of these ends, which differ at once, as they do not begin alike", "an", "end", "short")


def rows_by_step(engine, prompts):
    """Rows of each step that plays requests for one token."""
    plan, rows = engine.scheduler.plan_batch, []

    def planned():
        batch = plan()
        rows.append(0 if batch is None else len(batch.slots))
        return batch

    engine.scheduler.plan_batch = planned
    for prompt in prompts:
        engine.submit(
            prompt, SamplingParams(max_tokens=1, ignore_eos=True), sink=lambda event: None
        )
    engine.drain()
    engine.scheduler.plan_batch = plan
    return [count for count in rows if count]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_requests_wait_for_a_beginning_that_one_of_them_computes(page_size):
    engine = SteppedEngine(max_running=8, max_total_tokens=2048, page_size=page_size, overlap=False)
    asked = [LONG + end + LONG for end in ENDS]
    assert rows_by_step(engine, asked) == [1, 3]
    assert rows_by_step(engine, [prompt + "?" for prompt in asked]) == [4]
    engine.check_empty()


def test_a_prompt_whose_page_would_be_copied_from_all_other_pages_is_computed():
    """The copy locks the node that it reads, which is all that could be evicted."""
    engine = SteppedEngine(page_size=4, max_running=4, context_length=160, max_total_tokens=192)
    stem, params = [1 + i % 29 for i in range(66)], SamplingParams(max_tokens=0)
    for prompt in (stem + [3] * 90, stem + [4] * 36):
        _, events = engine.start(prompt, params)
        engine.drain()
        assert isinstance(ended(events), Generation)
    engine.check_empty()
