"""What the mistakes of hint_cures.toml and their cures need: models, servers, machines and packages
that lack something.
"""

import base64
import contextlib
import itertools
import json
import re
import shutil
import socket
import sys
import threading
import tomllib
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

import sglang_lite as sgl

ROOT = Path(__file__).parents[1]
APPENDS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
REWRITES = (  # moves the system's turn to the last one
    "{% set system = messages[0].content %}{% for m in messages[1:] %}"
    "[{{ system ~ ' ' if loop.last and m.role == 'user' }}{{ m.content }}]{% endfor %}"
)
MERGES = APPENDS.replace("[{{ m.role }}]", "{% if m.role != 'system' %}[{{ m.role }}]").replace(
    "{% endfor", "{% endif %}{% endfor"
)
# by module
DISTRIBUTIONS = {
    "google.genai": "google-genai",
    "opentelemetry": "opentelemetry-sdk",
    "outlines_core": "outlines-core",
}


class Packages:
    """Packages that are not there until they are installed.

    Args:
        patch: hides modules from imports.
    """

    def __init__(self, patch):
        self._patch, self._hidden = patch, {}

    def lack(self, name):
        """Hides a package, whose modules can't be found or imported then."""
        for each in {name, *(each for each in sys.modules if each.startswith(f"{name}."))}:
            self._hidden.setdefault(name, {})[each] = sys.modules.get(each)
            self._patch.setitem(sys.modules, each, None)

    def pip_install(self, requirement):
        """Brings packages back: the named one, or those of an extra of this package."""
        found = re.fullmatch(r"sglang-lite\[(.*)\]", requirement)
        names = extra(found[1]) if found else {requirement}
        for hidden in [name for name in self._hidden if DISTRIBUTIONS.get(name, name) in names]:
            for each, module in self._hidden.pop(hidden).items():
                if module is None:
                    self._patch.delitem(sys.modules, each)
                else:
                    self._patch.setitem(sys.modules, each, module)
        assert not self._hidden, f"{requirement} does not bring {[*self._hidden]}"


def extra(name):
    """Names of the distributions that an extra installs."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = set()
    for requirement in table[name]:
        own = re.fullmatch(r"sglang-lite\[(.*)\]", requirement)
        found |= extra(own[1]) if own else {re.match(r"[\w.-]+", requirement)[0]}
    return found


def ask(url, body=None, method="POST", **options):
    """Body of a server's answer. Raises BackendError with all texts of one that is an error."""
    found = httpx2.request(method, url, json=body, timeout=60, **options)
    if found.status_code >= 400:
        raise sgl.BackendError(" ".join(_texts(found.json())))
    return (
        found.json()
        if found.headers.get("content-type", "").startswith("application/json")
        else found.text
    )


def _texts(found):
    if isinstance(found, str):
        yield found
    elif isinstance(found, dict | list):
        for each in found.values() if isinstance(found, dict) else found:
            yield from _texts(each)


