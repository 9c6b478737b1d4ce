"""Engines whose answers show effects: small, and in this process, where mutations reach them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sglang_lite as sgl
from tests.effects.route_effects import TOKEN

if TYPE_CHECKING:
    from tests.server.conftest import Running


@pytest.fixture(scope="session")
def engines(
    small_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], sgl.Engine]]:
    """Gives the engine of a name, which is started when it is first asked for."""
    with ExitStack() as stack:
        started: dict[str, sgl.Engine] = {}

        def engine(name: str) -> sgl.Engine:
            if name not in started:
                started[name] = stack.enter_context(START[name](small_file, tmp_path_factory))
            return started[name]

        yield engine


@pytest.fixture(scope="session")
def running(engines: Callable[[str], sgl.Engine]) -> Iterator[Callable[[str], Running]]:
    """Gives the server of the engine of a name, with a playground."""
    from tests.server.conftest import Running

    with ExitStack() as stack:
        started: dict[str, Running] = {}

        def server(name: str) -> Running:
            if name not in started:
                started[name] = Running(engines(name), token=TOKEN)
                stack.callback(started[name].stop)
            return started[name]

        yield server


@pytest.fixture(scope="session")
def servers(running: Callable[[str], Running]) -> Callable[[str], str]:
    """Gives the address of a server of the engine of a name."""
    return lambda name: running(name).url


def _plain(small_file: Path, folders: pytest.TempPathFactory) -> sgl.Engine:
    """The default model's tokens, random weights."""
    return sgl.Engine(small_file, dtype="float32", in_process=True, max_total_tokens=4096)


def _thinker(small_file: Path, folders: pytest.TempPathFactory) -> sgl.Engine:
    """A model that never ends its thought, and drafts."""
    from tests.runtime.thinkers import thinker

    return sgl.Engine.of(thinker("abcdefghij."), speculation="prompt")


def _reads_texts(kind: str, **config: Any) -> Callable[[Path, pytest.TempPathFactory], sgl.Engine]:
    """Starts a small model that reads texts."""

    def start(small_file: Path, folders: pytest.TempPathFactory) -> sgl.Engine:
        import transformers

        from tests.runtime.embedding.tiny import saved
        from tests.server.openai.test_pooling import written

        folder = folders.mktemp("reads")
        if kind.startswith("Llama"):
            written(folder, getattr(transformers, kind), **config)
            return sgl.Engine(
                folder, in_process=True, threads=1, device="cpu", chat_template=READS_ALL
            )
        saved(getattr(transformers, kind), folder, **config)
        return sgl.Engine(folder, in_process=True, threads=1)

    return start


def _reciter(small_file: Path, folders: pytest.TempPathFactory) -> sgl.Engine:
    """A model that says ABC, and that it is the end."""
    from tests.runtime.thinkers import thinker

    return sgl.Engine.of(thinker("abcdefghij.", starts=False), served_model_name="served")


def _untold_thinker(small_file: Path, folders: pytest.TempPathFactory) -> sgl.Engine:
    """The same, whose chat template shows no marks of thoughts, as it has none."""
    from tests.runtime.thinkers import thinker

    loaded = thinker("abcdefghij.")
    loaded.tokenizer.chat_template = None
    return sgl.Engine.of(loaded)


def _mixture(small_file: Path, folders: pytest.TempPathFactory) -> sgl.Engine:
    """A mixture of experts whose tokens are recorded, with an adapter."""
    import torch  # what imports transformers takes seconds
    from safetensors.torch import save_file
    from transformers import Qwen3MoeForCausalLM

    from tests.runtime.models.test_experts import CONFIG
    from tests.runtime.models.tiny import randomise, save

    folder = save(randomise(Qwen3MoeForCausalLM(CONFIG)), folders.mktemp("mixture"))
    adapter = folders.mktemp("adapter")
    settings = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    noise = torch.Generator().manual_seed(0)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": torch.randn((2, CONFIG.hidden_size), generator=noise)}
    tensors[f"{name}.lora_B.weight"] = torch.randn(
        (CONFIG.num_attention_heads * CONFIG.head_dim, 2), generator=noise
    )
    save_file(tensors, adapter / "adapter_model.safetensors")
    return sgl.Engine(
        str(folder), dtype="float32", in_process=True, enable_return_routed_experts=True,
        enable_return_hidden_states=True, expert_distribution_recorder_mode="stat", lora_paths=(f"one={adapter}",), max_total_tokens=1024,
    )  # fmt: skip


