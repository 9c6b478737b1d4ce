"""Models in Mistral's own files: the logits of the Hugging Face folder, the ids of tiktoken's
algorithm, and a named error for what is damaged or not here.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import regex
from safetensors.torch import load_file, save_file
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import MistralForCausalLM

import sglang_lite as sgl
from sglang_lite.protocol import Span
from sglang_lite.runtime.models.folder_config import config_of_params
from sglang_lite.runtime.tokens.from_folder import tokenizer_from_folder
from sglang_lite.runtime.tokens.token_bytes import byte_level_bytes
from tests.runtime.models.test_families import SHAPE, engine
from tests.runtime.models.test_new_weights import pair, told
from tests.runtime.models.tiny import randomise, save

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = "The cat's mat is 3 cm wide, and it is naïve; 猫 sat on the mat.\n\n  The end of that tale, they tell.  "
NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn.": "attention.",
    "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "block_sparse_moe": "feed_forward",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
}  # fmt: skip


def mistrals_own(folder: Path, out: Path, parts: int = 1) -> Path:
    """The model of a Hugging Face folder in Mistral's files, which are `parts`."""
    config = json.loads((folder / "config.json").read_text())
    out.mkdir()
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    params = {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "head_dim": size,
        "hidden_dim": config["intermediate_size"], "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"], "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"], "rope_theta": config["rope_parameters"]["rope_theta"],
        "max_position_embeddings": config["max_position_embeddings"], "vision_encoder": None,
        "sliding_window": config["sliding_window"], "tied_embeddings": config["tie_word_embeddings"],
    }  # fmt: skip
    if experts := config.get("num_local_experts"):
        params["moe"] = {
            "num_experts": experts,
            "num_experts_per_tok": config["num_experts_per_tok"],
        }
    (out / "params.json").write_text(json.dumps(params))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # halves of a head to pairs
            tensor = (
                tensor.view(-1, 2, size // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            )
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor.contiguous()
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, out)
    names = sorted(tensors)
    for part in range(parts):
        written = (
            "consolidated.safetensors"
            if parts == 1
            else f"consolidated-{part + 1:05}-of-{parts:05}.safetensors"
        )
        save_file({name: tensors[name] for name in names[part::parts]}, out / written)
    return out


@pytest.fixture(scope="module")
def mistrals(tmp_path_factory):
    return pair("mistral-window", tmp_path_factory.mktemp("mistrals"))


@pytest.mark.parametrize(
    ("family", "parts"), [("mistral-window", 1), ("mistral-window", 3), ("mixtral", 1)]
)
def test_mistrals_files_give_the_same_logits(family, parts, tmp_path):
    old, new = pair(family, tmp_path)
    own = mistrals_own(old, tmp_path / "own", parts)
    with engine(old) as running:
        expected = told(running)
    with engine(own, load_format="mistral") as running:
        assert told(running) == expected
        other = mistrals_own(new, tmp_path / "other", parts)
        running.update_weights_from_disk(str(other))
        changed = told(running)
    with engine(new) as running:
        assert changed == told(running) != expected


def params(**changes: Any) -> dict[str, Any]:
    plain = {"dim": 64, "n_layers": 4, "hidden_dim": 96, "n_heads": 4, "vocab_size": 100}
    return {name: value for name, value in (plain | changes).items() if value != "absent"}


def test_params_say_windows_and_stretched_positions_in_hugging_faces_terms():
    found = config_of_params(
        params(sliding_window=[None, 8], yarn={"factor": 4, "alpha": 1, "beta": 32}), "it"
    )
    assert (found["sliding_window"], found["layer_types"]) == (
        8,
        ["full_attention", "sliding_attention"] * 2,
    )
    scaling = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4,
        "beta_slow": 1,
        "beta_fast": 32,
    }
    assert found["rope_parameters"] == scaling


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dim": "absent"}, "it: the field 'dim' is missing"),
        ({"n_layers": 10**9}, "`n_layers`: 1000000000 is not between"),
        ({"vision_encoder": {"dim": 8}}, "vision_encoder=.* is not supported"),
        ({"model_type": "mamba"}, "model_type='mamba' is not supported"),
        (
            {"moe": {"num_experts": 2, "num_shared_experts": 1}},
            "moe=.* it may have num_experts, num_experts_per_tok",
        ),
        ({"yarn": 3}, "yarn=3 is not supported"),
        ({"sliding_window": [8, 9]}, "neither a size, nor one for each layer"),
        ({"sliding_window": [8, None, None]}, "neither a size, nor one for each layer"),
    ],
)
def test_params_that_are_not_supported_are_named(changes, why):
    with pytest.raises(sgl.ModelError, match=why):
        config_of_params(params(**changes), "it")