class Models:
    """Small models, in folders of their own.

    Args:
        folders: makes folders.
    """

    def __init__(self, folders):
        self._folders, self._numbers = folders, itertools.count()

    def _new(self):
        folder = self._folders / f"model{next(self._numbers)}"
        folder.mkdir()
        return folder

    def llama(self):
        """A model of two layers."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from tests.runtime.models.tiny import VOCAB, randomise, save

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512,
        )  # fmt: skip
        return str(save(randomise(LlamaForCausalLM(config)), self._new()))

    def gpt2(self, **changes):
        """GPT-2 of one layer and 64 positions."""
        from transformers import GPT2Config, GPT2LMHeadModel

        from tests.runtime.models.tiny import VOCAB, randomise, save

        config = GPT2Config(
            vocab_size=VOCAB, n_embd=64, n_layer=1, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1, **changes
        )  # fmt: skip
        return str(save(randomise(GPT2LMHeadModel(config)), self._new()))

    def bert(self):
        """A model that reads at most 40 tokens, and writes none."""
        from transformers import BertModel

        from tests.runtime.embedding.tiny import saved

        saved(BertModel, folder := self._new())
        return str(folder)

    def seeing(self):
        """A model that reads images."""
        from tests.runtime.media.seeing import save_seeing

        save_seeing("qwen3_vl", folder := self._new())
        return str(folder)

    def whisper(self):
        """A model that writes down what is said."""
        from tests.runtime.media.whispering import save_whisper

        save_whisper(folder := self._new(), suppress_tokens=None, begin_suppress_tokens=None)
        return str(folder)

    def mistral(self):
        """A model in Mistral's own files, beside those of Hugging Face."""
        from transformers import MistralConfig, MistralForCausalLM

        from tests.runtime.models.test_families import SHAPE
        from tests.runtime.models.test_mistral_format import mistrals_own
        from tests.runtime.models.tiny import randomise, save

        folder = self._new()
        save(randomise(MistralForCausalLM(MistralConfig(**SHAPE))), folder)
        own = mistrals_own(folder, self._new() / "own")
        shutil.copytree(folder, own, dirs_exist_ok=True)
        return str(own)

    def adapter(self, base, **settings):
        """An adapter of a model, as peft saves it."""
        import peft
        from transformers import AutoModelForCausalLM

        config = peft.LoraConfig(
            **{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **settings}
        )
        folder = self._new()
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # that peft reads
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(
            folder
        )
        return str(folder)

    def merged(self, adapter):
        """What peft makes of a model and its adapter, with the base's tokenizer."""
        import peft

        folder = self._new()
        model = peft.AutoPeftModelForCausalLM.from_pretrained(adapter)
        model.merge_and_unload().save_pretrained(folder)
        base = Path(
            json.loads(Path(adapter, "adapter_config.json").read_text())["base_model_name_or_path"]
        )
        (folder / "tokenizer.json").write_text((base / "tokenizer.json").read_text())
        return str(folder)


@cache
def pictured():
    """A picture as a data URL."""
    from tests.runtime.media.seeing import png

    return f"data:image/png;base64,{base64.b64encode(png(40, 30)).decode()}"


def on_engines_thread(engine, call):
    """Has a sink call something on an engine's own thread, and raises what it raises."""
    done, raised = threading.Event(), []

    def sink(_):
        try:
            call()
        except sgl.SglError as error:
            raised.append(error)
        done.set()

    from sglang_lite.protocol import SamplingParams

    engine.submit("a", SamplingParams(max_tokens=1), sink=sink)
    assert done.wait(60)
    if raised:
        raise raised[0]


@contextlib.contextmanager
def taken_port():
    """A port on which somebody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def machine_with(patch, gigabytes):
    """Pretends that a machine has so much free memory."""
    patch.setattr(
        "sglang_lite.runtime.models.memory_check.free_bytes", lambda device: int(gigabytes * 1e9)
    )
    patch.setattr(
        "sglang_lite.runtime.loading.model_choice.precision",
        lambda dtype, device: SimpleNamespace(weights=SimpleNamespace(itemsize=2)),
    )


def command(*arguments):
    """Runs a command of this package. Raises BackendError with the message of one that fails."""
    import io

    from sglang_lite.cli import main

    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            status = main(list(arguments))
        except SystemExit as ended:
            status = int(ended.code or 0)
    if status not in (0, None):
        raise sgl.BackendError(said.getvalue())
    return out.getvalue()


def places(stack, folders):
    """Names for mistakes and cures.

    Args:
        stack: closes what they open.
        folders: folder in which they make others.
    """
    from tests.server.conftest import serving

    patch = stack.enter_context(pytest.MonkeyPatch.context())
    packages = Packages(patch)
    models = Models(folders)

    def engine(*given, **settings):
        return stack.enter_context(
            sgl.Engine(*given, **{"in_process": True, "dtype": "float32", **settings})
        )

    return {
        "ask": ask, "patch": patch, "lack": packages.lack, "pip_install": packages.pip_install, "models": models,
        "engine": engine, "serve_engine": lambda *given, **settings: stack.enter_context(serving(*given, **settings)),
        "on_engines_thread": on_engines_thread, "taken_port": lambda: stack.enter_context(taken_port()),
        "machine_with": lambda gigabytes: machine_with(patch, gigabytes), "command": command, "pictured": pictured,
        "APPENDS": APPENDS, "REWRITES": REWRITES, "MERGES": MERGES, "base64": base64, "json": json, "sys": sys, "threading": threading,
        "stack": stack,
    }  # fmt: skip
