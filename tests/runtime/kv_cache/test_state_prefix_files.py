"""Prefixes in files of the user, of a model with recurrent layers: the state at the end goes with
them.
"""

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.kv_cache.page_file import open_pages
from tests.runtime.core.test_states import draw
from tests.runtime.scripted import answer, loaded

LONG = draw(300, 1)
TWO = SamplingParams(max_tokens=2, temperature=0)
SECRET = "0123456789abcdef"


def engine(**config):
    sizes = {"max_total_tokens": 512, "page_size": 4, "max_running": 2, "max_mamba_cache_size": 6}
    return Engine.of(loaded(states=True), **{"enable_hierarchical_cache": True, **sizes, **config})


def cached(running, prompt):
    result = running.complete(prompt, TWO)
    assert list(result.token_ids) == answer(prompt, TWO)[0]
    return result.usage.cached_tokens


@pytest.fixture
def written(tmp_path):
    """A file with the first 300 tokens."""
    path = tmp_path / "prefix.kv"
    with engine() as first:
        first.complete(LONG, TWO)
        assert first.export_prefix([*LONG, 3, 3], path) == 300
    return path


def test_a_later_engine_goes_on_from_it(written):
    with engine() as later:
        assert later.import_prefix(written, trust_cache=True) == 300
        assert later.stats()["host_tokens_fetched"] == 300  # the device had room
        assert cached(later, [*LONG, 5]) == 300
        later.flush_cache()
        assert later.import_prefix(written, trust_cache=True, namespace="a") == 300
        assert cached(later, [*LONG, 5]) == 0


def test_it_ends_at_the_last_state(tmp_path):
    path = tmp_path / "prefix.kv"
    with engine(mamba_track_interval=100) as first:
        first.complete(LONG, TWO)
        assert first.export_prefix(LONG[:250], path) == 200
        with pytest.raises(sgl.ParameterError, match="prompt: the cache has no state of it"):
            first.export_prefix(LONG[:99], path)
    with engine(mamba_track_interval=100) as later:
        assert later.import_prefix(path, trust_cache=True) == 200
        assert cached(later, LONG) == 200


def test_what_only_the_host_has_is_written_too(tmp_path):
    path = tmp_path / "prefix.kv"
    with engine(hicache_ratio=8) as first:
        first.complete(LONG, TWO)
        for seed in range(2, 6):
            first.complete(draw(300, seed), TWO)
        assert first.export_prefix(LONG, path) == 300
    with engine() as later:
        later.import_prefix(path, trust_cache=True)
        assert cached(later, [*LONG, 5]) == 300


def test_a_secret_covers_the_state(tmp_path):
    path = tmp_path / "prefix.kv"
    with engine() as first:
        first.complete(LONG, TWO)
        first.export_prefix(LONG, path, secret=SECRET)
        other = draw(300, 2)
        first.complete(other, TWO)
        first.export_prefix(other, tmp_path / "other.kv", secret=SECRET)
    data = path.read_bytes()
    with open_pages(path, SECRET) as file:
        size = file.following.page_bytes + 32 + 16 + len(file.following.header)
    with engine() as later:
        assert later.import_prefix(path, secret=SECRET) == 300
        assert cached(later, [*LONG, 5]) == 300
        later.flush_cache()
        others_state = (tmp_path / "other.kv").read_bytes()[-size:]
        for forged in (data[:-1] + bytes([data[-1] ^ 1]), data[:-size] + others_state):
            path.write_bytes(forged)
            with pytest.raises(sgl.ParameterError, match=r"a different secret|of another prefix"):
                later.import_prefix(path, secret=SECRET)
        assert cached(later, [*LONG, 5]) == 0


def test_states_of_another_kind_are_refused_with_both(written, tmp_path):
    with (
        engine(mamba_ssm_dtype="bfloat16") as later,
        pytest.raises(
            sgl.ParameterError,
            match=r"has states of 16 bytes in float32 .*, and the engine states of 16 bytes in bfloat16",
        ),
    ):
        later.import_prefix(written, trust_cache=True)
    plain = {"enable_hierarchical_cache": True, "max_total_tokens": 512, "page_size": 4}
    with Engine.of(loaded(), **plain) as without:
        with pytest.raises(sgl.ParameterError, match=r"16 bytes in float32.* the engine no states"):
            without.import_prefix(written, trust_cache=True)
        without.complete(LONG, TWO)
        without.export_prefix(LONG, tmp_path / "without.kv")
    with engine() as later, pytest.raises(sgl.ParameterError, match="no states, and the engine"):
        later.import_prefix(tmp_path / "without.kv", trust_cache=True)
    with engine(weight_version="2") as later, pytest.raises(sgl.ParameterError, match="of another"):
        later.import_prefix(written, trust_cache=True)


def test_a_host_without_room_for_all_of_it_is_told(written):
    with engine(hicache_ratio=0.25) as later:
        with pytest.raises(sgl.ParameterError, match=r"room for 32 of its 75 pages.*hicache_ratio"):
            later.import_prefix(written, trust_cache=True)
        assert cached(later, LONG) == 0


@pytest.mark.parametrize("at", [-1, 3, 45])
def test_damaged_files_are_refused(written, at):
    data = bytearray(written.read_bytes())
    data[at] ^= 1
    written.write_bytes(data)
    with engine() as later:
        with pytest.raises(sgl.ParameterError, match="path: "):
            later.import_prefix(written, trust_cache=True)
        assert cached(later, LONG) == 0
