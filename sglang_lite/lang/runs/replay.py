"""`sgl.Replay`: backend that answers offline, from a recorded run."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Literal

import msgspec

from sglang_lite import wire
from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.base import ALL_CONSTRAINTS, Backend
from sglang_lite.lang.backend.capabilities import Capabilities, Demands, TurnRules
from sglang_lite.lang.backend.planning import Planner, RunFacts
from sglang_lite.lang.backend.remote.planner import CallPlanner
from sglang_lite.lang.chat_template import ChatTemplate, ChatTemplateStyle
from sglang_lite.lang.execution.operations import NodeIdentity, current_node
from sglang_lite.lang.runs import files
from sglang_lite.lang.runs.recording import (
    digest_line,
    prompt_for_recording,
    request_key,
    selection_request,
)
from sglang_lite.program.prefixes import common_prefix_length
from sglang_lite.protocol import (
    CapabilityError,
    Constraint,
    Delta,
    Generation,
    Location,
    ParameterError,
    Prompt,
    SamplingParams,
    Selection,
    WireError,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.protocol.recording import (
    RecordedCall,
    RecordedRequest,
    RecordedTemplate,
    RecordingEnd,
    RecordingHead,
)
from sglang_lite.text.chat_template import JinjaTemplate, TurnTemplate
from sglang_lite.wire.failure import as_error

_LONGEST_LINE = wire.LIMITS.bytes
_AGAIN = "Was that written by sgl.record(path), in this version? If not, record it again."
_SHOWN = 40  # characters shown on each side of a difference


class Replay(Backend):
    """Backend that repeats the answers of a recorded run (`sgl.record`). It needs no network, no
    key and no SDK.

    Args:
        path: path of the recording.
        match: which requests are answered. "request": those equal to a recorded one. A request gets
            the answer recorded for the same node if there is one left, otherwise the next unused
            answer to an equal request. Any other request is refused, and the error shows the first
            difference. "node": if no equal request is left, a node also accepts the next answer of
            the same node (program, place in the tree of forks, variable), so that prompts may have
            changed.
        timing: whether answers, and the chunks of streams, take as long as they did when recorded.
        partial: whether to accept a recording that was cut short, and use its complete calls.
        chat_template: template that renders turns as text, if the recording could not store its
            own.

    Attributes:
        left: number of recorded answers that have not been used yet.

    Raises:
        ParameterError: the file does not exist, or an argument is not valid.
        WireError: the file is not a recording, has another version, or was cut short or changed.
            The error names the line.
    """

    @explains_wrong_arguments
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        match: Literal["request", "node"] = "request",
        timing: bool = False,
        partial: bool = False,
        chat_template: TurnTemplate | None = None,
    ) -> None:
        super().__init__()
        if match not in ("request", "node"):
            raise ParameterError("match", f"{match!r:.60} is neither 'request' nor 'node'.")
        self._name = f"Replay({os.fspath(path)!r})"
        self._by_node = match == "node"
        self._timing = timing
        self._head, self._calls = _read_recording(path, partial=partial)
        constraints = frozenset(
            kind for kind in ALL_CONSTRAINTS if kind.__name__ in self._head.constraints
        )
        begun = self._head.begun
        constrained = self._head.begun_constrained
        rules = None if begun is None else TurnRules(begun, constrained or begun, self._head.texts)
        videos = any(
            image.kind == "video" for call in self._calls for image in call.request.prompt.images
        )
        self.capabilities = Capabilities(
            constraints,
            images=True,
            videos=videos,
            sounds=True,
            turns=rules,
            adapters=True,
            winds_down=True,
        )
        self.enforces = self._head.enforces and not self._by_node
        self.trace_name = self._head.backend
        self.chat_template = chat_template or _restore_template(self._head.template)
        self._lock = threading.Lock()
        # Calls by request and node, by request, and by node. Each is in all three queues; a used
        # one is passed over.
        self._queues: defaultdict[object, deque[RecordedCall]] = defaultdict(deque)
        for call in self._calls:
            key = request_key(call.request)
            node = _node_identity(call)
            for matched in ((key, node), key, node):
                self._queues[matched].append(call)
        self._used: set[int] = set()

    @property
    def left(self) -> int:
        return len(self._calls) - len(self._used)

    def get_model_name(self) -> str:
        return self._head.model

    def planner(self, run: RunFacts) -> Planner | None:
        return None if self.capabilities.turns is None else CallPlanner(self, run)

    def check(self, node: object, demands: Demands, where: Location | None) -> None:
        """Accepts every node. Requests that were not recorded fail later, when they are made."""

    def tool_family(self) -> str | None:
        return self._head.tool_family

    # ------------------------------------------------------------------------------------ answering

    def answer_now(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None
    ) -> Sequence[Generation] | None:
        if self._timing:
            return None
        call = self._take_call(RecordedRequest(prompt_for_recording(prompt), params, constraint))
        _raise_error(call)
        found = [each.event for each in call.events if isinstance(each.event, Generation)]
        return sorted(found, key=lambda each: each.index)

    def select_now(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool
    ) -> Selection | None:
        return (
            None
            if self._timing
            else _selection_of_call(self._take_selection(prompt, choices, unconditional))
        )

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None, *, stream: bool
    ) -> AsyncGenerator[Delta | Generation, None]:
        call = self._take_call(RecordedRequest(prompt_for_recording(prompt), params, constraint))
        now = 0.0
        for each in call.events:
            now = await self._sleep_until(now, each.at)
            if isinstance(each.event, Generation) or (stream and isinstance(each.event, Delta)):
                yield each.event
        await self._sleep_until(now, call.ended)
        _raise_error(call)

    async def aselect(
        self, prompt: Prompt, choices: Sequence[str], *, unconditional: bool
    ) -> Selection:
        call = self._take_selection(prompt, choices, unconditional)
        await self._sleep_until(0.0, call.ended)
        return _selection_of_call(call)

    async def _sleep_until(self, now: float, until: float) -> float:
        if self._timing and until > now:
            await asyncio.sleep(until - now)
        return until

    def _take_selection(
        self, prompt: Prompt, choices: Sequence[str], unconditional: bool
    ) -> RecordedCall:
        return self._take_call(selection_request(prompt, choices, unconditional=unconditional))

    # -------------------------------------------------------------------------------------- finding

    def _take_call(self, request: RecordedRequest) -> RecordedCall:
        """Returns the recorded call that answers a request, and marks it as used. Raises
        CapabilityError if no unused call matches.
        """
        node = current_node()
        key = request_key(request)
        with self._lock:
            for matched in ((key, node), key, *([node] if self._by_node else [])):
                calls = self._queues.get(matched)
                while calls:
                    call = calls.popleft()
                    if call.number not in self._used and call.request.choices == request.choices:
                        self._used.add(call.number)
                        return call
            raise self._unrecorded_error(request, key, node)

    def _unrecorded_error(
        self, request: RecordedRequest, key: bytes, node: NodeIdentity
    ) -> CapabilityError:
        """Returns the error for a request that was not recorded, or that is made more often than it
        was recorded.
        """
        count = sum(request_key(call.request) == key for call in self._calls)
        what = f"node {node.place!r}{f', variable {node.name!r}' if node.name else ''}"
        if count:
            return CapabilityError(
                f"{self._name}: {what} makes a request once more that was recorded {count} times.",
                hint="Record it again.",
            )
        other = self._most_similar_call(request, node)
        if other is None:
            return CapabilityError(
                f"{self._name}: {what} makes a request, but the recording has none.",
                hint="Record it again.",
            )
        pointer, before, now = next(
            differences(request_to_data(other.request), request_to_data(request))
        )
        return CapabilityError(
            f"{self._name}: the request of {what} was not recorded. The nearest is call {other.number}; first "
            f"difference at {pointer}: {before} was recorded, {now} is requested.",
            hint="Record it again, or use match='node'.",
        )

    def _most_similar_call(
        self, request: RecordedRequest, node: NodeIdentity
    ) -> RecordedCall | None:
        """Returns the recorded call whose prompt has the longest beginning in common with a
        request's. Unused calls of the same node are preferred. Returns None if the recording has no
        calls.
        """
        same = [
            call
            for call in self._calls
            if _node_identity(call) == node and call.number not in self._used
        ]
        text = request.prompt.text
        return max(
            same or self._calls,
            key=lambda call: common_prefix_length(call.request.prompt.text, text),
            default=None,
        )


def _raise_error(call: RecordedCall) -> None:
    if call.error is not None:
        raise as_error(call.error)


def _selection_of_call(call: RecordedCall) -> Selection:
    _raise_error(call)
    (each,) = call.events
    assert isinstance(each.event, Selection)
    return each.event


def _node_identity(call: RecordedCall) -> NodeIdentity:
    return NodeIdentity(call.program, call.place, call.name)


def request_to_data(request: RecordedRequest) -> dict[str, Json]:
    """Converts a request to plain data, including the whole text of its prompt."""
    data: dict[str, Any] = msgspec.to_builtins(request)
    data["prompt"] = {"text": request.prompt.text, **data["prompt"]}
    return data


def differences(before: Json, now: Json, pointer: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields each place where two JSON values differ, as (JSON Pointer, excerpt of `before`,
    excerpt of `now`).
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            yield from differences(before.get(name), now.get(name), f"{pointer}/{name}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (one, other) in enumerate(zip(before, now)):
            yield from differences(one, other, f"{pointer}/{i}")
    elif isinstance(before, str) and isinstance(now, str) and before != now:
        start = max(common_prefix_length(before, now) - _SHOWN, 0)
        shown = slice(start, start + 2 * _SHOWN)
        dots = "…" * bool(start)
        yield pointer, f"{dots}{before[shown]!r}", f"{dots}{now[shown]!r}"
    elif before != now:
        yield (
            pointer,
            "nothing" if before is None else f"{before!r:.80}",
            "nothing" if now is None else f"{now!r:.80}",
        )


# ----------------------------------------------------------------------------------------- the file


def _read_recording(
    path: files.AnyPath, *, partial: bool
) -> tuple[RecordingHead, list[RecordedCall]]:
    """Reads the head and the calls of a recording. The calls are in the order in which they were
    made.
    """
    try:
        with open(path, "rb") as file:
            head, calls = _read_lines(
                path, iter(lambda: file.readline(_LONGEST_LINE + 1), b""), partial=partial
            )
    except OSError as error:
        raise files.file_error(path, "read", error) from error
    return head, sorted(calls, key=lambda call: call.number)


def _read_lines(
    path: files.AnyPath, lines: Iterator[bytes], *, partial: bool
) -> tuple[RecordingHead, list[RecordedCall]]:
    head: RecordingHead | None = None
    calls: list[RecordedCall] = []
    after = ""
    number = 0
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n") and len(line) <= _LONGEST_LINE:
            break  # the recording was interrupted while this line was written
        match files.decode_line(path, number, line, _AGAIN):
            case RecordingHead() as head if number == 1:
                pass
            case RecordedCall() | RecordingEnd() as record if number > 1 and record.after != after:
                problem = "the line before it was changed after it was recorded"
                raise files.line_error(path, number, problem, "/data/after", _AGAIN)
            case RecordedCall() as call if head is not None:
                calls.append(call)
            case RecordingEnd() as end if head is not None:
                if end.calls == len(calls) and next(lines, None) is None:
                    return head, calls
                problem = f"the recording has {end.calls} calls, but they are not all here, or more lines follow"
                raise files.line_error(path, number, problem, hint=_AGAIN)
            case record:
                expected = "the head of a recording" if number == 1 else "a recorded call"
                raise files.line_error(
                    path, number, f"a {type(record).__name__} is not {expected}", hint=_AGAIN
                )
        after = digest_line(line[:-1])
    if head is None:
        raise files.line_error(
            path, 1, "the file is empty, or its first line is cut short", hint=_AGAIN
        )
    if not partial:
        raise WireError(
            f"{path}: the recording is cut short after {len(calls)} calls",
            hint="Use Replay(path, partial=True) for the calls that are complete.",
        )
    return head, calls


def _restore_template(template: RecordedTemplate | None) -> TurnTemplate | None:
    if template is None:
        return None
    if template.source:
        return JinjaTemplate(template.source, dict(template.special_tokens), template.name)
    return ChatTemplate(
        template.name,
        template.default_system_prompt,
        {role: (start, end) for role, start, end in template.turns},
        template.stop_str,
        template.image_token,
        style=ChatTemplateStyle.LLAMA2 if template.llama2 else ChatTemplateStyle.PLAIN,
    )
