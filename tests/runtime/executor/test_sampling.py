"""Draws, their ends and reports: the same alone, in a batch, from the cache and after a retraction."""

import threading

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.protocol import Delta, Generation, SamplingParams, Span
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.executor.logit_adjustments import DrawAdjustments, adjust_logits
from sglang_lite.runtime.executor.sampler import Masks, SamplingTable, sample
from sglang_lite.runtime.executor.step_record import SAMPLING, sampling_row
from sglang_lite.runtime.kernels.race import draw_exponentials
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models.layers.linear import Bf16Linear, DenseLinear
from sglang_lite.runtime.requests.resolved_params import resolve_params
from sglang_lite.runtime.requests.sample_seed import derive_sample_seed
from tests.runtime import scripted
from tests.runtime.models.tiny import VOCAB, randomise, save
from tests.runtime.scripted import CHAT


def set_row(table, params, seed):
    """Sets the parameters of slot 0."""
    table.set_parameters(
        np.zeros(1, dtype=np.int32), np.array([sampling_row(params, seed)], dtype=SAMPLING)
    )


def greedy(**options):
    return SamplingParams(temperature=0, **{"max_tokens": 16, **options})


@pytest.fixture(scope="module")
def small():
    with Engine.of(scripted.loaded()) as engine:
        yield engine


def run_all(engine, requests):
    """Submits all at once; their last events, in order. A request is a prompt, parameters and
    options.
    """
    outcomes, left, done = {}, [len(requests)], threading.Event()

    def sink(i):
        def take(event):
            if not isinstance(event, Delta):
                outcomes[i] = event
                left[0] -= 1
                if not left[0]:
                    done.set()

        return take

    for i, (prompt, params, options) in enumerate(requests):
        engine.submit(prompt, params, sink=sink(i), **options)
    assert done.wait(120)
    return [outcomes[i] for i in range(len(requests))]


# -------------------------------------------------------------------------------------------- draws


def test_noise_is_exponential_and_seeds_do_not_shift_each_other():
    seeds = [0, 1, -1 % 2**64, 0x9E3779B97F4A7C15, *(derive_sample_seed(0, i) for i in (1, 2))]
    streams = [
        1 - np.exp(-np.ravel([draw_exponentials(seed, position, 40) for position in range(100)]))
        for seed in seeds
    ]
    for stream in streams:
        assert 0 <= stream.min() < 0.01 < 0.99 < stream.max() < 1
        assert abs(stream.mean() - 0.5) < 0.02
    assert len(set(np.concatenate(streams).tolist())) > 5.99 * 4000  # float32 has few equal ones


def test_rows_are_adjusted_together_as_each_would_be_alone():
    """Counted token by token."""
    random, size = np.random.default_rng(3), 30
    logits = torch.from_numpy(random.normal(size=(40, size))).float()
    expected, adjustments = logits.clone(), {}
    for i in random.permutation(40)[:30].tolist():
        tokens = random.integers(0, 12, size=random.integers(1, 25)).astype(np.int32)
        prompt = int(random.integers(0, len(tokens) + 1))
        params = resolve_params(
            SamplingParams(
                repetition_penalty=float(random.choice([1, 0.7, 1.3])),
                frequency_penalty=float(random.choice([0, 0.4])),
                presence_penalty=float(random.choice([0, -0.3])),
                logit_bias=((3, 2.0), (5, -1.5)) if random.random() < 0.5 else (),
            ),
            size,
        )
        banned = (7, 3) if random.random() < 0.3 else ()
        adjustments[i] = DrawAdjustments(params, tokens, prompt, banned)
        for token in set(tokens.tolist()):
            score = expected[i, token]
            expected[i, token] = torch.where(
                score > 0, score / params.repetition_penalty, score * params.repetition_penalty
            )
            count = tokens[prompt:].tolist().count(token)
            if count:
                expected[i, token] -= float(
                    np.float32(params.frequency_penalty * count + params.presence_penalty)
                )
        for token, bias in params.logit_bias or ():
            expected[i, token] += bias
        expected[i, list(banned)] = -np.inf
    assert adjust_logits(logits, adjustments) == {}
    assert torch.equal(logits, expected)


