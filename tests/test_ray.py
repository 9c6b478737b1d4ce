"""Batches on other machines: on a Ray cluster of two nodes of which one is killed, and by a cluster
that is none.
"""

import asyncio
import json
import logging
import os
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.load_state import load_finished_run
from sglang_lite.lang.runs.saving import to_saved_run
from sglang_lite.protocol import BatchError, CapabilityError, ParameterError
from sglang_lite.ray import (
    RayOptions,
    _Actor,
    _restore_outcome,
    deserialize_program,
    group_rows,
    serialize_program,
)
from tests.constraints.test_generation import random_model
from tests.runtime.models.tiny import VOCAB, save

ROWS = int(os.environ.get("SGLANG_LITE_RAY_ROWS", "60"))


@sgl.function
def answer(s, document, number):
    if number == 7 and document == "raise":
        raise ValueError("seven")
    s += f"{document} {number}: " + sgl.gen("answer", max_tokens=40, temperature=0, ignore_eos=True)
    s += sgl.select("kind", ["a", "b"]) if number % 3 == 0 else "."
    return number


@sgl.function
async def shout(s, word):
    s += word + sgl.gen("loud", max_tokens=3)


def scripted():
    return sgl.ScriptedBackend(lambda prompt: f"<{len(str(prompt))}>")


class Threads:
    """A cluster on a thread of this process, whose states pass as data."""

    def __init__(self, fails=()):
        self.ran: list[int] = []
        self._fails = fails

    def identity(self):
        return "threads"

    def rows(self, given):
        return given

    def pool(self, program, plan, report, *, until_released):
        return _Thread(self, program, plan, report, self._fails)


class _Thread:
    def __init__(self, cluster, program, plan, report, fails):
        self._thread = threading.Thread(target=self._run)
        self._parts = cluster, program, plan, report, fails

    def _run(self):
        cluster, _, plan, report, _ = self._parts
        for index, item in reversed(plan.pending):
            cluster.ran.append(index)
            try:
                outcome = self._outcome(index, *item)
            except Exception as error:  # or the batch would wait for ever
                outcome = error
            report(index, outcome)

    def _outcome(self, index, args, kwargs):
        _, program, _, _, fails = self._parts
        if index in fails:
            raise ValueError(f"item {index}")
        state = program.run(*args, **kwargs, backend=scripted())
        state.sync()
        return load_finished_run(
            pickle.loads(pickle.dumps(to_saved_run(state.branch, None, again=False)))
        )

    def start(self):
        self._thread.start()

    def stop(self):
        self._thread.join()

    def release_run_slot(self):
        pass


@sgl.function
def plain(s, word):
    s += word + sgl.gen("loud", max_tokens=3)


def test_an_actor_runs_what_it_is_sent():
    """Without a cluster: the actor's part of it, with what it is sent."""
    with Engine.of(random_model(), max_running=4) as engine:
        check_actor(engine)


def check_actor(engine):
    rows: list[Any] = [(i, ((), {"word": word})) for i, word in enumerate(("one", "two", "three"))]
    task = pickle.loads(pickle.dumps((plain, {"seed": 3, "num_threads": 2})))
    before = engine.stats()
    found = {
        i: _restore_outcome(kind, data) for i, kind, data in _Actor(lambda: engine, task).run(rows)
    }
    assert engine.stats()["programs_opened"] - before["programs_opened"] == 3
    assert engine.stats()["programs_extended"] - before["programs_extended"] == 3
    want = plain.run_batch([row for _, (_, row) in rows], backend=engine, seed=3)
    assert [(found[i].text(), found[i]["loud"]) for i in range(3)] == [
        (s.text(), s["loud"]) for s in want
    ]


WORDS = [{"word": word} for word in ("one", "two", "three")]


def test_a_cluster_runs_a_batch_and_results_are_in_order():
    here = shout.run_batch(WORDS, backend=scripted())
    cluster = Threads()
    there = shout.run_batch(WORDS, cluster=cluster)
    assert cluster.ran == [2, 1, 0]
    assert [state.text() for state in there] == [state.text() for state in here]
    assert [state["loud"] for state in there] == [state["loud"] for state in here]
    assert [s.text() for s in shout.run_batch(WORDS, cluster=Threads(), generator_style=True)] == [
        s.text() for s in here
    ]


def test_a_coroutine_waits_for_a_cluster():
    async def both():
        found = [state.text() for state in await shout.arun_batch(WORDS, cluster=Threads())]
        stream = await shout.arun_batch(WORDS, cluster=Threads(), ordered=False)
        return found, [index async for index, _ in stream]

    texts, order = asyncio.run(both())
    assert texts == [state.text() for state in shout.run_batch(WORDS, backend=scripted())]
    assert order == [2, 1, 0]


def test_errors_of_a_cluster_are_as_a_batch_has_them():
    with pytest.raises(BatchError, match="item 1") as caught:
        shout.run_batch(WORDS, cluster=Threads(fails=[1]))
    assert [type(each).__name__ for each in caught.value.results] == [
        "ProgramState",
        "ValueError",
        "ProgramState",
    ]
    assert len(shout.run_batch(WORDS, cluster=Threads(fails=[1]), on_error="skip")) == 2


def test_what_a_cluster_has_done_is_kept_in_a_checkpoint(tmp_path):
    file = tmp_path / "batch.jsonl"
    first = shout.run_batch(WORDS, cluster=Threads(fails=[1]), on_error="return", checkpoint=file)
    cluster = Threads()
    second = shout.run_batch(WORDS, cluster=cluster, checkpoint=file)
    assert cluster.ran == [1]
    assert [second[i].text() for i in (0, 2)] == [first[i].text() for i in (0, 2)]


