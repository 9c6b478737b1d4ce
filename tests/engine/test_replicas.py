"""Two replicas behind one handle, as one engine: the same answers, calls to both, and the death of
one.
"""

import os
import signal
import threading
from random import Random

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

import sglang_lite as sgl
from sglang_lite.program.nodes import Fork, Gen, Join, Program, Select
from sglang_lite.protocol import EngineClosedError, Generation, Regex, SamplingParams
from tests.children import send
from tests.engine import load, processes
from tests.engine.collector import Collector
from tests.engine.conftest import SETTINGS
from tests.server.conftest import serving
from tests.waiting import until

KILLS = int(os.environ.get("SGLANG_LITE_KILLS", "1"))
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
A_WHILE = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
TEXTS = [
    "ab",
    "cd ef",
    "the cat sat on the mat, and the dog did not",
    "x",
    "the cat sat on the mat, and slept",
    "zz",
]


@pytest.fixture(scope="module")
def started(folders):
    """Two replicas, and their processes."""
    before = processes.children()
    with sgl.Engine(
        folders[0], **SETTINGS, dp_size=2, restart=True, enable_memory_saver=True
    ) as engine:
        yield engine, [pid for pid in processes.children() if pid not in before]


@pytest.fixture
def two(started):
    return started[0]


def test_the_processes_of_all_replicas_are_listed(started):
    engine, processes_of_replicas = started
    assert sorted(engine.get_all_child_pids()) == sorted(processes_of_replicas)


def ranks(engine, name):
    return [each[name] for each in engine.stats()["replicas"]]


@sgl.function
def branches(s, text):
    s += f"{text}: a question about it, which is long enough for a page: "
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += f"{i}" + sgl.gen("part", max_tokens=4, temperature=0, ignore_eos=True)
    s += "".join(fork["part"] for fork in forks)
    s += sgl.select("choice", ["yes", "no", "perhaps"]) + sgl.gen(
        "end", max_tokens=4, temperature=0, regex="[a-f]+"
    )


def test_whatever_is_asked_has_the_answers_of_one_engine(own, two):
    tree = Program(
        (
            Gen("x", GREEDY),
            Fork(((Gen("l", GREEDY),), (Select("r", ("d", "ef")),))),
            Join(),
            Gen("y", GREEDY),
        )
    )
    sampled = {"max_new_tokens": 6, "n": 3, "sampling_seed": 5, "ignore_eos": True}
    found = []
    for engine in (own, two):
        found.append((
            [each["output_ids"] for each in engine.generate(TEXTS * 3, {"max_new_tokens": 6, "temperature": 0})],
            [each["output_ids"] for each in engine.generate("ab", sampled)],
            [each["text"] for each in engine.generate("ab", {"max_new_tokens": 6, "temperature": 0}, stream=True)][-1],
            engine.select("ab", ["c", "de"]).scores,
            [(each.path, each.name) for each in engine.play("ab", tree)[1]],
            engine.play("ab", tree)[0],
            engine.complete("ab", SamplingParams(temperature=0, max_tokens=8), Regex("[a-f]{3}")).token_ids,
            [(s["choice"], s["end"]) for s in branches.run_batch([{"text": text} for text in TEXTS], backend=engine)],
        ))  # fmt: skip
    assert [a for a, b in zip(*found) if a != b] == []
    assert min(ranks(two, "requests_submitted")) > 0
    assert two.stats()["running"] == 0


def test_a_prompt_goes_where_it_is_cached(two):
    two.flush_cache()
    texts = [f"{i} bottles on the wall of the house, and one of them is empty" for i in range(6)]
    for text in texts:
        two.complete(text, GREEDY)
    begun = ranks(two, "requests_submitted")
    for text in texts:
        usage = two.complete(text, GREEDY).usage
        assert usage.cached_tokens == usage.prompt_tokens - 1
    assert [after - before for before, after in zip(begun, ranks(two, "requests_submitted"))] != [
        6,
        0,
    ]


def test_branches_of_a_program_are_computed_once(own, two):
    """Of each program with its replica."""
    counts = []
    for engine in (own, two):
        engine.flush_cache()
        before = engine.stats()
        branches.run_batch([{"text": f"{i} bottles"} for i in range(8)], backend=engine)
        after = engine.stats()
        counts.append(
            [after[name] - before[name] for name in ("prompt_tokens", "prompt_tokens_cached")]
        )
    computed = [prompt - cached for prompt, cached in counts]
    assert counts[0][0] == counts[1][0]
    assert computed[1] <= computed[0] * 1.02, counts


def test_a_request_may_name_its_replica(two):
    before = ranks(two, "requests_submitted")
    for rank, given in (
        (1, {"routed_dp_rank": 1}),
        (1, {"data_parallel_rank": 1}),
        (0, {"data_parallel_rank": 0}),
    ):
        two.generate("ab", {"max_new_tokens": 1}, **given)
        before[rank] += 1
        assert ranks(two, "requests_submitted") == before
    with pytest.raises(
        sgl.ParameterError, match="routed_dp_rank: the engine has the replicas 0 to 1, and no 2"
    ):
        two.generate("ab", {"max_new_tokens": 1}, routed_dp_rank=2)
    with pytest.raises(sgl.ParameterError, match="data_parallel_rank"):
        two.generate("ab", {"max_new_tokens": 1}, routed_dp_rank=0, data_parallel_rank=1)


