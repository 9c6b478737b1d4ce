"""Encodes text to token ids and decodes token ids to bytes.

The `tokenizers` library encodes; decoding uses a table of bytes, one entry per id, so that any
split of the ids gives the same bytes. Independent of requests and models.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from sglang_lite.protocol import ParameterError, Span

# Long text is encoded in blocks, so that only the last block of a growing text must be encoded
# again. Blocks end where no token can span the end: between a letter and a single blank.
BLOCK = 512  # characters; 2 % slower than encoding new texts as a whole (256: 5 %)
_LONGEST_KEPT = 16_384
_LONGEST_TURN = 1_024  # characters of texts that are kept together
_CUT = re.compile(r"(?<=[^\W\d_])(?=[ \n]\S)")
_SPANS_CUT = re.compile(rb"[A-Za-z\x80-\xff][ \n]")
_PROBE = "The cat's mat\nis 3 cm wide\nand it is caf\u00e9 au lait"


class Tokenizer:
    """Tokenizer with its byte table and special tokens.

    Args:
        backend: the `tokenizers` object, or a function that builds it when a text is first encoded.
        token_bytes: bytes of each token, by id; special tokens as their text.
        special_ids: ids that are omitted from decoded text.
        bos_id: beginning-of-sequence id, added before a prompt's first text; None for no id.
        eos_ids: ids that end a text.
        special_tokens: `bos_token`, `eos_token` … for the chat template.
        chat_template: the model's own Jinja template.
        continuation: backend for text that continues other text, or a function that builds it, if
            it differs (SentencePiece adds a space to the start of a text).
        starts_segments: whether text after a special token is encoded like the start of a text.
        control: control tokens by id: text can name them, but text of a span without `special`
            never becomes one; None for the tokens of `special_ids`.
        unknown_ids: ids in `control` that represent characters without a token.

    Attributes:
        knows_text: False for the substitute of a missing tokenizer (NoTokenizer).
    """

    knows_text = True

    def __init__(
        self,
        backend: Backend | Callable[[], Backend],
        token_bytes: Sequence[bytes],
        special_ids: Iterable[int],
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        continuation: Backend | Callable[[], Backend] | None = None,
        starts_segments: bool = False,
        control: Mapping[int, AddedToken] | None = None,
        unknown_ids: Iterable[int] = (),
    ) -> None:
        self._given_backend = backend
        self._given_continuation = continuation
        self.token_bytes = list(token_bytes)
        self._with_byte: dict[int, NDArray[np.bool_]] = {}
        self.special_ids = frozenset(special_ids)
        self._text_bytes = [
            b"" if i in self.special_ids else token for i, token in enumerate(self.token_bytes)
        ]
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._starts_segments = starts_segments
        if control is None:
            control = {
                i: AddedToken(self.token_bytes[i].decode("utf-8", "replace"))
                for i in self.special_ids
            }
        self._control = control
        self._control_id = {token.content: i for i, token in control.items()}
        self._at_control = _control_pattern(control.values())
        self._never_text = frozenset(control) - frozenset(unknown_ids)
        self._encode_block = lru_cache(maxsize=8192)(self._encode_uncached)
        self._encode_turn = lru_cache(maxsize=8192)(self._encode_texts)

    @cached_property
    def backend(self) -> Backend:
        """The `tokenizers` object."""
        return _build_untruncated_backend(self._given_backend)

    @cached_property
    def continuation(self) -> Backend:
        """Backend for text that continues other text."""
        given = self._given_continuation
        return self.backend if given is None else _build_untruncated_backend(given)

    @cached_property
    def digest(self) -> str:
        """Hash of all tokens with their ids. Equal for two tokenizers only if each id means the
        same in both.
        """
        found = hashlib.sha256(repr((sorted(self.special_ids), len(self.token_bytes))).encode())
        for token in self.token_bytes:
            found.update(len(token).to_bytes(4, "big") + token)
        return found.hexdigest()

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    @property
    def control_texts(self) -> list[str]:
        """Texts that encode to control tokens."""
        return list(self._control_id)

    def control_text(self, token: int) -> str:
        """Returns the text that names a control token. Raises KeyError if the token is not a
        control token.
        """
        return self._control[token].content

    def is_control(self, token: int) -> bool:
        """Returns whether a token is a control token."""
        return token in self._control

    def tokens_containing(self, byte: int) -> NDArray[np.bool_]:
        """Returns the mask of the tokens whose bytes contain `byte`, bool [vocab_size]. Computed
        once per byte.
        """
        if byte not in self._with_byte:
            found = np.fromiter(
                (byte in token for token in self.token_bytes), bool, self.vocab_size
            )
            self._with_byte[byte] = found
        return self._with_byte[byte]

    def encode(self, text: str, *, first: bool = True) -> list[int]:
        """Encodes one text that can name special tokens, like `encode_spans`."""
        return self.encode_spans((Span(text),), first=first).tolist()

    def encode_spans(self, spans: Iterable[Span], *, first: bool = True) -> array[int]:
        """Encodes spans as one text.

        Args:
            spans: spans of the text; their ids are ignored.
            first: whether they start a prompt. Then the beginning-of-sequence id is added before
                them, unless they begin with it.

        Raises:
            ParameterError: a text has unpaired surrogates.
        """
        texts = tuple([(span.text, span.special) for span in spans if span.text])
        # the text between two answers is short, and encoded again for each later prompt
        is_short = sum([len(text) for text, _ in texts]) <= _LONGEST_TURN
        return self._encode_turn(texts, first)[:] if is_short else self._encode_texts(texts, first)

    def _encode_texts(self, texts: Sequence[tuple[str, bool]], first: bool) -> array[int]:
        """Encodes texts, each with whether it can name special tokens, as one text."""
        ids = array("i")
        before: int | None = None
        for text, after in self._split_at_control_tokens(texts):
            if before is not None and self._control[before].rstrip:
                text = text.lstrip()
            if after is not None and self._control[after].lstrip:
                text = text.rstrip()
            if text:
                starts = (
                    first
                    if before is None
                    else self._starts_segments and before in self.special_ids
                )
                ids += self._encode_piece(text, starts)
            if after is not None:
                ids.append(after)
            before = after
        if first and self.bos_id is not None and (not ids or ids[0] != self.bos_id):
            ids.insert(0, self.bos_id)
        return ids

    def _split_at_control_tokens(
        self, texts: Sequence[tuple[str, bool]]
    ) -> Iterator[tuple[str, int | None]]:
        """Yields each text with the control token after it, or None after the last text. A control
        token is recognised only if it lies entirely in texts that can name special tokens.
        """
        text = ""
        for special, group in groupby(texts, key=itemgetter(1)):
            run = "".join([part for part, _ in group])
            start = 0
            for found in self._at_control.finditer(run) if special and self._at_control else ():
                yield text + run[start : found.start()], self._control_id[found[0]]
                text = ""
                start = found.end()
            text += run[start:]
        yield text, None

    def _encode_piece(self, text: str, first: bool) -> array[int]:
        ids = array("i")
        start = 0
        while (
            self._can_encode_in_blocks
            and len(text) - start > BLOCK
            and (cut := _CUT.search(text, start + BLOCK))
        ):
            ids += self._encode_block(text[start : cut.start()], first and not start)
            start = cut.start()
        rest = text[start:]
        encode = self._encode_block if len(rest) <= _LONGEST_KEPT else self._encode_uncached
        ids += encode(rest, first and not start)
        return ids

    def _encode_uncached(self, text: str, first: bool) -> array[int]:
        backend = self.backend if first else self.continuation
        try:
            # Only the batch method releases the GIL; otherwise an engine's loop would wait.
            encoding = backend.encode_batch_fast([text], add_special_tokens=False)[0]
        except TypeError:  # raised by `tokenizers` for text that can't be encoded as UTF-8
            raise ParameterError(
                "prompt", "is no valid Unicode: it has unpaired surrogates."
            ) from None
        ids = array("i", encoding.ids)
        if self._never_text.isdisjoint(ids):
            return ids
        # A control token was found in plain text, as a piece of the vocabulary or an added token
        # that the library does not treat as special: the text is cut so that no part is a control
        # token.
        offsets = backend.encode(text, add_special_tokens=False).offsets
        cuts = [a + 1 for i, (a, b) in zip(ids, offsets) if i in self._never_text and b - a > 1]
        if not cuts:  # a single character, which has no other spelling
            return array("i", [i for i in ids if i not in self._never_text])
        parts = [
            self._encode_uncached(text[a:b], first and not a)
            for a, b in pairwise([0, *cuts, len(text)])
        ]
        return sum(parts, array("i"))

    @cached_property
    def _can_encode_in_blocks(self) -> bool:
        """True if encoding text in blocks gives the same ids as encoding it whole."""
        tokens = b"\0".join(b for i, b in enumerate(self.token_bytes) if i not in self._control)
        if _SPANS_CUT.search(tokens):
            return False
        ends = [*(cut.start() for cut in _CUT.finditer(_PROBE)), len(_PROBE)]
        blocks = [self._encode_uncached(_PROBE[a:b], not a) for a, b in zip([0, *ends], ends)]
        return sum(blocks, array("i")) == self._encode_uncached(_PROBE, True)

    def ends_with_whole_character(self, token: int) -> bool:
        """Returns True if a token has text that certainly ends with a whole character, whatever
        comes before it.
        """
        text = self._text_bytes[token] if token < len(self._text_bytes) else b""
        try:
            return bool(text.decode())
        except UnicodeDecodeError:
            return False

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decodes ids to text. Invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        table = self._text_bytes if skip_special else self.token_bytes
        try:
            return b"".join(map(table.__getitem__, ids))
        except IndexError:  # ids of the vocabulary's padding have no text
            return b"".join([table[i] for i in ids if i < len(table)])


class NoTokenizer(Tokenizer):
    """Substitute for the tokenizer of a checkpoint that has none: ids decode to nothing, and text
    is rejected.

    Args:
        vocab_size: size of the model's vocabulary.
    """

    knows_text = False

    def __init__(self, vocab_size: int) -> None:
        super().__init__(Backend(BPE()), [b""] * vocab_size, ())

    def encode_spans(self, spans: Iterable[Span], *, first: bool = True) -> array[int]:
        if any(span.text for span in spans):
            raise ParameterError(
                "prompt",
                "is text, and the model has no tokenizer (skip_tokenizer_init).",
                hint="Give input_ids.",
            )
        return array("i")


def _build_untruncated_backend(given: Backend | Callable[[], Backend]) -> Backend:
    backend: Backend = given() if callable(given) else given
    backend.no_truncation()
    backend.no_padding()
    # encodes special tokens as text: `Tokenizer` finds them itself
    backend.encode_special_tokens = True
    return backend


def _control_pattern(tokens: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """Returns a pattern that finds the tokens in a text, the longest first, or None without tokens."""
    longest_first = sorted(
        (token for token in tokens if token.content), key=lambda t: len(t.content), reverse=True
    )
    found = [
        rf"(?<!\w){re.escape(t.content)}(?!\w)" if t.single_word else re.escape(t.content)
        for t in longest_first
    ]
    return re.compile("|".join(found)) if found else None
