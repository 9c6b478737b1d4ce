"""Prefixes that a user writes to a file: a later engine of the same kind finds them, and nobody
else does.
"""

import os
import stat

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.protocol import Prompt, SamplingParams, Span
from sglang_lite.runtime.kv_cache.page_file import open_pages
from tests.runtime.scripted import VOCAB, loaded

LONG = [1 + i * i % (VOCAB - 1) for i in range(300)]
TWO = SamplingParams(max_tokens=2, temperature=0)


def engine(**config):
    return Engine.of(
        loaded(), **{"enable_hierarchical_cache": True, "max_total_tokens": 512, **config}
    )


@pytest.fixture
def written(tmp_path):
    """A file with the first 300 tokens, in pages of 4."""
    path = tmp_path / "prefix.kv"
    with engine(page_size=4) as first:
        first.complete(LONG, TWO)
        assert first.export_prefix(LONG, path) == 300
        assert first.export_prefix([*LONG, 3, 3], path) == 300
    return path


def test_an_engine_of_another_process_goes_on_from_it(small_file, tmp_path):
    text = "The quick brown fox jumps over the lazy dog. " * 8
    settings = {
        "dtype": "float32",
        "enable_hierarchical_cache": True,
        "max_total_tokens": 1024,
        "page_size": 16,
    }
    with sgl.Engine(small_file, in_process=True, **settings) as first:
        whole = first.complete(text, TWO)
        tokens = first.export_prefix(Prompt((Span(text),)), tmp_path / "prefix.kv")
    assert whole.usage.prompt_tokens - 16 <= tokens <= whole.usage.prompt_tokens
    assert stat.S_IMODE((tmp_path / "prefix.kv").stat().st_mode) == 0o600
    with sgl.Engine(small_file, **settings) as later:
        assert later.import_prefix(tmp_path / "prefix.kv", trust_cache=True) == tokens
        again = later.complete(text, TWO)
    assert again.token_ids == whole.token_ids
    assert again.usage.cached_tokens >= tokens - 16  # the last token is computed in any case


def test_a_namespace_finds_its_own_alone(written):
    with engine(page_size=4) as later:
        assert later.import_prefix(written, trust_cache=True, namespace="a") == 300
        assert later.complete(LONG, TWO).usage.cached_tokens == 0
        later.flush_cache()
        with pytest.raises(sgl.ParameterError, match="prompt: the cache has no page of it"):
            later.export_prefix(LONG, written)
        assert later.import_prefix(written, trust_cache=True) == 300
        assert later.complete([*LONG, 5], TWO).usage.cached_tokens == 300


def test_it_comes_up_part_by_part_while_the_device_has_free_pages(written, monkeypatch):
    monkeypatch.setattr("sglang_lite.runtime.kv_cache.page_file.PART_BYTES", 1)
    with engine(page_size=4) as later:
        assert later.import_prefix(written, trust_cache=True) == 300
        usage = later.complete([*LONG, 5], TWO).usage
        assert usage.cached_tokens == 300
        assert later.stats()["host_tokens_fetched"] == 300
    others = [7] * 400
    with engine(page_size=4) as later:
        later.complete(others, TWO)
        assert later.import_prefix(written, trust_cache=True) == 300
        assert 0 < later.stats()["host_tokens_fetched"] <= 112
        assert later.complete(others, TWO).usage.cached_tokens == 399


def test_a_small_host_takes_what_fits(written):
    with engine(page_size=4, hicache_ratio=0.25) as later:
        assert later.import_prefix(written, trust_cache=True) == 128
        assert later.complete(LONG, TWO).usage.cached_tokens == 128


SECRET = "0123456789abcdef"


