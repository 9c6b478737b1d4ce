"""Calls to several replicas, with scripted ones: who is asked, the answer, and what a failure at
one leaves.
"""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from sglang_lite.engine import replica_calls
from sglang_lite.engine.replica_calls import COMBINED, ReplicaCalls
from sglang_lite.errors import EngineClosedError, ModelError, ParameterError
from sglang_lite.protocol import Regex
from sglang_lite.runtime import calls as table
from sglang_lite.runtime.calls import (
    BeginUpdate,
    CheckWeights,
    CompileGrammar,
    ContinueGeneration,
    EncodeMedia,
    EndUpdate,
    EngineCall,
    ExportPrefix,
    FlushCache,
    ImportPrefix,
    JoinGroup,
    LeaveGroup,
    LoadLoraAdapter,
    Loras,
    NameWeights,
    PauseGeneration,
    ReadWeights,
    ReceiveWeights,
    ReleaseMemory,
    ResumeMemory,
    Stats,
    StopProfile,
    UnloadLoraAdapter,
    UpdateTensors,
    UpdateWeights,
)
from sglang_lite.runtime.core.gate import Gate

NEVER = object()  # answer of a process that is stopped


class Replica:
    """A replica that answers with what a script says, and keeps what it was asked."""

    def __init__(self, answers=(), *, up=True):
        self.answers, self.asked, self.is_up = dict(answers), [], up
        self.gate, self.config, self.responds = Gate(), SimpleNamespace(weight_version="v"), True
        self.ended = False

    def submit_call(self, call):
        self.asked.append(call)
        answer, future = self.answers.get(type(call)), Future()
        answer = answer[len(self.asked) - 1] if isinstance(answer, tuple) else answer
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not NEVER:
            future.set_result(answer)
        return future

    ask_process = submit_call

    def disconnect(self):
        self.ended = True


def asked(replicas):
    return [[type(call).__name__ for call in replica.asked] for replica in replicas]


def calls_of(*replicas):
    return ReplicaCalls(replicas, "/first", "v")


def test_the_table_has_every_call():
    named = {
        each
        for each in vars(table).values()
        if isinstance(each, type) and issubclass(each, EngineCall)
    }
    here = set(COMBINED) | set(ReplicaCalls.answers)
    assert named - {EngineCall, ExportPrefix, EncodeMedia} == here  # which a chosen replica answers
    assert set(COMBINED).isdisjoint(ReplicaCalls.answers)


@pytest.mark.parametrize(
    ("call", "answers", "whole"),
    [
        (FlushCache(), (3, 4), 7),
        (PauseGeneration("abort"), (1, 2), 3),
        (ContinueGeneration(), (None, None), None),
        (ImportPrefix("f", ""), (32, 16), 16),
        (StopProfile(), ("/p/a.gz", "/p/b.gz"), "/p"),
        (Loras(), ([{"lora_name": "a", "resident": False}], [{"lora_name": "a", "resident": True}]),
         [{"lora_name": "a", "resident": True}]),
        (CheckWeights("compare"), ({"checksums": {"w": "1"}, "changed": ["w"]}, {"checksums": {"w": "1"}, "changed": []}),
         {"checksums": {"w": "1"}, "changed": ["w"]}),
        (CompileGrammar(Regex("a")), ("compiled", None), "compiled"),
    ],
)  # fmt: skip
def test_all_replicas_are_asked_and_answer_as_one(call, answers, whole):
    replicas = [Replica({type(call): answer}) for answer in answers]
    assert calls_of(*replicas).call_replicas(call).result() == whole
    assert asked(replicas) == [[type(call).__name__]] * 2


def test_weights_that_differ_are_found_out():
    replicas = [Replica({CheckWeights: {"checksums": {"w": n}}}) for n in "12"]
    with pytest.raises(ModelError, match="replica 1 has other weights"):
        calls_of(*replicas).call_replicas(CheckWeights("checksum")).result()


