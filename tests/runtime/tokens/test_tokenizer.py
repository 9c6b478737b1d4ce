"""Encoding against an independent BPE, decoding against the whole."""

import json

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

import sglang_lite as sgl
from sglang_lite.protocol import Choices, Span
from sglang_lite.runtime.models.weights.gguf_file import GgufFile
from sglang_lite.runtime.structured_output.llguidance import LlguidanceEngine
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary
from sglang_lite.runtime.structured_output.xgrammar import XgrammarEngine
from sglang_lite.runtime.tokens import tokenizer as module
from sglang_lite.runtime.tokens.detokenize import IncrementalDecoder
from sglang_lite.runtime.tokens.from_folder import tokenizer_from_folder
from sglang_lite.runtime.tokens.from_gguf import tokenizer_from_gguf
from sglang_lite.runtime.tokens.token_log import TokenLog, spans_for_next_prompt
from sglang_lite.text.tool_formats import select_output_marks


@pytest.fixture(scope="module")
def metadata(model_file):
    return GgufFile(model_file).metadata


@pytest.fixture(scope="module")
def tokenizer(metadata):
    return tokenizer_from_gguf(metadata, "test")


def byte_alphabet():
    """GPT-2's map from bytes to printable characters, written as its paper's code has it."""
    bs = (
        list(range(ord("!"), ord("~") + 1))
        + list(range(ord("¡"), ord("¬") + 1))
        + list(range(ord("®"), ord("ÿ") + 1))
    )
    cs, n = bs[:], 0
    for b in range(256):
        if b not in bs:
            bs.append(b)
            cs.append(256 + n)
            n += 1
    return dict(zip(bs, map(chr, cs)))


@pytest.fixture(scope="module")
def vocabulary(metadata):
    return set(metadata["tokenizer.ggml.tokens"])


@pytest.fixture(scope="module")
def oracle(metadata):
    """llama.cpp's `smollm`: digits one by one, then GPT-2's words, then byte-level BPE by merge
    rank.
    """
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {
        tuple(merge.split(" ", 1)): i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])
    }
    words = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    alphabet = byte_alphabet()

    def encode(text):
        ids = []
        for piece in regex.split(r"(\p{N})", text):
            for word in words.findall(piece):
                parts = [alphabet[b] for b in word.encode()]
                while len(parts) > 1:
                    best = min(
                        range(len(parts) - 1),
                        key=lambda i: ranks.get((parts[i], parts[i + 1]), 1e9),
                    )
                    if (parts[best], parts[best + 1]) not in ranks:
                        break
                    parts[best : best + 2] = [parts[best] + parts[best + 1]]
                ids += [vocab[part] for part in parts]
        return ids

    return encode


NUMBERS = ["12345", "In 1984, 3.14 and 2,000", "a1b22c333", " 7", "٣٤ ½ Ⅷ"]


@pytest.mark.parametrize(
    "text", [*NUMBERS, "Hello world", "  two  spaces\n\n\n", "don't I'll", "héllo 日本 🎉", ""]
)
def test_ids_are_those_of_the_vocabulary_and_its_pre_tokenizer(tokenizer, oracle, text):
    assert tokenizer.encode(text) == oracle(text)


@settings(max_examples=300)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_is_encoded_alike_and_comes_back(tokenizer, oracle, vocabulary, text):
    # a few are, and are dropped
    lacking = any(byte_alphabet()[byte] not in vocabulary for byte in text.encode())
    special = "<|" in text  # which the oracle does not know
    if not lacking and not special:
        ids = tokenizer.encode(text)
        assert ids == oracle(text)
        assert tokenizer.decode(ids) == text


