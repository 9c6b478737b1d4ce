"""`sglang-lite verify`: what passes, what it has to find wrong, and what it refuses before anything
is loaded.
"""

import json
import logging

import pytest
import torch

from sglang_lite.cli import main
from sglang_lite.engine.engine import Engine
from tests.runtime.models.tiny import randomise

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTROL = ("<|end|>", "<|user|>", "<|system|>", "<|assistant|>")


def letters():
    """The letters of a byte-level vocabulary, in GPT-2's order of bytes."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [*map(chr, printed), *(chr(256 + i) for i in range(256 - len(printed)))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with random weights, a tokenizer that has every byte, and a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("verified") / "tiny-llama"
    config = LlamaConfig(
        vocab_size=256 + len(CONTROL), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=256,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    randomise(LlamaForCausalLM(config)).save_pretrained(folder)
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    added = [
        {"id": 256 + i, "content": text, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
         "single_word": False}
        for i, text in enumerate(CONTROL)
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(letters())}, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(autouse=True)
def _exact_engines_here(monkeypatch):
    """Engines in float32 run in this process, as starting one takes seconds; the engine that is
    served has its own.
    """

    def start(model, **config):
        return Engine(model, **config, in_process="dtype" in config)

    monkeypatch.setattr("sglang_lite.commands.verify.engines.Engine", start)


@pytest.fixture(autouse=True)
def _level():
    """The level of messages, which an engine sets for its whole process."""
    logger = logging.getLogger("sglang_lite")
    before = logger.level
    yield
    logger.setLevel(before)


def reported(model, report, *flags):
    """Exit status and report of a verification."""
    status = main(["verify", str(model), "--report", str(report), *flags])
    return status, json.loads(report.read_text())


def statuses(report):
    return {check["name"]: check["status"] for check in report["checks"]}


def test_a_model_that_runs_as_transformers_does_passes_every_check(whole, tmp_path, capsys):
    status, report = reported(whole, tmp_path / "report.json")
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert statuses(report) == dict.fromkeys(
        ("template", "tokenizer", "greedy", "long", "served", "tasks", "recipes", "speed"), "passed"
    )
    greedy, long = report["checks"][2]["figures"], report["checks"][3]["figures"]
    assert (greedy["equal"], greedy["prompts"]) == (30, 30)
    assert greedy["largest_difference"] <= 1e-3
    assert (long["tokens"], long["beside"]) == (1024 - 9, "transformers in float32")
    assert report["model"] == "tiny-llama"
    assert set(report["sha256"]) >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert {"sglang_lite", "python", "torch", "transformers"} <= report["versions"].keys()
    assert "30 of 30 prompts have transformers' greedy ids" in printed


def test_the_served_engine_has_the_settings_that_were_given(whole, tmp_path, capsys):
    """Rounded to 4 bits a model of random weights is further from float32 than in bfloat16."""
    distances = {}
    for name in ("int4", None):
        flags = ["--quantization", name] if name else []
        _, report = reported(
            whole, tmp_path / "report.json", "--only", "served", "--dtype", "bfloat16", *flags
        )
        served = next(check for check in report["checks"] if check["name"] == "served")
        distances[name] = served["figures"]["mean_difference"]
        assert report["settings"] == {"dtype": "bfloat16"} | (
            {"quantization": name} if name else {}
        )
    assert distances["int4"] > 2 * distances[None]
    assert (
        "served in bfloat16 on cpu (dtype=bfloat16, quantization=int4)" in capsys.readouterr().out
    )


def test_a_setting_that_an_engine_refuses_is_refused_before_anything_is_loaded(whole, capsys):
    assert main(["verify", str(whole), "--quantization", "int5"]) == 1
    assert "quantization" in capsys.readouterr().err


def test_other_numbers_than_transformers_fail(whole, tmp_path, monkeypatch, capsys):
    """A tensor is another one to transformers: so a wrong one of ours would look."""
    from transformers import LlamaForCausalLM

    load = LlamaForCausalLM.from_pretrained

    def changed(*arguments, **options):
        model, loaded = load(*arguments, **options)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[:4] *= 1.5
        return model, loaded

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", changed)
    status, report = reported(whole, tmp_path / "report.json", "--only", "greedy", "long")
    assert status == 1
    found = statuses(report)
    assert (found["greedy"], found["long"], found["speed"]) == ("failed", "failed", "left out")
    partings = report["checks"][0]["figures"]["partings"]
    assert max(each["margin"] for each in partings) > 0.002
    assert "no near tie, margin" in capsys.readouterr().out


def test_another_template_than_transformers_reads_fails(whole, tmp_path, monkeypatch, capsys):
    from transformers import PreTrainedTokenizerBase

    wrong = CHAT.replace("<|end|>\n", "<|end|>")
    monkeypatch.setattr(PreTrainedTokenizerBase, "get_chat_template", lambda *_, **__: wrong)
    status, report = reported(whole, tmp_path / "report.json", "--only", "template")
    assert (status, report["checks"][0]["status"]) == (1, "failed")
    assert "one turn: other bytes" in capsys.readouterr().out


def test_other_token_ids_fail(whole, tmp_path, monkeypatch, capsys):
    from transformers import PreTrainedTokenizerBase

    encode = PreTrainedTokenizerBase.__call__

    def without_digits(self, text, *arguments, **options):
        return encode(self, text.replace("7", "8"), *arguments, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", without_digits)
    status, report = reported(whole, tmp_path / "report.json", "--only", "tokenizer")
    assert (status, report["checks"][0]["status"]) == (1, "failed")
    assert "have other ids than transformers': '7'" in capsys.readouterr().out


def test_control_tokens_that_transformers_leaves_out_of_a_gguf_file_are_given_back(
    tmp_path, monkeypatch, capsys
):
    """transformers 5.17 reads those of Qwen2.5-Coder's file as text, and 5.23 doesn't."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    load = AutoTokenizer.from_pretrained

    def without_controls(*arguments, **options):
        state = json.loads(load(*arguments, **options).backend_tokenizer.to_str())
        state["added_tokens"] = []
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", without_controls)
    status, report = reported("smollm2-135m", tmp_path / "report.json", "--only", "tokenizer")
    assert (status, report["checks"][0]["status"]) == (0, "passed")
    assert "17 control tokens, which transformers leaves out" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_model_that_transformers_can_not_load_is_verified_without(
    whole, tmp_path, monkeypatch, capsys
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def refuse(*_, **__):
        raise ValueError("unknown model\nand more lines")

    for loader in (AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(loader, "from_pretrained", refuse)
    status, report = reported(
        whole, tmp_path / "report.json", "--only", "template", "tokenizer", "greedy", "long"
    )
    assert status == 0
    found = statuses(report)
    assert (found["template"], found["greedy"]) == ("left out", "left out")
    assert (found["tokenizer"], found["long"]) == ("passed", "passed")
    printed = " ".join(capsys.readouterr().out.split())
    assert "transformers can't load it: ValueError: unknown model" in printed
    assert "our own prefill in one step (transformers can't load it" in printed


def test_a_model_larger_than_memory_is_refused_with_both_numbers(whole, monkeypatch, capsys):
    monkeypatch.setattr("sglang_lite.runtime.models.memory_check.free_bytes", lambda _: 1000)
    assert main(["verify", str(whole)]) == 1
    said = capsys.readouterr().err
    assert "needs 0.0 GiB" in said
    assert "are free on cpu" in said


def test_too_little_memory_for_float32_leaves_out_what_needs_it(
    whole, tmp_path, monkeypatch, capsys
):
    free = iter([1 << 40])
    monkeypatch.setattr(
        "sglang_lite.runtime.models.memory_check.free_bytes", lambda _: next(free, 1000)
    )
    status, report = reported(whole, tmp_path / "report.json", "--only", "greedy", "long")
    assert status == 0
    assert set(statuses(report).values()) == {"left out"}
    assert "an engine in float32 needs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere.gguf", "there is no such file or folder"),
        ("smollm2-135n", "Did you mean 'smollm2-135m'?"),
        ("s3://bucket/model", "is an address"),
    ],
)
def test_a_model_that_is_not_there_is_refused(name, said, capsys):
    assert main(["verify", name]) == 1
    assert said in capsys.readouterr().err


def test_an_embedding_model_is_refused_with_what_to_do(tmp_path, capsys):
    config = {"architectures": ["BertModel"], "model_type": "bert"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "an embedding model" in said
    assert f"sglang-lite models {tmp_path}" in said


@pytest.mark.parametrize(
    ("report", "said"),
    [("", "it is a folder"), ("none/report.json", "there is no folder"), ("/proc/r.json", "/proc")],
)
def test_a_report_that_can_not_be_written_is_refused_before_the_run(report, said, tmp_path, capsys):
    assert main(["verify", "nowhere.gguf", "--report", str(tmp_path / report)]) == 1
    told = capsys.readouterr().err
    assert said in told
    assert "nowhere.gguf" not in told


def test_an_unknown_check_is_refused_with_those_that_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "smollm2-135m", "--only", "speeds"])
    assert "recipes" in capsys.readouterr().err


def test_an_interrupt_leaves_no_report(whole, tmp_path, monkeypatch, capsys):
    from transformers import AutoTokenizer

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", interrupt)
    assert main(["verify", str(whole), "--report", str(tmp_path / "report.json")]) == 130
    assert list(tmp_path.iterdir()) == []
    assert "interrupted" in capsys.readouterr().err