def test_one_that_has_ended_is_left_out():
    replicas = [
        Replica({FlushCache: 3, ReadWeights: [1]}),
        Replica({FlushCache: 4, ReadWeights: [2]}),
    ]
    replicas[0].gate.reason = "killed"
    assert calls_of(*replicas).call_replicas(FlushCache()).result() == 4
    assert calls_of(*replicas).call_replicas(ReadWeights("w", 1)).result() == [2]
    assert asked(replicas) == [[], ["FlushCache", "ReadWeights"]]


def test_counts_are_added_and_shown_by_rank():
    counts = [
        {
            "running": 1,
            "mask_p50_s": 0.5,
            "asleep": 0,
            "avg_x": 1.0,
            "drafters": {"prompt": {"drafted": 1}},
        },
        {
            "running": 2,
            "mask_p50_s": 0.1,
            "asleep": 1,
            "avg_x": 2.0,
            "drafters": {"prompt": {"drafted": 5}},
        },
    ]
    away = Replica(up=False)
    stats = (
        calls_of(Replica({Stats: counts[0]}), away, Replica({Stats: counts[1]}))
        .call_replicas(Stats())
        .result()
    )
    ranks = stats.pop("replicas")
    drafters = {"prompt": {"drafted": 6}}
    assert stats == {
        "running": 3,
        "mask_p50_s": 0.5,
        "asleep": 1,
        "avg_x": 1.5,
        "drafters": drafters,
    }
    assert ranks == [{"dp_rank": 0, **counts[0]}, {"dp_rank": 2, **counts[1]}]
    assert away.asked == []  # it loads its model, and would answer after that


def test_counts_leave_out_one_that_dies_meanwhile():
    dying = Replica({Stats: EngineClosedError("killed")})
    stats = calls_of(dying, Replica({Stats: {"running": 2}})).call_replicas(Stats()).result()
    assert stats == {"running": 2, "replicas": [{"dp_rank": 1, "running": 2}]}
    with pytest.raises(EngineClosedError, match="killed"):
        calls_of(dying).call_replicas(Stats()).result()


def test_counts_leave_out_one_that_is_stopped(monkeypatch):
    monkeypatch.setattr(replica_calls, "STATS_S", 0.01)
    stopped, running = Replica({Stats: NEVER}), Replica({Stats: {"running": 2}})
    expected = {"running": 2, "replicas": [{"dp_rank": 1, "running": 2}]}
    assert calls_of(stopped, running).call_replicas(Stats()).result(60) == expected
    stopped.responds = False
    assert calls_of(stopped, running).call_replicas(Stats()).result(60) == expected
    assert len(stopped.asked) == 1


# -------------------------------------------------------------------------------------- all or none


def test_an_update_that_the_first_refuses_reaches_nobody_else():
    replicas = [Replica({UpdateWeights: ModelError("other shapes")}), Replica()]
    with pytest.raises(ModelError, match="other shapes"):
        calls_of(*replicas).call_replicas(UpdateWeights("b", None)).result()
    assert asked(replicas) == [["UpdateWeights"], []]


@pytest.mark.parametrize("failure", [ModelError("no memory"), EngineClosedError("killed")])
def test_an_update_that_fails_at_one_is_taken_back_at_the_others(failure):
    replicas = [
        Replica({UpdateWeights: "m"}),
        Replica({UpdateWeights: failure}),
        Replica({UpdateWeights: "m"}),
    ]
    updates = calls_of(*replicas)
    with pytest.raises(type(failure)):
        updates.call_replicas(UpdateWeights("b", "w")).result()
    assert [replica.asked[1:] for replica in replicas] == [
        [UpdateWeights("/first", "v")],
        [],
        [UpdateWeights("/first", "v")],
    ]
    replicas[1].answers[UpdateWeights] = "m"
    assert updates.call_replicas(UpdateWeights("b", "w")).result() == "m"