def test_special_tokens_are_recognised_and_left_out_of_decoded_text(tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>user\nhi<|im_end|>"


def test_ids_that_pad_the_vocabulary_spell_nothing(tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nhi")
    padded = [*ids, tokenizer.vocab_size, tokenizer.vocab_size + 7, *ids]
    assert tokenizer.decode(padded) == 2 * "user\nhi"
    assert tokenizer.decode(padded, skip_special=False) == 2 * "<|im_start|>user\nhi"


@given(st.lists(st.integers(0, 49_151), max_size=40), st.data())
def test_deltas_add_up_to_the_whole_for_any_split(tokenizer, ids, data):
    decoder = IncrementalDecoder(tokenizer)
    text, at = "", 0
    while at < len(ids):
        step = data.draw(st.integers(1, 5))
        text += decoder.push(ids[at : at + step])
        at += step
    assert text + "\ufffd" * decoder.pending == tokenizer.decode(ids)


def test_generated_ids_are_kept_and_text_between_is_encoded_as_one(tokenizer):
    odd = (33, 34)  # "1", "2": never merged, but also not how a model must have written it
    spans = [Span("The num"), Span("ber "), Span("12", odd), Span(" is"), Span(" it")]
    assert TokenLog(tokenizer, spans).ids().tolist() == [
        *tokenizer.encode("The number "),
        *odd,
        *tokenizer.encode(" is it"),
    ]
    assert TokenLog(tokenizer).ids().tolist() == []


@given(st.lists(st.integers(17, 49_151), min_size=1, max_size=12), st.integers(0, 40))
def test_what_a_stop_cut_off_is_not_kept(tokenizer, ids, cut):
    text = tokenizer.decode(ids)[:cut]
    spans = spans_for_next_prompt(tokenizer, tuple(ids), text)
    assert "".join(span.text for span in spans) == text
    kept = spans[0].ids if spans and spans[0].ids else ()
    assert tuple(ids[: len(kept)]) == kept


SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
    ],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, *[0.0] * 256, -1e6, -1e6, -1e6, -2.0, -1.0, -3.0],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def test_sentencepiece_from_a_gguf():
    tokenizer = tokenizer_from_gguf(SENTENCEPIECE, "test")
    tokens = SENTENCEPIECE["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in tokenizer.encode("ab a")] == ["<s>", "▁ab", "▁a"]
    # no space is put into running text
    assert [tokens[i] for i in tokenizer.encode("ab", first=False)] == ["ab"]
    assert tokenizer.decode(tokenizer.encode("é", first=False)) == "é"
    assert TokenLog(tokenizer, [Span("a"), Span("b", (261,)), Span("ab")]).ids()[
        -1
    ] == tokens.index("ab")
    assert tokenizer.encode("<s>ab")[:2] == [1, tokens.index("▁ab")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert' is not supported"),
        ({"tokenizer.ggml.model": None}, "tokenizer None"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "x"}, "pre-tokenizer 'x'"),
        ({"tokenizer.ggml.model": "gpt2"}, "the metadata key 'tokenizer.ggml.merges' is missing"),
    ],
)
def test_tokenizers_that_are_not_supported(change, message):
    with pytest.raises(sgl.ModelError, match=message):
        tokenizer_from_gguf({**SENTENCEPIECE, **change}, "test")


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_what_encodes_can_be_built_with_the_first_text(kind, metadata, monkeypatch):
    """Of 150,000 tokens that takes half a second, which a process that is given ids need not wait
    for.
    """
    described = {"bytes": metadata, "pieces": SENTENCEPIECE}[kind]
    first = tokenizer_from_gguf(described, "test")
    built = []
    monkeypatch.setattr(
        "sglang_lite.runtime.tokens.from_gguf.Backend",
        lambda *args: built.append(args) or Backend(*args),
    )
    later = tokenizer_from_gguf(described, "test", later=True)
    ids = first.encode("ab a", first=False)
    assert later.decode(ids) == first.decode(ids)
    assert (later.digest, later.control_texts, later.eos_ids) == (
        first.digest,
        first.control_texts,
        first.eos_ids,
    )
    assert not built
    for text, is_first in (("ab a<s>", True), ("ab a</s> b", False)):
        assert later.encode(text, first=is_first) == first.encode(text, first=is_first)
    assert len(built) == {"bytes": 1, "pieces": 2}[kind]