def test_samples_of_one_request_differ_and_the_first_is_the_seeds_own(small):
    events, done = [], threading.Event()

    def sink(event):
        events.append(event)
        if sum(isinstance(e, Generation) for e in events) == 4:
            done.set()

    params = SamplingParams(max_tokens=8, n=4, seed=5, ignore_eos=True)
    small.submit("ab", params, sink=sink, stream=True)
    assert done.wait(60)
    texts = {e.index: e.text for e in events if isinstance(e, Generation)}
    assert sorted(texts) == [0, 1, 2, 3]
    assert len(set(texts.values())) == 4
    assert (
        texts[0] == small.complete("ab", SamplingParams(max_tokens=8, seed=5, ignore_eos=True)).text
    )
    for i, text in texts.items():
        assert "".join(e.text for e in events if isinstance(e, Delta) and e.index == i) == text
    with pytest.raises(sgl.ParameterError, match="n: complete gives one"):
        small.complete("ab", SamplingParams(n=2))


def test_the_prompt_of_several_samples_is_computed_once(small):
    small.flush_cache()
    done = threading.Semaphore(0)
    results = []
    prompt = "abcdefgh" * 20
    small.submit(
        prompt,
        SamplingParams(n=5, max_tokens=2),
        sink=lambda e: (results.append(e), done.release()),
    )
    for _ in range(5):
        assert done.acquire(timeout=30)
    computed = [r.usage.prompt_tokens - r.usage.cached_tokens for r in results]
    assert sorted(computed) == [1, 1, 1, 1, 160]


# ------------------------------------------------------------------------------------ where it ends


def test_patterns_end_the_text_and_cut_it(reciting):
    """The answer is "The capital of France is Paris." of whatever tokens."""
    for pattern, text in (
        (r"F\w+", "The capital of "),  # a match is complete as soon as there is one
        (r"F\w+ ", "The capital of "),
        (r"(?<=of )F", "The capital of "),
        (r"^The capital of", ""),
        (r"[aeiou]{2}|Z", "The capital of France is Paris."),
        (r"is\b", "The capital of France "),
        (r"(?i)PARIS\.", "The capital of France is "),
    ):
        cut = reciting.complete(CHAT, greedy(stop_regex=(pattern, "never")))
        assert cut.text == text, pattern
        assert cut.matched == (pattern if text[-1:] != "." else 2)
        assert "".join(span.text for span in cut.spans) == text
    kept = reciting.complete(CHAT, greedy(stop_regex=(r"F\w+ ",), include_stop=True))
    assert kept.text == "The capital of France "
    both = reciting.complete(CHAT, greedy(stop=("France",), stop_regex=("of F",)))
    assert (both.text, both.matched) == ("The capital ", "of F")


@pytest.mark.parametrize(
    "stops",
    [dict(stop_regex=("of F.*s",)), dict(stop=("France is not",)), dict(stop_regex=("x+",))],
)
def test_what_streams_is_never_taken_back(reciting, stops):
    events, done = [], threading.Event()

    def sink(event):
        events.append(event)
        if not isinstance(event, Delta):
            done.set()

    reciting.submit(CHAT, greedy(**stops), sink=sink, stream=True)
    assert done.wait(60)
    assert "".join(e.text for e in events[:-1]) == events[-1].text


def test_no_stop_is_looked_for_in_the_first_tokens(small):
    text = small.complete("ab", greedy(ignore_eos=True)).text
    letter = text[1]
    later = text.index(letter, 2) if letter in text[2:] else None
    cut = small.complete(
        "ab", greedy(ignore_eos=True, min_tokens=2, stop=(letter,), stop_regex=("(?<=^..)[?]",))
    )
    assert cut.text == (text if later is None else text[:later])