def test_one_engine_is_replica_0(own):
    assert own.generate("ab", {"max_new_tokens": 1}, routed_dp_rank=0)
    with pytest.raises(
        sgl.ParameterError, match="routed_dp_rank: the engine has one replica, and no 1"
    ):
        own.generate("ab", {"max_new_tokens": 1}, routed_dp_rank=1)


def test_names_are_unique_among_replicas_and_abort_there(two):
    sinks = [Collector(), Collector()]
    for rid, sink in zip(("a", "b"), sinks):
        two.submit("ab", LONG, sink=sink, rid=rid, stream=True)
    for rid, sink in zip(("a", "b"), sinks):
        with pytest.raises(sgl.ParameterError, match="name of a request that has not ended"):
            two.submit("ab", LONG, sink=Collector(), rid=rid)
        two.abort(rid)
        assert isinstance(sink.end(), sgl.RequestAbortedError)


def test_a_sink_may_not_wait_for_any_replica(two):
    said = []
    for rank in (0, 1):
        done = threading.Event()

        def sink(event, done=done):
            try:
                two.stats()
            except sgl.SglError as error:
                said.append(str(error))
            done.set()

        two.generate("ab", {"max_new_tokens": 1}, routed_dp_rank=rank)
        two.submit(f"{rank}", GREEDY, sink=sink)
        assert done.wait(60)
    assert ["engine's own thread" in each for each in said] == [True, True]


def test_calls_reach_both(two, own, folders):
    two.complete("ab", GREEDY)
    assert two.flush_cache() > 0
    assert ranks(two, "cached_tokens") == [0, 0]
    two.pause_generation("retract")
    sinks = [Collector() for _ in range(4)]
    for sink, text in zip(sinks, TEXTS):
        two.submit(text, GREEDY, sink=sink)
    two.continue_generation()
    assert [sink.end().token_ids for sink in sinks] == [
        own.complete(text, GREEDY).token_ids for text in TEXTS[:4]
    ]
    two.release_memory_occupation()
    assert ranks(two, "asleep") == [1, 1]
    two.resume_memory_occupation()
    assert two.compile_grammar(Regex("[ab]+"))
    assert len(two.check_weights()["checksums"]) == len(own.check_weights()["checksums"])
    info = two.get_server_info()
    assert (info["dp_size"], [each["dp_rank"] for each in info["internal_states"]]) == (2, [0, 1])
    before = two.get_weights_by_name("model.norm.weight", 3)
    two.update_weights(folders[1], weight_version="second")
    assert (two.config.model, two.config.weight_version) == (folders[1], "second")
    two.update_weight_version("third")
    assert two.config.weight_version == two.get_model_info()["weight_version"] == "third"
    seconds = {tuple(two.generate("ab", {"max_new_tokens": 6, "temperature": 0}, routed_dp_rank=rank)["output_ids"])
               for rank in (0, 1)}  # fmt: skip
    assert len(seconds) == 1
    assert seconds != {own.complete("ab", GREEDY).token_ids}
    with pytest.raises(sgl.ModelError):
        two.update_weights(str(folders[0]) + "/nothing")
    two.update_weights(folders[0], weight_version="default")
    assert two.get_weights_by_name("model.norm.weight", 3) == before


def test_a_server_shows_each_and_sends_requests_to_the_one_that_they_name(two):
    with serving(two) as url:
        names = {"/generate": {"text": "ab", "sampling_params": {"max_new_tokens": 1}},
                 "/v1/completions": {"model": two.model_name, "prompt": "ab", "max_tokens": 1}}  # fmt: skip
        for path, body in names.items():
            before = ranks(two, "requests_submitted")
            answer = httpx2.post(f"{url}{path}", json={**body, "data_parallel_rank": 1}, timeout=60)
            assert answer.status_code == 200, answer.text
            assert ranks(two, "requests_submitted") == [before[0], before[1] + 1]
            refused = httpx2.post(f"{url}{path}", json={**body, "routed_dp_rank": 2}, timeout=60)
            assert (refused.status_code, "routed_dp_rank" in refused.text) == (400, True)
        loads = httpx2.get(f"{url}/v1/loads", timeout=60).json()
        assert (loads["dp_rank_count"], [row["dp_rank"] for row in loads["loads"]]) == (2, [0, 1])
        assert [row["dp_rank"] for row in httpx2.get(f"{url}/get_load", timeout=60).json()] == [
            0,
            1,
        ]
        text = httpx2.get(f"{url}/metrics", timeout=60).text
        found = {family.name: family.samples for family in text_string_to_metric_families(text)}
        submitted = {
            each.labels["rank"]: each.value for each in found["sglang_lite_requests_submitted"]
        }
        assert submitted == dict(zip("01", ranks(two, "requests_submitted")))
        assert [each.labels["rank"] for each in found["sglang:num_running_reqs"]] == ["0", "1"]
        assert ["rank" in each.labels for each in found["sglang:gen_throughput"]] == [False]
        assert httpx2.get(f"{url}/health_generate", timeout=60).status_code == 200


