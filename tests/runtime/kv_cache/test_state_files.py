"""Files of states: a later engine of the same model goes on behind the state that an earlier one has
kept, and never without all pages before it.
"""

import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest

from sglang_lite.protocol import Generation, SamplingParams
from sglang_lite.runtime.kv_cache.page_file import open_pages, pack_pages, write_pages
from sglang_lite.runtime.kv_cache.page_sums import DamagedFileError
from tests.children import send
from tests.counts import some
from tests.runtime.core.test_states import draw
from tests.runtime.kv_cache.test_disk_tier import altered, cut, emptied, lengthened
from tests.runtime.scripted import Inline, Late, SteppedEngine, answer, ended, loaded

KILLS = some(1, 50)
LONG = draw(600, 1)


def engine(folder, **config):
    sizes = {
        "max_running": 2,
        "context_length": 700,
        "max_total_tokens": 1024,
        "hicache_ratio": 4,
        "page_size": 4,
        "max_mamba_cache_size": 10,
    }
    files = {"hicache_storage_backend": "file", "hicache_storage_dir": str(folder)}
    made = {"model": loaded(1024, states=True), "enable_hierarchical_cache": True}
    return SteppedEngine(**{**made, **sizes, **files, **config})


def one(running, prompt, **options):
    params = SamplingParams(max_tokens=2, temperature=0)
    _, events = running.start(prompt, params, **options)
    running.drain()
    result = ended(events)
    assert list(result.token_ids) == answer(prompt, params)[0]
    return result.usage.cached_tokens


@pytest.mark.parametrize("page", [1, 4, 24])
@pytest.mark.parametrize("length", [60, 257, 600])
def test_a_later_engine_goes_on_behind_the_last_state(tmp_path, page, length):
    prompt, end = LONG[:length], (length - 1) // page * page
    assert one(engine(tmp_path, page_size=page), prompt) == 0
    later = engine(tmp_path, page_size=page)
    assert one(later, prompt) == end
    assert later.built[0].cache.disk_tokens == end
    assert later.store.source.read_pages == end // page
    later.check_empty()


def test_a_state_at_the_end_of_a_file_of_pages_needs_no_pages_of_its_own(tmp_path):
    one(engine(tmp_path), LONG[:513])
    assert one(engine(tmp_path), LONG[:513]) == 512


def test_another_text_begins_behind_the_last_state_that_both_share(tmp_path):
    one(engine(tmp_path, mamba_track_interval=100), LONG)
    later = engine(tmp_path, mamba_track_interval=100)
    assert one(later, [*LONG[:450], *draw(100, 2)]) == 400
    assert one(later, [*LONG[:590], *draw(30, 3)]) == 500
    assert one(later, LONG) == 596


@pytest.mark.parametrize(
    "other", [{"mamba_ssm_dtype": "bfloat16"}, {"weight_version": "2"}, {"page_size": 2}]
)
def test_nothing_of_another_kind_is_found(tmp_path, other):
    one(engine(tmp_path), LONG)
    assert one(engine(tmp_path, **other), LONG) == 0


def test_a_state_whose_pages_have_no_file_is_not_used(tmp_path):
    one(engine(tmp_path), LONG)
    for path in tmp_path.glob("*.kv"):
        with open_pages(path) as file:
            has_state = file.following is not None
        if not has_state:
            path.unlink()
    later = engine(tmp_path)
    assert one(later, LONG) == 0
    later.check_empty()


@pytest.mark.parametrize("harm", [cut, lengthened, altered, emptied])
def test_damaged_states_are_not_taken_and_are_removed(tmp_path, harm, caplog):
    one(engine(tmp_path), LONG)
    for path in list(tmp_path.glob("*.kv")):
        with open_pages(path) as file:
            has_state = file.following is not None
        if has_state:
            harm(path)
    found = []
    for _ in range(2):  # the first removes the damaged file, and writes it again
        running = engine(tmp_path)
        found.append(one(running, LONG))
        running.check_empty()
    assert found == [0, 596]
    assert caplog.text.count(".kv is damaged, and is removed: ") == 1