def test_the_first_tokens_have_no_end_even_where_it_would_be_ignored(reciting):
    end = min(reciting.tokenizer.eos_ids)
    forced = {"logit_bias": ((end, 1000.0),), "ignore_eos": True}
    assert reciting.complete(CHAT, greedy(max_tokens=6, **forced)).token_ids == (end,) * 6
    ids = reciting.complete(CHAT, greedy(max_tokens=6, min_tokens=4, **forced)).token_ids
    assert end not in ids[:4]
    assert ids[4:] == (end, end)


def test_a_stop_token_is_kept_where_it_is_asked_for(reciting):
    france = reciting.tokenizer.encode(" France")[0]
    assert reciting.complete(CHAT, greedy(stop_token_ids=(france,))).text == "The capital of"
    kept = reciting.complete(CHAT, greedy(stop_token_ids=(france,), include_stop=True))
    assert kept.text == "The capital of France"
    assert kept.spans == (Span(kept.text, kept.token_ids),)
    plain = reciting.complete(CHAT, greedy(include_stop=True))
    assert plain.spans == (Span("The capital of France is Paris.", plain.token_ids[:-1]),)
    whole = reciting.complete(CHAT, greedy(include_stop=True, skip_special_tokens=False))
    assert whole.text == "The capital of France is Paris.<|im_end|>"
    assert whole.spans == (Span(whole.text, whole.token_ids),)


def test_a_pattern_without_end_fails_its_request_alone(small):
    text = small.complete("ab", greedy(ignore_eos=True, max_tokens=300)).text
    letters = "|".join(sorted({f"[{c}]" if c in ".?" else c for c in text}))
    endless = greedy(
        ignore_eos=True, max_tokens=300, stop_regex=(rf"(?:(?:{letters})|(?:{letters})+)+\d",)
    )
    failed, fine = run_all(
        small, [("ab", endless, {}), ("ab", greedy(ignore_eos=True, max_tokens=300), {})]
    )
    assert isinstance(failed, sgl.ParameterError)
    assert failed.parameter == "stop_regex"
    assert fine.text == text


# --------------------------------------------------------------------------------- logit processors


def test_a_processor_changes_the_logits_of_its_request(small):
    seen = []

    def only_c(tokens, logits):
        seen.append(list(tokens))
        assert logits.dtype == torch.float32
        logits[:] = float("-inf")
        logits[scripted.LETTERS.index("c")] = 0
        return logits

    plain = small.complete("ab", greedy(max_tokens=3, ignore_eos=True)).text
    first, second = run_all(
        small,
        [
            ("ab", greedy(max_tokens=3), {"logit_processor": only_c}),
            ("ab", greedy(max_tokens=3, ignore_eos=True), {}),
        ],
    )
    assert (first.text, second.text) == ("ccc", plain)
    assert seen == [[1, 2], [1, 2, 3], [1, 2, 3, 3]]


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda tokens, logits: 1 / 0, "logit_processor failed: ZeroDivisionError"),
        (lambda tokens, logits: logits * float("nan"), "logit_processor returned NaN"),
        (lambda tokens, logits: logits + float("inf"), "logit_processor returned NaN, inf"),
        (lambda tokens, logits: logits - float("inf"), "nothing but -inf"),
        (lambda tokens, logits: logits[:3], r"returned \[3\] numbers"),
        (lambda tokens, logits: None, "logit_processor failed"),
    ],
)
def test_a_processor_that_fails_fails_its_request_alone(small, processor, message):
    failed, fine = run_all(
        small, [("ab", greedy(), {"logit_processor": processor}), ("ab", greedy(), {})]
    )
    assert isinstance(failed, sgl.ProgramError)
    with pytest.raises(sgl.ProgramError, match=message):
        raise failed
    assert isinstance(fine, Generation)


# ----------------------------------------------------------------------------------- broken numbers


