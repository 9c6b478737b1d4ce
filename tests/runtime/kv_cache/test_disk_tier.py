"""Files of pages: what was written comes back in any engine of the same model, and nothing else
does.
"""

import os
import random
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import sglang_lite as sgl
from sglang_lite.protocol import Generation, SamplingParams
from sglang_lite.runtime.kv_cache.disk_tier import DiskTier
from sglang_lite.runtime.kv_cache.page_file import open_pages, write_pages
from sglang_lite.runtime.kv_cache.page_store import Folder
from sglang_lite.runtime.kv_cache.page_sums import DamagedFileError
from tests.children import send
from tests.counts import some
from tests.runtime.scripted import VOCAB, Inline, Late, SteppedEngine, answer, ended, loaded

KILLS = some(1, 100)
LONG = [1 + i * i % 29 for i in range(600)]


def engine(folder, **config):
    sizes = {"max_running": 4, "context_length": 700, "max_total_tokens": 1024, "hicache_ratio": 2}
    files = {"hicache_storage_backend": "file", "hicache_storage_dir": str(folder)}
    return SteppedEngine(
        model=loaded(1024), **{"enable_hierarchical_cache": True, **sizes, **files, **config}
    )


def one(running, prompt, **options):
    _, events = running.start(prompt, SamplingParams(max_tokens=2, temperature=0), **options)
    running.drain()
    result = ended(events)
    assert result.usage.host_tokens + result.usage.disk_tokens <= result.usage.cached_tokens
    assert list(result.token_ids) == answer(prompt, SamplingParams(max_tokens=2, temperature=0))[0]
    return result.usage.cached_tokens


