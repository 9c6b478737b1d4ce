"""Text to token ids, and token ids to bytes.

The `tokenizers` library encodes; decoding is a table of bytes, one entry per id, so that any split of the ids gives
the same bytes. Knows nothing of requests or models.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sglang_lite.protocol import ModelError, ParameterError, SglError, Span
from sglang_lite.runtime.models.config_fields import (
    MOST_TOKENS,
    TOKENIZER,
    check,
    check_ids,
    read_json,
    read_text,
    shown,
)
from sglang_lite.text.tool_formats import SPOKEN, marks_among

# The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`: the pattern that splits text before BPE, and
# whether whole words in the vocabulary skip the merges.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CASELESS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS: dict[str, tuple[tuple[str, ...], bool]] = {
    "default": ((_GPT2,), False),
    "gpt-2": ((_GPT2,), False),
    "smollm": ((r"\p{N}", _GPT2), False),
    "starcoder": ((r"\p{N}", _GPT2), False),
    "refact": ((r"\p{N}", _GPT2), False),
    "codeshell": ((r"\p{N}", _GPT2), False),
    "llama-bpe": ((_LLAMA3,), True),
    "qwen2": ((_QWEN2,), False),
}
# Long text is encoded in blocks, so that of a growing one only the last is encoded again. They are cut where no token
# can span the cut: between a letter and a single blank.
BLOCK = 2048  # characters
_LONGEST_KEPT = 8 * BLOCK
_CUT = re.compile(r"(?<=[^\W\d_])(?=[ \n]\S)")
_SPANS_CUT = re.compile(rb"[A-Za-z\x80-\xff][ \n]")
_PROBE = "The cat's mat\nis 3 cm wide\nand it is caf\u00e9 au lait"

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_LONGEST_PIECE = 512  # characters of a SentencePiece token: all ways to cut it are tried
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # GGUF token types


class Tokenizer:
    """A tokenizer with its byte table and special tokens.

    Args:
        backend: the `tokenizers` object.
        token_bytes: the bytes of each id; special tokens as their text.
        special_ids: ids that are left out of decoded text.
        bos_id: the id put before a prompt's first text, None for no such id.
        special_tokens: `bos_token`, `eos_token` … for the chat template.
        chat_template: the model's own Jinja template.
        continuation: encodes text that continues other text, where that differs (SentencePiece adds a space to the
            start of a text).
        starts_segments: text after a special token is encoded like the start of a text.
        control: the tokens that text can name, by id, and that text of a span without `special` never becomes; None
            for those of `special_ids`.
        unknown_ids: those of them that stand for characters without a token.
    """

    def __init__(
        self,
        backend: Backend,
        token_bytes: Sequence[bytes],
        special_ids: Iterable[int],
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        continuation: Backend | None = None,
        starts_segments: bool = False,
        control: Mapping[int, AddedToken] | None = None,
        unknown_ids: Iterable[int] = (),
    ) -> None:
        self._continuation = continuation or backend
        for each in (backend, self._continuation):
            each.no_truncation()
            each.no_padding()
            each.encode_special_tokens = True  # as text: where they are tokens is said here
        self.backend = backend
        self.token_bytes = list(token_bytes)
        self._with_byte: dict[int, NDArray[np.bool_]] = {}
        self.special_ids = frozenset(special_ids)
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._starts_segments = starts_segments
        if control is None:
            control = {i: AddedToken(self.token_bytes[i].decode("utf-8", "replace")) for i in self.special_ids}
        self._control = control
        self._control_id = {token.content: i for i, token in control.items()}
        self._at_control = _pattern(control.values())
        self._never_text = frozenset(control) - frozenset(unknown_ids)
        self._encode_block = lru_cache(maxsize=2048)(self._encode_uncached)
        self._cuts = self._can_cut()

    @cached_property
    def digest(self) -> str:
        """Digest of its tokens, with their ids: ids mean the same to two tokenizers with one digest."""
        found = hashlib.sha256(repr((sorted(self.special_ids), len(self.token_bytes))).encode())
        for token in self.token_bytes:
            found.update(len(token).to_bytes(4, "big") + token)
        return found.hexdigest()

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @property
    def control_texts(self) -> list[str]:
        """The texts that name control tokens."""
        return list(self._control_id)

    def tokens_with(self, byte: int) -> NDArray[np.bool_]:
        """True for each token whose bytes have `byte` among them [vocab_size]. Computed once for each byte."""
        if byte not in self._with_byte:
            found = np.fromiter((byte in token for token in self.token_bytes), bool, self.vocab_size)
            self._with_byte[byte] = found
        return self._with_byte[byte]

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """`encode_spans` of one text, in which special tokens can be written out."""
        return self.encode_spans((Span(text),), first=first).tolist()

    def encode_spans(self, spans: Iterable[Span], *, first: bool = True) -> array[int]:
        """The ids of texts as one text.

        Args:
            spans: whose ids are not looked at.
            first: they start a prompt: the beginning-of-sequence id goes before them, unless they begin with it.

        Raises:
            ParameterError: a text has unpaired surrogates.
        """
        ids = array("i")
        before: int | None = None
        for text, after in self._parts(spans):
            if before is not None and self._control[before].rstrip:
                text = text.lstrip()
            if after is not None and self._control[after].lstrip:
                text = text.rstrip()
            if text:
                starts = first if before is None else self._starts_segments and before in self.special_ids
                ids += self._encode_piece(text, starts)
            if after is not None:
                ids.append(after)
            before = after
        if first and self.bos_id is not None and (not ids or ids[0] != self.bos_id):
            ids.insert(0, self.bos_id)
        return ids

    def _parts(self, spans: Iterable[Span]) -> Iterator[tuple[str, int | None]]:
        """Text, and the control token after it, again and again; None after the last text. A token is one that stands
        wholly in spans that may have it."""
        text = ""
        for special, group in groupby((span for span in spans if span.text), key=lambda span: span.special):
            run = "".join([span.text for span in group])
            start = 0
            for found in self._at_control.finditer(run) if special and self._at_control else ():
                yield text + run[start : found.start()], self._control_id[found[0]]
                text, start = "", found.end()
            text += run[start:]
        yield text, None

    def _encode_piece(self, text: str, first: bool) -> array[int]:
        ids = array("i")
        start = 0
        while self._cuts and len(text) - start > BLOCK and (cut := _CUT.search(text, start + BLOCK)):
            ids += self._encode_block(text[start : cut.start()], first and not start)
            start = cut.start()
        rest = text[start:]
        encode = self._encode_block if len(rest) <= _LONGEST_KEPT else self._encode_uncached
        ids += encode(rest, first and not start)
        return ids

    def _encode_uncached(self, text: str, first: bool) -> array[int]:
        backend = self.backend if first else self._continuation
        try:
            # A batch, as in it alone the library lets go of Python's lock: else an engine's loop would wait for it.
            encoding = backend.encode_batch_fast([text], add_special_tokens=False)[0]
        except TypeError:  # what `tokenizers` says to text that has no UTF-8
            raise ParameterError("prompt", "is no valid Unicode: it has unpaired surrogates.") from None
        ids = array("i", encoding.ids)
        if self._never_text.isdisjoint(ids):
            return ids
        # A vocabulary's own pieces, or an added token that the library does not call special: no part of it is it.
        offsets = backend.encode(text, add_special_tokens=False).offsets
        cuts = [a + 1 for i, (a, b) in zip(ids, offsets) if i in self._never_text and b - a > 1]
        if not cuts:  # one character, which can't be spelled in another way
            return array("i", [i for i in ids if i not in self._never_text])
        parts = [self._encode_uncached(text[a:b], first and not a) for a, b in pairwise([0, *cuts, len(text)])]
        return sum(parts, array("i"))

    def _can_cut(self) -> bool:
        """Text encoded in blocks gives the ids of the whole."""
        if any(_SPANS_CUT.search(b) for i, b in enumerate(self.token_bytes) if i not in self._control):
            return False
        ends = [*(cut.start() for cut in _CUT.finditer(_PROBE)), len(_PROBE)]
        blocks = [self._encode_uncached(_PROBE[a:b], not a) for a, b in zip([0, *ends], ends)]
        return sum(blocks, array("i")) == self._encode_uncached(_PROBE, True)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = True) -> bytes:
        skipped = self.special_ids if skip_special else frozenset()
        table = self.token_bytes
        return b"".join([table[i] for i in ids if i not in skipped and i < len(table)])


# ------------------------------------------------------------------------------------- Hugging Face folders


def tokenizer_from_folder(folder: Path, most: int | None = None) -> Tokenizer:
    """Reads `tokenizer.json` (or what transformers can convert) and `tokenizer_config.json`.

    Args:
        most: tokens that the model has. Added tokens beyond are left out (text models of the Gemma 3 family come with
            one for images): their text is then text like any other.

    Raises:
        ModelError: the folder has no tokenizer, or one of an unknown kind.
    """
    with _foreign(str(folder)):
        return _from_folder(folder, most)


def _from_folder(folder: Path, most: int | None) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.exists():
        text = read_text(path)
        try:
            backend = Backend.from_str(text)
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{path}: not a tokenizer: {error}") from error
    else:
        backend = _converted(folder)
    largest = max(backend.get_vocab(with_added_tokens=False).values(), default=-1)
    if not 0 <= largest < MOST_TOKENS:
        raise ModelError(f"{folder}: the tokenizer has no tokens, or one with the id {largest:,}.")
    description = json.loads(backend.to_str())
    if most is not None and any(token["id"] >= most for token in description.get("added_tokens", ())):
        description["added_tokens"] = [token for token in description["added_tokens"] if token["id"] < most]
        backend = Backend.from_str(json.dumps(description))
    settings = folder / "tokenizer_config.json"
    config = read_json(settings) if settings.exists() else {}
    check(config, TOKENIZER, str(settings))
    template_file = folder / "chat_template.jinja"
    template = read_text(template_file) if template_file.exists() else _template(config, settings)
    added = description.get("added_tokens", ())
    control = {t["id"]: t for t in added if t["special"] or _is_control(t["content"], template)}
    texts = marks_among(token["content"] for token in added)
    marks = [token for token in added if token["special"] and token["content"] in texts]
    if marks:  # they are text, for whoever reads it and for grammars
        for token in marks:
            token["special"] = False
        backend = Backend.from_str(json.dumps(description))
    special_tokens = {
        name: _content(token, name, settings)
        for name, token in config.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    bos = special_tokens.get("bos_token")
    adds_bos = bos is not None and backend.token_to_id(bos) in backend.encode("a").ids
    eos = backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    prefixed = _prefix_space(description)
    unknown = backend.token_to_id(_unknown_token(description["model"]))
    return Tokenizer(
        backend,
        _byte_table(backend, description, str(folder)),
        [t["id"] for t in added if t["special"]],
        bos_id=backend.token_to_id(bos) if adds_bos and bos else None,
        eos_ids=() if eos is None else (eos,),
        special_tokens=special_tokens,
        chat_template=template,
        continuation=Backend.from_str(json.dumps(prefixed)) if prefixed else None,
        starts_segments='"Prepend"' in json.dumps(description.get("normalizer")),
        control={
            i: AddedToken(t["content"], lstrip=t["lstrip"], rstrip=t["rstrip"], single_word=t["single_word"])
            for i, t in control.items()
        },
        unknown_ids=() if unknown is None else (unknown,),
    )


@contextmanager
def _foreign(label: str) -> Iterator[None]:
    """Whatever the tokenizers library makes of a damaged description is an error of ours."""
    try:
        yield
    except BaseException as error:  # a panic of its Rust code is no Exception
        if isinstance(error, SglError) or not (
            isinstance(error, Exception) or type(error).__name__ == "PanicException"
        ):
            raise
        raise ModelError(f"{label}: the tokenizer can't be used: {error!r}"[:1000]) from error


def _content(token: Any, name: str, file: Path) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ModelError(f"{file}: `{name}`: {shown(token)} is neither text nor an object with a content.")
    return text


def _template(config: Mapping[str, Any], file: Path) -> str | None:
    """The chat template, or of several named ones the default."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [t for t in template if isinstance(t, dict)]
        template = next((t.get("template") for t in named if t.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{file}: `chat_template`: {shown(template)} is no text.")
    return template


def _unknown_token(model: Mapping[str, Any]) -> str:
    """The text that a tokenizer's model has for a character without a token; "" for nothing."""
    if model.get("unk_id") is not None:  # Unigram
        return str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token") or ""


_MARKED = re.compile(r"<[|｜].+|.+[|｜]>", re.DOTALL)
_BRACKETED = re.compile(r"[^\w\s].+[^\w\s]", re.DOTALL)


def _is_control(token: str, template: object) -> bool:
    """True for an added token that is special although its tokenizer does not call it so: some that begin turns are
    not. Blanks, words and what a model says itself are text."""
    if token in SPOKEN:
        return False
    written = isinstance(template, str) and token in template
    return bool(_MARKED.fullmatch(token) or (written and _BRACKETED.fullmatch(token)))


def _pattern(tokens: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """Finds the tokens in a text, the longest where several begin."""
    longest_first = sorted((token for token in tokens if token.content), key=lambda t: len(t.content), reverse=True)
    found = [rf"(?<!\w){re.escape(t.content)}(?!\w)" if t.single_word else re.escape(t.content) for t in longest_first]
    return re.compile("|".join(found)) if found else None


def _converted(folder: Path) -> Backend:
    """The tokenizer that transformers makes of a folder's files: in a process of its own where torch is not
    loaded, so that an engine's handle loads neither."""
    try:
        if "torch" in sys.modules:
            return Backend.from_str(_convert(str(folder)))
        code = (
            f"import sys; sys.path[:] = {[os.path.abspath(path) for path in sys.path]!r}\n"
            f"from {__name__} import _convert\n"
            f"sys.stdout = sys.stderr; text = _convert({str(folder.absolute())!r})\n"
            f"sys.__stdout__.buffer.write(text.encode())"
        )
        done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode:
            raise ModelError(done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2])
        return Backend.from_str(done.stdout.decode())
    except Exception as error:  # whatever transformers raises, the folder has no tokenizer that can be used
        raise ModelError(
            f"{folder}: no tokenizer.json, and transformers can't convert another tokenizer: {error}"
        ) from error


def _convert(folder: str) -> str:
    """The content of `tokenizer.json` for a folder that has none."""
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str())


def _prefix_space(description: dict[str, Any]) -> dict[str, Any] | None:
    """The tokenizer without the space it puts before a text, None where it puts none."""
    changed = False

    def strip(part: Any) -> Any:
        nonlocal changed
        if isinstance(part, list):
            kept = [strip(p) for p in part if not (isinstance(p, dict) and p.get("type") == "Prepend")]
            changed |= len(kept) != len(part)
            return kept
        if isinstance(part, dict):
            part = {key: strip(value) for key, value in part.items()}
            if part.get("type") == "Metaspace" and part.get("prepend_scheme") != "never":
                part["prepend_scheme"] = "never"
                changed = True
        return part

    stripped = dict(description)
    for key in ("normalizer", "pre_tokenizer"):
        part = stripped.get(key)
        if isinstance(part, dict) and part.get("type") == "Prepend":
            stripped[key], changed = None, True
        else:
            stripped[key] = strip(part)
    return stripped if changed else None


def _byte_table(backend: Backend, description: dict[str, Any], label: str) -> list[bytes]:
    parts = json.dumps([description.get("decoder"), description.get("pre_tokenizer")])
    byte_level = '"ByteLevel"' in parts
    if not byte_level and '"Metaspace"' not in parts and '"ByteFallback"' not in parts:
        raise ModelError(
            f"{label}: the tokenizer is neither byte-level nor SentencePiece.",
            hint="Supported: BPE and Unigram tokenizers with a ByteLevel, Metaspace or ByteFallback decoder.",
        )
    added = {t["id"]: t["content"] for t in description.get("added_tokens", [])}
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values()) + 1)
    for token, i in vocab.items():
        if i in added:
            table[i] = added[i].encode()
        else:
            table[i] = _byte_level_bytes(token) if byte_level else _sentencepiece_bytes(token)
    return table


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


