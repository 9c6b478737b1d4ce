"""Calls to several replicas that have a single answer. Decides which replicas each call goes to,
and combines their answers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

from msgspec.structs import replace

from sglang_lite.engine.core_client import CoreClient, update_tensors_through_file
from sglang_lite.engine.futures import all_done_or_any_after_delay, convert_result, gather_results
from sglang_lite.protocol import EngineClosedError, ModelError, SglError
from sglang_lite.runtime import calls
from sglang_lite.runtime.calls import EngineCall, R

_WRITTEN = "it has the weights of its checkpoint, and can't have those that the others are given. Start a new engine."
_WITHOUT_GRAPHS = ("kv_cache", "weights")  # resuming the last of these brings back released graphs
STATS_S = 3.0  # time to wait for counts
_LARGEST = ("asleep", "mask_", "max_")  # prefixes of counts that are combined by their maximum


class ReplicaCalls:
    """Sends calls to the running replicas. Remembers calls that change a replica, such as loading
    an adapter, and repeats them to a replica's replacement process.

    Args:
        clients: all replicas.
        path: folder of their weights.
        version: name of these weights.

    Raises (by each call):
        SglError: as for one engine. If an update fails, no replica keeps it.
    """

    def __init__(self, clients: Sequence[CoreClient], path: str, version: str) -> None:
        self._clients = clients
        self._path = path
        self._version = version
        self._written = False  # whether tensors were written since
        self._groups: set[str] = set()  # groups in which weights are sent to their members
        self._repeated: list[EngineCall[Any]] = []  # calls to repeat to a replacement process
        self._lock = threading.Lock()  # held while these change
        # all-or-none calls, which wait for answers
        self._updates = ThreadPoolExecutor(1, "sglang_lite-updates")

    def call_replicas(self, call: EngineCall[Any]) -> Future[Any]:  # as the call's own
        """Returns the future of the answer to a call."""
        answer = self.answers.get(type(call))
        return self._ask_all(call) if answer is None else answer(self, call)

    def repeat_calls_to(self, client: CoreClient) -> Future[list[Any]]:  # answers that nobody needs
        """Brings a replacement process up to date: sends it the remembered calls that the previous
        process had received.
        """
        if self._written or self._groups:
            raise ModelError(_WRITTEN)
        return gather_results(
            [client.ask_process(call) for call in (*self._repeated, calls.Stats())]
        )

    def close(self) -> None:
        """Ends the thread that runs updates. An update in progress is finished first."""
        self._updates.shutdown(wait=False)

    def accepting_replicas(self) -> Sequence[CoreClient]:
        """Returns the replicas that accept calls. If there are none, returns all replicas."""
        return [client for client in self._clients if not client.gate.reason] or self._clients

    # ------------------------------------------------------------------------------------------ all

    def _ask_all(self, call: EngineCall[Any]) -> Future[Any]:
        combine = COMBINED[type(call)]

        def combine_and_remember(answers: list[Any]) -> Any:  # as the call's own
            self._remember_call(call)
            return combine(answers)

        return convert_result(
            gather_results([_ask_or_fail(client, call) for client in self.accepting_replicas()]),
            combine_and_remember,
        )

    def _remember_call(self, call: EngineCall[Any]) -> None:
        """Remembers a call if it must be repeated to a replacement process. If the call cancels
        earlier ones, forgets them instead.
        """
        with self._lock:
            match call:
                case (
                    calls.LoadLoraAdapter()
                    | calls.PauseGeneration()
                    | calls.BeginUpdate()
                    | calls.ReleaseMemory()
                ):
                    self._repeated = [*self._repeated, call]
                case calls.UnloadLoraAdapter(name):
                    self._forget_calls(
                        lambda each: isinstance(each, calls.LoadLoraAdapter) and each.name == name
                    )
                case calls.ContinueGeneration():
                    self._forget_calls(lambda each: isinstance(each, calls.PauseGeneration))
                case calls.EndUpdate():
                    self._forget_calls(lambda each: isinstance(each, calls.BeginUpdate))
                case calls.ResumeMemory(tags):
                    resumed = set(tags or calls.MEMORY_TAGS)
                    released = [
                        each for each in self._repeated if isinstance(each, calls.ReleaseMemory)
                    ]
                    self._forget_calls(lambda each: isinstance(each, calls.ReleaseMemory))
                    for each in released:
                        if left := tuple(sorted(set(each.tags or _WITHOUT_GRAPHS) - resumed)):
                            self._repeated = [*self._repeated, calls.ReleaseMemory(left, each.keep)]

    def _forget_calls(self, over: Callable[[EngineCall[Any]], bool]) -> None:
        self._repeated = [call for call in self._repeated if not over(call)]

    def _gather_replica_stats(self, call: calls.Stats) -> Future[dict[str, Any]]:
        """Returns the combined counts of all replicas, and the counts of each replica that answers
        in time. Stopped replicas are left out.
        """
        ranks = [
            rank for rank, client in enumerate(self._clients) if client.is_up and client.responds
        ]
        answers = {
            rank: _ask_or_fail(self._clients[rank], call)
            for rank in ranks or range(len(self._clients))
        }

        def combine_stats(_: None) -> dict[str, Any]:
            ended = {rank: stats for rank, stats in answers.items() if stats.done()}
            each = {
                rank: stats.result() for rank, stats in ended.items() if stats.exception() is None
            }
            if not each:
                next(iter(ended.values())).result()  # raises
            return {
                **_combine_counts([*each.values()]),
                "replicas": [{"dp_rank": rank, **stats} for rank, stats in each.items()],
            }

        return convert_result(
            all_done_or_any_after_delay([*answers.values()], STATS_S), combine_stats
        )

    def _compile(self, call: calls.CompileGrammar) -> Future[Any]:
        first, *others = self.accepting_replicas()
        compiled = first.submit_call(call)  # in this process, too
        return convert_result(
            gather_results([compiled, *(client.ask_process(call) for client in others)]),
            lambda answers: answers[0],
        )

    # ------------------------------------------------------------------------------------------ one

    def _ask_one(self, call: EngineCall[Any]) -> Future[Any]:
        return self.accepting_replicas()[0].submit_call(call)

    # ---------------------------------------------------------------------------------- all or none

    def _load_lora(self, call: calls.LoadLoraAdapter) -> Future[None]:
        def undo(client: CoreClient) -> None:
            client.submit_call(calls.UnloadLoraAdapter(call.name)).result()

        return self._updates.submit(self._call_all_or_undo, call, undo)

    def _update_weights(self, call: calls.UpdateWeights) -> Future[str]:
        def update() -> str:
            name: str = self._call_all_or_undo(call, self._reload_common_weights)
            self._path = os.path.abspath(call.path) if os.path.exists(call.path) else call.path
            self._written = False
            self._version = self._clients[0].config.weight_version
            return name

        return self._updates.submit(update)

    def _update_tensors(
        self, call: calls.UpdateTensors | calls.OpenTensors | calls.ReceiveWeights
    ) -> Future[str]:
        def update() -> str:
            together = isinstance(call, calls.ReceiveWeights)
            version: str = self._call_all_or_undo(
                call, self._reload_common_weights, together=together
            )
            self._written = True
            return version

        return self._updates.submit(update)

    def _set_weight_version(self, call: calls.NameWeights) -> Future[str]:
        def name() -> str:
            before = self.accepting_replicas()[0].config.weight_version
            version: str = self._call_all_or_undo(
                call, lambda client: client.submit_call(calls.NameWeights(before)).result()
            )
            self._version = version
            return version

        return self._updates.submit(name)

    def _join_group(self, call: calls.JoinGroup) -> Future[None]:
        """Makes all replicas join a process group. Their ranks are consecutive, starting at the
        call's rank.
        """
        for client in self._clients:
            client.gate.check_open()
        joins = [
            client.submit_call(replace(call, rank=call.rank + rank))
            for rank, client in enumerate(self._clients)
        ]
        return convert_result(gather_results(joins), lambda _: self._groups.add(call.name))

    def _leave_group(self, call: calls.LeaveGroup) -> Future[None]:
        left = gather_results([_ask_or_fail(client, call) for client in self.accepting_replicas()])
        return convert_result(left, lambda _: self._groups.discard(call.name))

    def _call_all_or_undo(
        self, call: EngineCall[Any], undo: Callable[[CoreClient], object], *, together: bool = False
    ) -> Any:  # as the call's own
        """Calls all replicas and returns the first one's answer. If the call fails at one replica,
        undoes it at the replicas where it succeeded.

        Args:
            together: whether to call all replicas at the same time. Otherwise, the first replica is
                called, and the others once it has succeeded.
        """
        first, *others = self.accepting_replicas()
        answers = [(first, _ask_or_fail(first, call))]
        if not together:
            answers[0][1].result()  # an error that concerns all is raised here
        answers += [(client, _ask_or_fail(client, call)) for client in others]
        errors = [error for _, each in answers if (error := each.exception()) is not None]
        if errors:
            for client, each in answers:
                if each.exception() is None:
                    undo(client)
            raise errors[0]
        self._remember_call(call)
        return answers[0][1].result()

    def _reload_common_weights(self, client: CoreClient) -> None:
        """Reloads a replica's weights from the last folder that all replicas have loaded. If
        tensors were written since then, the common weights can't be restored, and the replica is
        ended.
        """
        try:
            if self._written:
                raise ModelError(
                    "has weights that another replica could not take, and can't go back."
                )
            client.submit_call(calls.UpdateWeights(self._path, self._version)).result()
        except SglError as error:
            client.disconnect()
            client.gate.reason = f"the replica was ended: {error}"

    answers: ClassVar[Mapping[type[EngineCall[Any]], Callable[..., Future[Any]]]] = {
        calls.CompileGrammar: _compile,
        calls.Stats: _gather_replica_stats,
        calls.ReadWeights: _ask_one,
        calls.OfferWeights: _ask_one,
        calls.SendWeights: _ask_one,
        calls.LoadLoraAdapter: _load_lora,
        calls.UpdateWeights: _update_weights,
        calls.UpdateTensors: _update_tensors,
        calls.OpenTensors: _update_tensors,
        calls.ReceiveWeights: _update_tensors,
        calls.NameWeights: _set_weight_version,
        calls.JoinGroup: _join_group,
        calls.LeaveGroup: _leave_group,
        # once for all
        calls.WriteTensors: lambda self, call: update_tensors_through_file(
            call, self._update_tensors
        ),
    }


def _ask_or_fail(client: CoreClient, call: EngineCall[R]) -> Future[R]:
    """Asks a replica and returns the future of its answer. If the replica has ended, the future has
    the error.
    """
    try:
        return client.submit_call(call)
    except EngineClosedError as error:
        failed: Future[R] = Future()
        failed.set_exception(error)
        return failed


def _combine_counts(stats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combines the counts of several engines. Most numbers are added up. Times and states become
    their maximum, and averages their mean.
    """
    found: dict[str, Any] = {}
    for name in {name: None for each in stats for name in each}:
        values = [each[name] for each in stats if name in each]
        if isinstance(values[0], Mapping):
            found[name] = _combine_counts(values)
        elif name.startswith("avg_"):
            found[name] = sum(values) / len(values)
        elif isinstance(values[0], int | float):
            found[name] = max(values) if name.startswith(_LARGEST) else sum(values)
        elif isinstance(values[0], list):
            found[name] = [each for value in values for each in value]
        else:
            found[name] = values[0]
    return found


