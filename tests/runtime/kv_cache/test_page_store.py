"""Files of pages in stores of bytes: what one engine has written, another one reads, and a failing store costs nothing."""

import sys

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import SamplingParams
from tests.runtime.scripted import SteppedEngine, answer, ended, loaded

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


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Class that a package registers under the name "shelf"."""
    (tmp_path / "the_shelf.py").write_text(REGISTERED)
    about = tmp_path / "the_shelf-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: the-shelf\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[sglang_lite.page_stores]\nshelf = the_shelf:Shelf\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("the_shelf").Shelf
    del sys.modules["the_shelf"]


def test_a_later_engine_finds_it_behind_a_url():
    assert [cached(engine("fsspec", "memory://a/prefixes")) for _ in range(2)] == [0, 512]


@pytest.mark.parametrize("place", [" ", "file://", "file:///tmp/a", "local:///tmp/a", "/tmp/a"])
def test_fsspec_takes_no_folder_of_this_machine(place):
    with pytest.raises(sgl.ParameterError, match='"file" takes folders'):
        engine("fsspec", place)


def test_a_registered_class_is_used(shelf):
    assert [cached(engine("shelf", "the shelf")) for _ in range(2)] == [0, 512]
    assert len(shelf.kept) == 2
    for name, data in shelf.kept.items():
        shelf.kept[name] = data[:-1]
    damaged = engine("shelf", "the shelf")
    assert [cached(damaged), cached(engine("shelf", "the shelf"))] == [0, 512]  # it was written over
    with pytest.raises(sgl.ParameterError, match="'shelf' can't use 'the attic': there is one shelf alone"):
        engine("shelf", "the attic")
    with pytest.raises(sgl.ParameterError, match=r"no store is called 'attic'.*file, fsspec, shelf"):
        engine("attic", "the shelf")


@pytest.mark.parametrize("method", ["has", "get", "put"])
def test_a_store_that_fails_is_not_used_any_more(shelf, method, caplog):
    if method == "get":
        cached(engine("shelf", "the shelf"))
    shelf.fails.add(method)
    running = engine("shelf", "the shelf")
    assert [cached(running), cached(running)] == [0, 0]
    assert caplog.text.count("not used any more: the shelf is down") == 1