def _kernels(small_file: Path, folders: pytest.TempPathFactory) -> sgl.Engine:
    """A small model that is drawn from on a GPU or, where there is none, by interpreted kernels."""
    import torch

    from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
    from tests.runtime.executor.test_gpu_runner import saved

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr("sglang_lite.runtime.loading.load_model.Decoder", GpuDecoder)
        return sgl.Engine(
            str(saved(folders.mktemp("kernels"), layers=1)), dtype="float32", in_process=True, max_total_tokens=800,
            attention_backend="torch", device=device, threads=1,
        )  # fmt: skip


# Reads whatever a request may tell a template.
READS_ALL = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}"
    "{% if reasoning_effort %}effort={{ reasoning_effort }}{% endif %}{% if tone %}tone={{ tone }}{% endif %}"
    "{% if documents %}{{ documents | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }} {{ m.name }} {{ m.tool_call_id }}>{{ m.reasoning_content }}{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}{{ c.id }}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _bytes(small_file: Path, folders: pytest.TempPathFactory) -> sgl.Engine:
    """Random weights and a token a byte, so that each letter of a prompt counts; prefixes of one
    token are cached.
    """
    return _of_bytes(folders.mktemp("bytes"), max_running=4)


def _queue(small_file: Path, folders: pytest.TempPathFactory) -> sgl.Engine:
    """The same, for one request at a time; texts begin with a token."""
    return _of_bytes(folders.mktemp("queue"), max_running=1, begin="<|begin|>")


def _keeper(small_file: Path, folders: pytest.TempPathFactory) -> sgl.Engine:
    """The same, whose weights change and which gives memory back."""
    return _of_bytes(folders.mktemp("keeper"), max_running=4, enable_memory_saver=True)


def _infill(small_file: Path, folders: pytest.TempPathFactory) -> sgl.Engine:
    """The same, with tokens around a text between two others."""
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    return _of_bytes(folders.mktemp("infill"), max_running=4, more=marks)


def _whisper(small_file: Path, folders: pytest.TempPathFactory) -> sgl.Engine:
    """A model that writes down what is said."""
    from tests.runtime.media.seeing import engine_of
    from tests.runtime.media.whispering import save_whisper

    save_whisper(
        folder := folders.mktemp("whisper"), suppress_tokens=None, begin_suppress_tokens=None
    )
    return engine_of(folder)


def _seeing(small_file: Path, folders: pytest.TempPathFactory) -> sgl.Engine:
    """A model that reads images, of which larger ones have more tokens."""
    from tests.runtime.media.seeing import engine_of, save_seeing

    save_seeing("qwen3_vl", folder := folders.mktemp("seeing"))
    return engine_of(folder, chat_template=READS_ALL)


def _of_bytes(
    folder: Path, max_running: int, begin: str = "", more: Sequence[str] = (), **settings: Any
) -> sgl.Engine:
    import torch
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.server.conftest import byte_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258 + len(more), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=0, bos_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in more])
    if begin:
        tokenizer.post_processor = TemplateProcessing(f"{begin} $A", special_tokens=[(begin, 1)])
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": begin}))
    tokenizer.save(str(folder / "tokenizer.json"))
    return sgl.Engine(
        str(folder), dtype="float32", in_process=True, max_running=max_running, max_total_tokens=8192, threads=1,
        chat_template=READS_ALL, policy="priority", page_size=1, served_model_name="served", **settings,
    )  # fmt: skip


START = {
    "embedder": _reads_texts("BertModel"),
    "reranker": _reads_texts("BertForSequenceClassification", num_labels=1),
    "pooler": _reads_texts("LlamaModel"),
    "classifier": _reads_texts("LlamaForSequenceClassification", num_labels=3),
    "reciter": _reciter,
    "bytes": _bytes,
    "queue": _queue,
    "infill": _infill,
    "keeper": _keeper,
    "whisper": _whisper,
    "seeing": _seeing,
    "kernels": _kernels,
    "plain": _plain,
    "thinker": _thinker,
    "untold thinker": _untold_thinker,
    "mixture": _mixture,
}
