"""A server with a small model in this process, on a port of its own, and clients of it."""

import asyncio
import contextlib
import signal
import threading

import httpx2
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

import sglang_lite as sgl
from sglang_lite.server.app import application
from sglang_lite.server.http_server import HttpServer
from sglang_lite.server.settings import ServerSettings

# However slow this machine is, an answer is waited for: clients of tests give up after a minute,
# not after five seconds.
for opening in (
    httpx2.Client.__init__,
    httpx2.AsyncClient.__init__,
    httpx2.post,
    httpx2.get,
    httpx2.request,
):
    opening.__kwdefaults__["timeout"] = httpx2.Timeout(60)

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SETTINGS = dict(
    dtype="float32", max_running=8, max_total_tokens=16384, threads=1, deterministic=True
)


class Running:
    """A server that listens on a thread of its own, whose event loop `loop_factory` makes."""

    def __init__(self, engine, token="", tracer=None, loop_factory=None, **settings):
        told = ServerSettings(**settings)
        self.app = application(engine, told, token, tracer)
        self._server = HttpServer(self.app, told)
        # However slow this machine is, no connection is closed that a client would use again.
        self._server.config.timeout_keep_alive = 600
        self._loop_factory = loop_factory
        self._thread = threading.Thread(target=self._run)
        self._listening = threading.Event()
        self._thread.start()
        assert self._listening.wait(60)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def _run(self):
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            runner.run(self._serve())

    async def _serve(self):
        config = self._server.config
        config.load()
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup()
        self._listening.set()
        await self._server.main_loop()
        await self._server.shutdown()

    @property
    def service(self):
        return self.app.state.service

    def terminate(self):
        """Tells the server what a signal tells it."""
        self._server.handle_exit(signal.SIGTERM, None)

    def stop(self):
        self._server.should_exit = True
        self._thread.join()


@contextlib.contextmanager
def serving(engine, **settings):
    running = Running(engine, **settings)
    try:
        yield running.url
    finally:
        running.stop()


def byte_tokenizer():
    """A token a byte, after one that ends and one that begins a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": 0, "<|begin|>": 1, **{byte: i for i, byte in enumerate(alphabet, 2)}}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|end|>", "<|begin|>")]
    )
    return tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small checkpoint with a chat template."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=0, bos_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("served")
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="session")
def engine(folder):
    with sgl.Engine(folder, **SETTINGS, chat_template=TEMPLATE, in_process=True) as engine:
        yield engine


@pytest.fixture(scope="session")
def url(engine):
    with serving(engine, max_connections_per_client=1024) as url:
        yield url


@pytest.fixture(scope="session")
def http(url):
    with httpx2.Client(base_url=url, timeout=60) as client:
        yield client
