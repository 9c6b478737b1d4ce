"""Trajectories of programs on small models of all families, replayed through transformers."""

import pytest
import torch

import sglang_lite as sgl
from tests.runtime.models.test_families import engine, family  # noqa: F401 # a fixture


@sgl.function
def shapes(s):
    """Turns of several shapes: begun and continued, with a stop, samples, a retry, branches and
    what follows them.
    """
    s += sgl.system("ab") + sgl.user("cd") + sgl.assistant(sgl.gen("turn", max_tokens=4))
    s += sgl.user("e" * 11)
    s += (
        sgl.assistant_begin()
        + "f"
        + sgl.gen("stopped", max_tokens=12, stop_regex="[a-m]")
        + "g"
        + sgl.assistant_end()
    )
    s += sgl.gen("samples", max_tokens=3, n=2)
    seen: list[str] = []
    s += "h" + sgl.gen(
        "tried",
        max_tokens=3,
        retries=1,
        check=lambda text: bool(seen) or seen.append(text) is not None,
    )
    forks = s.fork(2)
    for number, fork in enumerate(forks):
        fork += (
            "i" * (number + 1)
            + sgl.gen("branch", max_tokens=3)
            + "j"
            + sgl.gen("more", max_tokens=2)
        )
    forks.join("concate_and_append")
    s += sgl.gen("end", max_tokens=3)


@pytest.mark.sampled(12)
def test_trajectories_have_the_log_probabilities_of_transformers(family):  # noqa: F811 # the fixture
    folder, reference = family
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}<assistant>"
    with engine(folder, max_total_tokens=2000, chat_template=template) as running:
        state = shapes.run(
            backend=running,
            seed=1,
            return_prompt_token_ids=True,
            return_logprob=True,
            ignore_eos=True,
        )
        trajectory, usage = state.trajectory(), state.usage()
    assert sum(sum(each.loss_mask) for each in trajectory) == usage.completion_tokens
    for each in trajectory:
        with torch.no_grad():
            logprobs = reference(torch.tensor([each.ids])).logits[0].log_softmax(-1)
        for i, drawn in enumerate(each.loss_mask):
            if drawn:
                assert each.logprobs[i] == pytest.approx(
                    float(logprobs[i - 1, each.ids[i]]), abs=1e-4
                )
