"""The GPU's runner gives what the CPU's gives: in batches, over shared prefixes, after retractions,
under constraints.

With a GPU, on it and through captured graphs; without one, on the CPU under Triton's
interpreter.
"""

import random
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM
from triton.runtime.interpreter import GridExecutor

import sglang_lite as sgl
from sglang_lite.protocol import Generation, ModelError, Regex, SamplingParams
from sglang_lite.runtime.calls import ContinueGeneration, PauseGeneration
from sglang_lite.runtime.drafting.drafting import TAIL
from sglang_lite.runtime.drafting.guess import Guess
from sglang_lite.runtime.drafting.registry import DRAFTERS
from sglang_lite.runtime.executor import make_runner
from sglang_lite.runtime.executor import prefix_groups as shared
from sglang_lite.runtime.executor.cuda_graphs import CudaGraphs, graph_sizes
from sglang_lite.runtime.executor.gpu_draws import GpuPendingTokens
from sglang_lite.runtime.models.gpu_decoder import GpuDecoder
from tests.counts import some
from tests.runtime.kernels import BACKENDS, PACKAGES, needs_kernels, skip_without
from tests.runtime.models.tiny import VOCAB, randomise, save
from tests.runtime.scripted import FreeDrafts

pytestmark = needs_kernels
GPU = torch.cuda.is_available()
DEVICE = {"device": "cuda" if GPU else "cpu"}


def saved(folder, layers):
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
        pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return save(randomise(Qwen3ForCausalLM(config)), folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture(scope="module")
def on_cpu(folder):
    with sgl.Engine(model=str(folder), dtype="float32", device="cpu", in_process=True) as engine:
        yield engine


@pytest.fixture(params=BACKENDS)
def device(request, folder, monkeypatch):
    """Makes engines that run fused kernels, with each backend of attention."""
    if not GPU:
        monkeypatch.setattr("sglang_lite.runtime.loading.load_model.Decoder", GpuDecoder)
    opened = []

    def make(**settings):
        opened.append(
            sgl.Engine(
                **{
                    "model": str(folder),
                    "dtype": "float32",
                    "max_total_tokens": 800,
                    "threads": 1,
                    "attention_backend": request.param,
                    **DEVICE,
                    **settings,
                },
                in_process=True,
            )
        )
        return opened[-1]

    make.folder = str(folder)
    yield make
    for engine in opened:
        engine.close()


class Again:
    """In place of a CUDA graph where there is none: computes again into the same tensor, from what
    is in others. Capturing launches no kernel.
    """

    def __init__(self, compute):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GridExecutor, "__call__", lambda *arguments, **constants: None)
            self.compute, self.logits = compute, compute()

    def replay(self):
        self.logits.copy_(self.compute())


@pytest.fixture
def with_graphs(device, monkeypatch):
    """`device`, whose decoding steps run as graphs without a GPU, too."""

    def make(**settings):
        engine = device(**settings)
        if not GPU:
            engine.core.runner.graphs.sizes = graph_sizes(settings["max_running"])
            engine.core.runner.prompts.max_tokens = settings.get("step_tokens", 0)
        return engine

    if not GPU:
        monkeypatch.setattr(
            CudaGraphs,
            "capture_function",
            lambda self, compute: (graph := Again(compute), graph.logits),
        )
    return make


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", ["triton"], indirect=True)
@pytest.mark.parametrize("most", [3, 40])
def test_captured_steps_of_rows_with_one_token_and_with_several(with_graphs, on_cpu, most):
    engine = with_graphs(max_running=most, page_size=4)
    first = prompts(2, own=12)
    asked = [prompt + more for prompt in first for more in ([7], [11, 12, 13, 14, 15])]
    for batch in (first, asked):  # what is new of the second are a few tokens each
        expected = [g.token_ids for g in answers(on_cpu, batch, greedy(max_tokens=3))]
        assert [g.token_ids for g in answers(engine, batch, greedy(max_tokens=3))] == expected
    words = [
        g.text for g in answers(on_cpu, first, greedy(max_tokens=7), Regex("[abc]defg[ij]k[a-z]*"))
    ]
    forced = answers(engine, first, greedy(max_tokens=7), Regex("[abc]defg[ij]k[a-z]*"))
    assert [g.text for g in forced] == words
    kinds = {key[1] for key in engine.core.runner.graphs.captured}
    assert kinds == {False, True}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["triton"], indirect=True)
