"""SGLang's native protocol: its offline engine's calls, dictionaries in and out."""

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sglang_lite as sgl
from sglang_lite.compat.sglang.answers import OneSample
from sglang_lite.protocol import (
    Ebnf,
    Generation,
    JsonSchema,
    Regex,
    SamplingParams,
    StructuralTag,
    Tag,
    TokenLogprob,
)
from sglang_lite.runtime.core.submission import GenerateRequest
from sglang_lite.server.sglang.answer import SampleAnswer
from sglang_lite.server.sglang.request import read_request, read_sampling
from sglang_lite.server.sglang.server_args import translate_engine_settings
from tests.runtime import scripted
from tests.runtime.models.tiny import VOCAB, save
from tests.waiting import until

GREEDY: OneSample = {"temperature": 0, "max_new_tokens": 8}
FOR_EVER = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def small():
    """An engine with the scripted model."""
    with sgl.Engine.of(scripted.loaded()) as engine:
        yield engine


# -------------------------------------------------------------------------------------- translation


WITHOUT_EFFECT = [
    (
        {"top_logprobs_num": 2},
        "top_logprobs_num: has no effect, as no log-probabilities are returned",
    ),
    (
        {"top_logprobs_num": [0, 2], "return_logprob": [True, False]},
        r"top_logprobs_num\[1\]: has no effect",
    ),
    ({"logprob_start_len": 0}, "logprob_start_len: has no effect"),
    ({"token_ids_logprob": np.array([3])}, "token_ids_logprob: has no effect"),
    (
        {"token_ids_logprob": [[], [3]], "return_logprob": [True, False]},
        r"token_ids_logprob\[1\]: has no effect",
    ),
    (
        {"return_text_in_logprobs": True, "top_logprobs_num": 1},
        "top_logprobs_num, return_text_in_logprobs: has no eff",
    ),
    ({"priority": 3}, "priority: has no effect, as the engine's policy is 'lpm'"),
    ({"priority": [0, 3]}, "priority: has no effect"),
]


@pytest.mark.parametrize(("options", "message"), WITHOUT_EFFECT)
def test_generate_warns_of_parameters_without_effect(small, options, message):
    several = any(isinstance(value, list) for value in options.values())
    prompt = ["ab", "b"] if several else "ab"
    with pytest.warns(UserWarning, match=message) as caught:
        small.generate(prompt, GREEDY, **options)
    with pytest.warns(UserWarning, match=message) as awaited:
        asyncio.run(awaited_generate(small, prompt, options))
    assert {each.filename for each in [*caught, *awaited]} == {__file__}


async def awaited_generate(engine, prompt, options):
    return await engine.async_generate(prompt, GREEDY, **options)


@pytest.mark.parametrize("options", [
    {"top_logprobs_num": 0, "logprob_start_len": -1, "token_ids_logprob": (), "priority": 0}, {"top_logprobs_num": None},
    {"top_logprobs_num": [2, 0], "return_logprob": [True, False]}, {"token_ids_logprob": [3], "return_logprob": True},
])  # fmt: skip
def test_generate_does_not_warn_of_what_has_an_effect_or_requests_nothing(small, options):
    small.generate(["ab", "b"], GREEDY, **options)


