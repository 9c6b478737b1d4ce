"""A model that never stops thinking, whose tokens are bytes and the marks of thoughts."""

from itertools import pairwise

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from tests.constraints.test_generation import byte_alphabet
from tests.runtime.scripted import RecitingModel

START, END = 256, 257
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}|{% endfor %}"
    "{% if m %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{% if add_generation_prompt %}x{% endif %}"
)
ANSWER = "ABC"


def token_ids(text):
    """Ids of a text, of a token a byte, but for marks of thoughts."""
    parts = text.replace("<think>", "\ue000").replace("</think>", "\ue001")
    marks = {"\ue000": [START], "\ue001": [END]}
    return [token for character in parts for token in marks.get(character, character.encode())]


def thinker(sentence, *, special=False, spelled=False, starts=True, answer=ANSWER):
    """A model that thinks the same sentence again and again, and whose free answer is `answer`.

    Args:
        sentence: characters of which none comes twice.
        special: whether the marks are special tokens.
        spelled: whether they are spelled by bytes.
        starts: whether it begins to think behind an "x".
    """
    assert len(set(sentence)) == len(sentence)
    alphabet = byte_alphabet()
    marks = [] if spelled else ["<think>", "</think>"]
    names = [*(alphabet[byte] for byte in range(256)), *marks, "<end>"]
    backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    eos = len(names) - 1
    texts = [*(bytes([byte]) for byte in range(256)), *(mark.encode() for mark in marks), b"<end>"]
    specials = [eos, START, END] if special else [eos]
    tokenizer = Tokenizer(backend, texts, specials, eos_ids=[eos], chat_template=TEMPLATE)
    following = dict(pairwise([*sentence.encode(), sentence.encode()[0]]))
    following[ord("x")] = (START if not spelled else ord("<")) if starts else ord(answer[0])
    if not spelled:
        following[START] = ord(sentence[0])
        following[END] = ord("\n")
    following[ord("\n")] = ord(answer[0])
    following |= dict(pairwise([*answer.encode(), eos]))
    model = RecitingModel(following, eos + 1)
    return LoadedModel("thinker", model, tokenizer, eos + 1, frozenset({eos}), 2048)
