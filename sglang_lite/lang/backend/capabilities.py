"""Capabilities of a backend with its model, and demands of a node. Before a node is queued, its
demands are compared with the capabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from sglang_lite.protocol import (
    ArgumentList,
    Choices,
    Constraint,
    Continuation,
    Ebnf,
    InOrder,
    JsonSchema,
    Lark,
    MediaKind,
    Number,
    OneOf,
    Regex,
    Repeated,
    SamplingParams,
    StructuralTag,
    TaggedObject,
)

CONSTRAINT_NAMES: Final[dict[type, str]] = {
    Regex: "a regex",
    JsonSchema: "a JSON schema",
    TaggedObject: "an object between tags",
    ArgumentList: "a list of arguments",
    Number: "a number in free text",
    Choices: "a list of choices",
    Ebnf: "an EBNF grammar",
    Lark: "a Lark grammar",
    StructuralTag: "a structural tag",
    InOrder: "constraints in order",
    OneOf: "one of several constraints",
    Repeated: "a repeated constraint",
    Continuation: "a grammar over several nodes",
}


BegunTurns: TypeAlias = Literal["continued", "asked", "refused"]
_WEAKEST_FIRST: tuple[BegunTurns, ...] = ("refused", "asked", "continued")


@dataclass(frozen=True, slots=True)
class TurnRules:
    """Rules for turns that contain several generations. They apply to backends that are called for
    one generation at a time.

    Attributes:
        begun_turns: how a turn that has begun is treated: "continued" by the model, which is shown
            the open turn; "asked": shown to the model as its own finished message, with a request
            to continue; or "refused".
        begun_constrained: the same for a turn that already has text before a constrained
            generation.
        enforces_grammars: True if grammars are enforced, so that a turn can be generated as one
            text.
    """

    begun_turns: BegunTurns
    begun_constrained: BegunTurns
    enforces_grammars: bool = False


def combine_turn_rules(each: Sequence[TurnRules]) -> TurnRules:
    """Combines the rules of several backends, any of which may have to answer. A turn is refused if
    one backend refuses it. It is continued, or generated as one text, only if all backends can do
    so.
    """
    return TurnRules(
        _weakest_turn_support(rules.begun_turns for rules in each),
        _weakest_turn_support(rules.begun_constrained for rules in each),
        all(rules.enforces_grammars for rules in each),
    )


def _weakest_turn_support(turns: Iterable[BegunTurns]) -> BegunTurns:
    return min(turns, key=_WEAKEST_FIRST.index)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a backend with its model. A node that needs more is rejected at the line that
    adds it.

    Attributes:
        constraints: types of constraint that are enforced.
        params: names of the sampling parameters that are honoured, or None for all.
        select: True if the model can choose among texts.
        scores: True if the choices' probabilities are reported, which methods and temperatures
            need.
        continues: True if any text is continued; False if only the last turn of a conversation can
            be generated.
        prefill: True if text already in that turn is continued.
        images, videos, sounds: True if the model accepts them. A model that accepts images but no
            videos is shown frames.
        fetches_images: True if images may be addresses; otherwise their bytes are fetched first.
        turns: rules for turns with several generations, for a backend that is called generation by
            generation; None if every generation is a call of its own.
        priority: True if programs may have a priority.
        reads_prompts: True if answers depend on the prompt passed to the backend. SGLang's hooks
            read the branch itself, so they can't be recorded, shown a repair, or called in a rerun.
        adapters: True if selections read `asked_adapter` (base.py), as generations read
            `lora_path`.
        sizes_answers: True if a generation with `type=` and no `max_tokens` gets the limit that its
            values need.
        winds_down: True if a running generation can be ended as soon as a limit could cut it: in a
            pushed-down program by `wind_down`, in others by `winds_down_at`
            (lang/concurrency/loop.py).
        winds_down_programs: True if this holds at least for pushed-down programs.
        caches_prompts: True if a provider caches prompts: a prompt with the same beginning is
            cheaper once the first token of an answer has arrived.
    """

    constraints: frozenset[type] = frozenset({Regex, JsonSchema, Choices})
    params: frozenset[str] | None = None
    select: bool = True
    scores: bool = True
    continues: bool = True
    prefill: bool = True
    images: bool = False
    videos: bool = False
    sounds: bool = False
    fetches_images: bool = True
    turns: TurnRules | None = None
    priority: bool = False
    reads_prompts: bool = True
    adapters: bool = False
    sizes_answers: bool = False
    winds_down: bool = False
    winds_down_programs: bool = False
    caches_prompts: bool = False

    def takes(self, kind: MediaKind) -> bool:
        """Returns whether a program may contain media of a kind: images, videos or sounds."""
        return {"image": self.images, "video": self.videos or self.images, "audio": self.sounds}[
            kind
        ]


MEDIA_NAMES: Final[Mapping[MediaKind, str]] = {
    "image": "images",
    "video": "videos",
    "audio": "sounds",
}
EVERYTHING = Capabilities()


@dataclass(frozen=True, slots=True)
class Demands:
    """What a node demands of a backend.

    Attributes:
        kind: "gen", or "select" for one of the choices.
        params: parameters that are set.
        constraint: constraint on the text; for a selection, its choices, or None if they are not
            known yet.
        scores: True if the choices' probabilities are needed.
        effort: amount of reasoning, or None for the model's default.
    """

    kind: Literal["gen", "select"] = "gen"
    params: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    scores: bool = False
    effort: str | None = None
