"""Files of pages in stores of bytes: what one engine has written, another one reads, and a failing
store costs nothing.
"""

import contextlib
import os
import random
import sys
from threading import Thread

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from tests.runtime.scripted import Late, SteppedEngine, answer, ended, loaded

LONG = [1 + i * i % 29 for i in range(600)]
TWO = SamplingParams(max_tokens=2, temperature=0)

REGISTERED = """
class Shelf:
    kept, fails = {}, set()
    def __init__(self, place):
        if place != "the shelf":
            raise ValueError("there is one shelf alone")
    def has(self, name):
        self.call("has")
        return name in self.kept
    def get(self, name):
        self.call("get")
        return self.kept[name]
    def put(self, name, data):
        self.call("put")
        self.kept[name] = data
    def call(self, method):
        if method in self.fails:
            raise ConnectionError("the shelf is down")  # an OSError
"""


def engine(backend, place):
    files = {"hicache_storage_backend": backend, "hicache_storage_dir": str(place)}
    sizes = {"max_running": 4, "context_length": 700, "max_total_tokens": 1024, "page_size": 16}
    return SteppedEngine(model=loaded(1024), enable_hierarchical_cache=True, **sizes, **files)


def cached(running):
    _, events = running.start(LONG, TWO)
    running.drain()
    result = ended(events)
    assert list(result.token_ids) == answer(LONG, TWO)[0]
    running.check_empty()
    return result.usage.cached_tokens


SLOW = """
import pathlib
class Slow:
    def __init__(self, place):
        self.folder = pathlib.Path(place)
    def has(self, name):
        return (self.folder / name).exists()
    def get(self, name):
        return (self.folder / name).read_bytes()
    def put(self, name, data):
        open(self.folder.parent / "gate", "rb").close()  # waits until somebody opens it to write
        (self.folder / name).write_bytes(data)
"""


def register(name, code, folder, monkeypatch):
    """Makes a package that registers the class of a module under a name."""
    (folder / f"the_{name}.py").write_text(code)
    about = folder / f"the_{name}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: the-{name}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        f"[sglang_lite.page_stores]\n{name} = the_{name}:{name.capitalize()}\n"
    )
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Class that a package registers under the name "shelf"."""
    register("shelf", REGISTERED, tmp_path, monkeypatch)
    yield __import__("the_shelf").Shelf
    del sys.modules["the_shelf"]


def test_a_later_engine_finds_it_behind_a_url():
    assert [cached(engine("fsspec", "memory://a/prefixes")) for _ in range(2)] == [0, 512]


@pytest.mark.parametrize("place", [" ", "file://", "file:///tmp/a", "local:///tmp/a", "/tmp/a"])
def test_fsspec_takes_no_folder_of_this_machine(place):
    with pytest.raises(sgl.ParameterError, match='"file" takes folders'):
        engine("fsspec", place)


def test_a_registered_class_is_used(shelf, caplog):
    assert [cached(engine("shelf", "the shelf")) for _ in range(2)] == [0, 512]
    assert len(shelf.kept) == 2
    for name, data in shelf.kept.items():
        shelf.kept[name] = data[:-1]
    damaged = engine("shelf", "the shelf")
    # it was written over
    assert [cached(damaged), cached(engine("shelf", "the shelf"))] == [0, 512]
    assert caplog.text.count(".kv is damaged, and is not read any more: ") == 2
    with pytest.raises(
        sgl.ParameterError, match="'shelf' can't use 'the attic': there is one shelf alone"
    ):
        engine("shelf", "the attic")
    with pytest.raises(
        sgl.ParameterError, match=r"no store is called 'attic'.*file, fsspec, shelf"
    ):
        engine("attic", "the shelf")


@pytest.mark.parametrize("method", ["has", "get", "put"])
def test_a_store_that_fails_is_not_used_any_more(shelf, method, caplog):
    if method == "get":
        cached(engine("shelf", "the shelf"))
    shelf.fails.add(method)
    running = engine("shelf", "the shelf")
    assert [cached(running), cached(running)] == [0, 0]
    assert caplog.text.count("not used any more: the shelf is down") == 1


def test_a_store_that_takes_nothing_in_time_is_not_used_any_more(shelf, caplog, monkeypatch):
    running = engine("shelf", "the shelf")
    tiers = running.store.source
    tiers.disk.writer = threads = Late(random.Random(1))  # as if `put` never returned
    assert cached(running) == 0
    assert "not used" not in caplog.text
    monkeypatch.setattr("sglang_lite.runtime.kv_cache.file_writes.WRITTEN_S", -1.0)
    assert cached(running) == 0
    assert caplog.text.count("not used any more: no file was written in -1 seconds.") == 1
    tiers.close()  # waits for nothing
    threads.run(9)
    assert not shelf.kept


def test_an_engine_that_closes_writes_what_waits(small_file, tmp_path, monkeypatch):
    register("slow", SLOW, tmp_path, monkeypatch)
    (tmp_path / "kept").mkdir()
    settings = {
        "enable_hierarchical_cache": True,
        "max_total_tokens": 1024,
        "page_size": 16,
        "context_length": 700,
    }
    files = {"hicache_storage_backend": "slow", "hicache_storage_dir": str(tmp_path / "kept")}
    os.mkfifo(tmp_path / "gate")
    first = sgl.Engine(small_file, dtype="float32", **settings, **files)
    first.complete(LONG, TWO)
    closing = Thread(target=first.close)
    closing.start()
    while closing.is_alive():
        with contextlib.suppress(OSError):  # nobody waits there now
            os.close(os.open(tmp_path / "gate", os.O_WRONLY | os.O_NONBLOCK))
    assert len(list((tmp_path / "kept").iterdir())) == 2
