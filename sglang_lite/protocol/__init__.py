"""The only contract between the language and the backends that run it: plain frozen records, and this package's errors.

Contains only data: nothing here depends on how prompts are rendered, how models are run or how programs are written.
"""

from sglang_lite.errors import (
    BackendError,
    BatchError,
    BudgetError,
    CapabilityError,
    CompileError,
    ConstraintError,
    DownloadError,
    EngineClosedError,
    Location,
    ModelError,
    OverloadedError,
    ParameterError,
    ProgramError,
    RefusalError,
    RequestAbortedError,
    RequestTimeoutError,
    SglError,
    TemplateError,
    ToolError,
    TraceError,
    UnknownVariableError,
    ValueValidationError,
    WireError,
)
from sglang_lite.protocol.constraints import (
    Choices,
    Constraint,
    Continuation,
    Ebnf,
    InOrder,
    JsonSchema,
    Lark,
    Number,
    OneOf,
    Regex,
    Repeated,
    StructuralTag,
    Tag,
    TaggedObject,
    Tags,
)
from sglang_lite.protocol.prompt import (
    Media,
    MediaKind,
    Message,
    Prompt,
    PromptTools,
    Span,
)
from sglang_lite.protocol.results import (
    ChoiceScore,
    Delta,
    Generation,
    Played,
    ProgramEvent,
    ProgramResult,
    ProgramSink,
    RecordName,
    Selection,
    TokenArray,
    TokenLogprob,
    TokenScores,
    Usage,
    total_usage,
)
from sglang_lite.protocol.sampling import (
    UNSET,
    SamplingParams,
    Unset,
)
from sglang_lite.protocol.trace import Attempt, CacheMiss, TraceHead, TraceNode
from sglang_lite.protocol.trajectory import DrawnSpan, TokenSequence

__all__ = [
    "UNSET", "Attempt", "BackendError", "BatchError", "BudgetError", "CacheMiss", "CapabilityError", "ChoiceScore",
    "Choices", "CompileError", "Constraint", "ConstraintError", "Continuation", "Delta", "DownloadError", "DrawnSpan",
    "Ebnf", "EngineClosedError", "Generation", "InOrder", "JsonSchema", "Lark", "Location", "Media", "MediaKind",
    "Message", "ModelError", "Number", "OneOf", "OverloadedError", "ParameterError", "Played", "ProgramError",
    "ProgramEvent", "ProgramResult", "ProgramSink", "Prompt", "PromptTools", "RecordName", "RefusalError", "Regex",
    "Repeated", "RequestAbortedError", "RequestTimeoutError", "SamplingParams", "Selection", "SglError", "Span",
    "StructuralTag", "Tag", "TaggedObject", "Tags", "TemplateError", "TokenArray", "TokenLogprob", "TokenScores",
    "TokenSequence", "ToolError", "TraceError", "TraceHead", "TraceNode", "UnknownVariableError", "Unset", "Usage",
    "ValueValidationError", "WireError", "total_usage",
]  # fmt: skip
