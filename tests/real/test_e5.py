"""A real embedding model of many languages gives transformers' vectors, and finds the answers to
questions by them.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

import sglang_lite as sgl
from tests.real.conftest import file_of
from tests.real.convert_e5 import convert, decode_q4_0

ANSWERS = {
    "How do I get to the island?": "The ferry to the island leaves every hour from the old harbour.",
    "Was kostet der Eintritt ins Museum?": "Karten für das Museum kosten acht Euro.",
    "¿Cuántas patas tiene una araña?": "Las arañas tienen ocho patas.",
    "Quelle est la capitale de la France ?": "Paris est la capitale de la France.",
    "蜂蜜是怎么来的?": "蜜蜂采集花蜜并酿成蜂蜜。",
    "日本で一番高い山は何ですか": "富士山は日本で最も高い山である。",
    "Кто написал «Войну и мир»?": "Роман «Война и мир» написал Лев Толстой.",
    "ما هي أكبر صحراء حارة في العالم؟": "الصحراء الكبرى هي أكبر صحراء حارة في العالم.",
    "भारत की राजधानी क्या है?": "नई दिल्ली भारत की राजधानी है।",
    "Quanto tempo devo cuocere la pasta?": "Gli spaghetti vanno bolliti per dieci minuti in acqua salata.",
}
TEXTS = [
    *(f"query: {each}" for each in ANSWERS),
    *(f"passage: {each}" for each in ANSWERS.values()),
]
ODD = [
    "query: \tＦｕｌｌ  width\u200b１２３ \x07",
    "passage: e\u0301 é ﬁne ½",
    "query: " + "long " * 400,
]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        convert(file_of("multilingual-e5-small"), Path(made))
        yield Path(made)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[sgl.Engine]:
    with sgl.Engine(folder, device="cpu", dtype="float32", in_process=True) as engine:
        yield engine


def test_blocks_of_four_bits_are_read_as_the_gguf_package_reads_them() -> None:
    random = np.random.default_rng(0)
    scales = random.normal(0, 0.1, (64, 1)).astype(np.float16).view(np.uint8)
    data = np.hstack((scales, random.integers(0, 256, (64, 16), np.uint8)))
    expected = dequantize(data, GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(decode_q4_0(data.reshape(-1)).reshape(-1), expected.reshape(-1))


def vectors(engine: sgl.Engine, texts: list[str]) -> NDArray[np.float64]:
    return np.array([each["embedding"] for each in engine.encode(texts)])


def test_vectors_are_those_of_transformers(engine: sgl.Engine, folder: Path) -> None:
    model, tokenizer = (
        AutoModel.from_pretrained(folder, dtype="float32"),
        AutoTokenizer.from_pretrained(folder),
    )
    expected = []
    for text in [*TEXTS, *ODD]:
        with torch.inference_mode():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        expected.append((mean / mean.norm()).numpy())
    np.testing.assert_allclose(vectors(engine, [*TEXTS, *ODD]), expected, atol=1e-4)


def test_its_tokens_are_xlm_robertas(engine: sgl.Engine) -> None:
    """These ids are those of fairseq's XLM-RoBERTa, by the tests of transformers."""
    assert engine.tokenizer.encode("Hello World!") == [35378, 6661, 38]
    assert engine.tokenizer.encode("Ｈｅｌｌｏ\u200b World!") == [35378, 6661, 38]


def test_each_question_finds_its_answer_in_ten_languages(engine: sgl.Engine) -> None:
    found = vectors(engine, TEXTS)
    scores = found[: len(ANSWERS)] @ found[len(ANSWERS) :].T
    assert scores.argmax(1).tolist() == scores.argmax(0).tolist() == list(range(len(ANSWERS)))