def test_sampling_params_are_translated_and_null_is_the_default():
    given = {
        "max_new_tokens": 5, "min_new_tokens": 1, "stop": "a", "stop_token_ids": [7], "stop_regex": ["b+"],
        "temperature": None, "top_k": 3, "no_stop_trim": True, "sampling_seed": 9, "logit_bias": {"4": -1.5},
        "skip_special_tokens": False, "spaces_between_special_tokens": True, "json_schema": "", "regex": None,
    }  # fmt: skip
    expected = SamplingParams(
        max_tokens=5, min_tokens=1, stop=("a",), stop_token_ids=(7,), stop_regex=("b+",), top_k=3, include_stop=True,
        seed=9, logit_bias=((4, -1.5),), skip_special_tokens=False,
    )  # fmt: skip
    assert read_sampling(given) == (expected, None)
    assert read_sampling({"regex": "a"})[1] == Regex("a")
    assert read_sampling({"json_schema": "{}"})[1] == JsonSchema("{}")
    assert read_sampling({"ebnf": 'root ::= "a"'})[1] == Ebnf('root ::= "a"')
    tag = '{"structures": [{"begin": "<a>", "schema": {"type": "null"}, "end": "</a>"}], "triggers": ["<a"]}'
    content = JsonSchema('{"type": "null"}')
    assert read_sampling({"structural_tag": tag})[1] == StructuralTag(
        (Tag("<a>", content, "</a>"),), ("<a",)
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"max_tokens": 3},
            "max_tokens: sampling_params has no such field. Did you mean max_new_tokens",
        ),
        ({"quux": 3}, "quux: sampling_params has no such field. It has: .*max_new_tokens"),
        ({"regex": "a", "json_schema": "{}"}, "json_schema: and regex are both given"),
        ({"ebnf": 3}, "ebnf: int is not a string"),
        ({"ebnf": "root ::= x", "structural_tag": "{}"}, "ebnf: and structural_tag are both given"),
        ({"json_schema": {"type": "object"}}, "json_schema: dict is not a string"),
        ({"beam_width": 2}, "beam_width"),
        ([1], "sampling_params: list is not a dictionary"),
    ],
)
def test_sampling_params_that_are_refused(given, message):
    with pytest.raises(sgl.ParameterError, match=message):
        read_sampling(given)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "prompt: exactly one of prompt and input_ids"),
        ({"prompt": "a", "input_ids": [1]}, "prompt: exactly one"),
        ({"prompt": 7}, "prompt: is neither text"),
        ({"prompt": [1, 2]}, "prompt: .* Token ids are input_ids"),
        ({"input_ids": "a"}, "input_ids: is no list"),
        (
            {"prompt": ["a", "b"], "sampling_params": [{}]},
            "sampling_params: 1 entries for 2 prompts",
        ),
        ({"prompt": ["a", "b"], "rid": ["x", "x"]}, "rid: .* not all different"),
        (
            {"prompt": "a", "custom_logit_processor": "gASV"},
            "custom_logit_processor: is not callable.*pickled",
        ),
        ({"prompt": ["a", "b"], "lora_path": ["x"]}, "lora_path: 1 entries for 2 prompts"),
        ({"prompt": "a", "image_data": 7}, "image_data: 7 is no data URL"),
        ({"input_ids": [1], "image_data": "aGk="}, "image_data: goes with text"),
        (
            {"prompt": "a", "modalities": ["image"]},
            "modalities: 'image' is not the kind of what is given",
        ),
        ({"prompt": "a", "temperature": 1}, "temperature: generate has no such parameter"),
        ({"prompts": "a"}, r"prompts: generate has no such parameter\. Did you mean prompt=\?"),
    ],
)
def test_requests_that_are_refused_by_name(request_, message):
    with pytest.raises(sgl.ParameterError, match=message):
        read_request(**request_)


def test_generate_shows_all_parameters_of_a_request():
    own, read = (dict(inspect.signature(f).parameters) for f in (sgl.Engine.generate, read_request))
    assert own.pop("self")
    assert own == read


def test_fields_are_for_all_prompts_or_one_for_each():
    request = read_request(
        ["a", "b"], [{"n": 2}, {}], return_logprob=[True, False], top_logprobs_num=3, token_ids_logprob=[[1], [2, 3]],
        rid="x", cache_salt=["s", "t"], image_data=None,
    )  # fmt: skip
    calls = request.calls
    assert request.is_list
    assert [(c.rid, c.samples, c.namespace) for c in calls] == [("x_0", 2, "s"), ("x_1", 1, "t")]
    assert calls[0].params == SamplingParams(
        n=2,
        return_logprob=True,
        return_text_in_logprobs=False,
        top_logprobs_num=3,
        token_ids_logprob=(1,),
    )
    assert calls[1].params == SamplingParams()


def test_input_logprobs_begin_with_a_null_where_nothing_is_before_them():
    entry = TokenLogprob(-1.0, 5, "e", top=((-0.5, 6, "f"),))
    for start, reported in ((0, 3), (1, 3), (2, 2), (3, 1)):
        params = SamplingParams(
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=1,
            return_text_in_logprobs=True,
        )
        answer = SampleAnswer(
            GenerateRequest("", params, rid="r"), [3, 4, 5, 5], None, lambda ids: f"<{ids[0]}>"
        )
        meta = answer.add_event(Generation("", prompt_logprobs=(entry,) * reported))["meta_info"]
        nothing = [(None, 3, "<3>")] if start == 0 else []
        assert meta["input_token_logprobs"] == nothing + [(-1.0, 5, "e")] * reported
        assert meta["input_top_logprobs"] == [None] * len(nothing) + [[(-0.5, 6, "f")]] * reported
        assert "input_token_ids_logprobs" not in meta


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"model_path": "m", "random_seed": 3, "dcp_size": 1}, {"model": "m", "seed": 3}),
        ({"tensor_parallel_size": 2, "dist_timeout": 9}, {"tp_size": 2, "dist_timeout": 9}),
        ({"pipeline_parallel_size": 2}, {"pp_size": 2}),
        (
            {"chunked_prefill_size": 64, "max_running_requests": 8},
            {"step_tokens": 64, "max_running": 8},
        ),
        ({"mem_fraction_static": 0.8}, {"mem_fraction": 0.8}),
        (
            {"kv_cache_dtype": "fp8_e4m3", "quantization": "fp8"},
            {"kv_dtype": "fp8", "quantization": "fp8"},
        ),
        ({"attention_backend": "torch_native"}, {"attention_backend": "torch"}),
        ({"attention_backend": "triton"}, {"attention_backend": "triton"}),
        ({"speculative_algorithm": "NGRAM"}, {"speculation": "auto"}),
        ({"speculative_num_draft_tokens": 4}, {"draft_tokens": 4}),
        ({"speculative_ngram_capacity": 9}, {"draft_capacity": 9}),
        ({"speculative_algorithm": None, "speculative_num_draft_tokens": None}, {}),
        ({"speculative_ngram_max_trie_depth": 4}, {"draft_context": 4}),
        ({"speculative_ngram_max_trie_depth": 18, "speculative_ngram_capacity": 10_000_000}, {}),
        (
            {"disable_radix_cache": True, "disable_cuda_graph": True},
            {"prefix_cache": False, "cuda_graphs": False},
        ),
        ({"context_length": 9, "page_size": 4}, {"context_length": 9, "page_size": 4}),
    ],
)
def test_server_args_with_a_meaning_here_are_translated(given, settings):
    assert translate_engine_settings(given) == settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dcp_size": 2}, "dcp_size: 2 is not supported, only 1"),
        ({"model_path": "a", "model": "b"}, "model: model is given, too.* Give one"),
        ({"lora_strict_loading": True}, "lora_strict_loading: True is not supported"),
        (
            {"speculative_algorithm": "EAGLE"},
            "speculative_algorithm: 'EAGLE' is SGLang's.* Use \"NGRAM\"",
        ),
        ({"speculative_ngram_max_trie_depth": 20}, "draft_context: 20 is more than 16"),
    ],
)
def test_server_args_without_one_are_refused_by_name(given, message):
    with pytest.raises(sgl.ParameterError, match=message):
        sgl.Engine(**given, in_process=True)


# ------------------------------------------------------------------------------------------ answers


def test_one_prompt_gives_one_dictionary(engine):
    answer = engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 4})
    meta = answer["meta_info"]
    assert answer["text"].startswith(" Paris")
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 4
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["reasoning_tokens"], meta["num_retractions"]) == (5, 0, 0)
    assert len(meta["id"]) == 32
    assert "index" not in answer


def test_lists_give_lists_in_order_and_samples_are_grouped(small):
    answers = small.generate(["ab", "ba"], [{**GREEDY, "n": 2}, GREEDY])
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [2, 2, 2]
    assert answers[0]["text"] == answers[1]["text"] == small.generate("ab", GREEDY)["text"]
    assert (
        answers[2]["text"] == small.generate(input_ids=[[2, 1]], sampling_params=GREEDY)[0]["text"]
    )
    params = {"max_new_tokens": 8, "sampling_seed": 4, "ignore_eos": True}
    drawn = [a["text"] for a in small.generate("ab", {**params, "n": 3})]
    assert len(set(drawn)) == 3
    assert drawn == [a["text"] for a in small.generate("ab", {**params, "n": 3})]
    assert drawn[0] == small.generate("ab", params)["text"]


