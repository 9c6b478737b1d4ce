"""Text to token ids, and token ids to bytes.

The `tokenizers` library encodes; decoding is a table of bytes, one entry per id, so that any split of the ids gives
the same bytes. Knows nothing of requests or models.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from sglang_lite.protocol import ParameterError, Span

# Long text is encoded in blocks, so that of a growing one only the last is encoded again. They are cut where no token
# can span the cut: between a letter and a single blank.
BLOCK = 512  # characters: 2 % slower than whole texts where nothing is known (256: 5 %)
_LONGEST_KEPT = 16_384
_CUT = re.compile(r"(?<=[^\W\d_])(?=[ \n]\S)")
_SPANS_CUT = re.compile(rb"[A-Za-z\x80-\xff][ \n]")
_PROBE = "The cat's mat\nis 3 cm wide\nand it is caf\u00e9 au lait"


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

    Attributes:
        knows_text: False of what stands for one where there is none.
    """

    knows_text = True

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
        self.continuation = continuation or backend
        for each in (backend, self.continuation):
            each.no_truncation()
            each.no_padding()
            each.encode_special_tokens = True  # as text: where they are tokens is said here
        self.backend = backend
        self.token_bytes = list(token_bytes)
        self._with_byte: dict[int, NDArray[np.bool_]] = {}
        self.special_ids = frozenset(special_ids)
        self._text_bytes = [b"" if i in self.special_ids else token for i, token in enumerate(self.token_bytes)]
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
        self._encode_block = lru_cache(maxsize=8192)(self._encode_uncached)
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
        backend = self.backend if first else self.continuation
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

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = True) -> bytes:
        table = self._text_bytes if skip_special else self.token_bytes
        try:
            return b"".join(map(table.__getitem__, ids))
        except IndexError:  # ids that pad the vocabulary spell nothing
            return b"".join([table[i] for i in ids if i < len(table)])


def _pattern(tokens: Iterable[AddedToken]) -> re.Pattern[str] | None:
    """Finds the tokens in a text, the longest where several begin."""
    longest_first = sorted((token for token in tokens if token.content), key=lambda t: len(t.content), reverse=True)
    found = [rf"(?<!\w){re.escape(t.content)}(?!\w)" if t.single_word else re.escape(t.content) for t in longest_first]
    return re.compile("|".join(found)) if found else None
