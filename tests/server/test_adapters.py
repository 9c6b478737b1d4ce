"""Adapters over HTTP: loaded and named in each protocol, and answered as the engine does."""

import base64
import json
from pathlib import Path

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
def reference(folder, tmp_path_factory):
    model = LlamaForCausalLM.from_pretrained(folder)
    return Adapted(
        model, tmp_path_factory.mktemp("adapters"), {"poet": {"r": 4}, "judge": {"r": 8}}
    )


@pytest.fixture(scope="module")
def folders(reference):
    return reference.folders


@pytest.fixture(scope="module")
def engine(folder, folders):
    own = dict(deterministic=False, dtype="float32", served_model_name="base", max_lora_rank=8)
    with sgl.Engine(
        folder, **SETTINGS | own, chat_template=TEMPLATE, in_process=True, lora_paths={"poet": str(folders["poet"])}
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="module")
def http(engine):
    with (
        serving(engine, served_model_name="base") as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def test_adapters_are_listed_below_their_model(http, folders):
    cards = http.get("/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in cards] == [("base", None), ("poet", "base")]
    assert http.get("/v1/models/poet").json()["root"] == str(folders["poet"])
    named = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert ([each["id"] for each in named["data"]], named["last_id"]) == (["base", "poet"], "poet")


def test_sglangs_field_names_one_beside_the_model(http, engine):
    poem = engine.generate("a quick", GREEDY, lora_path="poet")["text"]
    body = {"model": "base", "prompt": "a quick", "ignore_eos": True, **ASKED}
    found = http.post("/v1/completions", json={**body, "lora_path": "poet"}).json()
    assert (found["choices"][0]["text"], found["model"]) == (poem, "poet")
    chat = {**ASKED, "messages": [{"role": "user", "content": "hello"}]}
    by_field, by_model = (
        http.post("/v1/chat/completions", json={**chat, **name}).json()
        for name in ({"lora_path": "poet"}, {"model": "poet"})
    )
    for each in (by_field, by_model):
        assert each["model"] == "poet"
    assert by_field["choices"][0]["message"] == by_model["choices"][0]["message"]


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
        texts.add(
            http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        )
        said = http.post(
            "/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"}
        ).json()["content"]
        texts.add("".join(part["text"] for part in said))
        answer = http.post(
            "/v1/responses",
            json={"model": name, "input": "hello", "max_output_tokens": 8, "temperature": 0},
        )
        texts.add(
            "".join(part["text"] for item in answer.json()["output"] for part in item["content"])
        )
    assert len(texts) == 2  # one of the adapter and one of the model, in each protocol


@pytest.mark.parametrize("model", ["poet", "base:poet", "base"])
def test_answers_name_what_has_answered(http, model):
    name = model.removeprefix("base:")
    chat = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    bodies = {
        "/v1/completions": {"model": model, "prompt": "a", "max_tokens": 1}, "/v1/chat/completions": chat, "/v1/messages": chat,
        "/v1/responses": {"model": model, "input": "hello", "max_output_tokens": 1},
        "/v1/score": {"model": model, "prompt": "a", "continuations": ["b"]},
    }  # fmt: skip
    for path, body in bodies.items():
        assert http.post(path, json=body).json()["model"] == name, path


@pytest.mark.parametrize("model", ["poet", "base:poet"])
def test_ollama_s_protocol_names_one_as_its_model(http, engine, model):
    options = {"temperature": 0, "num_predict": 8}
    body = {"prompt": "a quick", "raw": True, "stream": False, "options": options}
    for name, of in ((model, "poet"), ("base", None)):
        answer = http.post("/api/generate", json={**body, "model": name}).json()
        assert (
            answer["response"]
            == engine.generate("a quick", {**GREEDY, "ignore_eos": False}, lora_path=of)["text"]
        )
    said = {
        http.post("/api/chat", json={"model": name, "messages": [{"role": "user", "content": "hello"}], "stream": False,
                                     "options": options}).json()["message"]["content"]
        for name in (model, "base")
    }  # fmt: skip
    assert len(said) == 2
    assert [each["name"] for each in http.get("/api/tags").json()["models"]] == ["base", "poet"]
    assert http.post("/api/show", json={"model": model}).json()["details"]["parent_model"] == "base"


def test_an_unknown_model_is_told_which_adapters_there_are(http):
    answer = http.post("/v1/completions", json={"model": "base:clerk", "prompt": "a"})
    assert answer.status_code == 404
    assert "with the adapters 'poet'" in answer.text


CHOICES = [" fox", " dog", " lazy brown fox"]


def by_peft(reference, engine, prompt, name):
    """Sums of the choices' log-probabilities."""
    before, sums = len(engine.tokenizer.encode(prompt)), []
    for choice in CHOICES:
        ids = engine.tokenizer.encode(prompt + choice)
        rows = reference(list(ids), name)
        sums.append(sum(float(rows[at - 1, ids[at]]) for at in range(before, len(ids))))
    return sums


def sums_of(selection):
    return [sum(each.logprobs) for each in selection.scores]


def test_choices_are_scored_by_their_adapter(http, engine, reference):
    for name in ("poet", None):
        expected = by_peft(reference, engine, "a quick", name)
        assert sums_of(engine.select("a quick", CHOICES, lora_path=name)) == pytest.approx(
            expected, abs=1e-3
        )
        body = {"model": name or "base", "prompt": "a quick", "continuations": CHOICES}
        scores = http.post("/v1/score", json=body).json()["scores"]
        assert [each["logprob"] for each in scores] == pytest.approx(expected, abs=1e-3)
        label = [engine.tokenizer.encode("a quick" + choice)[-1] for choice in CHOICES[:2]]
        body = {
            "model": name or "base",
            "query": "a quick",
            "items": [""],
            "label_token_ids": label,
        }
        (shares,) = http.post("/v1/score", json=body).json()["scores"]
        ids = list(engine.tokenizer.encode("a quick"))
        assert shares == pytest.approx(
            [float(reference(ids, name)[-1, each].exp()) for each in label], abs=1e-3
        )
    assert by_peft(reference, engine, "a quick", "poet") != pytest.approx(expected, abs=1e-2)


def test_a_decision_is_made_by_an_adapter(http):
    body = {
        "input": "hello",
        "questions": [{"type": "choice", "instructions": "Which?", "choices": [{"value": "one"}, {"value": "two"}]}],
    }  # fmt: skip
    answers = [
        http.post("/v1/decisions", json={**body, "model": name}).json() for name in ("poet", "base")
    ]
    assert [each.get("model") for each in answers] == ["poet", "base"], answers
    assert answers[0]["answers"] != answers[1]["answers"]


def test_a_selection_names_one_adapter_as_generations_do(engine):
    with pytest.raises(sgl.ParameterError, match="lora_path: 2 entries"):
        sgl.select("a", CHOICES, lora_path=["poet", "judge"])
    assert (
        sgl.gen("a", choices=CHOICES, lora_path="poet").node
        == sgl.select("a", CHOICES, lora_path="poet").node
    )
    with pytest.raises(sgl.ParameterError, match=r"lora_path: \['poet'\] is no name"):
        engine.select("a", CHOICES, lora_path=["poet"])
    with pytest.raises(sgl.ParameterError, match="no adapter 'base'") as caught:
        engine.select("a", CHOICES, lora_path="base")
    assert "the model's name" in caught.value.hint


def test_no_adapter_can_be_asked_for_where_the_run_has_one(http, engine):
    @sgl.function
    def two(s):
        s += (
            "a quick"
            + sgl.gen("own", ignore_eos=True)
            + sgl.gen("none", lora_path=[], ignore_eos=True)
        )

    texts = set()
    for backend in (engine, sgl.RuntimeEndpoint(str(http.base_url))):
        for push_down in (True, False):
            state = two.run(
                backend=backend,
                push_down=push_down,
                lora_path="poet",
                max_new_tokens=5,
                temperature=0,
            )
            texts.add((state["own"], state["none"]))
    assert len(texts) == 1


@sgl.function
def choosing(s, adapter=None):
    s += "a quick" + sgl.select("own", CHOICES, lora_path=adapter)
    s += " and" + sgl.select("plain", CHOICES, lora_path=[])


def test_selections_of_a_program_are_scored_by_their_adapters(http, engine, reference, tmp_path):
    endpoint, expected = (
        sgl.RuntimeEndpoint(str(http.base_url)),
        by_peft(reference, engine, "a quick", "poet"),
    )
    for backend in (engine, endpoint):
        for push_down in (True, False):
            for arguments in ({"adapter": "poet"}, {"lora_path": "poet"}):
                state = choosing.run(**arguments, backend=backend, push_down=push_down)
                assert sums_of(state.selection("own")) == pytest.approx(expected, abs=1e-3)
                plain = by_peft(reference, engine, f"a quick{state['own']} and", None)
                assert sums_of(state.selection("plain")) == pytest.approx(plain, abs=1e-3)
    with sgl.record(tmp_path / "calls", backend=engine) as recording:
        recorded = [choosing.run(adapter=name, backend=recording) for name in ("poet", None)]
    replayed = sgl.Replay(tmp_path / "calls")
    for name, state in zip((None, "poet"), recorded[::-1]):
        again = choosing.run(adapter=name, backend=replayed)
        assert sums_of(again.selection("own")) == sums_of(state.selection("own"))
    assert sums_of(recorded[0].selection("own")) != sums_of(recorded[1].selection("own"))


def test_a_trace_names_the_adapters_and_tells_their_questions_apart(engine):
    found = []
    for name in ("poet", None):
        with_gen = program.run(backend=engine, max_new_tokens=1, lora_path=name)
        found.append(
            [*choosing.run(adapter=name, backend=engine).trace().nodes, *with_gen.trace().nodes]
        )
    adapters = [
        [each.adapter for each in nodes if each.kind in ("gen", "select")] for nodes in found
    ]
    assert adapters == [["poet", None, "poet", "poet"], [None, None, None, "poet"]]
    (one, *_), (other, *_) = (
        [each.asked for each in nodes if each.kind == "select"] for nodes in found
    )
    assert one != other


def test_a_selection_by_an_adapter_that_is_not_there_fails(http, engine):
    for backend in (engine, sgl.RuntimeEndpoint(str(http.base_url))):
        for push_down in (True, False):
            state = choosing.run(adapter="clerk", backend=backend, push_down=push_down)
            with pytest.raises(sgl.SglError, match="there is no adapter 'clerk'"):
                state["own"]


def test_prompts_of_a_request_have_their_own(http, engine):
    body = {"text": ["a quick"] * 2, "sampling_params": GREEDY, "lora_path": ["poet", None]}
    found = [each["text"] for each in http.post("/generate", json=body).json()]
    assert found == [
        engine.generate("a quick", GREEDY, lora_path=name)["text"] for name in ("poet", None)
    ]


@sgl.function
def program(s):
    s += (
        "a quick"
        + sgl.gen("plain", ignore_eos=True)
        + sgl.gen("poem", lora_path="poet", ignore_eos=True)
    )


def test_an_endpoint_sends_the_adapter_of_a_node(http, engine):
    def texts(backend, **more):
        state = program.run(backend=backend, max_new_tokens=6, temperature=0, **more)
        return state["plain"], state["poem"]

    endpoint, local = sgl.RuntimeEndpoint(str(http.base_url)), engine
    assert (
        texts(endpoint)
        == texts(endpoint, push_down=False)
        == texts(local)
        == texts(local, push_down=False)
    )
    assert texts(local)[0] != texts(local, lora_path="poet")[0]


def test_loading_and_unloading(http, folders):
    answer = http.post(
        "/load_lora_adapter", json={"lora_name": "judge", "lora_path": str(folders["judge"])}
    )
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert set(answer.json()["loaded_adapters"]) == {"poet", "judge"}
    assert (
        http.post(
            "/generate", json={"text": "a", "sampling_params": GREEDY, "lora_path": "judge"}
        ).status_code
        == 200
    )
    again = http.post(
        "/load_lora_adapter", json={"lora_name": "judge", "lora_path": str(folders["judge"])}
    )
    assert (again.status_code, again.json()["success"]) == (400, False)
    assert "is taken" in again.json()["error_message"]
    counts = http.get("/metrics").text
    assert all(
        f"sglang_lite_{name}" in counts
        for name in ("adapters{", "adapters_resident{", "adapter_copies_total{")
    )
    assert http.post("/unload_lora_adapter", json={"lora_name": "judge"}).json()["success"]
    gone = http.post(
        "/generate", json={"text": "a", "sampling_params": GREEDY, "lora_path": "judge"}
    )
    assert (gone.status_code, "there is no adapter 'judge'" in gone.text) == (400, True)
    assert http.post("/unload_lora_adapter", json={"lora_name": "judge"}).status_code == 400
    missing = http.post("/v1/completions", json={"model": "judge", "prompt": "a"})
    assert missing.status_code == 404


def test_an_adapter_may_come_in_a_request(http, engine, folders):
    data = base64.b64encode((folders["judge"] / "adapter_model.safetensors").read_bytes()).decode()
    config = json.loads((folders["judge"] / "adapter_config.json").read_text())
    body = {"lora_name": "sent", "config_dict": config, "serialized_named_tensors": [data]}
    path = "/load_lora_adapter_from_tensors"
    for wrong, word in (
        ({"serialized_named_tensors": [data, data]}, "has 2 entries, not one"),
        ({"serialized_named_tensors": ["gASV"]}, "is no safetensors file"),
        ({"serialized_named_tensors": ["?"]}, "is no base64"),
        ({"config_dict": {**config, "r": 7}}, "has shape (8, 96)"),
        ({"load_format": "flattened_bucket"}, "load_format: is not supported by this server"),
    ):
        refused = http.post(path, json={**body, **wrong})
        assert (refused.status_code, word in refused.text) == (400, True), refused.text
    assert http.post(path, json={**body, "pinned": True}).json()["success"]
    assert [each["pinned"] for each in engine.loras() if each["lora_name"] == "sent"] == [True]
    engine.load_lora_adapter("file", folders["judge"])
    for name in ("sent", "file"):
        asked = {"text": "a quick", "sampling_params": GREEDY, "lora_path": name}
        text = http.post("/generate", json=asked).json()["text"]
        assert text == engine.generate("a quick", GREEDY, lora_path="file")["text"]
    engine.unload_lora_adapter("file")
    (folder,) = [each["lora_path"] for each in engine.loras() if each["lora_name"] == "sent"]
    assert http.post("/unload_lora_adapter", json={"lora_name": "sent"}).json()["success"]
    assert not Path(folder).exists()


def answered(engine, prompt, name):
    return engine.generate(prompt, GREEDY, lora_path=name)["text"]


def test_nodes_of_a_program_with_late_adapters_share_its_document(folder, tmp_path):
    document, names = "a quick brown fox " * 8, ["first", "second", "third", "fourth"]
    own = SETTINGS | dict(deterministic=False, dtype="float32", max_lora_rank=8, in_process=True)
    with sgl.Engine(folder, **own) as plain:
        invocation = plain.tokenizer.encode(" ask now", first=False)
    late = {"r": 8, "alora_invocation_tokens": invocation, "task_type": "CAUSAL_LM"}
    adapters = Adapted(
        LlamaForCausalLM.from_pretrained(folder), tmp_path, dict.fromkeys(names, late)
    )

    @sgl.function
    def program(s):
        s += document
        for name, branch in zip(names, s.fork(len(names))):
            branch += " ask now" + sgl.gen(
                name, lora_path=name, max_tokens=8, temperature=0, ignore_eos=True
            )
            texts[name] = branch

    texts: dict[str, sgl.ProgramState] = {}
    paths = {name: str(adapters.folders[name]) for name in names}
    with sgl.Engine(folder, **own, context_length=512, lora_paths=paths) as engine:
        usage = program.run(backend=engine).usage()
        found = {name: texts[name][name] for name in names}
        for name in names:
            assert found[name] == answered(engine, f"{document} ask now", name)
        assert len({*found.values()}) > 1
    once = usage.prompt_tokens // len(names)
    assert usage.prompt_tokens - usage.cached_tokens <= once + (len(names) - 1) * (
        len(invocation) + 16
    )
