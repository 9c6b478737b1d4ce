"""A real model in the layout of the hub's cache is found and run without the hub."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.real.conftest import file_of
from tests.real.readings import read_by_transformers

HUB_ID, COMMIT = "google/gemma-3-270m", "c" * 40
TEXT = "The capital of France is"
PROGRAM = f"""
import json, sglang_lite as sgl

with sgl.Engine({HUB_ID!r}, dtype="float32", max_total_tokens=2048) as engine:
    ids = engine.tokenizer.encode({TEXT!r})
    asked = {{"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}}
    answer = engine.generate(input_ids=ids, sampling_params=asked, return_logprob=True)
logprobs = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
print(json.dumps({{"ids": ids, "out": answer["output_ids"], "logprobs": logprobs}}))
"""


def write_cache(source: Path, cache: Path) -> Path:
    """Moves a folder's files into the layout of the hub's cache: contents by their hashes, links by
    their names.
    """
    repository = cache / f"models--{HUB_ID.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    for folder in (snapshot, blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in source.iterdir():
        with open(file, "rb") as content:
            blob = blobs / hashlib.file_digest(content, "sha256").hexdigest()
        os.replace(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs", blob.name))
    return snapshot


@pytest.fixture(scope="module")
def snapshot() -> Iterator[Path]:
    """The model as transformers saves it, in bfloat16, in a cache of the hub's; some 0.6 GB, which
    go away.
    """
    with tempfile.TemporaryDirectory() as folder:
        for part in read_by_transformers(file_of("gemma-3-270m"), "bfloat16"):
            part.save_pretrained(Path(folder, "saved"))
        yield write_cache(Path(folder, "saved"), Path(folder, "hub"))


def offline(snapshot: Path, *command: str) -> str:
    """Returns what a command prints where the hub may not be asked."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(snapshot.parents[2])}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_hub_id_is_found_in_the_cache_without_the_hub(snapshot):
    assert offline(snapshot, "-m", "sglang_lite", "models", "pull", HUB_ID).strip() == str(snapshot)


def test_a_model_of_the_cache_gives_transformers_tokens(snapshot):
    found = json.loads(offline(snapshot, "-c", PROGRAM))
    model = AutoModelForCausalLM.from_pretrained(snapshot, dtype="float32")
    ids = torch.tensor([found["ids"]])
    asked = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "max_new_tokens": 8,
        "min_new_tokens": 8,
    }
    with torch.no_grad():
        whole = model.generate(ids, **asked)[0]
        rows = model(whole[None]).logits[0].log_softmax(-1)
    begun = ids.shape[1]
    assert found["out"] == whole[begun:].tolist()
    theirs = [float(rows[at - 1, whole[at]]) for at in range(begun, len(whole))]
    assert found["logprobs"] == pytest.approx(theirs, abs=1e-3)