BAD_FILES = {
    "consolidated-00002-of-00003.safetensors": (None, "2 of 3 are there"),
    "params.json": ("[]", "not a JSON object"),
    "consolidated-00001-of-00003.safetensors": ("no", "damaged or truncated"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_missing_or_damaged_are_named(name, mistrals, tmp_path):
    own, (text, why) = mistrals_own(mistrals[0], tmp_path / "own", 3), BAD_FILES[name]
    (own / name).unlink() if text is None else (own / name).write_text(text)
    with pytest.raises(sgl.ModelError, match=why):
        engine(own, load_format="mistral")


def test_the_other_format_is_named(mistrals, tmp_path):
    own = mistrals_own(mistrals[0], tmp_path / "own")
    with pytest.raises(sgl.ModelError, match=r'no weights found.*load_format="mistral"'):
        engine(own)
    with pytest.raises(
        sgl.ModelError, match=r'there is no consolidated.safetensors.*load_format="auto"'
    ):
        (own / "consolidated.safetensors").unlink()
        engine(own, load_format="mistral")


# -------------------------------------------------------------------------------------- tekken.json


@pytest.fixture(scope="module")
def tekken(tmp_path_factory):
    """Folder with a `tekken.json` of 400 trained tokens behind 20 special ones, of which the file
    names five.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False),
    )
    by_id = sorted(backend.get_vocab().items(), key=lambda each: each[1])
    content = {
        "config": {
            "pattern": PATTERN, "num_vocab_tokens": len(by_id), "default_vocab_size": 20 + len(by_id) - 5,
            "default_num_special_tokens": 20, "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(byte_level_bytes(text)).decode(), "token_str": None}
            for rank, (text, _) in enumerate(by_id)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(("<unk>", "<s>", "</s>", "[INST]", "[/INST]"))
        ],
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("tekken")
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder, content


def tiktoken_ids(text: str, content: dict[str, Any]) -> list[int]:
    """Ids by tiktoken's algorithm: of each piece, the neighbours whose union has the lowest rank
    are joined.
    """
    count = content["config"]["default_num_special_tokens"]
    kept = content["vocab"][: content["config"]["default_vocab_size"] - count]
    rank = {base64.b64decode(each["token_bytes"]): i for i, each in enumerate(kept)}
    ids = []
    for piece in regex.findall(PATTERN, text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while len(parts) > 1:
            best = min(
                range(len(parts) - 1), key=lambda i: rank.get(parts[i] + parts[i + 1], 1 << 30)
            )
            if parts[best] + parts[best + 1] not in rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        ids += [count + rank[part] for part in parts]
    return ids


def test_texts_have_the_ids_of_tiktokens_algorithm(tekken):
    folder, content = tekken
    tokenizer, draw = tokenizer_from_folder(folder), random.Random(1)
    assert tokenizer.vocab_size == content["config"]["default_vocab_size"]
    for _ in range(300):
        text = "".join(draw.choices(TEXT + "[INST]<s>é🐈\t", k=draw.randrange(40)))
        ids = list(tokenizer.encode_spans([Span(text, special=False)], first=False))
        assert ids == tiktoken_ids(text, content), text
        assert b"".join(tokenizer.token_bytes[i] for i in ids).decode() == text


def test_control_tokens_have_their_ids_and_every_prompt_begins_with_one(tekken):
    tokenizer = tokenizer_from_folder(tekken[0])
    assert tokenizer.encode("[INST]")[:2] == [1, 3]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.token_bytes[7]) == (
        1,
        {2},
        b"<SPECIAL_7>",
    )
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    assert 3 not in tokenizer.encode_spans([Span("[INST]", special=False)])


def test_a_model_in_mistrals_files_reads_texts(tekken, tmp_path):
    model = randomise(
        MistralForCausalLM(MistralForCausalLM.config_class(**SHAPE | {"vocab_size": 512}))
    )
    own = mistrals_own(save(model, tmp_path / "theirs"), tmp_path / "own")
    for file in own.glob("tokenizer*"):
        file.unlink()
    shutil.copy(tekken[0] / "tekken.json", own)
    with sgl.Engine(str(own), load_format="mistral", device="cpu", max_running=2) as running:
        ids = running.tokenizer.encode(TEXT)
        greedy = {"temperature": 0, "max_new_tokens": 5}
        by_text = running.generate([TEXT], greedy)[0]["output_ids"]
        by_ids = running.generate(input_ids=[ids], sampling_params=greedy)[0]["output_ids"]
    assert by_text == by_ids


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c: c.pop("vocab"), "damaged: KeyError"),
        (lambda c: c["special_tokens"].pop(0), "the special tokens are not the first"),
        (lambda c: c["config"].update(default_vocab_size=10**6), "has .* tokens, and says"),
        (
            lambda c: (
                c["vocab"].append(c["vocab"][0]) or c["config"].update(default_vocab_size=421)
            ),
            "and says 401",
        ),
        (lambda c: c["config"].update(default_num_special_tokens=3), "not the first of 3"),
        (
            lambda c: c["vocab"][300].update(token_bytes=base64.b64encode(b"a" * 2000).decode()),
            "2,000 bytes",
        ),
    ],
)
def test_a_damaged_tekken_is_named(change, why, tekken, tmp_path):
    content = json.loads(json.dumps(tekken[1]))
    change(content)
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    with pytest.raises(sgl.ModelError, match=why):
        tokenizer_from_folder(tmp_path)