def _byte_level_bytes(token: str) -> bytes:
    alphabet = _byte_level_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()  # a token outside the byte alphabet stands for itself


def _sentencepiece_bytes(token: str) -> bytes:
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode("utf-8", "replace")


# --------------------------------------------------------------------------------------------------- GGUF


def tokenizer_from_gguf(metadata: Mapping[str, Any], label: str) -> Tokenizer:
    """Builds the tokenizer that a GGUF file describes, pre-tokenizer included.

    Raises:
        ModelError: a tokenizer or pre-tokenizer that is not supported.
    """
    with _foreign(label):
        return _from_gguf(metadata, label)


def _from_gguf(metadata: Mapping[str, Any], label: str) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        types: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
        for key in ("token_type", "scores"):
            given = metadata.get(f"tokenizer.ggml.{key}") or tokens
            if not isinstance(given, list) or len(given) != len(tokens) or not tokens:
                raise ModelError(f"{label}: `tokenizer.ggml.{key}` is not one for each of {len(tokens):,} tokens.")
        if kind == "gpt2":
            backend = _gguf_byte_level(metadata, tokens, label)
            continuation = None
            table = [
                _byte_level_bytes(token) if types[i] == _NORMAL else token.encode() for i, token in enumerate(tokens)
            ]
        elif kind == "llama":
            scores = metadata["tokenizer.ggml.scores"]
            space = metadata.get("tokenizer.ggml.add_space_prefix", True)
            backend = _gguf_sentencepiece(tokens, scores, label, prefix_space=space)
            continuation = _gguf_sentencepiece(tokens, scores, label, prefix_space=False) if space else None
            table = [
                token.encode() if types[i] in (_CONTROL, _USER_DEFINED) else _sentencepiece_bytes(token)
                for i, token in enumerate(tokens)
            ]
        else:
            raise ModelError(
                f"{label}: tokenizer {kind!r} is not supported.", hint="Supported: gpt2 (byte-level), llama."
            )
    except KeyError as error:
        raise ModelError(f"{label}: the metadata key {error} is missing.") from error
    template = metadata.get("tokenizer.chat_template")
    unknown = [i for i, t in enumerate(types) if t == _UNKNOWN]
    named = [
        i for i, t in enumerate(types) if t == _CONTROL or (t == _USER_DEFINED and _is_control(tokens[i], template))
    ]
    marks = marks_among(tokens)
    types = [_USER_DEFINED if t == _CONTROL and tokens[i] in marks else t for i, t in enumerate(types)]
    special = [i for i, t in enumerate(types) if t in (_CONTROL, _UNKNOWN)]
    written = [i for i, t in enumerate(types) if t in (_CONTROL, _USER_DEFINED)]
    for tokenizer in (backend, continuation):
        if tokenizer is not None:
            tokenizer.add_tokens(
                [AddedToken(tokens[i], special=types[i] == _CONTROL, normalized=False) for i in written]
            )
    for key in (*_GGUF_SPECIALS.values(), "eot"):
        check_ids(metadata.get(f"tokenizer.ggml.{key}_token_id"), len(tokens), label, f"tokenizer.ggml.{key}_token_id")
    names = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_SPECIALS.items()}
    special_tokens = {name: tokens[i] for name, i in names.items() if i is not None}
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    ends = (names["eos_token"], metadata.get("tokenizer.ggml.eot_token_id"))
    return Tokenizer(
        backend,
        table,
        special,
        bos_id=names["bos_token"] if adds_bos else None,
        eos_ids=[i for i in ends if i is not None],
        special_tokens=special_tokens,
        chat_template=template,
        continuation=continuation,
        starts_segments=continuation is not None,
        control={i: AddedToken(tokens[i]) for i in (*named, *unknown)},
        unknown_ids=unknown,
    )


_GGUF_SPECIALS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _gguf_byte_level(metadata: Mapping[str, Any], tokens: list[str], label: str) -> Backend:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{label}: pre-tokenizer {name!r} is not supported.",
            hint=f"Supported: {', '.join(_PRE_TOKENIZERS)}.",
        )
    patterns, ignore_merges = _PRE_TOKENIZERS[name]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys():
            raise ModelError(f"{label}: the merge {shown(' '.join(merge))} is not of tokens of the vocabulary.")
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _gguf_sentencepiece(tokens: list[str], scores: list[float], label: str, *, prefix_space: bool) -> Backend:
    """SentencePiece BPE joins the neighbours whose union has the best score: merges ranked by that score."""
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, i in vocab.items():
        if len(token) > _LONGEST_PIECE:
            raise ModelError(f"{label}: a token has {len(token):,} characters; the limit is {_LONGEST_PIECE}.")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[i], vocab[left], vocab[right], left, right))
    merges.sort()
    backend = Backend(
        models.BPE(
            vocab=vocab,
            merges=[m[3:] for m in merges],
            fuse_unk=True,
            byte_fallback=True,
            unk_token=tokens[0],
        )
    )
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix_space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend
