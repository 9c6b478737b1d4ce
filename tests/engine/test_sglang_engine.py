"""Arguments and answers of SGLang's offline engine, on a small checkpoint."""

import asyncio
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sglang_lite as sgl
from sglang_lite.compat.sglang.answers import OneSample
from tests.engine.conftest import SETTINGS

GREEDY: OneSample = {"temperature": 0, "max_new_tokens": 4}
IN_PROCESS = {**SETTINGS, "in_process": True}


def test_ids_of_other_packages_are_ids(here):
    plain = here.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
    for ids in (np.array([5, 6, 7]), [np.int64(5), np.int32(6), 7]):
        assert (
            here.generate(input_ids=ids, sampling_params=GREEDY)["output_ids"]
            == plain["output_ids"]
        )
    for several in (np.array([[5, 6, 7], [5, 6, 7]]), [np.array([5, 6, 7])] * 2):
        found = here.generate(input_ids=several, sampling_params=GREEDY)
        assert [each["output_ids"] for each in found] == [plain["output_ids"]] * 2
    with pytest.raises(sgl.ParameterError, match="input_ids"):
        here.generate(input_ids=np.array([0.5, 1.5]), sampling_params=GREEDY)


def test_sets_are_taken_where_order_means_nothing(here):
    first = here.generate("abc", GREEDY)["output_ids"][0]
    found = here.generate(
        "abc", {**GREEDY, "stop_token_ids": {first}, "stop": frozenset(("zz", "yy"))}
    )
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": first}


def test_hints_for_caches_change_no_answer_and_are_told_of(here):
    plain = here.generate("abc", GREEDY)["output_ids"]
    retain = {
        "action_id": "1",
        "action_type": "retain",
        "action_version": "1",
        "payload": {"ttl": 9},
    }
    hints = {"protocol_version": "1", "message_id": "m", "actions": [retain]}
    for nothing in (None, {}, {**hints, "actions": []}):
        assert here.generate("abc", GREEDY, kv_hints=nothing)["output_ids"] == plain
    with pytest.warns(UserWarning, match=r"kv_hints \(retain\): has no effect"):
        assert here.generate("abc", GREEDY, kv_hints=hints)["output_ids"] == plain
    with pytest.raises(sgl.ParameterError, match=r"kv_hints.*protocol_version"):
        here.generate("abc", GREEDY, kv_hints={"a": 1})
    with pytest.raises(sgl.ParameterError, match=r"kv_hints\[1\].actions\[0\]"):
        here.generate(["a", "b"], GREEDY, kv_hints=[None, {**hints, "actions": [{}]}])
    with pytest.raises(sgl.ParameterError, match="kv_hints: is a list for one prompt"):
        here.generate("a", GREEDY, kv_hints=[hints])
    with pytest.raises(sgl.ParameterError, match="kv_hints: 1 entries for 2 prompts"):
        here.generate(["a", "b"], GREEDY, kv_hints=[hints])


def test_each_sample_has_a_name(here):
    answers = here.generate(["a", "b"], {**GREEDY, "n": 2}, rid=["x", "y"])
    assert [answer["meta_info"]["id"] for answer in answers] == ["x_0", "x_1", "y_0", "y_1"]
    assert here.generate("a", GREEDY, rid="z")["meta_info"]["id"] == "z"


@pytest.mark.parametrize("in_process", [True, False])
def test_the_weights_have_a_name_that_an_update_changes(folders, in_process):
    settings = {**SETTINGS, "in_process": in_process}
    with sgl.Engine(
        folders[0], weight_version="one", served_model_name="mine", **settings
    ) as engine:
        info = engine.get_model_info()
        assert (info["model_path"], info["served_model_name"], info["weight_version"]) == (
            str(folders[0]), "mine", "one",
        )  # fmt: skip
        assert (info["load_format"], info["is_generation"]) == ("auto", True)
        assert engine.get_server_info()["served_model_name"] == engine.model_name == "mine"
        assert engine.generate("a", GREEDY)["meta_info"]["weight_version"] == "one"
        engine.update_weights(str(folders[1]), "two")
        assert engine.generate("a", GREEDY)["meta_info"]["weight_version"] == "two"
        engine.update_weights(str(folders[0]))
        assert engine.get_model_info()["weight_version"] == "two"
        with pytest.raises(sgl.ParameterError, match="weight_version"):
            engine.update_weights(str(folders[1]), 3)  # type: ignore[arg-type] # wrong on purpose


