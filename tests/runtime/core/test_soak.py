"""Thousands of requests, many aborted: every one ends once, and nothing is left of them."""

import gc
import os
import random
import threading
from collections import Counter

from sglang_lite import Engine
from sglang_lite.protocol import Delta, Generation, RequestAbortedError, SamplingParams
from tests.runtime.scripted import VOCAB, loaded

REQUESTS = int(os.environ.get("SGLANG_LITE_SOAK", "2000"))  # 20,000 of them: CONTRIBUTING.md


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_is_left_of_thousands_of_requests():
    draw = random.Random(0)
    stems = [[draw.randrange(1, VOCAB) for _ in range(50)] for _ in range(20)]
    ends = Counter()
    free = threading.Semaphore(200)
    memory = []
    with Engine.of(
        loaded(), max_running=32, step_tokens=256, page_size=4, max_total_tokens=2048
    ) as engine:
        for i in range(REQUESTS):
            free.acquire()
            last = Counter()

            def sink(event, last=last):
                if not isinstance(event, Delta):
                    last["ends"] += 1
                    assert last["ends"] == 1
                    ends[type(event)] += 1
                    free.release()

            stem = draw.choice(stems)
            params = SamplingParams(
                max_tokens=draw.randrange(0, 12), temperature=draw.choice([0, 1])
            )
            ticket = engine.submit(
                stem[: draw.randrange(1, 51)], params, sink=sink, stream=draw.random() < 0.5
            )
            if draw.random() < 0.3:
                ticket.abort()
            if i in (REQUESTS // 2, REQUESTS - 1):
                gc.collect()
                memory.append(resident())
        for _ in range(200):
            free.acquire()
        assert sum(ends.values()) == REQUESTS
        assert ends.keys() <= {Generation, RequestAbortedError}
        assert ends[RequestAbortedError] > 0 < ends[Generation]
        engine.flush_cache()
        stats = engine.stats()
    assert (stats["waiting"], stats["running"], stats["cached_tokens"]) == (0, 0, 0)
    assert stats["free_tokens"] == stats["total_tokens"]
    assert memory[1] < memory[0] * 1.02
