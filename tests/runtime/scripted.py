"""A model whose exact answer is known, and an engine around it that is stepped by hand.

The KV cache holds the token ids themselves, and a token's logits are a function of all ids before
it as they stand in the cache. So whatever a scheduler does wrong (a page reused too early, a wrong
position, a lost copy) changes the text.
"""

from __future__ import annotations

import random
from concurrent.futures import Executor, Future
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from sglang_lite import Engine
from sglang_lite.protocol import Delta, Generation, SamplingParams, SglError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.core.engine_core import EngineCore
from sglang_lite.runtime.core.engine_parts import make_parts
from sglang_lite.runtime.drafting.drafting import TAIL, StepCost
from sglang_lite.runtime.drafting.guess import Guess
from sglang_lite.runtime.drafting.registry import DRAFTERS
from sglang_lite.runtime.kernels.kv_cache import KVCache, LayerStates
from sglang_lite.runtime.kernels.race import draw_exponentials
from sglang_lite.runtime.kernels.reference.kv_copy import copy_kv
from sglang_lite.runtime.kv_cache.check import check_cache
from sglang_lite.runtime.kv_cache.tiers import Tiers
from sglang_lite.runtime.loading.load_model import LoadedModel
from sglang_lite.runtime.tokens.tokenizer import Tokenizer

EOS = 0
LETTERS = "\x00abcdefghijklmnopqrstuvwxyz ,.?"
VOCAB = len(LETTERS)
CHAT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
_POWERS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, 4097, dtype=np.uint64)
STEP_S, TOKEN_S = 0.002, 0.0001  # simulated times of a step, and of each of its tokens
_TOKENS = np.arange(1, VOCAB + 1, dtype=np.uint64)


def hashes(tokens):
    """A number for each prefix of `tokens`."""
    with np.errstate(over="ignore"):
        return np.cumsum(
            (np.asarray(tokens).astype(np.uint64) + np.uint64(1)) * _POWERS[: len(tokens)]
        )


def logits_of(states):
    """float32 [R, VOCAB] of prefix numbers [R]; the end of sequence is rather unlikely."""
    with np.errstate(over="ignore"):
        mixed = (np.asarray(states, dtype=np.uint64)[:, None] ^ np.uint64(0x5DEECE66D)) * (
            _TOKENS * np.uint64(2) + 1
        )
    logits = ((mixed >> np.uint64(40)) % np.uint64(1009)).astype(np.float32) / 200
    logits[:, EOS] -= 2
    return logits


class ScriptedModel:
    fused = False
    device = torch.device("cpu")
    spec, format, batch_sensitive, token_bytes = None, "float32", False, 0
    window: int | None = None
    window_bytes = 0
    state_bytes = 0

    def allocate_cache(self, slots, window_slots=0, states=0):
        tokens = torch.full((1, slots, 1), -1, dtype=torch.int64)
        return KVCache((tokens,), (tokens,))

    def copy_slots(self, cache, source, target):
        copy_kv(cache, source, target)

    def forward(self, ids, positions, plan, cache):
        cache = cache.k[0].view(-1)
        cache[plan.store_at] = ids
        states = np.zeros(len(ids), dtype=np.uint64)
        for group in plan.decode:
            tokens = np.arange(len(ids))[group.tokens].tolist()
            for i, length, read_at in zip(tokens, group.rows.lengths.tolist(), group.rows.read_at):
                states[i] = hashes(cache[read_at[:length].long()].numpy())[-1]
                assert int(positions[i]) == length - 1
        for row in plan.extends:
            at = row.read_at if isinstance(row.read_at, slice) else row.read_at.long()
            states[row.start : row.end] = hashes(cache[at].numpy())[-(row.end - row.start) :]
        return torch.from_numpy(states.view(np.int64)).unsqueeze(1)

    def logits(self, hidden):
        return torch.from_numpy(logits_of(hidden[:, 0].numpy().view(np.uint64)))