def test_what_encodes_is_checked_when_it_is_built():
    damaged = {**SENTENCEPIECE, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "x"}
    tokenizer = tokenizer_from_gguf(damaged, "test", later=True)
    with pytest.raises(sgl.ModelError, match="pre-tokenizer 'x'"):
        tokenizer.encode("a")


def write_sentencepiece_folder(folder):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "b": 5, "▁a": 6}
    special = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": t, **special} for t, i in list(vocab.items())[:3]],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": None,
        "post_processor": {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["▁", "a"]], "byte_fallback": True, "unk_token": "<unk>"},
    }))  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": "<s>", "eos_token": {"content": "</s>"},
        "chat_template": [{"name": "tool", "template": "x"}, {"name": "default", "template": "{{ messages }}"}],
    }))  # fmt: skip


def test_a_folder_with_sentencepiece_settings(tmp_path):
    write_sentencepiece_folder(tmp_path)
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.encode("a b") == [1, 6, 3, 5]
    assert tokenizer.encode("a", first=False) == [4]
    assert (tokenizer.eos_ids, tokenizer.chat_template) == ({2}, "{{ messages }}")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert tokenizer_from_folder(tmp_path).chat_template == "from the file"


def test_marks_of_calls_are_text_though_a_tokenizer_calls_them_special(tmp_path):
    write_sentencepiece_folder(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    mark = {**described["added_tokens"][1], "id": 7, "content": "[TOOL_CALLS]"}
    described["added_tokens"].append(mark)
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.encode("a[TOOL_CALLS]b", first=False) == [4, 7, 5]
    assert tokenizer.decode([1, 4, 7, 5]) == "a[TOOL_CALLS]b"
    assert 7 not in tokenizer.special_ids
    from_gguf = tokenizer_from_gguf(
        {**SENTENCEPIECE, **{
            key: [*SENTENCEPIECE[key], value]
            for key, value in (("tokenizer.ggml.tokens", "[TOOL_CALLS]"), ("tokenizer.ggml.scores", 0.0),
                               ("tokenizer.ggml.token_type", 3))
        }}, "test",
    )  # fmt: skip
    last = from_gguf.vocab_size - 1
    assert last not in from_gguf.special_ids
    assert from_gguf.decode([last]) == "[TOOL_CALLS]"
    assert from_gguf.encode("[TOOL_CALLS]", first=False) == [last]


def test_marks_of_harmony_are_text_where_they_are_its():
    harmony = {"<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"}
    assert select_output_marks({*harmony, "<|return|>", "<tool_call>"}) == {*harmony, "<tool_call>"}
    muse = {"<|message|>", "<|start|>", "<|eom|>"}
    assert select_output_marks({*muse, "<|eot|>"}) == muse
    # Phi's turns end so
    assert select_output_marks({"<|end|>", "<|user|>", "<tool_call>"}) == {"<tool_call>"}


def test_a_grammar_can_be_written_with_marks_of_calls(tmp_path):
    write_sentencepiece_folder(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["added_tokens"].append(
        {**described["added_tokens"][1], "id": 7, "content": "[TOOL_CALLS]"}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = tokenizer_from_folder(tmp_path)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, 8, [2])
    assert vocabulary.tokens[7] == b"[TOOL_CALLS]"
    assert vocabulary.tokens[1] == b""
    for engine in (LlguidanceEngine(tokenizer, 8, [2]), XgrammarEngine(vocabulary)):
        matcher = engine.compile(Choices(("[TOOL_CALLS]a", "ba"))).matcher()
        assert matcher.accept(7)
        assert matcher.accept(4)
        assert matcher.complete


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(sgl.ModelError, match=r"no tokenizer.json"):
        tokenizer_from_folder(tmp_path)
    write_sentencepiece_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(sgl.ModelError, match="not JSON"):
        tokenizer_from_folder(tmp_path)
    parts = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({**parts, "decoder": None, "normalizer": None})
    )
    with pytest.raises(sgl.ModelError, match="neither byte-level nor SentencePiece"):
        tokenizer_from_folder(tmp_path)


WORDS = [
    "a",
    "it's",
    "b ",
    "\n",
    " ",
    "\r\n\t",
    "  ",
    "x.\n",
    "1234",
    "né",
    "日本",
    "<|im_end|>",
    "A",
    "- ",
    "e\u0301",
    "½",
]
words = st.lists(st.sampled_from(WORDS))


@pytest.fixture(scope="module", params=["smollm", "llama-bpe", "qwen2", "gpt-2"])
def byte_level(request, metadata):
    return tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": request.param}, "test")


@pytest.fixture(scope="module")
def sentencepiece():
    return tokenizer_from_gguf(SENTENCEPIECE, "test")


@given(pieces=words)
def test_long_text_is_encoded_in_blocks_with_the_same_ids(byte_level, pieces):
    text = " ".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 3)
        assert byte_level.encode(text) == whole(byte_level, text)


