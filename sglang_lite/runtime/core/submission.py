"""Requests to an engine whose events go to a sink: generations, selections and programs. Calls with
a single answer are in runtime/calls.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, get_args

import msgspec

from sglang_lite.errors import short_repr
from sglang_lite.program.nodes import BaseNode, Fork, Node, Path, Pause, Program, Verdict
from sglang_lite.protocol import (
    Constraint,
    OverloadedError,
    ParameterError,
    Prompt,
    SamplingParams,
    Unset,
)
from sglang_lite.runtime.requests.logit_processors import LogitProcessor
from sglang_lite.runtime.tokens.image_span import MediaItem

_CONSTRAINTS_OR_NONE = (type(None), *get_args(Constraint))
MIN_SECRET = 16  # characters
MAX_QUEUED = 100_000  # queued nodes of one program, including the branches of its forks


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Prompt to continue; the fields are the parameters of `Engine.submit`."""

    prompt: Prompt | str | Sequence[int]
    params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    stream: bool = False
    namespace: str = ""
    priority: int = 0
    logit_processor: LogitProcessor | None = None
    rid: str | None = None
    output_ids: Sequence[int] = ()
    timeout: float | None = None
    routed_dp_rank: int | None = None  # replica that runs it; None for the best
    session: str | None = None  # server session that the request belongs to
    # images of virtual ids, if the prompt is ids from `RequestBuilder`
    media: tuple[MediaItem, ...] = ()
    winds_down: bool = False
    # number of the last ids that were made of text, if the prompt is ids from `RequestBuilder`
    text_tokens: int | None = None

    def check_fields(self) -> None:
        """Raises ParameterError if the constraint, priority or namespace has the wrong type."""
        if not isinstance(self.constraint, _CONSTRAINTS_OR_NONE):
            raise ParameterError("constraint", f"{short_repr(self.constraint)} is no constraint.")
        check_field_type("priority", self.priority, int)
        check_field_type("namespace", self.namespace, str)
        check_field_type("timeout", self.timeout, int, float, type(None))
        check_field_type("routed_dp_rank", self.routed_dp_rank, int, type(None))
        check_field_type("winds_down", self.winds_down, bool)

    @property
    def samples(self) -> int:
        return 1 if isinstance(self.params.n, Unset) else self.params.n


class SelectRequest(msgspec.Struct, frozen=True, array_like=True, tag="select"):
    """Choices to score; the fields are the parameters of `Engine.submit_select`."""

    prompt: Prompt | str
    choices: Sequence[str]
    unconditional: bool = False
    namespace: str = ""
    lora_path: str | None = None

    def check_fields(self) -> None:
        """Raises ParameterError if no choices are given, or a field has the wrong type."""
        check_field_type("prompt", self.prompt, str, Prompt)
        check_field_type("namespace", self.namespace, str)
        check_field_type("choices", self.choices, list, tuple)
        if not isinstance(self.lora_path, str | None):
            raise ParameterError(
                "lora_path",
                f"{short_repr(self.lora_path)} is no name of an adapter.",
                hint="Give one name.",
            )
        for choice in self.choices:
            check_field_type("choices", choice, str)
        if not self.choices:
            raise no_choices_error()


class ProgramRequest(msgspec.Struct, frozen=True, array_like=True, tag="play"):
    """Whole program to execute; the fields are the parameters of `Engine.run_program`."""

    prompt: Prompt | str
    program: Program
    stream: bool = False
    namespace: str = ""
    priority: int = 0

    def check_fields(self) -> None:
        """Checks the types of the fields, and the size of the program.

        Raises:
            ParameterError: a field has the wrong type.
            OverloadedError: the program has too many nodes.
        """
        check_field_type("prompt", self.prompt, str, Prompt)
        check_field_type("namespace", self.namespace, str)
        check_field_type("program", self.program, Program)
        check_field_type("program", self.program.nodes, list, tuple)
        check_nodes(self.program.nodes)
        check_without_pauses(self.program.nodes)
        if count_nodes(self.program.nodes) > MAX_QUEUED:
            raise too_many_nodes_error()


Submission: TypeAlias = GenerateRequest | SelectRequest | ProgramRequest  # complete from the start