def test_a_file_of_a_secret_is_taken_with_it_alone(written, tmp_path):
    path = tmp_path / "of a secret.kv"
    with engine(page_size=4) as first:
        first.complete(LONG, TWO)
        assert first.export_prefix(LONG, path, secret=SECRET) == 300
    with engine(page_size=4) as later:
        for wrong, message in (
            (SECRET[::-1], "it was altered, or written with a different secret"),
            (None, "it was written under a secret"),
        ):
            with pytest.raises(sgl.ParameterError, match=message):
                later.import_prefix(path, trust_cache=True, secret=wrong)
        with pytest.raises(sgl.ParameterError, match="it was written under no secret"):
            later.import_prefix(written, secret=SECRET)
        with pytest.raises(sgl.ParameterError, match=r"^secret: it has 15 characters"):
            later.import_prefix(path, secret=SECRET[1:])
        with pytest.raises(sgl.ParameterError, match=r"^secret: 3 is no str"):
            later.export_prefix(LONG, path, secret=3)  # type: ignore[arg-type] # wrong on purpose
        assert later.import_prefix(path, secret=SECRET) == 300
        assert later.complete([*LONG, 5], TWO).usage.cached_tokens == 300
    size = path.stat().st_size
    with open_pages(path, SECRET) as file:
        page = file.page_bytes
    data, first_page = path.read_bytes(), size - 75 * page
    swapped = data[first_page + page : first_page + 2 * page] + data[first_page : first_page + page]
    for forged in (
        data[:-1] + bytes([data[-1] ^ 1]),
        data[:first_page] + swapped + data[first_page + 2 * page :],
        data[:60] + bytes([data[60] ^ 1]) + data[61:],
    ):
        path.write_bytes(forged)
        with (
            engine(page_size=4) as later,
            pytest.raises(sgl.ParameterError, match=r"secret|checksum of its header"),
        ):
            later.import_prefix(path, secret=SECRET)


@pytest.mark.parametrize("other", [{"page_size": 2}, {"page_size": 4, "weight_version": "2"}])
def test_another_kind_is_refused(written, other):
    with (
        engine(**other) as later,
        pytest.raises(sgl.ParameterError, match=r"path: .* is of another model"),
    ):
        later.import_prefix(written, trust_cache=True)


def test_what_can_not_be_is_refused_by_name(written, tmp_path):
    data = written.read_bytes()
    with engine(page_size=4) as later:
        with pytest.raises(sgl.ParameterError, match=r"^trust_cache: .* Set trust_cache=True"):
            later.import_prefix(written)
        for at, message in (
            (len(data) - 1, "checksum"),
            (3, "no file of pages"),
            (45, "checksum|other pages|another"),
        ):
            written.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(sgl.ParameterError, match=message):
                later.import_prefix(written, trust_cache=True)
        written.write_bytes(data[:-1])
        with pytest.raises(sgl.ParameterError, match="not what its header says"):
            later.import_prefix(written, trust_cache=True)
        with pytest.raises(sgl.ParameterError, match="path: the file can't be read"):
            later.import_prefix(tmp_path / "none", trust_cache=True)
        later.complete(LONG, TWO)
        with pytest.raises(sgl.ParameterError, match="path: the file can't be written"):
            later.export_prefix(LONG, tmp_path / "none" / "prefix.kv")
        with pytest.raises(
            sgl.ParameterError, match=r"^prompt: 3 is no str or Prompt or list or tuple"
        ):
            later.export_prefix(3, written)  # type: ignore[arg-type] # wrong on purpose
        with pytest.raises(sgl.ParameterError, match=r"^namespace: 3 is no str"):
            later.import_prefix(written, trust_cache=True, namespace=3)  # type: ignore[arg-type] # wrong on purpose
        with pytest.raises(sgl.ParameterError, match="1000000000 is no token id"):
            later.export_prefix([10**9], written)
        written.write_bytes(data)
        assert later.import_prefix(written, trust_cache=True) == 300  # all slots are free again
    assert [each for each in os.listdir(tmp_path) if each != written.name] == []
    with (
        engine(enable_hierarchical_cache=False) as without,
        pytest.raises(
            sgl.CapabilityError, match=r"no prefixes below.*enable_hierarchical_cache=True"
        ),
    ):
        without.import_prefix(written, trust_cache=True)
