"""A compiled constraint asked about whole texts, with a token for every byte."""

from functools import lru_cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sglang_lite.protocol import ConstraintError
from sglang_lite.runtime.grammar.llguidance import LlguidanceEngine
from sglang_lite.runtime.tokens.tokenizer import Tokenizer

EOS = 256
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2's byte alphabet leaves as they are
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
ALPHABET = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}


@lru_cache(maxsize=1)
def byte_engine():
    vocab = {ALPHABET[byte]: byte for byte in range(256)} | {"<end>": EOS}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    return LlguidanceEngine(Tokenizer(backend, tokens, [EOS], eos_ids=[EOS]), EOS + 1, [EOS], cache_size=4)


def compiled(constraint):
    """The grammar and None, or None and the error that refuses it."""
    try:
        return byte_engine().compile(constraint), None
    except ConstraintError as error:
        return None, error


def accepts(grammar, text):
    """The text can be generated and may end there."""
    matcher = grammar.matcher()
    for byte in text.encode():
        if not matcher.accept(byte):
            return False
    assert not matcher.error
    return matcher.complete