def test_stops_tell_what_was_matched(small):
    text = small.generate("ab", {**GREEDY, "ignore_eos": True})["text"]
    for key, value, matched in (
        ("stop", text[2], text[2]),
        ("stop_regex", f"[{text[2]}]", f"[{text[2]}]"),
        ("stop_token_ids", [scripted.LETTERS.index(text[2])], scripted.LETTERS.index(text[2])),
    ):
        answer = small.generate("ab", {**GREEDY, "ignore_eos": True, key: value})
        assert answer["text"] == text[: text.index(text[2])]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
        kept = small.generate(
            "ab", {**GREEDY, "ignore_eos": True, key: value, "no_stop_trim": True}
        )
        assert kept["text"] == text[: text.index(text[2]) + 1]


def test_logprobs_cover_prompt_and_output(engine):
    answer = engine.generate(
        "The capital of France is",
        {"temperature": 0, "max_new_tokens": 3},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[5, 6],
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    prompt_ids = engine.tokenizer.encode("The capital of France is")
    assert [i for _, i, _ in meta["input_token_logprobs"]] == prompt_ids
    assert [text for _, _, text in meta["input_token_logprobs"]] == [
        "The",
        " capital",
        " of",
        " France",
        " is",
    ]
    assert [i for _, i, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert meta["output_token_logprobs_length"] == 3
    assert meta["input_top_logprobs"][0] is None
    assert [len(row) for row in meta["output_top_logprobs"]] == [2, 2, 2]
    assert meta["output_top_logprobs"][0][0] == meta["output_token_logprobs"][0]  # greedy
    assert [[i for _, i, _ in row] for row in meta["output_token_ids_logprobs"]] == [[5, 6]] * 3
    plain = engine.generate("The capital of France is", GREEDY, return_logprob=True)["meta_info"]
    assert plain["input_token_logprobs"] == []
    assert "output_top_logprobs" not in plain


def test_a_stream_is_cumulative_and_ends_with_the_answer(small):
    params = {"max_new_tokens": 6, "sampling_seed": 1, "ignore_eos": True}
    *partial, last = small.generate("ab", params, return_logprob=True, stream=True)
    whole = small.generate("ab", params, return_logprob=True)
    assert (last["text"], last["output_ids"]) == (whole["text"], whole["output_ids"])
    assert [p["text"] for p in partial] == [last["text"][: i + 1] for i in range(6)]
    assert [p["output_ids"] for p in partial] == [last["output_ids"][: i + 1] for i in range(6)]
    assert all(p["meta_info"]["finish_reason"] is None for p in partial)
    assert (
        partial[2]["meta_info"]["output_token_logprobs"]
        == last["meta_info"]["output_token_logprobs"][:3]
    )
    assert partial[-1]["meta_info"]["cached_tokens"] == last["meta_info"]["cached_tokens"]


def test_streams_of_a_batch_tell_the_index(small):
    finished = {}
    for answer in small.generate(["ab", "ba"], {**GREEDY, "n": 2}, stream=True):
        if answer["meta_info"]["finish_reason"]:
            finished[answer["index"]] = answer["text"]
    assert list(dict(sorted(finished.items())).values()) == [
        a["text"] for a in small.generate(["ab", "ba"], {**GREEDY, "n": 2})
    ]


def test_asyncio_gives_the_same(small):
    async def main():
        one, many = await asyncio.gather(
            small.async_generate("ab", GREEDY), small.async_generate(["ab", "ba"], GREEDY)
        )
        streamed = [a async for a in await small.async_generate("ab", GREEDY, stream=True)]
        return one, many, streamed

    one, many, streamed = asyncio.run(main())
    assert (
        one["text"]
        == many[0]["text"]
        == streamed[-1]["text"]
        == small.generate("ab", GREEDY)["text"]
    )


def test_the_twins_have_one_signature():
    assert inspect.signature(sgl.Engine.generate) == inspect.signature(sgl.Engine.async_generate)


def test_a_stream_that_is_left_aborts_its_request(small):
    stream = small.generate("ab", FOR_EVER, stream=True)
    next(stream)
    stream.close()
    assert small.stats()["running"] == 0

    async def main():
        async for _ in await small.async_generate(["ab", "b"], FOR_EVER, stream=True):
            break
        task = asyncio.ensure_future(small.async_generate("ab", FOR_EVER))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert small.stats()["running"] == small.stats()["waiting"] == 0


def test_an_aborted_request_says_so(small):
    started, answers, held = threading.Event(), [], Held()

    def run():
        for answer in small.generate(
            "ab", FOR_EVER, rid="mine", stream=True, custom_logit_processor=held
        ):
            answers.append(answer)
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    with pytest.raises(
        sgl.ParameterError, match="rid: 'mine' is the name of a request that has not ended"
    ):
        small.generate("ab", rid="mine")
    small.abort("mine")
    held.left.set()
    thread.join()
    last = answers[-1]["meta_info"]["finish_reason"]
    assert (last["type"], last["err_type"]) == ("abort", "RequestAbortedError")
    assert answers[-1]["text"].startswith(answers[0]["text"])
    # the name is free again
    assert small.generate("ab", GREEDY, rid="mine")["meta_info"]["id"] == "mine"


def test_an_aborted_request_that_did_not_stream_keeps_what_it_has(small):
    async def main():
        samples = asyncio.ensure_future(
            small.async_generate("ab", {**FOR_EVER, "sampling_seed": 3, "n": 2}, rid="mine")
        )
        scored = asyncio.ensure_future(
            small.async_generate("ab", FOR_EVER, rid="too", return_logprob=True)
        )
        await asyncio.sleep(0)
        beside = {"max_new_tokens": 20, "ignore_eos": True}
        await small.async_generate("ba", beside, custom_logit_processor=abort_both)
        return await samples, await scored

    tokens = []

    def abort_both(_, logits):
        """At the last token of what runs beside them, on the engine's thread."""
        tokens.append(1)
        if len(tokens) == 20:
            for rid in ("mine", "too"):
                small.abort(rid)
        return logits

    samples, scored = asyncio.run(main())
    whole = small.generate("ab", {**FOR_EVER, "sampling_seed": 3, "n": 2})
    for part, all_of_it in zip(samples, whole):
        count = len(part["output_ids"])
        assert 10 < count < 400
        assert part["output_ids"] == all_of_it["output_ids"][:count]
        assert part["text"] == all_of_it["text"][:count]
        assert part["meta_info"]["completion_tokens"] == count
        assert part["meta_info"]["finish_reason"]["type"] == "abort"
    assert samples[0]["text"] != samples[1]["text"]
    ids = [token for _, token, _ in scored["meta_info"]["output_token_logprobs"]]
    assert ids == scored["output_ids"]
    assert len(ids) > 10


def test_one_aborted_before_it_ran_has_nothing(engine):
    async def main():
        asked = {"regex": "a{1,9}(b|c)d{7}e", "max_new_tokens": 400}
        task = asyncio.ensure_future(engine.async_generate("ab", asked, rid="mine"))
        await asyncio.sleep(0)
        engine.abort("mine")  # while its grammar is compiled
        return await task

    answer = asyncio.run(main())
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"]["status_code"] == 499


def test_one_that_fails_leaves_the_others_their_results(small):
    def fail(tokens, logits):
        raise LookupError("mine")

    message = "1 of 3 requests failed; the first at index 1: logit_processor failed"
    with pytest.raises(sgl.BatchError, match=message) as caught:
        small.generate(["ab", "ba", "b"], GREEDY, custom_logit_processor=[None, fail, None])
    first, second, third = caught.value.results
    assert first["text"] == small.generate("ab", GREEDY)["text"]
    assert isinstance(second.__cause__, LookupError)
    assert third["text"] == small.generate("b", GREEDY)["text"]
    with pytest.raises(sgl.ProgramError, match="logit_processor failed: LookupError"):
        small.generate("ab", GREEDY, custom_logit_processor=fail)
    with pytest.raises(sgl.ProgramError, match="logit_processor failed"):
        list(small.generate("ab", GREEDY, custom_logit_processor=fail, stream=True))


def test_a_bad_prompt_of_a_batch_stops_the_batch_before_it_runs(small):
    with pytest.raises(sgl.ParameterError, match="prompt: 600 tokens long") as caught:
        small.generate(["ab", "b" * 600], FOR_EVER)
    assert caught.value.__notes__ == ["in prompt 1 of 2"]
    assert small.stats()["running"] == small.stats()["waiting"] == 0


def test_a_batch_may_be_longer_than_the_queue():
    prompts = [scripted.LETTERS[1 + i % 20] * (1 + i // 20) for i in range(60)]
    with sgl.Engine.of(scripted.loaded(), max_running=2, max_queued=3) as engine:
        answers = engine.generate(prompts, {**GREEDY, "n": 2})
        assert [a["meta_info"]["prompt_tokens"] for a in answers] == [
            len(p) for p in prompts for _ in range(2)
        ]
        others = engine.generate(prompts[:40], GREEDY, stream=True)
        assert len({a["index"] for a in others if a["meta_info"]["finish_reason"]}) == 40


def test_a_cache_salt_keeps_prefixes_apart(small):
    small.flush_cache()
    prompt = "abcdefgh" * 8
    cached = [
        small.generate(prompt, GREEDY, cache_salt=salt)["meta_info"]["cached_tokens"]
        for salt in ("x", "y", "x")
    ]
    assert cached == [0, 0, 63]


def test_the_rest_of_the_offline_engine(small):
    info = small.get_server_info()
    assert (info["served_model_name"], info["max_running"], info["vocab_size"]) == (
        "scripted",
        64,
        scripted.VOCAB,
    )
    assert info["internal_states"][0]["running"] == 0
    assert small.flush_cache() >= 0
    with pytest.raises(sgl.CapabilityError, match="this needs an embedding model"):
        small.encode("ab")
    score = small.score("ab", ["c", "dd"])
    assert [len(s.logprobs) for s in score] == [1, 2]
    other = sgl.Engine.of(scripted.loaded())
    other.shutdown()
    with pytest.raises(sgl.EngineClosedError):
        other.generate("ab")


def tiny_llama(folder, seed, hidden_size=32):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden_size, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5)
    return str(save(model, folder))


def test_weights_are_updated_between_steps_and_nothing_of_the_old_ones_stays(tmp_path):
    old, new = (tiny_llama(tmp_path / name, seed) for name, seed in (("old", 1), ("new", 2)))
    other = tiny_llama(tmp_path / "other", 3, hidden_size=64)
    prompt = "abcdefgh" * 6
    with sgl.Engine(model=new, dtype="float32", in_process=True) as engine:
        expected = engine.generate(prompt, GREEDY)["text"]
    with sgl.Engine(model_path=old, dtype="float32", in_process=True) as engine:
        before = engine.generate(prompt, GREEDY)
        running = engine.generate("xyz", {"max_new_tokens": 180, "ignore_eos": True}, stream=True)
        next(running)
        with pytest.raises(
            sgl.ModelError,
            match=r"another architecture than the running model's: hidden_size, .* differ",
        ):
            engine.update_weights(other)
        assert engine.generate(prompt, GREEDY)["text"] == before["text"] != expected
        engine.update_weights(new)
        after = engine.generate(prompt, GREEDY)
        assert after["text"] == expected
        assert after["meta_info"]["cached_tokens"] == 0
        *_, last = running
        assert last["meta_info"]["completion_tokens"] == 180
        assert last["meta_info"]["num_retractions"] == 1
        assert engine.get_server_info()["model_path"] == new


# ------------------------------------------------------------------------ room, and streams dropped


def test_gathered_requests_wait_for_room_as_a_list_does():
    prompts = [scripted.LETTERS[1 + i % 20] * (1 + i // 20) for i in range(60)]
    params = [{**GREEDY, "n": 1 + i % 3} for i in range(60)]

    async def gathered(engine):
        answers = await asyncio.gather(
            *(engine.async_generate(p, q) for p, q in zip(prompts, params))
        )
        cancelled = [asyncio.ensure_future(engine.async_generate(p, GREEDY)) for p in prompts]
        await asyncio.sleep(0)
        for task in cancelled[::2]:
            task.cancel()
        await asyncio.wait(cancelled)
        return answers, [task.result()["text"] for task in cancelled[1::2]]

    with sgl.Engine.of(scripted.loaded(), max_running=2, max_queued=3) as engine:
        answers, left = asyncio.run(gathered(engine))
        alone = [engine.generate(p, GREEDY) for p in prompts]
        assert left == [answer["text"] for answer in alone[1::2]]
        assert [a["text"] if isinstance(a, dict) else a[0]["text"] for a in answers] == [
            a["text"] for a in alone
        ]
        with ThreadPoolExecutor(60) as threads:
            assert list(threads.map(lambda p: engine.generate(p, GREEDY)["text"], prompts)) == [
                a["text"] for a in alone
            ]
        with pytest.raises(sgl.OverloadedError, match="6 samples at once; 5 may wait or run"):
            engine.generate("ab", {**GREEDY, "n": 6})
        held = Held()
        with pytest.raises(sgl.OverloadedError):  # the low level says so at once
            for _ in range(6):
                engine.submit(
                    "ab",
                    SamplingParams(max_tokens=400),
                    logit_processor=held,
                    sink=lambda event: None,
                )
        held.left.set()


def test_programs_wait_for_room_too():
    @sgl.function
    def program(s, i):
        s += scripted.LETTERS[1 + i % 20] + sgl.gen("a", max_tokens=3)
        s += sgl.select("b", ["ab", "cd"]) + sgl.gen("c", n=2, max_tokens=2)
        s["a"]

    async def gathered():
        return await asyncio.gather(*(program.arun(i, seed=1, backend=engine) for i in range(40)))

    with sgl.Engine.of(scripted.loaded(), max_running=2, max_queued=2) as engine:
        states = asyncio.run(gathered())
        assert [s.text() for s in states] == [
            program.run(i, seed=1, backend=engine).text() for i in range(40)
        ]


def test_who_waits_for_room_is_told_when_the_engine_is_closed():
    async def gathered(engine):
        tasks = [asyncio.ensure_future(engine.async_generate("ab", FOR_EVER)) for _ in range(12)]
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.close)
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(gathered(sgl.Engine.of(scripted.loaded(), max_running=1, max_queued=2)))
    assert {type(outcome) for outcome in outcomes} <= {
        sgl.EngineClosedError,
        sgl.RequestAbortedError,
    }


class Held:
    """A logit processor that holds its request at its fourth token until the stream was left."""

    def __init__(self):
        self.tokens, self.left = 0, threading.Event()

    def __call__(self, tokens, logits):
        self.tokens += 1
        if self.tokens == 4:
            assert self.left.wait(60)
        return logits

    def ends_in(self, engine):
        """The number of tokens, once nothing runs any more."""
        self.left.set()
        until(lambda: not engine.stats()["running"] and not engine.stats()["waiting"])
        return self.tokens


@pytest.mark.parametrize("end", ["close", "drop"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_is_left_ends_its_request(small, end, begun):
    held = Held()
    stream = small.generate("ab", FOR_EVER, stream=True, custom_logit_processor=held)
    if begun:
        next(stream)
    if end == "close":
        stream.close()
        assert list(stream) == []
    del stream
    assert held.ends_in(small) < 20


@pytest.mark.parametrize("end", ["close", "drop"])
@pytest.mark.parametrize("begun", [False, True])
def test_an_asynchronous_stream_that_is_left_ends_its_request(small, end, begun):
    held = Held()

    async def leave():
        stream = await small.async_generate(
            "ab", FOR_EVER, stream=True, custom_logit_processor=held
        )
        if begun:
            await anext(stream)
        if end == "close":
            await stream.aclose()
            assert [answer async for answer in stream] == []
        del stream
        return await asyncio.to_thread(held.ends_in, small)

    assert asyncio.run(leave()) < 20
