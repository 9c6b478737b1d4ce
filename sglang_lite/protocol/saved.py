"""Records of a saved run: its text and variables, and the answers of its nodes with digests of the
requests.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from sglang_lite.protocol.prompt import Media, Message, Span
from sglang_lite.protocol.record import Record, Variant
from sglang_lite.protocol.results import Generation, Selection, Usage
from sglang_lite.protocol.run_log import LogRecord, PendingCall
from sglang_lite.protocol.sampling import SamplingParams
from sglang_lite.protocol.trace import TraceNode


class SavedSamples(Variant, frozen=True):
    """Results of several samples, branches or steps."""

    results: tuple[Generation | Selection | SavedSamples | None, ...]


SavedResult: TypeAlias = Generation | Selection | SavedSamples


class SavedPiece(Record, frozen=True):
    """A piece of a transcript: text or an image.

    Attributes:
        spans: text with final token ids.
        image: image, or None.
        answer: answer without the reasoning, for the text of a generation with `reasoning`;
            else None.
    """

    spans: tuple[Span, ...] = ()
    image: Media | None = None
    answer: str | None = None


class SavedVariable(Record, frozen=True):
    """A value that a variable of a run has received.

    Attributes:
        name: name of the variable.
        value: value as plain data; objects are stored with the names of their types.
        result: result of the node that produced it, or None.
        error: error that the node failed with, if it has no value, or the reason a replaced
            value is not saved.
        behind: end of the node in the run's text: number of pieces up to there, number of
            finished turns, and the open turn (role and index of its first piece) or None. None
            if no node of the text produced the value.
        node: path in the program's tree of the node that produced the value; "" if none did.
        text: index in `SavedRun.earlier` of the text that `behind` refers to; the length of
            `earlier` for the run's last text.
    """

    name: str
    value: Any = None
    result: SavedResult | None = None
    error: str | None = None
    behind: tuple[int, int, tuple[str, int] | None] | None = None
    node: str = ""
    text: int = 0


class SavedText(Record, frozen=True):
    """A text that a compaction has replaced. For its attributes, see SavedRun."""

    pieces: tuple[SavedPiece, ...]
    messages: tuple[Message, ...]
    turn_ends: tuple[int, ...]
    suffixes: tuple[str | None, ...]


class SavedRun(Record, frozen=True):
    """A run as data, up to the time when it was saved.

    Attributes:
        program: name of the program; "" if the state belongs to none, for example after
            `fork_at`.
        parts: digests of the parts of the program (its code and the values that it reads), by
            name; empty if they can't be compared.
        arguments: arguments of the body; None if they are not plain data.
        params, seed, retries: settings of the run.
        branch, nodes: path of the branch and its number of nodes so far. Seeds are derived
            from both.
        model: name of the model.
        tokenizer: digest of the tokenizer of the token ids; None if it is not known.
        pieces: pieces of the text.
        messages: finished turns.
        turn: role of the open turn and the index of its first piece, or None.
        suffixes: for each turn, the text that ends it, the open turn last; None where unknown.
            Older files have none.
        turn_ends: for each finished turn, index of the piece after its content. Older files have
            none.
        earlier: texts that compactions have replaced, in order.
        variables: values of the variables in the order in which they were set, including
            those that were replaced. The one with the name "" is the return value of the
            body.
        answers: generations and selections of the program's body, with the data that a rerun
            needs.
        usage: usage of the whole run.
        format: version of this record's meaning. Earlier versions can't be read any more.
        pending: tool calls on which a suspended run waits for decisions; empty for other runs.
        log: log of a suspended run, from which it is resumed.
        identity: random text from which the idempotency keys of its calls are derived.
    """

    program: str
    parts: tuple[tuple[str, str], ...] = ()
    arguments: SavedVariable | None = None
    params: SamplingParams = SamplingParams()
    seed: int | None = None
    retries: int = 0
    branch: str = ""
    nodes: int = 0
    model: str = ""
    tokenizer: str | None = None
    pieces: tuple[SavedPiece, ...] = ()
    messages: tuple[Message, ...] = ()
    turn: tuple[str, int] | None = None
    suffixes: tuple[str | None, ...] = ()
    variables: tuple[SavedVariable, ...] = ()
    answers: tuple[TraceNode, ...] = ()
    usage: Usage = msgspec.field(default_factory=Usage)
    format: int = 1
    pending: tuple[PendingCall, ...] = ()
    log: tuple[LogRecord, ...] = ()
    identity: str = ""
    turn_ends: tuple[int, ...] = ()
    earlier: tuple[SavedText, ...] = ()


class CheckpointHead(Record, frozen=True):
    """First line of a batch's checkpoint: the program's name, and digests of everything that
    results depend on, except the items. Each digest has a description.

    Attributes:
        secret: whether the authentication codes of the lines depend on a secret.
        code: authentication code of this line; "" in earlier files. It is the last field.
    """

    program: str
    parts: tuple[tuple[str, str], ...]
    secret: bool = False
    code: str = ""


class CheckpointRow(Record, frozen=True):
    """Line of a checkpoint for a finished item: the item's index, the digest of its arguments, and
    its run. Scores and metadata are left out of the run.

    Attributes:
        code: authentication code of this line; "" in earlier files. It is the last field.
    """

    index: int
    arguments: str
    run: SavedRun
    code: str = ""


class JournalHead(Record, frozen=True):
    """First line of a journal: the run that it belongs to.

    Attributes:
        program: name of the program.
        identity: random text from which the idempotency keys of calls are derived.
        arguments: arguments of the body.
        params, seed: settings of the run.
        secret: whether the codes of the lines depend on a secret.
        code: code of this line. It is the last field.
    """

    program: str
    identity: str
    arguments: SavedVariable
    params: SamplingParams = SamplingParams()
    seed: int | None = None
    secret: bool = False
    code: str = ""