class WindowedModel(ScriptedModel):
    """Has a second layer with a window, which must see the last tokens that the first one sees.

    Args:
        window: the window, in tokens.
    """

    def __init__(self, window):
        self.window: int = window

    def allocate_cache(self, slots, window_slots=0, states=0):
        layers = tuple(
            torch.full((1, count, 1), -1, dtype=torch.int64)
            for count in (slots, window_slots or slots)
        )
        return KVCache(layers, layers, windowed=(False, True) if window_slots else ())

    def forward(self, ids, positions, plan, cache):
        every, last = (layer.view(-1) for layer in cache.k)
        last[plan.in_layer(self.window).store_at] = ids
        states = super().forward(ids, positions, plan, cache)
        for whole, windowed in zip(_reads(plan), _reads(plan.in_layer(self.window))):
            for length in range(whole[1] + 1, len(whole[0]) + 1):
                seen = slice(max(length - self.window, 0), length)
                assert torch.equal(every[whole[0][seen]], last[windowed[0][seen]])
        return states


class StatefulModel(ScriptedModel):
    """Has a second, recurrent layer, whose results must equal what the first one sees."""

    state_bytes = 16

    def allocate_cache(self, slots, window_slots=0, states=0):
        cache = super().allocate_cache(slots)
        sums = torch.full((states, 2), -1, dtype=torch.int64)  # number of tokens, and their hash
        return replace(cache, states=(LayerStates(sums[:, :0], sums),))

    def forward(self, ids, positions, plan, cache):
        numbers = super().forward(ids, positions, plan, cache)
        sums = cache.states[0].sums
        found = torch.empty_like(numbers[:, 0])
        for wave in plan.states:
            rows = wave.rows
            tokens = torch.arange(len(ids))
            if wave.tokens is not None:
                tokens = tokens[wave.tokens]
            before = [(0, 0) if place < 0 else sums[place].tolist() for place in rows.read.tolist()]
            for i, (start, end) in enumerate(pairwise(rows.offsets.tolist())):
                at = tokens[start:end]
                count, number = before[i]
                assert count == int(positions[at[0]]), "the state of another position"
                with np.errstate(over="ignore"):
                    added = (ids[at].numpy().astype(np.uint64) + np.uint64(1)) * _POWERS[
                        count : count + len(at)
                    ]
                    sum_of = np.uint64(number % 2**64) + np.cumsum(added, dtype=np.uint64)
                found[at] = torch.from_numpy(sum_of.view(np.int64))
                if (place := int(rows.write[i])) >= 0:
                    sums[place] = torch.tensor([count + len(at), int(found[at[-1]])])
        assert torch.equal(found, numbers[:, 0]), "the state of other tokens"
        return numbers


def _reads(plan):
    """Token slots of each row, and the number of its tokens before those of the step."""
    for group in plan.decode:
        for at, length in zip(group.rows.read_at, group.rows.lengths.tolist()):
            yield at[:length].long(), length - 1
    for row in plan.extends:
        yield row.slots(0), row.length - (row.end - row.start)


class RecitingModel(ScriptedModel):
    """Has a next token for each token.

    Args:
        following: token by token before it; 0 comes after the others.
        vocab_size: numbers of the logits.
    """

    def __init__(self, following, vocab_size):
        self.following = torch.zeros(vocab_size, dtype=torch.int64)
        self.following[[*following]] = torch.tensor([*following.values()])

    def forward(self, ids, positions, plan, cache):
        return self.following[ids]

    def logits(self, hidden):
        return 10 * torch.nn.functional.one_hot(hidden, len(self.following)).float()


def reciting_model(tokenizer, prompt, answer):
    """A model that answers the end of a prompt by a text in which no token comes twice."""
    tokens = tokenizer.encode(prompt)[-1:] + tokenizer.encode(answer)
    assert len(set(tokens)) == len(tokens)
    size, eos = len(tokenizer.token_bytes), frozenset(tokenizer.eos_ids)
    return LoadedModel(
        "reciting", RecitingModel(dict(pairwise(tokens)), size), tokenizer, size, eos, 512
    )


def tokenizer():
    """One token a character."""
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, [letter.encode() for letter in LETTERS], [EOS], eos_ids=[EOS])


def loaded(context_length=512, window=None, stages=1, *, states=False):
    model = ScriptedModel() if window is None else WindowedModel(window)
    if states:
        model = StatefulModel()
    return LoadedModel(
        "scripted", model, tokenizer(), VOCAB, frozenset({EOS}), context_length, stages=stages
    )


