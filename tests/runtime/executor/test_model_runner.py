"""Both runners meet the interface that the step loop knows. Their types are mypy's: `make_runner`
returns a ModelRunner.
"""

import inspect

import pytest

from sglang_lite.runtime.executor import cpu_runner, gpu_draws, gpu_runner, sampler
from sglang_lite.runtime.executor.model_runner import LaunchedForward, ModelRunner, PendingTokens


def public(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("runner", [cpu_runner.CpuRunner, gpu_runner.GpuRunner])
def test_a_runner_has_the_methods_of_the_interface(runner):
    for name in public(ModelRunner):
        asked, own = getattr(ModelRunner, name), getattr(runner, name)
        if isinstance(asked, property):
            assert isinstance(own, property)
        else:
            same, more = (
                parameters(own)[: len(parameters(asked))],
                parameters(own)[len(parameters(asked)) :],
            )
            assert same == parameters(asked), name
            # `executor/stages.py` gives them
            assert all(default is None for _, _, default in more), name
    # which `make_runner` and `executor`'s ranks and stages call
    others = {"warm_up", "logits", "with_drawn_ids", "finish_forward"}
    assert public(runner) - public(ModelRunner) <= others


@pytest.mark.parametrize(
    ("interface", "kinds"),
    [
        (LaunchedForward, (cpu_runner.CpuForward, gpu_runner.GpuForward)),
        (PendingTokens, (sampler.SampledTokens, gpu_draws.GpuPendingTokens)),
    ],
)
def test_a_runners_results_have_the_members_of_the_interface(interface, kinds):
    for kind in kinds:
        assert public(interface) <= set(dir(kind)) | kind.__dataclass_fields__.keys()