@pytest.mark.parametrize("page", [1, 16, 24])
def test_a_later_engine_finds_what_an_earlier_one_has_computed(tmp_path, page):
    assert one(engine(tmp_path, page_size=page), LONG) == 0
    run = -(-256 // page) * page
    assert {path.stat().st_size > 0 for path in tmp_path.glob("*.kv")} == {True}
    later = engine(tmp_path, page_size=page)
    assert one(later, LONG) == 2 * run
    assert later.built[0].cache.disk_tokens == 2 * run
    assert later.store.source.read_pages == 2 * run // page
    assert one(later, [*LONG[:300], 3, 4, 5]) == 300  # on the device now
    later.check_empty()


@pytest.mark.parametrize(
    "other", [{"page_size": 2}, {"weight_version": "2"}, {"context_length": 650}]
)
def test_nothing_of_another_kind_is_found(tmp_path, other):
    one(engine(tmp_path), LONG)
    assert one(engine(tmp_path, **other), LONG) == 0


def test_namespaces_share_no_file(tmp_path):
    one(engine(tmp_path), LONG, namespace="a")
    later = engine(tmp_path)
    assert one(later, LONG, namespace="b") == one(later, LONG) == 0
    assert one(later, LONG, namespace="a") == 512


def test_what_computing_brings_sooner_is_computed(tmp_path):
    one(engine(tmp_path), LONG)
    later = engine(tmp_path)
    assert one(later, LONG) == 512  # and the time that files take is known
    later.scheduler.end_pauses_and_flush()
    later.scheduler.pauses.token_s = 1e-12
    _, events = later.start(LONG, SamplingParams(max_tokens=2, temperature=0))
    later.drain()
    assert ended(events).usage.cached_tokens == 0
    assert ended(events).meta["cache_miss"]["reason"] == "on_disk"


@pytest.mark.parametrize(
    ("policy", "patience_s", "waits"),
    [
        ("best_effort", 2, False),
        ("timeout", 2, True),
        ("timeout", -1, False),
        ("wait_complete", -1, True),
    ],
)
def test_a_request_waits_for_files_as_long_as_the_policy_says(
    tmp_path, policy, patience_s, waits, monkeypatch
):
    monkeypatch.setattr("sglang_lite.runtime.kv_cache.tiers._PATIENCE_S", patience_s)
    one(engine(tmp_path), LONG)
    later = engine(tmp_path, hicache_storage_prefetch_policy=policy)
    threads = later.store.source.disk.executor = Late(random.Random(1))
    _, events = later.start(LONG, SamplingParams(max_tokens=2, temperature=0))
    for _ in range(8):
        later.step()
    assert (events == []) == waits
    while later.step():
        threads.run(1)
    assert ended(events).usage.cached_tokens == 512 * waits
    assert not later.store.source.disk.off


def test_a_long_prompt_is_fetched_part_by_part_while_the_next_part_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("sglang_lite.runtime.kv_cache.tiers._PART_FILES", 1)
    one(engine(tmp_path), LONG)
    later = engine(tmp_path)
    tiers = later.store.source
    threads = tiers.disk.executor = Late(SimpleNamespace(shuffle=lambda _: None))  # in order
    _, events = later.start(LONG, SamplingParams(max_tokens=2, temperature=0))
    fetched = set()
    while later.step():
        fetched.add(tiers.fetched_pages)
        threads.run(1)
    assert fetched == {0, 256, 512}
    usage = ended(events).usage
    assert (usage.cached_tokens, usage.disk_tokens, usage.host_tokens) == (512, 512, 0)
    later.check_empty()


def test_a_file_that_is_gone_is_written_again(tmp_path):
    one(engine(tmp_path), LONG)
    later, files = engine(tmp_path), set(tmp_path.glob("*.kv"))
    assert one(later, LONG) == 512
    for path in files:
        path.unlink()
    later.scheduler.end_pauses_and_flush()
    assert one(later, LONG) == 0
    assert one(later, LONG) == 599
    later.scheduler.end_pauses_and_flush()
    assert set(tmp_path.glob("*.kv")) == files
    assert one(later, LONG) == 512


def test_files_are_the_users_own(tmp_path):
    one(engine(tmp_path / "new"), LONG)
    files = list((tmp_path / "new").iterdir())
    assert len(files) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def lengthened(path):
    path.write_bytes(path.read_bytes() + b"0")


def altered(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def header_altered(path):
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)


def of_an_older_version(path):
    data = bytearray(path.read_bytes())
    data[7] -= 1
    path.write_bytes(data)


def emptied(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "harm", [cut, lengthened, altered, header_altered, of_an_older_version, emptied]
)
def test_damaged_files_are_not_taken_and_are_removed(tmp_path, harm, caplog):
    one(engine(tmp_path), LONG)
    for path in list(tmp_path.glob("*.kv")):
        harm(path)
    found = []
    for _ in range(2):  # the first removes the damaged files, and writes them again
        running = engine(tmp_path)
        found.append(one(running, LONG))
        running.check_empty()
    assert found == [0, 512]
    assert caplog.text.count(".kv is damaged, and is removed: ") == 2


def test_a_file_under_another_name_is_not_taken(tmp_path):
    one(engine(tmp_path), LONG)
    first, second = sorted(tmp_path.glob("*.kv"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    assert one(engine(tmp_path), LONG) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(sgl.ParameterError, match="hicache_storage_dir"):
        engine(tmp_path)


def test_a_path_that_is_no_folder_or_takes_no_files_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", "/proc"):
        with pytest.raises(
            sgl.ParameterError, match=r"hicache_storage_dir: .* Name a folder that you may write to"
        ):
            engine(path)


def test_a_folder_that_vanishes_is_not_used_any_more(tmp_path, caplog):
    running = engine(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert one(running, LONG) == 0
    assert one(running, [2, *LONG[:650]]) == 0
    assert caplog.text.count("the cache's folder is not used any more") == 1
    running.check_empty()


def test_no_look_for_files_waits_for_a_write(tmp_path):
    late = Late(random.Random(1))
    disk = DiskTier(Folder(tmp_path, 1_000_000), Inline(), late)
    written = disk.start_write(b"a", np.zeros((1, 8), np.uint8), np.zeros(1, np.int32))
    assert disk.count_existing([b"a"]).result() == 0
    disk.close()
    assert written.done()
    assert [path.name for path in tmp_path.iterdir()] == ["61.kv"]


def test_the_least_recently_used_files_go_first(tmp_path):
    rows = np.zeros((256, 1000), np.uint8)
    slots = np.arange(256, dtype=np.int32)
    disk = DiskTier(Folder(tmp_path, 1_000_000), Inline())
    names = [bytes([i] * 16) for i in range(5)]
    for i, name in enumerate(names):
        disk.start_write(name, rows, slots).result()
        path = tmp_path / f"{name.hex()}.kv"
        if path.exists():
            os.utime(path, (i, i))
        if i == 2:
            os.utime(tmp_path / f"{names[0].hex()}.kv", (10, 10))  # used again
    assert [disk.count_existing([name]).result() for name in names] == [1, 0, 0, 1, 1]


def test_a_file_that_is_read_counts_as_used(tmp_path):
    rows, slots = np.zeros((1, 8), np.uint8), np.zeros(1, np.int32)
    disk = DiskTier(Folder(tmp_path, 1_000_000), Inline())
    disk.start_write(b"a", rows, slots).result()
    path = tmp_path / "61.kv"
    os.utime(path, (1, 1))
    assert disk.start_read(b"a", rows, slots, 0).result()
    assert path.stat().st_mtime > 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"hicache_storage_dir": None},
        {"hicache_storage_dir": ""},
        {"hicache_storage_backend": None},
        {"hicache_storage_backend": "nixl"},
        {"hicache_storage_max_gb": 0},
        {"hicache_storage_prefetch_policy": "later"},
        {"enable_hierarchical_cache": False},
        {"hicache_storage_backend": 3},
    ],
)
def test_wrong_settings_are_refused(tmp_path, wrong):
    with pytest.raises(sgl.ParameterError, match="hicache_storage"):
        engine(tmp_path, **wrong)
    with pytest.raises(
        sgl.ParameterError,
        match=r"hicache_storage_backend: no store is called 'mooncake'.* file, fsspec",
    ):
        engine(tmp_path, hicache_storage_backend="mooncake")
    with pytest.raises(
        sgl.ParameterError,
        match=r"hicache_storage_dir: 'fsspec' can't use 'nowhere://a': Protocol not",
    ):
        engine("nowhere://a", hicache_storage_backend="fsspec")


@pytest.mark.parametrize("hangs", ["the look for files", "their reading"])
def test_a_folder_that_hangs_is_not_used_any_more(tmp_path, hangs, monkeypatch, caplog):
    one(engine(tmp_path), LONG)
    later = engine(tmp_path)
    tiers = later.store.source
    threads = tiers.disk.executor = Late(random.Random(1))
    _, events = later.start(LONG, SamplingParams(max_tokens=2, temperature=0))
    later.step()
    if hangs == "their reading":
        threads.run(1)
    for _ in range(3):
        later.step()
    assert events == []
    monkeypatch.setattr("sglang_lite.runtime.kv_cache.tiers.DEADLINE_S", -1.0)
    later.drain()
    assert ended(events).usage.cached_tokens == 0
    assert [each.message for each in caplog.records].count(
        "the cache's folder is not used any more: a file was not read in -1 seconds."
    ) == 1
    assert one(later, [7, *LONG]) == 0
    threads.run(9)  # the system gives up
    later.step()
    assert one(later, [8, *LONG]) == 0
    tiers.close()
    tiers.host.check_slots()


def test_a_slow_folder_that_returns_a_file_within_the_deadline_is_used_on(tmp_path, monkeypatch):
    one(engine(tmp_path), LONG)
    later = engine(tmp_path, hicache_storage_prefetch_policy="wait_complete")
    passed = [0.0]  # seconds
    clock = SimpleNamespace(perf_counter=lambda: passed[0])
    for module in ("tiers", "fetches"):
        monkeypatch.setattr(f"sglang_lite.runtime.kv_cache.{module}.time", clock)
    monkeypatch.setattr("sglang_lite.runtime.kv_cache.tiers._PART_FILES", 1)
    tiers = later.store.source
    threads = tiers.disk.executor = Late(random.Random(1))
    _, events = later.start(LONG, SamplingParams(max_tokens=2, temperature=0))
    later.step()
    threads.run(1)  # the look for files
    later.step()
    threads.run(1)  # one of two
    passed[0] = 8.0
    later.step()
    assert events == []
    passed[0] = 13.0  # the prompt has waited for too long, the folder has not
    later.drain()
    assert ended(events).usage.cached_tokens in (0, 256)  # the first of the two, if it was that
    assert not tiers.disk.off
    threads.run(9)
    later.step()
    tiers.close()
    tiers.host.check_slots()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_whatever_threads_and_copies_do_answers_are_right(tmp_path, policy):
    rng = random.Random(1)
    stems = [[rng.randrange(1, VOCAB) for _ in range(600)] for _ in range(4)]
    read = 0
    for _ in range(some(2, 30)):
        running = engine(
            tmp_path, hicache_write_policy=policy, late=lambda: rng.random() < 0.5, page_size=rng.choice([16, 32]),
            hicache_storage_max_gb=rng.choice([1e-5, 1]), hicache_ratio=rng.choice([0.5, 2]),
        )  # fmt: skip
        tiers = running.store.source
        threads = tiers.disk.executor = tiers.disk.writer = Late(rng)
        requests = []
        for _ in range(some(12, 60)):
            ids = [*rng.choice(stems)[: rng.randrange(200, 600)], rng.randrange(1, VOCAB)]
            params = SamplingParams(max_tokens=rng.randrange(4), temperature=0)
            requests.append((*running.start(ids, params), ids, params))
            for _ in range(rng.randrange(6)):
                running.step()
                threads.run(rng.randrange(2))
            if rng.random() < 0.1:
                rng.choice(requests)[0].abort()
            if rng.random() < 0.05:
                running.scheduler.end_pauses_and_flush()
            for path in list(tmp_path.glob("*.kv")):
                if rng.random() < 0.02:
                    rng.choice([cut, altered, os.unlink])(path)
        while running.step():
            threads.run(1)
        for _, events, ids, params in requests:
            result = ended(events)
            if isinstance(result, Generation):
                assert (list(result.token_ids), result.finish_reason) == answer(ids, params)
        threads.run(len(requests) * 9)
        tiers.disk.writer = Inline()
        tiers.close()
        tiers.host.check_slots()
        read += tiers.read_pages
    assert read


WRITER = """
import sys
import numpy as np
from pathlib import Path
from sglang_lite.runtime.kv_cache.page_file import write_pages
folder, rows = Path(sys.argv[1]), np.zeros((64, 4096), np.uint8)
print("ready", flush=True)
for i in range(10**9):
    rows[:] = i % 50
    write_pages(folder / f"{i % 50}.kv", str(i % 50).encode(), rows, np.arange(64, dtype=np.int32)[:: 1 - 2 * (i % 2)])
    if i % 50 == 49:
        print("round", flush=True)
"""


def test_two_writers_that_are_killed_leave_whole_files(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    for _ in range(KILLS):
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for writer in writers:
            with writer:
                assert [writer.stdout.readline() for _ in range(2)] == ["ready\n", "round\n"]
                send(writer.pid, signal.SIGKILL)
        for path in tmp_path.glob("*.kv"):
            rows = np.zeros((64, 4096), np.uint8)
            with open_pages(path) as file:
                file.read_into(rows, np.arange(64, dtype=np.int32))
            assert file.header == path.stem.encode()
            assert (rows == int(path.stem)).all()


def test_pages_are_read_into_any_places(tmp_path):
    rows = np.random.default_rng(1).integers(0, 256, (20, 7), dtype=np.uint8)
    slots = np.array([3, 4, 5, 11, 2, 1], np.int32)
    write_pages(tmp_path / "a", b"what", rows, slots)
    into, places = np.zeros((9, 7), np.uint8), np.array([8, 0, 1, 5], np.int32)
    with open_pages(tmp_path / "a") as file, ThreadPoolExecutor(2) as threads:
        assert (file.header, file.pages, file.page_bytes) == (b"what", 6, 7)
        file.read_into(into, places[:3], skip=2)
        assert (into[places[:3]] == rows[slots[2:5]]).all()
        assert list(file.read_with_threads(threads, into, places)) == [4]
    assert (into[places] == rows[slots[:4]]).all()


@pytest.mark.parametrize("size", [1, 6, 12, 24])
def test_every_altered_byte_and_every_two_pages_that_change_places_are_found(tmp_path, size):
    path = tmp_path / "a"
    rows = np.random.default_rng(1).integers(0, 256, (5, size), dtype=np.uint8)
    rows[:, -1] = range(5)  # no two are equal
    write_pages(path, b"what", rows, np.arange(5, dtype=np.int32))
    data, first = path.read_bytes(), path.stat().st_size - rows.size
    changed = [data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :] for at in range(len(data))]
    pages = [data[at : at + size] for at in range(first, len(data), size)]
    changed.append(data[:first] + b"".join([pages[1], pages[0], *pages[2:]]))
    if size == 24:  # the top bits of two words, which are signs of bfloat16
        signs = bytearray(data)
        signs[first + 7] ^= 128
        signs[first + 15] ^= 128
        changed.append(bytes(signs))
    for each in changed:
        path.write_bytes(each)
        with pytest.raises(DamagedFileError), open_pages(path) as file:
            assert (file.header, file.pages, file.page_bytes) == (b"what", 5, size)
            file.read_into(np.zeros((5, size), np.uint8), np.arange(5, dtype=np.int32))