def test_a_step_in_which_every_row_appends_is_a_captured_one(with_graphs, on_cpu):
    engine = with_graphs(max_running=4, page_size=4)
    first = prompts(4, own=12)
    asked = [[*prompt, 7, 11, 12] for prompt in first]
    for batch in (first, asked):
        expected = [g.token_ids for g in answers(on_cpu, batch, greedy(max_tokens=3))]
        assert [g.token_ids for g in answers(engine, batch, greedy(max_tokens=3))] == expected
    assert (12, True, False, False) in engine.core.runner.graphs.captured


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["triton"], indirect=True)
def test_two_short_prompts_are_one_captured_step(with_graphs, on_cpu):
    engine = with_graphs(max_running=20, page_size=4)
    asked = [[*range(2, 27)], [*range(30, 40)]]
    expected = [g.token_ids for g in answers(on_cpu, asked, greedy(max_tokens=3))]
    engine.core.submit_call(PauseGeneration("in_place")).result()  # until both have arrived
    futures = [Future() for _ in asked]
    for prompt, future in zip(asked, futures):
        engine.submit(prompt, greedy(max_tokens=3), sink=future.set_result)
    engine.core.submit_call(ContinueGeneration()).result()
    assert [future.result(timeout=120).token_ids for future in futures] == expected
    assert (40, True, False, False) in engine.core.runner.graphs.captured
    scored = answers(
        engine, [[*range(41, 60)]], greedy(max_tokens=1, return_logprob=True, logprob_start_len=0)
    )  # by no graph
    assert len(scored[0].prompt_logprobs) == 18


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["triton"], indirect=True)
def test_a_step_that_reads_prompts_is_a_captured_one(with_graphs, on_cpu):
    engine = with_graphs(max_running=4, page_size=4, step_tokens=120)
    asked = [[*range(2, 72)], [*range(60, 90)], [*range(3, 93), *range(2, 22)], [5, 6, 7]]
    expected = [g.token_ids for g in answers(on_cpu, asked, greedy(max_tokens=3))]
    assert [g.token_ids for g in answers(engine, asked, greedy(max_tokens=3))] == expected
    # none is decoded, some are
    assert {*engine.core.runner.prompts.captured} == {(0, 128, False), (4, 128, False)}
    behind = [[*asked[0], *range(10, 80)]]  # tokens that are cached
    scored = greedy(max_tokens=2, return_logprob=True, logprob_start_len=72)
    (found,), (wanted,) = answers(engine, behind, scored), answers(on_cpu, behind, scored)
    assert found.token_ids == wanted.token_ids
    assert [p.logprob for p in found.prompt_logprobs] == pytest.approx(
        [p.logprob for p in wanted.prompt_logprobs], abs=1e-3
    )
    assert len(engine.core.runner.prompts.captured) == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["triton"], indirect=True)
def test_a_captured_prompt_reads_what_is_before_it_once(with_graphs, on_cpu, monkeypatch):
    monkeypatch.setattr(shared, "MIN_SAVED_TOKENS", 1)
    engine = with_graphs(max_running=20, page_size=4)
    asked = [[*range(2, 23)], [*range(2, 23), *range(40, 58)]]
    # the second, of which 18 tokens are new, beside a row that decodes behind the same tokens
    for prompt in asked:
        expected = [
            g.token_ids for g in answers(on_cpu, [prompt, prompt[:-1]], greedy(max_tokens=3))
        ]
        assert [
            g.token_ids for g in answers(engine, [prompt, prompt[:-1]], greedy(max_tokens=3))
        ] == expected
    assert {key[1:3] for key in engine.core.runner.graphs.captured} >= {(True, True), (False, True)}


def prompts(count, *, shared=0, own=20, seed=0):
    rng = random.Random(seed)
    prefix = [rng.randrange(2, VOCAB) for _ in range(shared)]
    return [
        prefix + [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, own))] for _ in range(count)
    ]


def answers(engine, asked, params, constraint=None):
    futures = [Future() for _ in asked]
    for prompt, future in zip(asked, futures):
        engine.submit(prompt, params, constraint, sink=future.set_result)
    return [future.result(timeout=120) for future in futures]