def test_a_store_of_bytes_keeps_states_too(tmp_path):
    place = {"hicache_storage_backend": "fsspec", "hicache_storage_dir": "memory://states"}
    one(engine(tmp_path, **place), LONG)
    assert one(engine(tmp_path, **place), LONG) == 596


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_whatever_threads_and_copies_do_answers_are_right(tmp_path, policy):
    rng = random.Random(1)
    stems = [draw(600, seed) for seed in range(4)]
    read = 0
    for _ in range(some(3, 30)):
        running = engine(
            tmp_path, hicache_write_policy=policy, late=lambda: rng.random() < 0.5, page_size=16,
            hicache_storage_max_gb=rng.choice([1e-5, 1]), hicache_ratio=rng.choice([0.5, 2]),
            mamba_track_interval=rng.choice([0, 128]), max_mamba_cache_size=rng.choice([3, 10]),
        )  # fmt: skip
        tiers = running.store.source
        threads = tiers.disk.executor = tiers.disk.writer = Late(rng)
        requests = []
        for i in range(some(12, 60)):
            ids = [*rng.choice(stems)[: rng.choice([300, 450, 600])], *draw(rng.randrange(9), i)]
            params = SamplingParams(max_tokens=rng.randrange(4), temperature=0)
            requests.append((*running.start(ids[:650], params), ids[:650], params))
            for _ in range(rng.randrange(6)):
                running.step()
                threads.run(rng.randrange(2))
            if rng.random() < 0.1:
                rng.choice(requests)[0].abort()
            if rng.random() < 0.05:
                running.scheduler.end_pauses_and_flush()
            for path in list(tmp_path.glob("*.kv")):
                if rng.random() < 0.02:
                    whole = path.stat().st_size > 200  # or it was cut before
                    rng.choice([cut, altered, os.unlink] if whole else [os.unlink])(path)
        while running.step():
            threads.run(1)
        for _, events, ids, params in requests:
            result = ended(events)
            if isinstance(result, Generation):
                assert (list(result.token_ids), result.finish_reason) == answer(ids, params)
        threads.run(len(requests) * 9)
        tiers.disk.writer = Inline()
        tiers.close()
        tiers.check_invariants()
        read += tiers.read_pages
    assert read


WRITER = """
import sys
import numpy as np
from pathlib import Path
from sglang_lite.runtime.kv_cache.page_file import pack_pages, write_pages
folder, rows, states = Path(sys.argv[1]), np.zeros((8, 4096), np.uint8), np.zeros((1, 1 << 20), np.uint8)
print("ready", flush=True)
for i in range(10**9):
    rows[:] = states[:] = i % 50
    name, slots = str(i % 50).encode(), np.arange(8, dtype=np.int32)
    write_pages(folder / f"{i % 50}.kv", name, rows, slots, following=pack_pages(name, states, slots[:1]))
    if i % 50 == 49:
        print("round", flush=True)
"""


def test_a_writer_that_is_killed_leaves_whole_files(tmp_path):
    for _ in range(KILLS):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert [writer.stdout.readline() for _ in range(2)] == ["ready\n", "round\n"]
            send(writer.pid, signal.SIGKILL)
        found = list(tmp_path.glob("*.kv"))
        assert len(found) == 50
        for path in found:
            rows, state = np.zeros((8, 4096), np.uint8), np.zeros((1, 1 << 20), np.uint8)
            with open_pages(path) as file:
                file.read_into(rows, np.arange(8, dtype=np.int32))
                file.following.read_into(state, np.zeros(1, np.int32))
            assert (rows == int(path.stem)).all()
            assert (state == int(path.stem)).all()


@pytest.mark.parametrize("secret", [None, "sixteen letters!"])
@pytest.mark.parametrize("pages", [0, 2])
def test_every_altered_byte_of_pages_and_state_is_found(tmp_path, pages, secret):
    path, rng = tmp_path / "a", np.random.default_rng(1)
    rows, state = (rng.integers(0, 256, shape, dtype=np.uint8) for shape in ((3, 24), (1, 40)))
    slots, first = np.arange(pages, dtype=np.int32), np.zeros(1, np.int32)
    following = pack_pages(b"state", state, first, secret)
    write_pages(path, b"what", rows, slots, secret, following)
    data = path.read_bytes()

    def read():
        into, kept = np.zeros_like(rows), np.zeros_like(state)
        with open_pages(path, secret) as file:
            if file.page_bytes != 24:  # no size of the file depends on it without pages
                raise DamagedFileError
            file.read_into(into, slots)
            file.following.read_into(kept, first)
            assert (file.pages, file.header, file.following.header) == (pages, b"what", b"state")
        return (into[:pages] == rows[:pages]).all() and (kept == state).all()

    assert read()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with pytest.raises(DamagedFileError):
            read()


def test_files_without_states_are_as_they_were():
    rows = np.arange(48, dtype=np.uint8).reshape(2, 24)
    data = b"".join(pack_pages(b"what", rows, np.array([1, 0], np.int32)))
    assert data[:8] == b"sglkv\\0\\0\\5".decode("unicode_escape").encode("latin-1")
    assert data[8:28] == b"".join((n).to_bytes(b, "little") for n, b in ((4, 4), (2, 8), (24, 8)))
    assert data.endswith(b"what" + data[36:52] + bytes(range(24, 48)) + bytes(range(24)))
    assert len(data) == 32 + 4 + 2 * 8 + 48