def test_a_program_of_the_script_that_runs_is_sent_as_its_code_and_others_by_name(monkeypatch):
    assert deserialize_program(serialize_program(answer)) is answer
    # where an actor has nothing of the script
    monkeypatch.setattr(answer.func, "__module__", "__main__")
    sent = deserialize_program(serialize_program(answer.bind("a", 1)))
    assert (sent.func, sent.bind_arguments) == (answer.func, {"document": "a", "number": 1})


def test_what_is_no_cluster_or_beside_a_backend_is_refused():
    with pytest.raises(ParameterError, match="RayOptions"):
        shout.run_batch(WORDS, cluster="auto")  # type: ignore[call-overload]  # a text is none
    with pytest.raises(ParameterError, match="Leave backend out"):
        shout.run_batch(WORDS, cluster=Threads(), backend=scripted())


def test_rows_that_share_a_text_are_together():
    documents = [
        "a long document",
        "another document",
        "a long document",
        "third",
        "another document",
    ]
    rows = [
        (i, ((), {"document": document, "question": "what?"}))
        for i, document in enumerate(documents)
    ]
    assert group_rows(rows, 8) == [[0, 2], [1, 4], [3]]
    assert group_rows(rows, 1) == [[0], [2], [1], [4], [3]]
    assert group_rows([(i, ((number,), {})) for i, number in enumerate((5, 5, 6))], 2) == [
        [0, 1],
        [2],
    ]
    assert group_rows([], 8) == []


@pytest.mark.parametrize(
    ("bad", "cure"),
    [
        ({"engine": 3}, "RayOptions"),
        ({"actors": 0}, "one per GPU"),
        ({"actors": True}, "one per GPU"),
        ({"actors": "2"}, "one per GPU"),
        ({"num_cpus": "2"}, "0 or more"),
        ({"num_cpus": None}, "0 or more"),
        ({"num_cpus": True}, "0 or more"),
        ({"num_gpus": -1}, "0 or more"),
        ({"num_gpus": float("nan")}, "0 or more"),
        ({"start_timeout_s": -1}, "0 or more"),
        ({"start_timeout_s": [1]}, "0 or more"),
    ],
)
def test_bad_options_are_refused_with_what_to_give(bad, cure):
    with pytest.raises(ParameterError, match=f"^{next(iter(bad))}: .*{cure}"):
        RayOptions(**bad)


def test_numbers_of_other_packages_are_options():
    np = pytest.importorskip("numpy")
    options = RayOptions(num_cpus=np.int64(2), num_gpus=np.float32(0.5))
    assert (options.num_cpus, options.num_gpus) == (2, 0.5)


def test_ray_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CapabilityError, match=r"sglang-lite\[ray\]"):
        shout.run_batch(WORDS, cluster=RayOptions())


# ------------------------------------------------------------------------------------ on Ray itself


@pytest.fixture(scope="module")
def cluster():
    """Two nodes on this machine, and the one that can be killed."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 80 * 2**20}
    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **memory}
    )
    second = found.add_node(num_cpus=1, **memory)
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
    yield found, second
    ray.shutdown()
    found.shutdown()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=0, bos_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    folder = str(save(LlamaForCausalLM(config), tmp_path_factory.mktemp("model")))
    return dict(
        model=folder,
        dtype="float32",
        max_running=4,
        max_total_tokens=8192,
        threads=1,
        deterministic=True,
    )


def rows(count, *more):
    return [{"document": f"document {i % 5}", "number": i} for i in range(count)] + list(more)


def test_errors_and_values_come_from_actors(cluster, engine):
    bad = {"document": "raise", "number": 7}
    found = answer.run_batch(
        rows(4, bad), cluster=RayOptions(engine=engine, actors=1), on_error="return"
    )
    assert [getattr(each, "ret_value", each) for each in found[:4]] == [0, 1, 2, 3]
    assert isinstance(found[4], ValueError)
    assert str(found[4]) == "seven"
    assert found[0]["kind"] in ("a", "b")
    assert found[0].usage().completion_tokens >= 40


def test_an_engine_that_cannot_start_is_an_error_of_every_row(cluster):
    options = RayOptions(engine={"model": "/nowhere/at/all"}, actors=1)
    found = answer.run_batch(rows(2), cluster=options, on_error="return")
    assert ["/nowhere/at/all" in str(each) for each in found] == [True, True]


def test_rows_of_a_node_that_is_killed_run_again(cluster, engine, tmp_path, caplog):
    """The last one: it kills the node."""
    nodes, second = cluster
    file = tmp_path / "batch.jsonl"
    with sgl.Engine(**engine) as one:
        expected = answer.run_batch(rows(ROWS), backend=one)
    killed = threading.Event()
    at_kill = []

    def kill():
        turn = threading.Event()
        while not killed.is_set():
            lines = file.read_bytes().count(b"\n") if file.exists() else 0
            if lines > ROWS // 4:
                at_kill.append(lines)
                nodes.remove_node(second)
                return
            turn.wait(0.005)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with caplog.at_level(logging.WARNING, logger="sglang_lite"):
            found = answer.run_batch(rows(ROWS), cluster=RayOptions(engine=engine), checkpoint=file)
    finally:
        killed.set()
        killer.join()
    assert at_kill
    assert at_kill[0] < ROWS
    assert "an actor has died" in caplog.text
    assert [state.text() for state in found] == [state.text() for state in expected]
    kept = [json.loads(line)["data"]["index"] for line in file.read_text().splitlines()[1:]]
    assert sorted(kept) == list(range(ROWS))
