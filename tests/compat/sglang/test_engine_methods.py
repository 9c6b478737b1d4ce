"""Methods of SGLang's engine: sessions, adapters as tensors, embeddings for asyncio, processes, and
those that are refused by name.
"""

import asyncio
import gc
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import sglang_lite as sgl
from sglang_lite.compat.sglang import absent_calls
from tests.engine import processes
from tests.engine.conftest import SETTINGS
from tests.runtime.embedding.test_decoders import TEXTS, modules, running, written
from tests.runtime.models.adapters import Adapted

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # that peft reads
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def reference(folders, tmp_path_factory):
    model = LlamaForCausalLM.from_pretrained(folders[0])
    return Adapted(model, tmp_path_factory.mktemp("adapters"), {"poet": {"r": 4}})


@pytest.fixture(scope="module")
def engine(folders):
    adapted = {**SETTINGS, "deterministic": False, "enable_lora": True, "max_lora_rank": 8}
    with sgl.Engine(folders[0], **adapted, in_process=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def own(folders):
    """An engine in a process of its own."""
    with sgl.Engine(folders[0], **SETTINGS) as engine:
        yield engine


@pytest.fixture
def session(engine):
    name = engine.open_session(1000)
    yield name
    engine.close_session(name)


def ask(engine, text, session, rid=None, **given):
    return engine.generate(text, GREEDY, session_params={"id": session, "rid": rid, **given})


def continued(engine, *parts, new):
    """Output ids for the ids of some parts and new text."""
    ids = [*(token for part in parts for token in part), *engine.tokenizer.encode(new, first=False)]
    return engine.generate(input_ids=ids, sampling_params=GREEDY)["output_ids"]


def test_a_request_continues_an_earlier_one_of_its_session(engine, session):
    prompt = engine.tokenizer.encode("a quick")
    first = ask(engine, "a quick", session)
    rid, output = first["meta_info"]["id"], first["output_ids"]
    assert output == engine.generate("a quick", GREEDY)["output_ids"]
    second = ask(engine, " brown", session, rid)
    assert second["output_ids"] == continued(engine, prompt, output, new=" brown")
    assert second["meta_info"]["cached_tokens"] > 0
    dropped = ask(engine, " fox", session, rid, drop_previous_output=True)
    assert dropped["output_ids"] == continued(engine, prompt, new=" fox")


def test_streams_and_coroutines_have_places_in_a_session_too(engine, session):
    *_, first = engine.generate(
        "a quick", GREEDY, rid="one", stream=True, session_params={"id": session}
    )
    given = {"id": session, "rid": "one"}
    second = asyncio.run(engine.async_generate(" b", GREEDY, session_params=given))
    prompt = engine.tokenizer.encode("a quick")
    assert second["output_ids"] == continued(engine, prompt, first["output_ids"], new=" b")


def test_a_request_that_is_left_is_forgotten_by_its_session(engine, session):
    stream = engine.generate("a", GREEDY, rid="left", stream=True, session_params={"id": session})
    stream.close()
    assert ask(engine, "a", session)["output_ids"]
    with pytest.raises(sgl.ParameterError, match="session_params: the session has no request"):
        ask(engine, " b", session, "left")


def test_a_closed_session_is_refused_by_name(engine):
    name = engine.open_session(2, "small")
    assert name == "small"
    with pytest.raises(sgl.ParameterError, match="session_id: a session 'small' is open already"):
        engine.open_session(2, "small")
    with pytest.raises(sgl.ParameterError, match="more than its capacity_of_str_len, 2"):
        ask(engine, "a quick brown fox", name)
    with pytest.raises(sgl.ParameterError, match="one prompt with one answer"):
        ask(engine, ["a", "b"], name)
    engine.close_session(name)
    with pytest.raises(sgl.ParameterError, match=r"session_params.id: no session 'small' is open"):
        ask(engine, "a", name)
    with pytest.raises(sgl.ParameterError, match="session_id: no session 'small'") as refused:
        engine.close_session(name)
    assert refused.value.hint == "Open one: open_session."
    for unsupported in ({"streaming": True}, {"timeout": 3.0}):
        with pytest.raises(sgl.ParameterError, match="is not supported"):
            engine.open_session(2, **unsupported)


def test_an_adapter_may_come_as_tensors(engine, reference):
    folder = reference.folders["poet"]
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    asyncio.run(engine.async_load_lora_adapter("file", folder))
    expected = engine.generate("a quick", GREEDY, lora_path="file")["output_ids"]
    assert expected != engine.generate("a quick", GREEDY)["output_ids"]
    asyncio.run(engine.async_unload_lora_adapter("file"))
    config["target_modules"] = set(config["target_modules"])  # as peft's own record has them
    engine.load_lora_adapter_from_tensors("given", tensors, config)
    assert engine.generate("a quick", GREEDY, lora_path="given")["output_ids"] == expected
    (given,) = engine.loras()
    assert Path(given["lora_path"]).is_dir()
    engine.unload_lora_adapter("given")
    assert not Path(given["lora_path"]).exists()
    with pytest.raises(sgl.ParameterError, match="lora_path"):
        engine.generate("a quick", GREEDY, lora_path="given")


def test_an_adapter_of_other_things_is_refused_by_name(engine):
    one = {"a": torch.zeros(1)}
    for tensors, config, match in (
        (one, {"r": object()}, "config_dict: can't be written as JSON"),
        (one, [], "config_dict"),
        ({"a": 1}, {}, "tensors: 'a' is 1, and not a tensor"),
        ({}, {}, "tensors: is empty"),
    ):
        with pytest.raises(sgl.ParameterError, match=f"^{match}"):
            engine.load_lora_adapter_from_tensors("given", tensors, config)
    with pytest.raises(sgl.ParameterError, match="load_format: 'other' is not for tensors"):
        engine.load_lora_adapter_from_tensors("given", one, {}, "other")
    assert engine.loras() == []


def test_embeddings_are_computed_for_asyncio(tmp_path):
    written(tmp_path, "Llama", "Model")
    modules(tmp_path)
    with running(tmp_path) as engine:
        found = asyncio.run(engine.async_encode(TEXTS))
        expected = engine.encode(TEXTS)
    assert len(found) == len(TEXTS)
    for mine, other in zip(found, expected):
        np.testing.assert_allclose(mine["embedding"], other["embedding"], atol=1e-5)


def test_an_engine_in_this_process_has_no_others(engine):
    assert engine.get_all_child_pids() == []


def test_an_engine_has_one_process(own):
    (pid,) = own.get_all_child_pids()
    assert pid in processes.children()


@pytest.mark.parametrize("in_process", [True, False])
def test_objects_are_frozen_in_this_process(engine, own, in_process):
    before = gc.get_freeze_count()
    kept = [[] for _ in range(1000)]
    (engine if in_process else own).freeze_gc()
    assert gc.get_freeze_count() >= before + len(kept)
    gc.unfreeze()  # for the tests that follow


def test_an_engine_starts_from_a_record_of_sglangs_settings(folders):
    record = sgl.ServerArgs(folders[0], dtype="float32", max_total_tokens=1024, device="cpu")
    with sgl.Engine(server_args=record) as engine:
        assert (engine.config.dtype, engine.config.max_total_tokens) == ("float32", 1024)
    with pytest.raises(sgl.ParameterError, match="server_args: dtype is given, too"):
        sgl.Engine(server_args=record, dtype="float32")  # type: ignore[call-overload] # wrong on purpose
    for wrong in ({"model_path": "m"}, sgl.ServerArgs):
        with pytest.raises(sgl.ParameterError, match=r"server_args: .* is no record"):
            sgl.Engine(server_args=wrong)


REFUSED: dict[str, dict[str, Any]] = {
    "update_weights_from_ipc": dict(zmq_handles={"gpu": "ipc://one"}),
    "save_sharded_model": dict(path="/out"),
    "save_remote_model": dict(url="redis://host"),
    "collective_rpc": dict(method="dump"),
    "attach_tokenizer_worker": {},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_here_is_refused_by_name_with_a_cure(engine, name):
    with pytest.raises(sgl.CapabilityError, match=f"^{name}: ") as refused:
        getattr(engine, name)(**REFUSED[name])
    assert refused.value.hint
    for value in REFUSED[name].values():
        assert isinstance(value, dict) or value in str(refused.value)


def test_each_refused_method_is_one_of_the_engine():
    functions = dict(inspect.getmembers(absent_calls, inspect.isfunction))
    ours = {name for name, each in functions.items() if each.__module__ == absent_calls.__name__}
    assert ours == REFUSED.keys()
    assert all(inspect.getattr_static(sgl.Engine, name, None) is not None for name in ours)
