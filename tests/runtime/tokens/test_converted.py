"""Folders without a `tokenizer.json`, whose tokenizer transformers converts: here, or in a process
of its own.
"""

import json
import subprocess
import sys

import pytest

import sglang_lite as sgl
from sglang_lite.runtime.tokens.from_folder import tokenizer_from_folder

CODE = """
import sys
from pathlib import Path
from sglang_lite.runtime.tokens.from_folder import tokenizer_from_folder
print(tokenizer_from_folder(Path(sys.argv[1])).encode("abc a"))
assert not {"torch", "transformers"} & set(sys.modules)
"""


@pytest.fixture
def folder(tmp_path):
    """The files of a GPT-2 tokenizer, with one merge."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [*map(chr, printed), *(chr(256 + i) for i in range(256 - len(printed)))]
    vocabulary = {letter: i for i, letter in enumerate([*letters, "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_the_same_tokens_here_and_where_torch_is_not_to_be_loaded(folder):
    ids = tokenizer_from_folder(folder).encode("abc a")
    assert ids == [256, 66, 220, 64]  # with the merge; a blank is a letter of its own
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder)], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(ids)


def test_what_transformers_cannot_read_is_a_model_error(tmp_path):
    with pytest.raises(sgl.ModelError, match=r"no tokenizer.json|has no tokens"):
        tokenizer_from_folder(tmp_path)