def _check_equal_checksums(checks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the checksums of the weights, which must be equal in all replicas. Raises ModelError
    if they differ.
    """
    for rank, each in enumerate(checks):
        if each.get("checksums") != checks[0].get("checksums"):
            raise ModelError(
                f"replica {rank} has other weights than replica 0.",
                hint="Update the weights again.",
            )
    changed = sorted({name for each in checks for name in each.get("changed", ())})
    return {**checks[0], **({"changed": changed} if "changed" in checks[0] else {})}


def _combine_loras(lists: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Combines the replicas' lists of adapters, which all contain the same adapters. An adapter
    counts as resident if at least one replica has it on its device.
    """
    found = {adapter["lora_name"]: adapter for adapter in lists[0]}
    resident = {adapter["lora_name"] for each in lists for adapter in each if adapter["resident"]}
    return [{**adapter, "resident": name in resident} for name, adapter in found.items()]


def _discard_answers(_: Sequence[object]) -> None:
    """Returns None in place of the answers. Used for calls that have no answer."""


# How to combine the answers to a call that goes to all replicas.
COMBINED: Mapping[type[EngineCall[Any]], Callable[[list[Any]], Any]] = {
    calls.CheckWeights: _check_equal_checksums,
    calls.PauseGeneration: sum,
    calls.ContinueGeneration: _discard_answers,
    calls.BeginUpdate: _discard_answers,
    calls.EndUpdate: _discard_answers,
    calls.FreezeObjects: _discard_answers,
    calls.ReleaseMemory: _discard_answers,
    calls.ResumeMemory: _discard_answers,
    calls.UnloadLoraAdapter: _discard_answers,
    calls.Loras: _combine_loras,
    calls.FlushCache: sum,
    calls.EndSession: _discard_answers,
    calls.ImportPrefix: min,
    calls.StartProfile: _discard_answers,
    calls.RecordExperts: lambda each: [
        [sum(rows) for rows in zip(*layers)] for layers in zip(*each)
    ],
    calls.StopProfile: lambda paths: os.path.dirname(paths[0]),
}