def greedy(**more):
    return SamplingParams(**{"temperature": 0, "max_tokens": 4, "ignore_eos": True, **more})


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 4, "max_running": 3, "step_tokens": 16},
        {"page_size": 16, "max_running": 5, "overlap": False},
        {"page_size": 1, "max_running": 4, "prefix_cache": False},
        {
            "page_size": 4,
            "max_running": 4,
            "max_total_tokens": 64,
            "context_length": 60,
            "step_tokens": 9,
        },
    ],
    ids=str,
)
def test_the_same_tokens_whatever_the_schedule(device, on_cpu, settings):
    asked = prompts(5)
    expected = [g.token_ids for g in answers(on_cpu, asked, greedy(max_tokens=3))]
    assert [
        g.token_ids for g in answers(device(**settings), asked, greedy(max_tokens=3))
    ] == expected


@pytest.mark.filterwarnings("ignore")  # flash-attn-4 calls what its own base is about to drop
@pytest.mark.parametrize("package", PACKAGES)
def test_packages_give_the_probabilities_of_our_kernels(package, tmp_path):
    skip_without(package)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
        pad_token_id=None,
    )  # fmt: skip
    settings: dict[str, Any] = {
        "model": str(save(randomise(Qwen3ForCausalLM(config)), tmp_path)),
        "dtype": "float16",
        "step_tokens": 150,
        "max_total_tokens": 4096,  # they share the GPU
    }
    asked = [*prompts(4, own=200), *prompts(3, shared=40)]
    with (
        sgl.Engine(**settings, attention_backend="triton", in_process=True) as ours,
        sgl.Engine(**settings, attention_backend=package, in_process=True) as theirs,
    ):
        params = greedy(return_logprob=True, top_logprobs_num=5)
        for our, their in zip(answers(ours, asked, params), answers(theirs, asked, params)):
            for a, b in zip(our.output_logprobs, their.output_logprobs):
                assert abs(a.top[0][0] - b.top[0][0]) < 0.02
                if a.token_id != b.token_id:  # they were as good
                    assert a.top[0][0] - {i: value for value, i, _ in a.top}[b.token_id] < 0.02
                    break


@pytest.mark.parametrize("device", ["triton"], indirect=True)
def test_rows_that_share_a_prefix_read_it_together(device, on_cpu, monkeypatch):
    monkeypatch.setattr(shared, "MIN_SAVED_TOKENS", 1)
    found = []
    plain = shared.find_groups
    monkeypatch.setattr(shared, "find_groups", lambda *a: found.append(plain(*a)) or found[-1])
    asked = [*prompts(4, shared=40, own=6), *prompts(2, own=9, seed=5)]
    expected = [g.token_ids for g in answers(on_cpu, asked, greedy(max_tokens=3))]
    engine = device(page_size=4, max_running=8)
    assert [g.token_ids for g in answers(engine, asked, greedy(max_tokens=3))] == expected
    assert max(len(group.rows) for groups in found for group in groups) == 4


@pytest.mark.sampled(4)
def test_log_probabilities_of_a_draw_are_those_of_the_cpu(device, on_cpu):
    """Draws differ, but not what they are drawn from."""
    params = SamplingParams(
        temperature=0.6,
        max_tokens=1,
        return_logprob=True,
        top_logprobs_num=8,
        logit_bias=((7, 2.0),),
        ignore_eos=True,
    )
    engine = device(page_size=4, max_running=4)
    for constraint in (None, Regex("[a-f]{1,3}")):
        for prompt in prompts(2):
            ours, theirs = (
                each.complete(prompt, params, constraint).output_logprobs[0]
                for each in (engine, on_cpu)
            )
            likely = [[(v, i) for v, i, _ in each.top if v > -1e30] for each in (ours, theirs)]
            # of what is ruled out none comes first
            assert [i for _, i in likely[0]] == [i for _, i in likely[1]]
            assert [v for v, _ in likely[0]] == pytest.approx([v for v, _ in likely[1]], abs=1e-4)