class OpenRequest(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Program that will be extended; the fields are the parameters of `Engine.open_program`."""

    stream: bool = False
    namespace: str = ""
    priority: int = 0

    def check_for_policy(self, policy: str) -> None:
        """Raises ParameterError if a field has the wrong type, or the engine's policy has no
        priorities.
        """
        check_field_type("namespace", self.namespace, str)
        check_priority(self.priority, policy)


def check_nodes(nodes: Sequence[Node], path: Path = ()) -> None:
    """Raises ParameterError if an item is not a node, or the path of their branch is not a tuple of
    integers. The contents of nodes are checked when they are created.
    """
    check_field_type("path", path, tuple)
    for index in path:
        check_field_type("path", index, int)
    for node in nodes:
        if not isinstance(node, BaseNode):
            raise ParameterError("nodes", f"{short_repr(node)} is no node of a program.")


def check_without_pauses(nodes: Sequence[Node]) -> None:
    """Raises ParameterError if a node is a pause. Only a program opened with `open_program` can get
    the verdict that ends one.
    """
    for node in nodes:
        if isinstance(node, Pause):
            raise ParameterError(
                "program", "a pause needs a verdict, which only an open program can get. Open it."
            )
        for branch in node.branches if isinstance(node, Fork) else ():
            check_without_pauses(branch)


def count_nodes(nodes: Iterable[Node]) -> int:
    """Counts nodes recursively. Each branch of a fork counts as one more, because it takes as much
    memory as a node.
    """
    count = 0
    pending = [nodes]
    while pending:
        for node in pending.pop():
            count += 1
            if isinstance(node, Fork):
                count += len(node.branches)
                pending += [branch for branch in node.branches if branch]
    return count


def check_verdict(path: Path, place: int, verdict: Verdict) -> None:
    """Raises ParameterError if an argument has the wrong type."""
    check_nodes((), path)
    check_field_type("place", place, int)
    check_field_type("verdict", verdict, Verdict)


def check_field_type(name: str, value: object, *kinds: type) -> None:
    """Raises ParameterError if a value has none of the given types."""
    if not isinstance(value, kinds):
        raise ParameterError(
            name, f"{short_repr(value)} is no {' or '.join(kind.__name__ for kind in kinds)}."
        )


def check_prefix_file(namespace: object, secret: object, *, trusted: bool = True) -> None:
    """Raises ParameterError if a prefix file is not trusted, or an argument for one has the wrong
    type.
    """
    if not trusted:
        raise ParameterError(
            "trust_cache",
            "whoever writes a file of a prefix decides what the model takes for its own computation.",
            hint="Set trust_cache=True for a file that you know, or write and read it under a secret.",
        )
    check_field_type("namespace", namespace, str)
    check_field_type("secret", secret, str, type(None))
    if isinstance(secret, str) and len(secret) < MIN_SECRET:
        raise ParameterError(
            "secret", f"it has {len(secret)} characters.", hint=f"Draw {MIN_SECRET} or more."
        )


def check_replica_rank(rank: int | None, replicas: int) -> None:
    """Raises ParameterError if an engine has no replica with that number."""
    if rank is not None and (isinstance(rank, bool) or not 0 <= rank < replicas):
        known = (
            "the engine has one replica"
            if replicas == 1
            else f"the engine has the replicas 0 to {replicas - 1}"
        )
        raise ParameterError("routed_dp_rank", f"{known}, and no {rank}.", hint="Leave it out.")


def check_priority(priority: object, policy: str) -> None:
    """Raises ParameterError if a program's priority is not an integer, or is not 0 under a policy
    that ignores priorities.
    """
    check_field_type("priority", priority, int)
    if priority and policy != "priority":
        told = f"the engine's policy is {policy!r}, which knows no priorities."
        raise ParameterError("priority", told, hint='Make the engine with policy="priority".')


def no_choices_error() -> ParameterError:
    """Returns the error for a selection without choices."""
    return ParameterError("choices", "at least one is needed.")


def too_many_nodes_error() -> OverloadedError:
    """Returns the error for a program with too many queued nodes."""
    return OverloadedError(
        f"more than {MAX_QUEUED:,} nodes of the program wait to be played.",
        hint="Does a loop end? Read a value now and then: that waits for what was added before.",
    )