def test_a_name_that_one_could_not_take_is_taken_back_at_the_others():
    replicas = [
        Replica({NameWeights: "w"}),
        Replica({NameWeights: ModelError("no"), UpdateWeights: "m"}),
    ]
    names = calls_of(*replicas)
    with pytest.raises(ModelError, match="no"):
        names.call_replicas(NameWeights("w")).result()
    assert [replica.asked[1:] for replica in replicas] == [[NameWeights("v")], []]
    replicas[1].answers[NameWeights] = "w"
    assert names.call_replicas(NameWeights("w")).result() == "w"
    replicas[1].answers[UpdateWeights] = ModelError("no memory")
    with pytest.raises(ModelError, match="no memory"):
        names.call_replicas(UpdateWeights("b", "x")).result()
    assert replicas[0].asked[-1] == UpdateWeights("/first", "w")


def test_tensors_that_one_could_not_take_end_those_that_have_them_for_good():
    replicas = [
        Replica({UpdateTensors: "w"}),
        Replica({UpdateTensors: ("w", ModelError("no memory"))}),
    ]
    updates = calls_of(*replicas)
    assert updates.call_replicas(UpdateTensors("f", last=True, version="w")).result() == "w"
    with pytest.raises(ModelError, match="no memory"):
        updates.call_replicas(UpdateTensors("f", last=True, version="x")).result()
    assert [replica.ended for replica in replicas] == [True, False]
    assert "another replica could not take" in replicas[0].gate.reason
    with pytest.raises(ModelError, match="weights of its checkpoint"):
        updates.repeat_calls_to(replicas[1])


def test_an_adapter_is_loaded_by_all_or_none():
    replicas = [Replica(), Replica({LoadLoraAdapter: ParameterError("lora_name", "no room.")})]
    with pytest.raises(ParameterError, match="no room"):
        calls_of(*replicas).call_replicas(LoadLoraAdapter("a", "/a", pinned=False)).result()
    assert asked(replicas) == [["LoadLoraAdapter", "UnloadLoraAdapter"], ["LoadLoraAdapter"]]


def test_weights_that_are_sent_in_a_group_are_received_by_all_at_once():
    replicas = [Replica({ReceiveWeights: "w"}), Replica({ReceiveWeights: "w"})]
    updates = calls_of(*replicas)
    updates.call_replicas(JoinGroup("localhost", 1, 1, 3, "g", "gloo")).result()
    assert [replica.asked[0].rank for replica in replicas] == [1, 2]
    assert (
        updates.call_replicas(
            ReceiveWeights("g", (), (), (), flattened=False, last=True, version="w")
        ).result()
        == "w"
    )
    updates.call_replicas(LeaveGroup("g")).result()
    assert asked(replicas) == [["JoinGroup", "ReceiveWeights", "LeaveGroup"]] * 2
    replicas[1].answers[ReceiveWeights] = ModelError("its sender has gone")
    with pytest.raises(ModelError, match="sender has gone"):
        updates.call_replicas(
            ReceiveWeights("g", (), (), (), flattened=False, last=True, version="x")
        ).result()
    assert [replica.ended for replica in replicas] == [True, False]


# -------------------------------------------------------------------------------------- coming back


def test_a_process_that_comes_back_is_told_what_still_holds():
    calls, late = calls_of(Replica({PauseGeneration: 0})), Replica()
    for call in (
        LoadLoraAdapter("a", "/a", pinned=False), LoadLoraAdapter("b", "/b", pinned=True), UnloadLoraAdapter("a"),
        PauseGeneration("abort"), ContinueGeneration(), ReleaseMemory((), keep=True),
        ResumeMemory(("kv_cache",)), PauseGeneration("retract"), BeginUpdate(), EndUpdate(), BeginUpdate(),
    ):  # fmt: skip
        calls.call_replicas(call).result()
    calls.repeat_calls_to(late).result()
    told = [
        LoadLoraAdapter("b", "/b", pinned=True),
        ReleaseMemory(("weights",), keep=True),
        PauseGeneration("retract"),
        BeginUpdate(),
    ]
    assert sorted(map(repr, late.asked)) == sorted(map(repr, [*told, Stats()]))
    calls.call_replicas(ResumeMemory(())).result()
    later = Replica()
    calls.repeat_calls_to(later).result()
    assert [type(call) for call in later.asked] == [
        LoadLoraAdapter,
        PauseGeneration,
        BeginUpdate,
        Stats,
    ]