@pytest.mark.sampled(4)
def test_log_probabilities_penalties_and_biases(device, on_cpu):
    params = greedy(
        return_logprob=True, top_logprobs_num=3, logprob_start_len=0, frequency_penalty=0.4, repetition_penalty=1.2,
        logit_bias=((7, 2.0),), min_tokens=3, ignore_eos=False,
    )  # fmt: skip
    asked = prompts(3)
    engine = device(page_size=4, max_running=4)
    for ours, theirs in zip(answers(engine, asked, params), answers(on_cpu, asked, params)):
        assert ours.token_ids == theirs.token_ids
        for a, b in zip(
            (*ours.prompt_logprobs, *ours.output_logprobs),
            (*theirs.prompt_logprobs, *theirs.output_logprobs),
        ):
            assert (a.logprob is None) == (b.logprob is None)
            assert a.logprob is None or abs(a.logprob - b.logprob) < 1e-4
            assert [i for _, i, _ in a.top] == [i for _, i, _ in b.top]


@pytest.mark.sampled(4)
def test_scores_of_tokens_are_those_of_the_cpu(device, on_cpu):
    """Alone and beside others, of the model as it is: penalties and log-probabilities don't change
    them.
    """
    engine = device(page_size=4, max_running=4)
    asked = prompts(some(1, 3))
    for params in (
        greedy(confidence=True, max_tokens=6),
        greedy(
            confidence=True,
            return_logprob=True,
            repetition_penalty=1.3,
            logit_bias=((7, 2.0),),
            max_tokens=6,
        ),
    ):
        for constraint in (None, Regex("[a-f]{1,3}")):
            for prompt in asked:
                ours, theirs = (
                    each.complete(prompt, params, constraint) for each in (engine, on_cpu)
                )
                assert ours.token_ids == theirs.token_ids
                assert ours.scores.logprobs == pytest.approx(theirs.scores.logprobs, abs=1e-4)
                assert ours.scores.allowed == pytest.approx(theirs.scores.allowed, abs=1e-4)
                assert ours.scores.ends == theirs.scores.ends