def answer(prompt, params, seed=None):
    """Text that the model generates, worked out one token after another: token ids, and why it
    ended.
    """
    tokens, out = list(prompt), []
    least = params.min_tokens if isinstance(params.min_tokens, int) else 0
    for _ in range(params.max_tokens):
        token = drawn(tokens, params.temperature, seed, ends=len(out) >= least)
        tokens.append(token)
        out.append(token)
        text = "".join(LETTERS[t] for t in out)
        if token == EOS or (
            isinstance(params.stop, tuple) and text.endswith(params.stop) and len(out) > least
        ):
            return out, "stop"
    return out, "length"


def drawn(tokens, temperature, seed, ends=True):
    """The token that the model draws after others."""
    logits = torch.from_numpy(logits_of(hashes(tokens)[-1:]))[0]
    if not ends:
        logits[EOS] = float("-inf")
    if temperature == 0:
        return int(logits.argmax())
    noise = np.log(draw_exponentials(seed, len(tokens), VOCAB))
    return int((logits.numpy() / np.float64(temperature) - noise).argmax())


class Guesses:
    """A drafter that is right in a share of its tokens.

    Args:
        right: the share.
    """

    name = "prompt"

    def __init__(self, right):
        self._right, self._dice = right, random.Random(0)

    def can_draft(self, request):
        return True

    def make_guesser(self, request, known, chance):
        tokens, seen = known.tolist(), min(len(known), TAIL)

        def guess(text, state):
            right = drawn([*tokens, *text[seen:]], request.params.temperature, request.seed)
            return Guess(
                right if self._dice.random() < self._right else self._dice.randrange(VOCAB), 0
            )

        return guess

    def learn_tokens(self, request, text, start):
        pass


class FreeDrafts(StepCost):
    """Steps that take no longer with drafts."""

    def estimate_seconds(self, tokens):
        return 1.0


class ShortRunner:
    """A runner whose memory ends where it is told to."""

    def __init__(self, runner, fails):
        self._runner, self._fails = runner, fails
        self.allocate_masks = runner.allocate_masks

    def forward(self, record):
        self._where = self._fails(record)
        if self._where == "forward":
            raise torch.OutOfMemoryError(NO_MEMORY)
        return self._runner.forward(record)

    def sample(self, *arguments):
        if self._where == "sample":
            raise torch.OutOfMemoryError(NO_MEMORY)
        drawn = self._runner.sample(*arguments)
        return Unread() if self._where == "read" else drawn


class Unread:
    def wait_for_tokens(self):
        raise torch.OutOfMemoryError(NO_MEMORY)


NO_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has a total capacity of 23.69 GiB."
)


class LateMemory:
    """A page memory whose copies are made later, in their order, when `run` is called or its turn
    has come.
    """

    def __init__(self, memory, turns):
        self._memory, self._turns, self._waiting, self._done = memory, turns, [], 0
        self.rows, self.launched, self.page_s = memory.rows, 0, 0.0

    def count_completed(self):
        while self._waiting and self._turns():
            self.run(1)
        return self._done

    def copy_to_host(self, pages, slots):
        self._add(self._memory.copy_to_host, pages, slots)

    def copy_to_device(self, slots, pages):
        self._add(self._memory.copy_to_device, slots, pages)

    def close(self):
        self._memory.close()

    def _add(self, copy, source, target):
        self.launched += 1
        self._waiting.append((copy, source.copy(), target.copy()))

    def run(self, count):
        for copy, source, target in self._waiting[:count]:
            copy(source, target)
        self._done += len(self._waiting[:count])
        del self._waiting[:count]


class Inline(Executor):
    """Does at once what is submitted."""

    def submit(self, work, *args, **kwargs):  # type: ignore[override]  # callers give them in order
        done = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class Late(Executor):
    """Does what is submitted later, in any order, or not at all until it is told."""

    def __init__(self, rng):
        self._rng, self._waiting = rng, []

    def submit(self, work, *args, **kwargs):  # type: ignore[override]  # callers give them in order
        self._waiting.append((Future(), work, args))
        return self._waiting[-1][0]

    def run(self, count):
        self._rng.shuffle(self._waiting)
        for future, work, args in self._waiting[:count]:
            future.set_result(work(*args))
        del self._waiting[:count]

    def shutdown(self, wait=True, *, cancel_futures=False):
        self.run(len(self._waiting))