@given(text=st.text(alphabet="ab \né", max_size=40))
def test_sentencepiece_text_is_encoded_in_blocks_with_the_same_ids(sentencepiece, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 3)
        assert sentencepiece.encode(text) == [1, *whole(sentencepiece, text)]


@given(ids=st.lists(st.integers(3, 264), max_size=30))
# held back as one sequence, though two replacement characters when decoded
@example(ids=[0xED + 3, 0xA0 + 3])
def test_sentencepiece_deltas_are_the_bytes_of_the_whole(sentencepiece, ids):
    decoder = IncrementalDecoder(sentencepiece)
    text = "".join(decoder.push((i,)) for i in ids)
    tokens = SENTENCEPIECE["tokenizer.ggml.tokens"]
    raw = b"".join(bytes([i - 3]) if i < 259 else tokens[i].replace("▁", " ").encode() for i in ids)
    expected = raw.decode("utf-8", "replace")
    held_back = expected[len(text) :]
    assert expected == text + held_back
    assert held_back in (("\ufffd", "\ufffd\ufffd") if decoder.pending else ("",))


def whole(tokenizer, text):
    """As the library has it, special tokens too."""
    tokenizer.backend.encode_special_tokens = False
    try:
        return tokenizer.backend.encode(text, add_special_tokens=False).ids
    finally:
        tokenizer.backend.encode_special_tokens = True


def test_a_growing_text_is_encoded_from_its_last_block_on(tokenizer, monkeypatch):
    encoded: list[str] = []
    text = "Once upon a time there was a king who had three sons. " * 200
    tokenizer.encode(text)
    inner = tokenizer.backend
    monkeypatch.setattr(tokenizer, "continuation", Spy(inner, encoded))
    longer = text + "The first one went away."
    assert tokenizer.encode(longer) == whole(tokenizer, longer)
    assert sum(len(each) for each in encoded) < 2 * module.BLOCK


class Spy:
    """Has nothing that keeps Python's lock."""

    def __init__(self, backend, seen):
        self.backend, self.seen = backend, seen

    def encode_batch_fast(self, texts, **options):
        self.seen += texts
        return self.backend.encode_batch_fast(texts, **options)


def test_text_is_not_cut_where_a_token_spans_words():
    tokens = [*SENTENCEPIECE["tokenizer.ggml.tokens"], "a▁b"]
    more = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*SENTENCEPIECE["tokenizer.ggml.token_type"], 1],
        "tokenizer.ggml.scores": [*SENTENCEPIECE["tokenizer.ggml.scores"], -0.5],
    }
    tokenizer = tokenizer_from_gguf({**SENTENCEPIECE, **more}, "test")
    text = "a b " * 2000
    assert tokenizer.encode(text)[1:] == whole(tokenizer, text)