class BrokenModel(scripted.ScriptedModel):
    """Gives `value` in place of a logit after a "?" at position 2."""

    def __init__(self, value):
        self.value = value

    def forward(self, ids, positions, plan, cache):
        hidden = super().forward(ids, positions, plan, cache)
        return torch.cat(
            (hidden, ((ids == scripted.VOCAB - 1) & (positions == 2)).long().unsqueeze(1)), 1
        )

    def logits(self, hidden):
        logits = super().logits(hidden)
        logits[hidden[:, 1] == 1, 3] = self.value
        return logits


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_numbers_fail_their_request_alone(value, temperature):
    loaded = scripted.loaded()
    params = SamplingParams(temperature=temperature, max_tokens=6, seed=1, ignore_eos=True)
    bad = SamplingParams(temperature=temperature, max_tokens=6, seed=1, logit_bias=((5, 1.0),))
    with (
        Engine.of(
            type(loaded)("broken", BrokenModel(value), *list(loaded.__getstate__())[2:])
        ) as broken,
        Engine.of(loaded) as sound,
    ):
        requests = [("ab", params, {}), ("a??", params, {}), ("a??", bad, {}), ("ba", params, {})]
        outcomes = run_all(broken, requests)
        assert [o.text for o in outcomes if isinstance(o, Generation)] == [
            sound.complete(p, params).text for p in ("ab", "ba")
        ]
        for failed in outcomes[1:3]:
            assert isinstance(failed, sgl.ModelError)
            assert "logits for position 3 are NaN or infinite" in str(failed)
        scored = SamplingParams(max_tokens=0, return_logprob=True, logprob_start_len=0)
        with pytest.raises(sgl.ModelError, match="logits for position 3"):
            broken.complete("a??b", scored)
        assert len(broken.complete("a?b?", scored).prompt_logprobs) == 3


def test_what_a_broken_request_left_in_the_cache_reaches_nobody(small_file):
    """The request's keys and values are NaN, and stay in pages that others' rows may be padded
    with.
    """
    with sgl.Engine(
        small_file,
        dtype="float32",
        max_running=3,
        max_total_tokens=400,
        context_length=300,
        step_tokens=64,
        in_process=True,
    ) as engine:
        short, long = (
            ("Hello", greedy(max_tokens=8), {}),
            ("a b c d e " * 10, greedy(max_tokens=8), {}),
        )
        expected = [g.text for g in run_all(engine, [short, long])]
        embedding = engine.core.runner.model.embedding

        @torch.inference_mode()
        def become(values):
            embedding[500] = values

        kept = embedding[500].clone()
        engine.core.loop.inbox.call_and_wait(lambda: become(float("inf")))
        with pytest.raises(sgl.ModelError, match="NaN"):
            engine.complete([500] * 200, greedy())
        engine.core.loop.inbox.call_and_wait(lambda: become(kept))
        engine.flush_cache()
        assert [g.text for g in run_all(engine, [short, long])] == expected


# -------------------------------------------------------------------------------- log-probabilities


def test_prompt_logprobs_have_their_text_and_survive_a_retraction():
    engine = scripted.SteppedEngine(
        max_running=4, max_total_tokens=60, context_length=60, step_tokens=8, retract_every=2
    )
    params = greedy(
        return_logprob=True,
        logprob_start_len=0,
        return_text_in_logprobs=True,
        top_logprobs_num=2,
        ignore_eos=True,
    )
    prompts = ["abcdefghijklmn", "abcdefg", "hijk"]
    started = [engine.start(prompt, params)[1] for prompt in prompts]
    engine.drain()
    for prompt, events in zip(prompts, started):
        generation = scripted.ended(events)
        assert [e.text for e in generation.prompt_logprobs] == list(prompt[1:])
        assert [e.token_id for e in generation.prompt_logprobs] == [
            scripted.LETTERS.index(c) for c in prompt[1:]
        ]
        assert "".join(e.text for e in generation.output_logprobs) == generation.text
        top = generation.output_logprobs[0].top
        assert (top[0][2], len(top)) == (generation.text[0], 2)
    assert sum(scripted.ended(events).meta["num_retractions"] for events in started) > 0


