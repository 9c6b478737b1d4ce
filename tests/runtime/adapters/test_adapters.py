"""Requests with adapters, however they are scheduled, get the tokens of an engine that has only
theirs.
"""

import itertools
import os
import random
import shutil

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.calls import UnloadLoraAdapter
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.adapters_part import AdaptersPart
from sglang_lite.runtime.loading.load_model import load_model
from sglang_lite.runtime.models.lora.check import check_adapters
from sglang_lite.runtime.scheduler.admission_order import AGE_BOUND
from tests.runtime.models.test_lora import adapted
from tests.runtime.models.tiny import VOCAB
from tests.runtime.scripted import SteppedEngine, ended

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # that peft reads
NAMES = ["one", "two", "three", "four"]
LATE = ["late", "later"]  # from token 3 on
# actions of each schedule: CONTRIBUTING.md
ROUNDS = int(os.environ.get("SGLANG_LITE_ADAPTERS", "40"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(loaded model, folders of its adapters by name)"""
    late = {"r": 8, "alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"}
    adapters = {name: {"r": rank} for name, rank in zip(NAMES, (4, 8, 12, 4))} | dict.fromkeys(
        LATE, late
    )
    base, reference = adapted("llama-2", tmp_path_factory.mktemp("llama"), adapters)
    return load_model(EngineConfig(str(base), dtype="float32"), base, iter), reference.folders


def adapters_of(engine):
    (adapters,) = [each.adapters for each in engine.core.parts if isinstance(each, AdaptersPart)]
    return adapters


class AdaptedEngine(SteppedEngine):
    """A small stepped engine whose adapters are counted anew after every step."""

    def __init__(self, **config):
        super().__init__(
            **{"max_total_tokens": 128, "max_running": 4, "max_lora_rank": 16} | config
        )

    def check(self):
        super().check()
        adapters = adapters_of(self)
        running = self.scheduler.queues.running()
        check_adapters(
            adapters.loaded,
            adapters.pool,
            [
                (r.space.adapter, int(self.scheduler.store.table.columns["adapter"][r.slot]))
                for r in running
                if r.space.adapter
            ],
            self.core.config.max_loaded_loras,
        )


def params(name, most=8, **more):
    return SamplingParams(
        max_tokens=most,
        temperature=0,
        ignore_eos=True,
        lora_path=() if name is None else (name,),
        **more,
    )


class Alone:
    """The tokens that an engine gives which has one adapter, or none, and one request at a time."""

    def __init__(self, model):
        self._model, self._engines, self._known = model, {}, {}

    def __call__(self, folder, prompt, most):
        key = folder, tuple(prompt), most
        if folder not in self._engines:
            paths = {} if folder is None else {"it": str(folder)}
            self._engines[folder] = AdaptedEngine(
                model=self._model, enable_lora=True, lora_paths=paths, max_total_tokens=256
            )
        if key not in self._known:
            engine = self._engines[folder]
            _, events = engine.start(prompt, params(None if folder is None else "it", most))
            engine.drain()
            self._known[key] = list(ended(events).token_ids)
        return self._known[key]


@pytest.fixture(scope="module")
def alone(llama):
    return Alone(llama[0])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["lpm", "fcfs", "priority"])
def test_random_schedules_with_loads_and_unloads_between(llama, alone, overlap, policy):
    model, folders = llama
    draw = random.Random(f"{overlap} {policy}")
    engine = AdaptedEngine(
        model=model, enable_lora=True, max_loras_per_batch=2, max_loaded_loras=3, max_running=5, overlap=overlap,
        policy=policy, max_total_tokens=160, step_tokens=16, context_length=64, retract_every=5, page_size=4,
    )  # fmt: skip
    stems = [[draw.randrange(1, VOCAB) for _ in range(20)] for _ in range(2)]
    named: dict = {}  # folder by name
    asked: list = []  # events, folder, prompt, samples
    leaving: list = []  # unloads
    for _ in range(ROUNDS):
        kind = draw.random()
        if kind < 0.25 and len(named) < 4:
            name = draw.choice([each for each in NAMES if each not in named])
            named[name] = folders[
                draw.choice([*NAMES, *LATE])
            ]  # under any name: what is loaded again may be another one
            engine.load_lora_adapter(name, named[name])
        elif kind < 0.35 and named:
            name = draw.choice(sorted(named))
            del named[name]
            leaving.append(engine.core.submit_call(UnloadLoraAdapter(name)))
        elif kind < 0.8:
            chosen = draw.choice([None, *sorted(named)])
            invoked = [3] * draw.randrange(2)
            prompt = [
                *draw.choice(stems)[: draw.randrange(1, 20)],
                *invoked,
                draw.randrange(1, VOCAB),
            ]
            n = draw.choice([1, 1, 3])
            _, events = engine.start(prompt, params(chosen, 6, n=n))
            asked.append((events, named.get(chosen), prompt, n))
        else:
            for _ in range(draw.randrange(1, 6)):
                engine.step()
    engine.drain()
    assert all(each.done() for each in leaving)
    for events, folder, prompt, n in asked:
        results = [each for each in events if isinstance(each, sgl.protocol.Generation)]
        assert len(results) == n
        for result in results:
            assert list(result.token_ids) == alone(folder, prompt, 6)
    engine.check_empty()


def test_a_request_finds_the_prefixes_of_its_own_adapter_only(llama):
    model, folders = llama
    engine = AdaptedEngine(
        model=model, lora_paths={name: str(folders[name]) for name in ("one", "two")}
    )
    prompt = list(range(1, 20))
    cached = []
    for name, namespace in itertools.product(["one", "two", None], ["", "salt", f"\0{'a' * 32}:"]):
        for _ in range(2):
            _, events = engine.start(prompt, params(name), namespace=namespace)
            engine.drain()
            cached.append(ended(events).usage.cached_tokens)
    assert cached == [0, 18] * 9
    engine.core.submit_call(UnloadLoraAdapter("one"))
    engine.drain()
    engine.load_lora_adapter("one", folders["three"])
    _, events = engine.start(prompt, params("one"))
    engine.drain()
    assert ended(events).usage.cached_tokens == 0


def test_late_adapters_and_the_model_find_what_they_share(llama, alone):
    model, folders = llama
    names = [None, *LATE]
    engine = AdaptedEngine(
        model=model, lora_paths={name: str(folders[name]) for name in LATE}, page_size=4
    )
    document, cached = list(range(10, 31)), []
    for prompt in ([*document, 3, 5, 6, 7, 8, 9], [*document, 3, 5, 6, 7, 8, 9, 3, 5]):
        for name in [*names, *names]:
            _, events = engine.start(prompt, params(name))
            engine.drain()
            cached.append(ended(events).usage.cached_tokens)
            assert list(ended(events).token_ids) == alone(folders.get(name), prompt, 8)
    first = [0, 21, 21, 26, 26, 26]  # what all share, then all but the last token
    second = [27, 27, 27, 28, 27, 27]  # one token would not prove which adapter has computed it
    assert cached == [*first, *second]


def test_a_program_of_late_adapters_computes_its_document_once(llama):
    model, folders = llama
    engine = AdaptedEngine(
        model=model, lora_paths={name: str(folders[name]) for name in LATE}, max_total_tokens=2048, page_size=4,
        max_loras_per_batch=3,
    )  # fmt: skip
    document = [4 + i % 20 for i in range(200)]

    def computed(names):
        before = (
            engine.scheduler.admission.prompt_tokens
            - engine.scheduler.admission.prompt_tokens_cached
        )
        asked = [engine.start([*document, 3, 5], params(name))[1] for name in names]
        engine.drain()
        assert all(map(ended, asked))
        after = (
            engine.scheduler.admission.prompt_tokens
            - engine.scheduler.admission.prompt_tokens_cached
        )
        engine.scheduler.end_pauses_and_flush()
        return after - before

    assert computed([*LATE, None, *LATE]) <= 1.05 * computed(["late"])


def test_requests_of_resident_adapters_go_first_and_no_other_starves(llama):
    model, folders = llama
    engine = AdaptedEngine(
        model=model, lora_paths={name: str(folders[name]) for name in ("one", "two")}, max_loras_per_batch=1, max_lora_rank=16,
        max_running=2, max_total_tokens=128,
    )  # fmt: skip
    prompt = [1, 2, 3]
    _, first = engine.start(prompt, params("one", 20))
    engine.step()
    _, other = engine.start(prompt, params("two", 2))
    _, later = engine.start(prompt, params("one", 2))
    while not later:
        engine.step()
    assert not other  # which came before
    (waiting,) = engine.scheduler.queues.waiting
    waiting.passed_over = AGE_BOUND
    _, last = engine.start(prompt, params("one", 2))
    engine.drain()
    assert [len(each) for each in (first, other, later, last)] == [1] * 4
    order = [engine.built[i].admission for i in (1, 3)]
    # the aged request came before the last one of the resident adapter
    assert order == sorted(order)


def test_more_adapters_than_slots_wait_and_none_fails(llama, alone):
    model, folders = llama
    engine = AdaptedEngine(
        model=model,
        lora_paths={name: str(folders[name]) for name in NAMES},
        max_loras_per_batch=1,
        max_running=8,
    )
    asked = [
        (engine.start([5, 6, each], params(name))[1], folders[name], [5, 6, each])
        for each in (1, 2)
        for name in NAMES
    ]
    engine.drain()
    for events, folder, prompt in asked:
        assert list(ended(events).token_ids) == alone(folder, prompt, 8)
    assert adapters_of(engine).pool.writes >= 4


@pytest.mark.parametrize(("policy", "left"), [("lru", ["one", "four"]), ("fifo", ["two", "four"])])
def test_the_adapter_that_gives_way_is_the_one_used_or_loaded_longest_ago(
    policy, left, llama, alone
):
    model, folders = llama
    engine = AdaptedEngine(
        model=model, lora_paths={name: str(folders[name]) for name in ("one", "two", "four")}, max_loras_per_batch=2,
        max_lora_rank=8, lora_eviction_policy=policy,
    )  # fmt: skip
    for name in ["one", "two", "one", "four"]:
        _, events = engine.start([5, 6, 7], params(name))
        engine.drain()
        assert list(ended(events).token_ids) == alone(folders[name], [5, 6, 7], 8)
    assert [each["lora_name"] for each in adapters_of(engine).list() if each["resident"]] == sorted(
        left
    )


def test_adapters_of_small_ranks_leave_their_pages_to_others(llama, alone):
    model, folders = llama
    engine = AdaptedEngine(
        model=model,
        lora_paths={name: str(folders[name]) for name in NAMES},
        max_loras_per_batch=1,
        max_lora_rank=24,
    )
    # ranks of 8, 8, 16 and 8: three pages have two of the first three
    for name in [*NAMES, *NAMES[::-1]]:
        _, events = engine.start([5, 6, 7], params(name))
        engine.drain()
        assert list(ended(events).token_ids) == alone(folders[name], [5, 6, 7], 8)
    assert sorted(map(len, adapters_of(engine).pool.pages.values())) == [1, 1]
    assert adapters_of(engine).pool.writes == 6  # the third and the fourth were still there


def test_an_unload_waits_for_running_requests_and_ends_nobody(llama, alone):
    model, folders = llama
    engine = AdaptedEngine(model=model, lora_paths={"one": str(folders["one"])})
    _, events = engine.start([5, 6], params("one", 12))
    engine.step()
    unloading = engine.core.submit_call(UnloadLoraAdapter("one"))
    engine.step()
    assert not unloading.done()
    with pytest.raises(sgl.ParameterError, match="there is no adapter 'one'"):
        engine.start([5, 6], params("one"))
    engine.drain()
    assert unloading.done()
    assert list(ended(events).token_ids) == alone(folders["one"], [5, 6], 12)
    assert adapters_of(engine).list() == []


def test_an_old_request_waits_while_pinned_adapters_have_all_slots(llama, alone):
    """One is unloaded while a request still uses it, so two adapters in use are pinned, and no
    adapter can give way.
    """
    model, folders = llama
    engine = AdaptedEngine(model=model, enable_lora=True, max_loras_per_batch=2)
    asked = []

    def start(name):
        asked.append((engine.start([5, 6], params(name, 12))[1], folders[name]))
        engine.step()

    engine.load_lora_adapter("one", folders["one"], pinned=True)
    start("one")
    leaving = engine.core.submit_call(UnloadLoraAdapter("one"))
    engine.load_lora_adapter("two", folders["two"], pinned=True)
    start("two")
    engine.load_lora_adapter("three", folders["three"])
    start("three")
    (waiting,) = engine.scheduler.queues.waiting
    waiting.passed_over = AGE_BOUND
    engine.drain()
    assert leaving.done()
    for events, folder in asked:
        assert list(ended(events).token_ids) == alone(folder, [5, 6], 12)
    engine.check_empty()


def test_a_request_whose_adapter_fails_unexpectedly_says_so(llama, monkeypatch):
    model, folders = llama
    engine = AdaptedEngine(model=model, lora_paths={"one": str(folders["one"])})

    def broken(name):
        raise OSError("the disk is gone")

    monkeypatch.setattr(engine.core.builder, "adapters", broken)
    monkeypatch.setattr(engine.core.builder, "adapter_at_hand", lambda name: False)
    _, events = engine.start([5, 6], params("one"))
    engine.drain()
    with pytest.raises(sgl.BackendError, match=r"the adapter can't be read: OSError\('the disk"):
        raise ended(events)
    engine.check_empty()


def test_an_adapter_that_gave_way_is_read_again(llama, alone, tmp_path):
    model, folders = llama
    copies = {name: shutil.copytree(folders[name], tmp_path / name) for name in NAMES}
    engine = AdaptedEngine(
        model=model,
        lora_paths={name: str(copies[name]) for name in NAMES},
        max_loras_per_batch=2,
        max_loaded_loras=2,
    )
    for name in [*NAMES, *NAMES]:
        _, events = engine.start([7, 8], params(name))
        engine.drain()
        assert list(ended(events).token_ids) == alone(folders[name], [7, 8], 8)
    shutil.rmtree(copies["one"])
    _, events = engine.start([7, 8], params("one"))
    engine.drain()
    (failure,) = events
    assert isinstance(failure, sgl.ModelError)
    assert "one/adapter_model.safetensors: can't be read: " in str(failure)