def test_labels_are_scored_as_the_next_token(here):
    found = here.score("ab", ["c", "de"], [5, 6, 7])
    for item, scores in zip(("c", "de"), found.scores):
        answer = here.generate(
            f"ab{item}", {"max_new_tokens": 0}, return_logprob=True, token_ids_logprob=[5, 6, 7]
        )
        wanted = [
            math.exp(entry[0]) for entry in answer["meta_info"]["output_token_ids_logprobs"][0]
        ]
        assert scores == pytest.approx(wanted)
    assert found.prompt_tokens == 7
    assert found.token_logprobs is None
    shares = asyncio.run(here.async_score("ab", ["c", "de"], [5, 6, 7], True))
    for mine, scores in zip(shares.scores, found.scores):
        assert mine == pytest.approx([each / sum(scores) for each in scores])
    cold = here.score(
        "ab", "c", [5, 6], apply_softmax=True, temperature=0.01, return_token_logprobs=True
    )
    assert max(cold.scores[0]) > max(shares.scores[0])
    assert [math.exp(each) for each in cold.token_logprobs[0]] == pytest.approx(found.scores[0][:2])
    turned = here.score("c", ["ab"], [5, 6, 7], item_first=True)
    assert turned.scores[0] == pytest.approx(found.scores[0])
    own = here.score("ab", ["c", "de"], [[6, 5], [7]])
    assert own.scores == [
        pytest.approx([found.scores[0][1], found.scores[0][0]]),
        pytest.approx([found.scores[1][2]]),
    ]
    ids = here.tokenizer.encode("ab"), here.tokenizer.encode("c", first=False)
    assert here.score(ids[0], [ids[1]], [5, 6, 7]).scores[0] == pytest.approx(found.scores[0])
    assert here.score("ab", [], [5]).scores == []


def test_without_labels_the_items_are_scored(here):
    assert here.score("ab", ["c", "de"]) == asyncio.run(here.async_score("ab", ["c", "de"]))
    assert [each.text for each in here.score("ab", ["c", "de"])] == ["c", "de"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(label_token_ids=[]), "label_token_ids: is empty"),
        (dict(label_token_ids=[[1], [2]]), "2 lists for 1 items"),
        (dict(label_token_ids=[1], items=[[1]]), "items: query and items"),
        (
            dict(label_token_ids=[1], temperature=0.5),
            "temperature: has an effect only with apply_softmax=True",
        ),
        (
            dict(label_token_ids=[1], temperature=0, apply_softmax=True),
            "temperature: 0 is no number above 0",
        ),
        (
            dict(label_token_ids=[1], score_extraction_token_id=3),
            "score_extraction_token_id: is not supported",
        ),
        (dict(label_token_ids=[1], nothing=3), "nothing: score has no such parameter"),
        (dict(apply_softmax=True), "apply_softmax: has an effect only with label_token_ids"),
        (dict(query=[1]), "label_token_ids: is missing"),
        (dict(label_token_ids=[10**6]), "label_token_ids: 1000000 is no token id"),
    ],
)
def test_what_can_not_be_scored_is_refused(here, given, message):
    with pytest.raises(sgl.ParameterError, match=message):
        here.score(**{"query": "ab", "items": ["c"], **given})


@pytest.mark.parametrize("wait", [lambda found: found, asyncio.run])
def test_a_temperature_is_checked_before_anything_is_computed(here, wait):
    before = here.stats()["requests_submitted"]
    score = here.async_score if wait is asyncio.run else here.score
    with pytest.raises(sgl.ParameterError, match="temperature"):
        wait(score("ab", ["c"], [5], True, temperature=0))
    assert here.stats()["requests_submitted"] == before


def test_reranking_needs_a_cross_encoder(here):
    with pytest.raises(sgl.CapabilityError):
        here.rerank([["a", "b"]])


def test_prompts_may_be_prefilled_whole(folders):
    config = {**IN_PROCESS, "max_total_tokens": 4096}
    with sgl.Engine(folders[0], chunked_prefill_size=-1, context_length=300, **config) as engine:
        assert engine.core.capacity.sizes.step_tokens == 300
        before = engine.stats()["steps"]
        assert (
            len(
                engine.generate(input_ids=[5] * 290, sampling_params={"max_new_tokens": 1})[
                    "output_ids"
                ]
            )
            == 1
        )
        assert engine.stats()["steps"] - before <= 2


def test_a_format_is_that_of_the_weights(folders):
    with sgl.Engine(folders[0], load_format="safetensors", **IN_PROCESS) as engine:
        assert engine.get_model_info()["load_format"] == "safetensors"
    with pytest.raises(sgl.ModelError, match="load_format is 'gguf', and this is safetensors"):
        sgl.Engine(folders[0], load_format="gguf", **IN_PROCESS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_process", [True, False])
def test_a_folder_without_a_tokenizer_takes_and_gives_ids(folders, here, tmp_path, in_process):
    folder = tmp_path / "ids"
    shutil.copytree(folders[0], folder)
    for file in Path(folder).glob("*token*"):
        if file.name != "generation_config.json":
            file.unlink()
    settings = {**SETTINGS, "in_process": in_process}
    with pytest.raises(sgl.ModelError, match="tokenizer"):
        sgl.Engine(folder, **settings)
    asked: dict[str, Any] = dict(
        input_ids=[5, 6, 7], sampling_params={**GREEDY, "ignore_eos": True}
    )
    with sgl.Engine(folder, skip_tokenizer_init=True, **settings) as engine:
        found = engine.generate(**asked)
        assert (found["text"], found["output_ids"]) == ("", here.generate(**asked)["output_ids"])
        with pytest.raises(sgl.ParameterError, match="has no tokenizer"):
            engine.generate("text", GREEDY)
        with pytest.raises(sgl.ConstraintError, match="no tokenizer"):
            engine.generate(input_ids=[5], sampling_params={**GREEDY, "regex": "a"})
    with sgl.Engine(folders[0], skip_tokenizer_init=True, **settings) as engine:
        assert engine.generate("ab", GREEDY)["text"]  # it has one, so it is used