def first_logits(prompt):
    return torch.from_numpy(
        scripted.logits_of(scripted.hashes([scripted.LETTERS.index(c) for c in prompt])[-1:])
    )[0]


def everything(**options):
    """The first token's log-probability and those of all tokens."""
    ids = tuple(range(scripted.VOCAB))
    options = {"temperature": 0.5, "ignore_eos": True, "max_tokens": 1, **options}
    return SamplingParams(return_logprob=True, token_ids_logprob=ids, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, lambda logits: logits / 0.5),
        ({"top_p": 0.5, "min_p": 0.3, "top_k": 4}, lambda logits: logits / 0.5),
        ({"temperature": 0}, lambda logits: logits),
        ({"top_k": 1}, lambda logits: logits),
        (
            {"logit_bias": ((5, 3.0),)},
            lambda logits: (logits + 3.0 * (torch.arange(scripted.VOCAB) == 5)) / 0.5,
        ),
    ],
)
def test_log_probabilities_are_those_of_the_draw_before_its_filters(small, options, expected):
    first = small.complete("abc", everything(**options)).output_logprobs[0]
    logprobs = expected(first_logits("abc")).log_softmax(-1)
    assert [value for value, _, _ in first.ids] == pytest.approx(logprobs.tolist(), abs=1e-5)
    assert first.logprob == pytest.approx(float(logprobs[first.token_id]), abs=1e-5)


def test_a_constraint_leaves_log_probabilities_of_what_it_allows():
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    params = resolve_params(
        SamplingParams(
            temperature=0.5, return_logprob=True, token_ids_logprob=(0, 1, 2, 3), seed=1
        ),
        4,
    )
    table = SamplingTable(1)
    set_row(table, params, 1)
    at = np.zeros(1, dtype=np.int32)
    adjustments = {0: DrawAdjustments(params, at, 1)}
    masks = Masks(np.array([[0b0101]], dtype=np.int32), at)
    allowed = (torch.tensor([1.0, 3.0]) / 0.5).log_softmax(-1).tolist()
    never = torch.finfo(torch.float32).min
    first = sample(logits.clone(), table, at, at, adjustments, masks).logprobs[0]
    assert [value for value, _, _ in first.ids] == pytest.approx(
        [allowed[0], never, allowed[1], never]
    )
    first = sample(
        logits.clone(), table, at, at, adjustments, masks, original_logprobs=True
    ).logprobs[0]
    assert [value for value, _, _ in first.ids] == pytest.approx(logits[0].log_softmax(-1).tolist())


def test_log_probabilities_of_the_model_itself_on_demand():
    with Engine.of(scripted.loaded(), original_logprobs=True) as engine:
        params = everything(logit_bias=((5, 3.0),))
        first = engine.complete("abc", params).output_logprobs[0]
    assert [value for value, _, _ in first.ids] == pytest.approx(
        first_logits("abc").log_softmax(-1).tolist(), abs=1e-5
    )


# -------------------------------------------------------------------------------------- determinism