def two_that_run(engine):
    """Sinks of two requests that run, each at another replica."""
    sinks = [Collector(), Collector()]
    for rank, sink in enumerate(sinks):
        engine.submit(
            f"{rank} of two requests that run for a while", A_WHILE, sink=sink, stream=True
        )
    for sink in sinks:
        sink.begun()
    return sinks


def killed(engine, pid):
    """Kills a replica; returns the error of its request, and the result of the other one's."""
    sinks = two_that_run(engine)
    send(pid, signal.SIGKILL)
    ends = sorted((sink.end() for sink in sinks), key=lambda end: isinstance(end, Generation))
    assert [isinstance(end, Generation) for end in ends] == [False, True]
    assert isinstance(ends[0], EngineClosedError)
    assert "the process of replica" in str(ends[0])
    assert "SIGKILL" in str(ends[0])
    return ends


def test_a_replica_that_is_killed_fails_its_own_requests_and_comes_back(started, own):
    two, (first, _) = started
    killed(two, first)
    expected = own.complete("ab", GREEDY).token_ids
    # by the other one
    assert [two.complete("ab", GREEDY).token_ids for _ in range(3)] == [expected] * 3
    until(lambda: len(two.stats()["replicas"]) == 2)
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    answers = [two.generate("ab", params, routed_dp_rank=rank)["output_ids"] for rank in (0, 1)]
    assert answers == [list(expected)] * 2


def test_without_restart_the_others_go_on_until_the_last_one_dies(folders):
    """Whenever the first one is killed: each request ends once, and those of the other one as they
    would.
    """
    for kill in range(KILLS):
        before, rng = processes.children(), Random(kill)
        with sgl.Engine(folders[0], **SETTINGS, dp_size=2) as engine:
            pids = [pid for pid in processes.children() if pid not in before]
            rng.shuffle(pids)
            left, moment = rng.choice([0, 10, 100, 500]), threading.Event()

            def told(event, moment=moment):
                nonlocal left
                left -= 1
                if left <= 0:
                    moment.set()

            sinks = load.start(engine, kill, told=told)
            moment.wait(20)
            send(pids[0], signal.SIGKILL)
            ends = [end for sink in sinks for end in sink.ends()]
            assert [len(sink.ends()) for sink in sinks] == [sink.count for sink in sinks]
            closed = [str(end) for end in ends if isinstance(end, EngineClosedError)]
            assert len(closed) < len(ends)
            assert all("the process of replica" in each and "SIGKILL" in each for each in closed)
            processes.ended(pids[0])
            until(lambda engine=engine: len(engine.stats()["replicas"]) == 1)
            assert engine.complete("ab", GREEDY)
            program, end = engine.open_program(sink=(sink := Collector())), sink.end
            send(pids[1], signal.SIGKILL)
            processes.ended(pids[1])
            until(lambda engine=engine: engine.core.gate.reason)
            with pytest.raises(
                EngineClosedError, match=r"the process of replica . was ended by SIGKILL"
            ):
                engine.complete("ab", GREEDY)
            program.close()
            assert isinstance(end(), EngineClosedError)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dp_size": 0}, "dp_size: 0 is not a whole number of at least 1"),
        ({"dp_size": 2.0}, "dp_size: 2.0 is not a whole number"),
        ({"dp_size": 2000}, "dp_size: 2,000 is more than 1,024"),
        ({"dp_size": 2, "in_process": True}, "dp_size: is for an engine in its own process"),
        (
            {"dp_size": 2, "device": "cuda:1"},
            "device: 'cuda:1' is one GPU, for 2 processes. Use device=\"cuda\"",
        ),
        ({"base_gpu_id": 1, "device": "cpu"}, "base_gpu_id: device is 'cpu'"),
        ({"gpu_id_step": -1}, "gpu_id_step: -1 is not a whole number of at least 0"),
        (
            {"load_balance_method": "follow_bootstrap_room"},
            "load_balance_method: 'follow_bootstrap_room' is not one of",
        ),
        ({"data_parallel_size": 2, "dp_size": 3}, "data_parallel_size|dp_size"),
    ],
)
def test_bad_settings_are_refused_by_name(folders, given, said):
    with pytest.raises(sgl.ParameterError, match=said):
        sgl.Engine(folders[0], **given)


def test_a_replica_that_can_not_start_ends_the_others(folders, tmp_path, monkeypatch):
    """And the error is its own."""
    before = processes.children()
    with pytest.raises(sgl.SglError, match=r"memory|max_total_tokens"):
        sgl.Engine(folders[0], **{**SETTINGS, "max_total_tokens": 2**31 - 1}, dp_size=2)
    assert processes.children() == before


def test_round_robin_alternates_though_one_replica_has_the_prompt(folders):
    with sgl.Engine(folders[0], **SETTINGS, dp_size=2, load_balance_method="round_robin") as engine:
        for _ in range(4):
            engine.generate(TEXTS[2], {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True})
        assert ranks(engine, "requests_submitted") == [2, 2]
