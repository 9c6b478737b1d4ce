"""Nodes that a backend answers: the user's generations and selections with the settings of their run, checked against
what their backend can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sglang_lite.constraints.number_text import TERMINATORS
from sglang_lite.lang.backend.base import Backend, check_adapter
from sglang_lite.lang.backend.capabilities import EVERYTHING, Demands
from sglang_lite.lang.execution.blocks import OpenBlocks
from sglang_lite.lang.execution.repair_prompt import check_repair
from sglang_lite.lang.execution.run import Run
from sglang_lite.lang.expressions import (
    NUMBER_STOPS,
    SglGen,
    SglSelect,
    example_choices,
    number_as_regex,
    only_picks,
)
from sglang_lite.program.nodes import Gen, Select
from sglang_lite.protocol import UNSET, Choices, Continuation, InOrder, Location, Number, SamplingParams, Unset
from sglang_lite.protocol.sampling import NO_PARAMS, merge
from sglang_lite.text.reasoning import with_reasoning

if TYPE_CHECKING:
    from sglang_lite.lang.tools import Toolbox


def check_select(own: SglSelect, run: Run, backend: Backend, blocks: OpenBlocks, where: Location | None) -> None:
    """Checks a selection.

    Raises:
        ProgramError: it picks several choices inside a grammar.
        CapabilityError: the backend can't do it.
    """
    if own.multi:
        blocks.refuse_in_grammar("select(multi=True) can't be part of a grammar.", "Select one by one.", where)
    check_adapter(backend, own, _adapter(own, run), where)
    texts = example_choices(own.choices, multi=own.multi)
    choices = Choices(texts) if isinstance(texts, tuple) else None  # a symbol, in a trace
    backend.check(own, Demands("select", constraint=choices, scores=not only_picks(own)), where)


def select_node(own: SglSelect, run: Run, blocks: OpenBlocks, path: str, where: Location | None) -> Select:
    """Node of a selection.

    Args:
        path: path of the node in the program's tree.
    """
    judged = own.multi or run.settings.retries or run.kept is not None
    return msgspec.structs.replace(
        own.node, method=None if judged else own.node.method, seed=run.seed_of(path), special=blocks.role is None,
        lora_path=_adapter(own, run), where=where,
    )  # fmt: skip


def _adapter(own: SglSelect, run: Run) -> tuple[str, ...] | Unset:
    """Adapter of a selection: its own, or that of the run."""
    return run.settings.params.lora_path if isinstance(own.node.lora_path, Unset) else own.node.lora_path


def with_tools_of(own: SglGen, tools: Toolbox, backend: Backend) -> SglGen:
    """Generation that calls tools as the backend's model writes calls."""
    if (family := backend.tool_family()) is None:
        return own
    spelled = tools.value_type(family)
    node = msgspec.structs.replace(own.node, constraint=spelled.constraint)
    return msgspec.structs.replace(own, node=node, value_type=spelled)


def gen_node(
    own: SglGen, run: Run, backend: Backend, blocks: OpenBlocks, path: str, where: Location | None, *,
    shows_tools: bool, later: bool,
) -> Gen:  # fmt: skip
    """Node of a generation.

    Args:
        backend: backend that answers it.
        path: path of the node in the program's tree.
        shows_tools: whether its prompt shows its tools.
        later: whether its text is read while it grows, after the end of the body.

    Raises:
        ProgramError: it is to be repaired inside a grammar.
        CapabilityError: the backend can't do it.
    """
    options, constraint, stops = own.options, own.node.constraint, tuple[str, ...]()
    reasoning = None if options is None else options.reasoning
    kinds = backend.capabilities.constraints
    if isinstance(constraint, Number) and (Number not in kinds or (reasoning is not None and InOrder in kinds)):
        if reasoning is None:
            constraint, stops = number_as_regex(constraint), NUMBER_STOPS
        else:  # a stop would end the reasoning
            constraint = number_as_regex(constraint, TERMINATORS)
    if reasoning is not None and constraint is not None and InOrder in kinds:
        constraint = with_reasoning(reasoning, constraint)
    params = _params(own.node, run, stops if blocks.role is None else (*stops, *run.template.stop_str), path)
    whole = constraint if blocks.grammar is None else Continuation(blocks.grammar, part=constraint)
    if whole is not None or backend.capabilities is not EVERYTHING:
        backend.check(own, Demands("gen", params, whole), where)
    if options is not None and options.repair:
        blocks.refuse_in_grammar("repair can't be part of a grammar.", "Leave it out.", where)
        check_repair(own, backend, run.settings.retries, blocks.role, params, where)
    judged = shows_tools or _judged(own, run)
    return Gen(own.node.name, params, constraint, judged, later, own.node.timeout, where=where)


def _params(node: Gen, run: Run, stops: tuple[str, ...], path: str) -> SamplingParams:
    """Parameters of the node over those of the run, with more stops and the node's seed."""
    params, seed = node.params, run.seed_of(path)
    if run.settings.params is not NO_PARAMS:
        params = merge(run.settings.params, params)
    if not stops and seed is UNSET:
        return params
    own = () if isinstance(params.stop, Unset) else params.stop
    return msgspec.structs.replace(
        params,
        stop=(*own, *(s for s in stops if s not in own)) or UNSET,
        seed=seed if isinstance(params.seed, Unset) else params.seed,
    )


def _judged(own: SglGen, run: Run) -> bool:
    """Returns True if the caller's Python decides on a generation's result: by retries, a check, another backend, or
    because an earlier run may have the answer."""
    if own.options is None or run.kept is not None:
        return bool(run.settings.retries) or run.kept is not None
    retries = run.settings.retries if own.options.retries is None else own.options.retries
    return bool(retries) or own.options.check is not None or own.options.backend is not None
