"""Interface of an engine's core. It has the calls that `Engine` needs, no matter which process the
engine runs in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sglang_lite.program.nodes import Node, Path, Verdict
    from sglang_lite.protocol import ProgramSink
    from sglang_lite.runtime.calls import EngineCall, R
    from sglang_lite.runtime.capacity import Capacity
    from sglang_lite.runtime.config import EngineConfig
    from sglang_lite.runtime.core.gate import Gate
    from sglang_lite.runtime.core.open_requests import OpenRequests, Ticket
    from sglang_lite.runtime.core.request_builder import RequestBuilder
    from sglang_lite.runtime.core.submission import OpenRequest, Submission
    from sglang_lite.runtime.embedding.spec import EncoderSpec
    from sglang_lite.runtime.tokens.tokenizer import Tokenizer


class OpenProgram(Protocol):
    """Program that can be extended while it runs: see `EngineProgram`."""

    def extend(self, path: Path, nodes: Sequence[Node]) -> None: ...
    def judge(self, path: Path, place: int, verdict: Verdict) -> None: ...
    def drop_branch(self, path: Path) -> None: ...
    def expect_pause(self, path: Path, seconds: float) -> None: ...
    def wind_down(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class Core(Protocol):
    """Core of an engine. In this process, it is an `EngineCore`, `EmbeddingCore` or `TowerCore`;
    for an engine in another process, it is a `CoreClient`. `Engine` documents the submissions, and
    runtime/calls.py the calls that `submit_call` accepts.
    """

    @property
    def config(self) -> EngineConfig: ...
    @property
    def model_name(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def capacity(self) -> Capacity: ...
    @property
    def description(self) -> str: ...
    @property
    def encoder(self) -> EncoderSpec | None: ...  # None unless the model encodes texts
    @property
    def generates(self) -> bool: ...  # False for an encoder of texts, or of media alone
    @property
    def builder(self) -> RequestBuilder: ...
    @property
    def open_requests(self) -> OpenRequests: ...
    @property
    def gate(self) -> Gate: ...
    @property
    def responds(self) -> bool: ...  # False while its process is stopped, swapped out or ending
    @property
    def pids(self) -> Sequence[int]: ...  # process ids of the engine here, without ranks

    def submit(
        self,
        request: Submission,
        sink: Callable[[Any], None],
        flush: Callable[[], object] | None = None,
    ) -> Ticket: ...  # each kind of submission has its own events
    def open_program(
        self, request: OpenRequest, sink: ProgramSink, flush: Callable[[], object] | None = None
    ) -> OpenProgram: ...
    def submit_call(self, call: EngineCall[R]) -> Future[R]: ...

    # on the thread of the sinks; takes no lock
    def call_soon(self, call: Callable[[], object], /) -> None: ...
    def close(self) -> None: ...
