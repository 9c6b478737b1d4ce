"""Sleep of an engine: memory that it gives back, and what requests and calls get meanwhile."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.kernels.arena import HostArena
from tests.runtime.core.test_weight_update import LONG, Stream, tokens
from tests.runtime.models.test_new_weights import Q, engine, pair, tensors_of

ACTIONS = int(os.environ.get("SGLANG_LITE_SLEEPS", "25"))  # each with 3.5 requests: CONTRIBUTING.md


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    return pair("llama-biases", tmp_path_factory.mktemp("llamas"))


@pytest.fixture
def running(llamas):
    with engine(llamas[0], enable_memory_saver=True) as running:
        yield running


@pytest.mark.parametrize("level", [1, 2])
def test_requests_wait_for_an_engine_that_sleeps(running, level):
    expected = tokens(running)
    stream = Stream(running)
    stream.first.result(60)
    running.sleep(level)
    assert running.is_sleeping()
    later = Stream(running)
    stats = running.stats()
    assert (stats["waiting"], stats["running"], stats["asleep"]) == (2, 0, 1)
    assert stats["free_tokens"] == stats["total_tokens"]
    running.wake()
    assert not running.is_sleeping()
    assert stream.end.result(60).token_ids == later.end.result(60).token_ids == expected


def test_new_requests_are_refused_if_the_engine_is_set_so(llamas):
    with engine(llamas[0], enable_memory_saver=True, refuse_while_asleep=True) as running:
        expected = tokens(running)
        stream = Stream(running)
        stream.first.result(60)
        running.sleep()
        refused = Stream(running).end.result(60)
        assert isinstance(refused, sgl.OverloadedError)
        assert "the engine is asleep" in str(refused)
        running.wake()
        assert stream.end.result(60).token_ids == tokens(running) == expected


@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_what_is_cached_waits_in_the_hosts_memory(llamas, policy):
    tiers = {"enable_hierarchical_cache": True, "hicache_write_policy": policy, "page_size": 16}
    with engine(llamas[0], enable_memory_saver=True, max_total_tokens=1024, **tiers) as running:
        # this model computes faster than it copies
        running.core.scheduler.pauses.record_duration = lambda *_: None

        def asked():
            answer = running.complete(
                [5, 6, 7, 8] * 25, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            )
            return answer.token_ids, answer.usage.cached_tokens, answer.usage.host_tokens

        expected = asked()[0]
        running.sleep(1)
        stats = running.stats()
        assert stats["free_tokens"] == stats["total_tokens"]
        running.wake()
        assert asked() == (expected, 96, 96)
        running.release_memory_occupation(["kv_cache"])
        running.wake()
        assert asked() == (expected, 96, 96)
        running.sleep(2)  # the checkpoint may have other weights by now
        running.wake()
        assert asked() == (expected, 0, 0)


def test_each_kind_of_memory_comes_and_goes_by_itself(running, llamas):
    expected = tokens(running)
    running.release_memory_occupation(["kv_cache"])
    running.release_memory_occupation(["weights"])
    with pytest.raises(sgl.ModelError, match="the engine is asleep, without its weights"):
        running.update_weights_from_tensor(tensors_of(llamas[1]))
    with pytest.raises(sgl.ModelError, match="the engine is asleep, without its weights"):
        running.get_weights_by_name(Q)
    running.resume_memory_occupation(["weights"])
    running.update_weights_from_tensor(tensors_of(llamas[1]))
    assert running.is_sleeping()
    running.resume_memory_occupation()
    new = tokens(running)
    assert new != expected
    running.release_memory_occupation()
    running.wake()
    assert tokens(running) == new


def test_weights_that_no_file_has_must_come_again_after_they_were_dropped(running, llamas):
    running.update_weights_from_tensor({Q: tensors_of(llamas[1])[Q]})
    running.sleep(2)
    running.wake()
    assert "weights incomplete" in str(Stream(running).end.result(60))
    running.update_weights_from_tensor(tensors_of(llamas[0]))
    with engine(llamas[0]) as other:
        assert tokens(running) == tokens(other)


def test_requests_that_wait_continue_when_dropped_weights_have_come_again(running, llamas):
    running.update_weights_from_tensor({Q: tensors_of(llamas[1])[Q]})
    stream = Stream(running)
    stream.first.result(60)
    running.sleep(2)
    later = Stream(running)
    running.wake()
    assert "weights incomplete" in str(Stream(running).end.result(60))
    running.update_weights_from_tensor(tensors_of(llamas[0]))
    with engine(llamas[0]) as other:
        assert later.end.result(60).token_ids == tokens(other)
    assert len(stream.end.result(60).token_ids) == LONG.max_tokens


def quantised():
    if torch.cpu._is_vnni_supported():  # noqa: SLF001 # torch has no other name for it
        return ["float32", "int8"]
    return ["float32"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU drops no tensors, only what they have")
@pytest.mark.parametrize("dtype", quantised())
def test_weights_that_were_dropped_may_come_in_several_complete_updates(llamas, dtype):
    tensors = tensors_of(llamas[1])
    with engine(llamas[0], dtype=dtype) as running:
        running.update_weights_from_tensor(tensors)
        expected = tokens(running)
        running.sleep(2)
        running.wake()
        with pytest.raises(sgl.ModelError, match=r"k_proj.weight was dropped .* q, k and v"):
            running.update_weights_from_tensor({Q: tensors[Q]})
        with pytest.raises(sgl.ModelError, match="was dropped"):
            running.get_weights_by_name("model.norm.weight")
        first = {name: tensor for name, tensor in tensors.items() if ".1." in name}
        running.update_weights_from_tensor(first)
        assert "weights incomplete" in str(Stream(running).end.result(60))
        running.update_weights_from_tensor(
            {name: tensors[name] for name in tensors.keys() - first.keys()}
        )
        assert tokens(running) == expected


@pytest.mark.parametrize(
    "resumed",
    [
        [["weights"], ["kv_cache"]],
        [["weights"], ["kv_cache"], ["cuda_graph"]],
        [["kv_cache", "cuda_graph"], []],
    ],
)
def test_what_was_released_without_tags_is_awake_once_weights_and_cache_are_back(running, resumed):
    expected = tokens(running)
    running.release_memory_occupation()
    for tags in resumed:
        running.resume_memory_occupation(tags)
    assert tokens(running) == expected
    with pytest.raises(sgl.CapabilityError, match="the engine is awake"):
        running.resume_memory_occupation(["weights"])


def test_a_wake_that_failed_may_be_tried_again(llamas, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(llamas[0], folder)
    with engine(folder, enable_memory_saver=True) as running:
        expected = tokens(running)
        running.sleep(2)
        folder.rename(tmp_path / "elsewhere")
        with pytest.raises(sgl.ModelError):
            running.wake()
        assert running.is_sleeping()
        (tmp_path / "elsewhere").rename(folder)
        running.wake()
        assert tokens(running) == expected


def test_a_checkpoint_that_is_gone_is_told_and_another_one_mends_it(llamas, tmp_path):
    folder = tmp_path / "model"
    folder.symlink_to(llamas[0])
    with engine(folder, enable_memory_saver=True) as running:
        expected = tokens(running)
        running.sleep(2)
        folder.unlink()
        with pytest.raises(sgl.SglError):
            running.wake()
        assert "weights incomplete" in str(Stream(running).end.result(60))
        running.update_weights_from_disk(str(llamas[0]))
        running.wake()
        assert tokens(running) == expected


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (
            lambda e: e.release_memory_occupation(["lora"]),
            "'lora' is none of kv_cache, weights, cuda_graph",
        ),
        (lambda e: e.release_memory_occupation("weights"), "tags"),
        (lambda e: e.release_memory_occupation([1]), "tags"),
        (lambda e: e.sleep(3), "level: 3 is neither 1 nor 2"),
        (lambda e: e.wake(), "^the engine is awake"),
        (
            lambda e: e.resume_memory_occupation(["kv_cache"]),
            "^the engine is awake: .* kv_cache is not given back",
        ),
        (
            lambda e: (e.sleep(), e.sleep()),
            "^the engine is asleep: .* kv_cache and weights is given back already",
        ),
        (
            lambda e: (e.sleep(), e.resume_memory_occupation(["cuda_graph"])),
            "of cuda_graph is not given back",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(running, call, why):
    expected = tokens(running)
    with pytest.raises((sgl.ParameterError, sgl.CapabilityError), match=why):
        call(running)
    if running.is_sleeping():
        running.wake()
    assert tokens(running) == expected


def test_a_backup_is_for_engines_that_sleep():
    with pytest.raises(sgl.ParameterError, match="Add enable_memory_saver=True"):
        sgl.Engine("smollm2-135m", enable_weights_cpu_backup=True)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_memory_of_the_host_is_given_back_and_is_zero_again():
    arena = HostArena()
    tensor = arena.zeros((1 << 24,), torch.float32)
    before = resident()
    tensor.fill_(1.0)
    assert resident() - before > 60e6
    arena.release_memory()
    assert resident() - before < 10e6
    arena.restore_memory()
    assert tensor[::4096].count_nonzero() == 0


def test_each_request_ends_once_whatever_happens_meanwhile(running, llamas):
    """Random sleeps, pauses, updates, refused calls and aborts: one end a request, and an empty
    pool.
    """
    rng = random.Random(7)
    streams: list[Stream] = []
    updates = [tensors_of(folder) for folder in llamas]
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    actions = [
        lambda: running.sleep(rng.choice((1, 2))),
        running.wake,
        running.release_memory_occupation,
        running.resume_memory_occupation,
        lambda: running.pause_generation(rng.choice(("abort", "retract", "in_place"))),
        running.continue_generation,
        lambda: running.update_weights(str(rng.choice(llamas))),
        lambda: running.update_weights_from_tensor(rng.choice(updates)),
        lambda: running.update_weights_from_tensor({Q: updates[0][Q] * float("nan")}),
        running.flush_cache,
        lambda: streams and rng.choice(streams).ticket.abort(),
    ]
    for _ in range(ACTIONS):
        streams += [Stream(running, params) for _ in range(rng.randrange(8))]
        try:
            rng.choice(actions)()
        except sgl.SglError:
            continue
    if running.is_sleeping():
        running.wake()
    running.update_weights(str(llamas[0]))
    running.continue_generation()
    ends = [stream.end.result(60) for stream in streams]
    assert all(isinstance(end, sgl.SglError) or len(end.token_ids) == 12 for end in ends)
    running.flush_cache()
    stats = running.stats()
    assert stats["free_tokens"] == stats["total_tokens"]
    with engine(llamas[0]) as other:
        assert tokens(running) == tokens(other)