class SteppedEngine(Engine):
    """An engine without a thread: the test runs its loop, and the cache is checked after every
    step. Steps take simulated time.

    Args:
        retract_every: steps after which some running request is put back.
        model: a LoadedModel other than the scripted one.
        fails: of a record, where in its step memory ends: "forward", "sample" or "read"; None for
            nowhere.
        drafter: proposes the tokens that steps check; None for none.
        parts: parts of the engine; None for those that the model and the config need.
        late: tells whether another copy between tiers ends now. They take no time.
        **config: of EngineConfig.
    """

    def __init__(
        self,
        *,
        retract_every=0,
        seed=0,
        model=None,
        fails=None,
        drafter=None,
        late=lambda: True,
        parts=None,
        **config,
    ):
        more = {} if drafter is None else {"speculation": "prompt"}
        with mock.patch.dict(DRAFTERS, {} if drafter is None else {"prompt": lambda _: drafter}):
            settings = EngineConfig.make(**more, **config)
            made = model or loaded()
            parts = make_parts(settings, made) if parts is None else parts
            self.core = EngineCore(settings, made, parts, Inline())
        self.loop, self.scheduler, self.store = (
            self.core.loop,
            self.core.scheduler,
            self.core.scheduler.store,
        )
        if fails is not None:
            self.loop.runner = ShortRunner(self.loop.runner, fails)  # type: ignore[assignment]  # a fake around it
        if isinstance(tiers := self.store.source, Tiers):
            tiers.host.memory = LateMemory(tiers.host.memory, late)
            if tiers.states is not None:
                tiers.states.host.memory = LateMemory(tiers.states.host.memory, late)
        if drafter is not None and self.scheduler.drafts is not None:
            self.scheduler.drafts.drafting.cost = FreeDrafts()  # so that no guess is too unlikely
        self.built = []  # all requests, in their order
        build = self.core.builder.build_requests
        record = self._built
        self.core.builder.build_requests = lambda *args, **options: record(build(*args, **options))  # type: ignore[method-assign]  # to see them
        self._retract_every, self._random = retract_every, random.Random(seed)
        self.time = 0.0  # in seconds
        self._record_duration = self.scheduler.record_duration
        self.scheduler.record_duration = self._timed  # type: ignore[method-assign]  # simulated time
        self.scheduler.pauses.now = lambda: self.time

    def _timed(self, batch, _):
        seconds = STEP_S + TOKEN_S * (
            batch.tokens - batch.draft_counts.sum()
        )  # drafts cost nothing, so they are not given up
        self.time += seconds
        self._record_duration(batch, seconds)

    def _built(self, requests):
        self.built += requests
        return requests

    def start(self, prompt, params=SamplingParams(), **options):
        """Submits; returns the ticket and the list that the events go to."""
        events = []
        return self.submit(prompt, params, sink=events.append, **options), events

    def step(self):
        """Commands and one step. False: there is nothing left to do."""
        self.loop.inbox.run()
        before = self.loop.steps
        self.loop.run_step()
        if self.loop.steps == before:
            self.time += STEP_S
        if self._retract_every and self.loop.steps % self._retract_every == 0:
            running = list(self.scheduler.queues.running())
            if len(running) > 1:
                self.scheduler.retraction.retract_request(self._random.choice(running))
        self.check()
        return self.loop.busy or not self.loop.inbox.empty

    def check(self):
        check_cache(
            self.store,
            [r.handle for r in self.scheduler.queues.running()],
            [p.lock for p in self.scheduler.pauses],
        )

    def drain(self, limit=100_000):
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("requests that never end")

    def stats_now(self):
        return self.core.open_requests.counts()

    @property
    def open(self):
        """Number of requests and programs that count as open."""
        return self.core.open_requests.open_count

    def check_empty(self):
        """Nothing is held when nothing runs, but for programs that are still open."""
        assert self.store.table.free == len(self.store.table.length)
        assert all(pause.branch.program.open for pause in self.scheduler.pauses)
        self.scheduler.end_pauses_and_flush()
        assert self.store.tree.locked_pages == 0
        while self.store.source.has_pending_pages(self.store.collect_finished_copies()):
            pass
        self.store.complete_steps(self.store.step)
        assert self.store.pool.free == self.store.pool.total
        assert (
            self.store.windows is None
            or self.store.windows.pool.free == self.store.windows.pool.total
        )


def ended(events):
    """The one terminal event."""
    last = [event for event in events if not isinstance(event, Delta)]
    assert len(last) == 1, last
    assert events[-1] is last[0]
    assert isinstance(last[0], Generation | SglError)
    return last[0]
