"""The engine that starts by itself where no backend is set."""

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.local import default_identity


def test_the_default_engine_starts_by_itself_and_says_so(model_file, caplog, tmp_path, monkeypatch):
    @sgl.function
    def capital(s, country):
        s += sgl.user(f"What is the capital of {country}?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))

    assert capital.run("France")["answer"].endswith("Paris.")
    assert caplog.text.count("the default engine is started") == 1
    assert default_identity() == sgl.global_config.default_backend.identity()
    checkpoint = {"checkpoint": tmp_path / "run.jsonl"}
    (state,) = capital.run_batch([{"country": "France"}], **checkpoint)
    sgl.global_config.default_backend.shutdown()

    # A finished batch is opened without an engine.
    sgl.global_config.default_backend = None
    monkeypatch.setattr("sglang_lite.lang.backend.local.default_engine", None)
    (again,) = capital.run_batch([{"country": "France"}], **checkpoint)
    assert again["answer"] == state["answer"]
    assert again.text() == state.text()
    monkeypatch.setattr("sglang_lite.lang.backend.local.default_identity", lambda: ("another",))
    with pytest.raises(sgl.ProgramError, match="this has changed: the backend"):
        capital.run_batch([{"country": "France"}], **checkpoint)
