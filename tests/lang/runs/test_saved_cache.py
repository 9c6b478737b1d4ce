"""States that are saved with what was computed for their text."""

import pytest

import sglang_lite as sgl

TIERS = {
    "dtype": "float32",
    "enable_hierarchical_cache": True,
    "max_total_tokens": 1024,
    "page_size": 16,
}
SECRET = "0123456789abcdef"
TEXT = "The quick brown fox jumps over the lazy dog. " * 6


@sgl.function
def story(s):
    s += TEXT + sgl.gen("a", max_tokens=20, temperature=0, ignore_eos=True)


def continued(state):
    state += " And then" + sgl.gen("b", max_tokens=4, temperature=0)
    return state["b"], state.usage("b")


def test_a_new_engine_continues_without_computing_the_text_again(small_file, tmp_path):
    path = tmp_path / "story.json"
    with sgl.Engine(small_file, in_process=True, **TIERS) as engine:
        state = story.run(backend=engine)
        state.save(path, cache=True)
        state.save(tmp_path / "secret.json", secret=SECRET)
        told, _ = continued(state)
    with sgl.Engine(small_file, in_process=True, **TIERS) as engine:
        again, usage = continued(sgl.load(path, backend=engine, trust_cache=True))
        assert again == told
        assert usage.cached_tokens >= 0.8 * usage.prompt_tokens - 16
        engine.flush_cache()
        again, usage = continued(sgl.load(path, backend=engine))  # which nobody trusts
        assert (again, usage.cached_tokens) == (told, 0)
        engine.flush_cache()
        again, usage = continued(sgl.load(tmp_path / "secret.json", backend=engine, secret=SECRET))
        assert (again, usage.cached_tokens > 0) == (told, True)
        (tmp_path / "story.json.kv").unlink()
        with pytest.raises(sgl.ParameterError, match=r"story\.json\.kv"):
            sgl.load(path, backend=engine, trust_cache=True)


def test_backends_without_files_refuse_by_name_and_write_nothing(small_engine, tmp_path):
    path = tmp_path / "story.json"
    for backend, message in (
        (sgl.ScriptedBackend(default="x"), "ScriptedBackend keeps no keys and values"),
        (small_engine, "enable_hierarchical_cache=True"),
    ):
        state = story.run(backend=backend)
        with pytest.raises(sgl.CapabilityError, match=message):
            state.save(path, cache=True)
        assert list(tmp_path.iterdir()) == []
        state.save(path)
        with pytest.raises(sgl.CapabilityError, match=message):
            sgl.load(path, backend=backend, trust_cache=True)
        path.unlink()
    state = story.run(backend=sgl.ScriptedBackend(default="x"))
    state.save(path)
    with pytest.raises(sgl.CapabilityError, match="keeps no keys and values"):
        sgl.load(path, trust_cache=True)
