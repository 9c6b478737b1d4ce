"""Adapters over HTTP: loaded and named in each protocol, and answered as the engine does."""

import httpx2
import pytest
from transformers import LlamaForCausalLM

import sglang_lite as sgl
from tests.runtime.models.adapters import Adapted
from tests.server.conftest import SETTINGS, TEMPLATE, serving

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # that peft reads
GREEDY = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
ASKED = {"max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def folders(folder, tmp_path_factory):
    model = LlamaForCausalLM.from_pretrained(folder)
    return Adapted(model, tmp_path_factory.mktemp("adapters"), {"poet": {"r": 4}, "judge": {"r": 8}}).folders


@pytest.fixture(scope="module")
def engine(folder, folders):
    own = dict(deterministic=False, dtype="float32", served_model_name="base", max_lora_rank=8)
    with sgl.Engine(
        folder, **SETTINGS | own, chat_template=TEMPLATE, in_process=True, lora_paths={"poet": str(folders["poet"])}
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="module")
def http(engine):
    with serving(engine, served_model_name="base") as url, httpx2.Client(base_url=url, timeout=60) as client:
        yield client


def test_adapters_are_listed_below_their_model(http, folders):
    cards = http.get("/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in cards] == [("base", None), ("poet", "base")]
    assert http.get("/v1/models/poet").json()["root"] == str(folders["poet"])
    named = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert ([each["id"] for each in named["data"]], named["last_id"]) == (["base", "poet"], "poet")


@pytest.mark.parametrize("model", ["poet", "base:poet"])
def test_each_protocol_names_one_as_its_model(http, engine, model):
    poem = engine.generate("a quick", GREEDY, lora_path="poet")["text"]
    plain = engine.generate("a quick", GREEDY)["text"]
    assert poem != plain
    for name, expected in ((model, poem), ("base", plain)):
        body = {"model": name, "prompt": "a quick", "ignore_eos": True, **ASKED}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    texts = set()
    for name in (model, "base"):
        body = {"model": name, **chat, **ASKED}
        texts.add(http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])
        said = http.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"}).json()["content"]
        texts.add("".join(part["text"] for part in said))
        answer = http.post(
            "/v1/responses", json={"model": name, "input": "hello", "max_output_tokens": 8, "temperature": 0}
        )
        texts.add("".join(part["text"] for item in answer.json()["output"] for part in item["content"]))
    assert len(texts) == 2  # one of the adapter and one of the model, in each protocol


def test_prompts_of_a_request_have_their_own(http, engine):
    body = {"text": ["a quick"] * 2, "sampling_params": GREEDY, "lora_path": ["poet", None]}
    found = [each["text"] for each in http.post("/generate", json=body).json()]
    assert found == [engine.generate("a quick", GREEDY, lora_path=name)["text"] for name in ("poet", None)]


def test_an_endpoint_sends_the_adapter_of_a_node(http, engine):
    @sgl.function
    def program(s):
        s += "a quick" + sgl.gen("plain", ignore_eos=True) + sgl.gen("poem", lora_path="poet", ignore_eos=True)

    def texts(backend, **more):
        state = program.run(backend=backend, max_new_tokens=6, temperature=0, **more)
        return state["plain"], state["poem"]

    endpoint, local = sgl.RuntimeEndpoint(str(http.base_url)), engine
    assert texts(endpoint) == texts(endpoint, push_down=False) == texts(local) == texts(local, push_down=False)
    assert texts(local)[0] != texts(local, lora_path="poet")[0]


def test_loading_and_unloading(http, folders):
    answer = http.post("/load_lora_adapter", json={"lora_name": "judge", "lora_path": str(folders["judge"])})
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert set(answer.json()["loaded_adapters"]) == {"poet", "judge"}
    assert (
        http.post("/generate", json={"text": "a", "sampling_params": GREEDY, "lora_path": "judge"}).status_code == 200
    )
    again = http.post("/load_lora_adapter", json={"lora_name": "judge", "lora_path": str(folders["judge"])})
    assert (again.status_code, again.json()["success"]) == (400, False)
    assert "is taken" in again.json()["error_message"]
    assert http.post("/unload_lora_adapter", json={"lora_name": "judge"}).json()["success"]
    gone = http.post("/generate", json={"text": "a", "sampling_params": GREEDY, "lora_path": "judge"})
    assert (gone.status_code, "there is no adapter 'judge'" in gone.text) == (400, True)
    assert http.post("/unload_lora_adapter", json={"lora_name": "judge"}).status_code == 400
    missing = http.post("/v1/completions", json={"model": "judge", "prompt": "a"})
    assert missing.status_code == 404