# they begin differently
PROMPTS = [[(7 * j + i) % VOCAB for j in range(17 + 9 * (i % 3))] for i in range(9)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The folder of a model whose products have the sizes of the default model's: libraries choose
    how to compute by them. With fewer layers and tokens, and random weights.
    """
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    return str(save(randomise(LlamaForCausalLM(config)), tmp_path_factory.mktemp("wide")))


def asked(i):
    """Half of them greedy; all report log-probabilities, whose bits are compared."""
    return SamplingParams(
        temperature=i % 2,
        seed=i,
        max_tokens=6,
        ignore_eos=True,
        return_logprob=True,
        top_logprobs_num=2,
    )


def bits(generation):
    return generation.token_ids, generation.output_logprobs


def test_in_float32_tokens_are_the_same_alone_in_a_batch_and_from_the_cache(wide):
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=7, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    requests = [(prompt, own, {}) for prompt, own in zip(PROMPTS, params)]
    with sgl.Engine(model=wide, device="cpu", dtype="float32", in_process=True) as engine:
        alone = [engine.complete(*request[:2]).token_ids for request in requests]
        cached = [g.token_ids for g in run_all(engine, requests)]
        engine.flush_cache()
        assert [g.token_ids for g in run_all(engine, requests)] == alone == cached


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_a_prompt_alone_gives_the_same_bits_from_an_empty_and_a_warm_cache(
    tmp_path, dtype, monkeypatch
):
    """Though products of few rows are computed differently, as on CPUs with units for 16 bits."""
    for kind in (DenseLinear, Bf16Linear):
        plain = kind.__call__
        monkeypatch.setattr(
            kind,
            "__call__",
            lambda self, x, plain=plain: plain(self, x) * (1 + 2**-6 * (len(x) <= 3)),
        )
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model = str(save(randomise(LlamaForCausalLM(config)), tmp_path))
    with sgl.Engine(
        model=model, dtype=dtype, device="cpu", step_tokens=64, in_process=True
    ) as engine:
        for length in (2, 3, 40, 64, 65, 150):
            ids = [(7 * i + length) % VOCAB for i in range(length)]
            first, again = engine.complete(ids, asked(0)), engine.complete(ids, asked(0))
            assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, length - 1)
            assert bits(again) == bits(first)


def test_in_16_bits_logits_are_float32(tmp_path):
    """Scores are not so far apart that the best ones are equal, and as exact as the last hidden
    state.
    """
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    reference = randomise(LlamaForCausalLM(config))
    folder = save(reference, tmp_path)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16() * 20
    exact = hidden.double() @ reference.lm_head.weight.detach().double().T
    for deterministic in (False, True):
        model = load_model(
            EngineConfig(device="cpu", dtype="bfloat16", deterministic=deterministic), folder
        ).model
        # half precision's weights
        assert ((model.logits(hidden) - exact).abs() < exact.abs().max() * 5e-4).all()
        assert model.logits(hidden).unique().numel() == exact.numel()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_engine_gives_the_same_bits_in_any_company(wide, dtype):
    requests = [
        (prompt, msgspec.structs.replace(asked(i), max_tokens=24), {})
        for i, prompt in enumerate(PROMPTS)
    ]
    settings = {
        "model": wide,
        "device": "cpu",
        "dtype": dtype,
        "deterministic": True,
        "context_length": 80,
    }
    with sgl.Engine(**settings, max_running=16, max_total_tokens=2048, in_process=True) as engine:
        some = (0, 1, 8)
        alone = {i: bits(engine.complete(*requests[i][:2])) for i in some}
        engine.flush_cache()
        batch = [bits(g) for g in run_all(engine, requests)]
        assert {i: batch[i] for i in some} == alone
        cached = run_all(engine, requests)
        assert [bits(g) for g in cached] == batch
        assert all(g.usage.cached_tokens == g.usage.prompt_tokens - 1 for g in cached)
    with sgl.Engine(
        **settings, max_running=6, max_total_tokens=96, step_tokens=7, in_process=True
    ) as tight:
        generations = run_all(tight, requests)
        assert [bits(g) for g in generations] == batch
        assert sum(g.meta["num_retractions"] for g in generations) > 0


def test_a_draw_does_not_depend_on_a_neighbours_filters():
    from tests.runtime.scripted import SteppedEngine

    own = SamplingParams(temperature=1.0, seed=5, max_tokens=12)

    def drawn(**neighbour):
        engine = SteppedEngine(max_running=4, context_length=64)
        _, events = engine.start("ab", own)
        if neighbour:
            engine.start("ab", SamplingParams(temperature=1.0, seed=6, max_tokens=12, **neighbour))
        engine.drain()
        return events[-1].token_ids

    alone = drawn()
    assert [drawn(top_k=3), drawn(top_p=0.5), drawn(min_p=0.2)] == [alone] * 3
