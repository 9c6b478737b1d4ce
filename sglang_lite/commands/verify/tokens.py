"""Check `tokenizer`: encodes texts, compares the ids with those of transformers, and decodes them
again.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sglang_lite.commands.verify.records import Check, Subject, Unread
from sglang_lite.commands.verify.texts import PROMPTS, TOKENIZED
from sglang_lite.protocol import Span
from sglang_lite.protocol.anything import Foreign
from sglang_lite.runtime.tokens.tokenizer import Tokenizer

# Tokenizers, as named by GGUF files (`tokenizer.ggml.pre`), that transformers converts
# incompletely.
_NORMALISED: Final = ("qwen2", "qwen35")
_SINGLE_DIGITS: Final = ("smollm",)
_CONTROL: Final = 3  # in `tokenizer.ggml.token_type`


@dataclass(frozen=True, slots=True)
class _Found:
    """Findings of the tokenizer check: the texts with each kind of problem, and the texts that the
    tokenizer normalizes.
    """

    other_ids: tuple[str, ...]
    not_back: tuple[str, ...]
    normalised: tuple[str, ...]
    spelled: tuple[str, ...]


def check_tokenizer(subject: Subject, theirs: Foreign | Unread) -> Check:
    """Encodes and decodes texts. Also compares the ids with transformers', if transformers has the
    tokenizer. Users' text that spells control tokens must not become control tokens.
    """
    ours = subject.files.tokenizer
    controls = ours.control_texts[:40]
    texts = [
        *TOKENIZED,
        *PROMPTS,
        *controls,
        *(f"a {each} b" for each in controls),
        "".join(controls),
    ]
    restored = (
        "" if isinstance(theirs, Unread) else _restore_dropped_tokenizer_parts(theirs, subject)
    )
    found = _compare_texts(ours, theirs, texts)
    wrong = {
        "have other ids than transformers'": found.other_ids,
        "do not come back": found.not_back,
        "become control tokens though they are users' text": found.spelled,
    }
    if isinstance(theirs, Unread):
        summary = f"{len(texts)} texts come back ({theirs.reason}, so ids were not compared)"
    else:
        summary = f"{len(texts)} texts have transformers' ids{restored} and come back"
    if any(wrong.values()):
        told = [
            f"{len(each)} of {len(texts)} texts {what}: {_quote_first_texts(each)}"
            for what, each in wrong.items()
            if each
        ]
        summary = "; ".join(told) + restored
    elif found.normalised:
        summary += f", {len(found.normalised)} of them in the form that the tokenizer gives them"
    figures = {
        "texts": len(texts),
        "compared": not isinstance(theirs, Unread),
        "restored": restored.strip(" ()"),
        "normalised": list(found.normalised),
        **{what: list(each) for what, each in wrong.items()},
    }
    return Check("tokenizer", "failed" if any(wrong.values()) else "passed", summary, figures)


def _compare_texts(ours: Tokenizer, theirs: Foreign | Unread, texts: list[str]) -> _Found:
    other = list[str]()
    lost = list[str]()
    normalised = list[str]()
    spelled = list[str]()
    controls = {ours.encode(each, first=False)[0]: each for each in ours.control_texts if each}
    for text in texts:
        ids = ours.encode(text)
        if not isinstance(theirs, Unread) and ids != _ids_by_transformers(theirs, text, ours):
            other.append(text)
        own = ours.encode(text, first=False)
        back = ours.decode(own, skip_special=False)
        if back != text:
            same = back in {unicodedata.normalize(form, text) for form in ("NFC", "NFKC")}
            if not same and not isinstance(theirs, Unread):
                same = back == theirs.decode(own, clean_up_tokenization_spaces=False)
            (normalised if same else lost).append(text)
        plain = ours.encode_spans((Span(text, special=False),), first=False).tolist()
        if any(controls.get(each, text + "x") in text for each in plain):
            spelled.append(text)
    return _Found(tuple(other), tuple(lost), tuple(normalised), tuple(spelled))


def _ids_by_transformers(theirs: Foreign, text: str, ours: Tokenizer) -> list[int]:
    """Encodes a text with transformers' tokenizer. If our tokenizer has a beginning-of-sequence
    token, adds the token where it is missing. For some models only the chat template writes this
    token.
    """
    ids: list[int] = theirs(text, add_special_tokens=False).input_ids
    first = ours.bos_id
    return ids if first is None or (ids and ids[0] == first) else [first, *ids]


def _restore_dropped_tokenizer_parts(theirs: Foreign, subject: Subject) -> str:
    """Restores parts of a GGUF file's tokenizer that transformers drops, such as control tokens.
    Returns a note about them for the check's summary, or "" if no part was missing.
    """
    from tokenizers import AddedToken, normalizers, pre_tokenizers

    if subject.files.gguf is None:
        return ""
    metadata = subject.files.gguf.metadata
    kind = metadata.get("tokenizer.ggml.pre")
    backend = theirs.backend_tokenizer
    restored = []
    if kind in _NORMALISED and backend.normalizer is None:
        backend.normalizer = normalizers.NFC()
        restored.append(f"the NFC form of {kind}")
    if kind in _SINGLE_DIGITS and len(theirs("12", add_special_tokens=False).input_ids) == 1:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        restored.append(f"the single digits of {kind}")
    if missing := _find_missing_control_tokens(theirs, metadata):
        theirs.add_tokens([AddedToken(text, special=True, normalized=False) for text in missing])
        restored.append(f"{len(missing)} control tokens")
    return (
        f" (with {' and '.join(restored)}, which transformers leaves out of GGUF files)"
        if restored
        else ""
    )


def _find_missing_control_tokens(theirs: Foreign, metadata: Mapping[str, Any]) -> list[str]:
    """Returns the tokens that a GGUF file declares as control tokens and that transformers'
    tokenizer reads as text.
    """
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    known = theirs.get_added_vocab()
    return [text for text, kind in zip(tokens, kinds) if kind == _CONTROL and text not in known]


def _quote_first_texts(texts: tuple[str, ...]) -> str:
    some = ", ".join(repr(text if len(text) <= 24 else f"{text[:24]}…") for text in texts[:3])
    return some if len(texts) <= 3 else f"{some} …"