class Operators(TorchDispatchMode):
    """Notes operators that run, each with the formats of what it computes with."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "_to_copy" not in str(func) or result.dtype != args[0].dtype:  # else no kernel runs
            self.seen.add(
                (
                    func,
                    *(each.dtype for each in tree_leaves(args) if isinstance(each, torch.Tensor)),
                )
            )
        return result

    def noting(self, function):
        def inner(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return inner


@pytest.mark.parametrize("device", ["triton"], indirect=True)
def test_warming_up_runs_every_operator_that_requests_do(device, tmp_path, monkeypatch):
    warm, asked = Operators(), Operators()

    def make(*args):
        runner = make_runner(*args)
        warm.noting(runner.warm_up)()
        return runner

    monkeypatch.setattr("sglang_lite.runtime.core.engine_core.make_runner", make)
    one_layer = str(saved(tmp_path, layers=1))
    engine = device(model=one_layer, page_size=4, max_running=1, step_tokens=24, context_length=24)
    runner = engine.core.runner
    for owner, name in (
        (runner, "forward"),
        (runner, "sample"),
        (GpuPendingTokens, "wait_for_tokens"),
    ):
        monkeypatch.setattr(owner, name, asked.noting(getattr(owner, name)))
    everything = SamplingParams(
        max_tokens=2, temperature=0.7, return_logprob=True, top_logprobs_num=3, token_ids_logprob=(5,),
        logprob_start_len=0, frequency_penalty=0.4, repetition_penalty=1.2, logit_bias=((7, 2.0),), min_tokens=2,
    )  # fmt: skip
    prompt = [*range(2, 20)]
    engine.complete(prompt, greedy(max_tokens=2))
    engine.complete(prompt, everything)
    engine.complete(prompt, everything, Regex("[a-f]{1,3}"))
    assert len(asked.seen) > 30
    # no kernel
    late = asked.seen - warm.seen - {(torch.ops.aten.copy_.default, torch.int32, torch.int32)}
    assert not late


@pytest.mark.sampled(4)
def test_constraints_hold(device, on_cpu):
    constraint, params = Regex("[a-c]{4}-[0-9]{2}"), greedy(max_tokens=20, ignore_eos=False)
    asked = prompts(3)
    expected = [g.text for g in answers(on_cpu, asked, params, constraint)]
    assert [
        g.text for g in answers(device(page_size=4, max_running=4), asked, params, constraint)
    ] == expected


class Half:
    """Drafter that knows the answers, by prompt, and is right with two of three tokens."""

    name = "prompt"

    def __init__(self, known):
        self.known, self.dice = known, random.Random(3)

    def can_draft(self, request):
        return True

    def make_guesser(self, request, known, chance):
        answer = self.known[tuple(known[: request.prompt_len].tolist())]
        start, seen = len(known) - request.prompt_len, min(len(known), TAIL)

        def guess(text, state):
            at = start + len(text) - seen
            right = at < len(answer) and self.dice.random() < 2 / 3
            return Guess(answer[at] if right else self.dice.randrange(2, VOCAB), 0)

        return guess

    def learn_tokens(self, request, text, start):
        pass


@pytest.mark.sampled(6)
@pytest.mark.parametrize("device", ["triton"], indirect=True)
@pytest.mark.parametrize(("more", "constraint"), [
    ({"temperature": 0.9, "seed": 5}, None), ({"temperature": 0.9, "seed": 5}, Regex("[abc]defg[ij]k[a-z]{9}")),
    ({"frequency_penalty": 0.7, "repetition_penalty": 1.2, "min_tokens": 9}, None),
    ({"return_logprob": True, "top_logprobs_num": 2}, Regex("[abc]defg[ij]k[a-z]{9}")),
    ({"confidence": True, "temperature": 0.7, "seed": 2}, None),
], ids=str)  # fmt: skip
def test_drafts_change_nothing(with_graphs, more, constraint, monkeypatch):
    asked, params = prompts(2, own=9), greedy(max_tokens=9, **more)
    settings = {"max_running": 4, "page_size": 4}
    expected = answers(with_graphs(**settings), asked, params, constraint)
    known = {tuple(prompt): each.token_ids for prompt, each in zip(asked, expected)}
    monkeypatch.setitem(DRAFTERS, "prompt", lambda _: Half(known))
    engine = with_graphs(**settings, speculation="prompt", draft_tokens=4)
    engine.core.scheduler.drafts.drafting.cost = FreeDrafts()
    for found, one in zip(answers(engine, asked, params, constraint), expected):
        assert (found.token_ids, found.finish_reason) == (one.token_ids, one.finish_reason)
        for a, b in zip(found.output_logprobs or (), one.output_logprobs or (), strict=True):
            assert a.token_id == b.token_id
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        if one.scores is not None:
            assert found.scores.logprobs == pytest.approx(one.scores.logprobs, abs=1e-4)
    assert engine.core.scheduler.drafts.drafting.counts["prompt"].accepted > 1
    assert any(key[1] for key in engine.core.runner.graphs.captured)


@pytest.mark.sampled(4)
def test_draws_depend_on_seed_and_position_alone(device):
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=2, seed=3, ignore_eos=True)
    asked = prompts(3, own=8)
    alone = [
        answers(device(page_size=4, max_running=4), [p], params)[0].token_ids for p in asked[:2]
    ]
    together = [g.token_ids for g in answers(device(page_size=4, max_running=5), asked, params)]
    assert together[:2] == alone


@pytest.mark.parametrize("device", ["torch"], indirect=True)
def test_a_draw_does_not_depend_on_a_neighbours_filters(device):
    first, other = prompts(2)
    engine = device(page_size=4, max_running=4, prefix_cache=False)

    def drawn(**filters):
        futures = [Future(), Future()]
        for prompt, future, own in zip((first, other), futures, ({}, filters)):
            params = SamplingParams(temperature=1.0, max_tokens=4, seed=3, ignore_eos=True, **own)
            engine.submit(prompt, params, sink=future.set_result)
        return [future.result(timeout=120).token_ids for future in futures]

    (alone, neighbour), (beside, filtered) = drawn(), drawn(top_k=1, top_p=0.1, min_p=0.9)
    assert beside == alone
    assert filtered != neighbour


@pytest.mark.sampled(4)
def test_a_fork_in_a_page_copies_it(device, on_cpu):
    (first,) = prompts(1, own=1, shared=32)
    second = [*first[:22], 5, 6, 7]
    engine = device(page_size=16, max_running=4)
    answers(engine, [first], greedy())
    (generation,) = answers(engine, [second], greedy())
    assert generation.usage.cached_tokens > 16
    assert generation.token_ids == answers(on_cpu, [second], greedy())[0].token_ids


@pytest.mark.sampled(4)
# the interpreter computes with numpy
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_logits_that_are_no_numbers_fail_their_request_alone(device, monkeypatch):
    """A prompt that contains token 95 gives NaN."""
    engine = device(page_size=4, max_running=4)
    model = engine.core.runner.model
    with torch.inference_mode():
        model.embedding[95] = float("nan")
    good, bad = [[5, 6, 7, 8], [9, 10, 11]], [12, 95, 13]
    expected = [g.token_ids for g in answers(engine, good, greedy(logit_bias=((95, -100.0),)))]
    engine.flush_cache()
    first, broken, second = answers(
        engine, [good[0], bad, good[1]], greedy(logit_bias=((95, -100.0),))
    )
    assert isinstance(broken, ModelError)
    assert "NaN or infinite" in str(broken)
    assert isinstance(first, Generation)
    assert [first.token_ids, second.token_ids] == expected


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize(
    "settings",
    [
        {"kv_dtype": "fp8"},
        {"quantization": "fp8"},
        {"quantization": "int8"},
        {"quantization": "fp8", "kv_dtype": "fp8"},
    ],
    ids=str,
)
def test_eight_bits_stay_near(device, settings):
    """Log-probabilities of the same tokens, alone, in few rows and in many."""
    params = SamplingParams(
        max_tokens=1, temperature=0, ignore_eos=True, return_logprob=True, logprob_start_len=1
    )
    asked = [(p * 20)[:48] for p in prompts(40)]
    with sgl.Engine(
        model=device.folder, dtype="bfloat16", max_total_tokens=8000, **DEVICE, in_process=True
    ) as exact:
        expected = answers(exact, asked, params)
    engine = device(dtype="bfloat16", max_total_tokens=8000, **settings)
    for part in (asked[:1], asked[:7], asked):
        engine.flush_cache()
        gaps = [
            abs(a.logprob - b.logprob)
            for ours, theirs in zip(answers(engine, part, params), expected)
            for a, b in zip(ours.prompt_logprobs, theirs.prompt_logprobs)
        ]
        assert sum(gaps) / len(gaps) < 0.3


@pytest.mark.sampled(4)
def test_programs_play(device, on_cpu):
    @sgl.function
    def program(s):
        s += "ab"
        s += sgl.gen("x", max_tokens=3, temperature=0, ignore_eos=True)
        s += sgl.select("y", ["cd", "ce", "f"])
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += f"g{i}"
            fork += sgl.gen("z", max_tokens=3, temperature=0, ignore_eos=True)
        s += forks[0]["z"] + forks[1]["z"]

    texts = [
        program.run(backend=engine).text()
        for engine in (on_cpu, device(page_size=4, max_running=4))
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("device", ["auto"], indirect=True)
def test_heads_that_the_kernels_have_no_room_for_take_torch(device, tmp_path, caplog):
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=264, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
        pad_token_id=None,
    )  # fmt: skip
    reference = randomise(Qwen3ForCausalLM(config))
    wide = str(save(reference, tmp_path))
    with pytest.raises(
        sgl.ParameterError,
        match=r"'triton' can't run this model: the head size 264 .* can: 'torch'",
    ):
        device(model=wide, attention_backend="triton")
    assert not caplog.records
    for prompt, generation in zip(prompts(3), answers(device(model=wide), prompts(3), greedy())):
        with torch.no_grad():
            best = reference(torch.tensor([[*prompt, *generation.token_ids]])).logits[0].argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == list(generation.token_ids)
    (record,) = caplog.records
    assert "Using 'torch', which is slower" in record.getMessage()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:99"}, "device"),
        ({"mem_fraction": 1.5}, "mem_fraction"),
        ({"mem_fraction": True}, "mem_fraction"),
        ({"device": "cpu", "quantization": "fp8"}, "quantization"),
        ({"device": "cpu", "kv_dtype": "fp8"}, "kv_dtype"),
        ({"quantization": "fp4"}, "quantization"),
        (
            {"attention_backend": "xformers"},
            "attention_backend: 'xformers' is not one of auto, triton, torch, flash",
        ),
        ({"attention_backend": []}, "attention_backend"),
    ],
)
def test_a_device_that_is_not_there_is_refused(folder, settings, message):
    with pytest.raises(sgl.ParameterError, match=message):
        sgl.Engine(model=str(folder), **settings, in_process=True)
