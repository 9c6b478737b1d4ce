"""OpenAI's SDK on our own server: a turn that has begun is continued as an engine continues it."""

import pytest

import sglang_lite as sgl


@pytest.fixture(scope="module")
def backend(url, engine):
    made = sgl.OpenAI(engine.config.model, base_url=f"{url}/v1", api_key="key", max_retries=0)
    yield made
    made.shutdown()


@pytest.mark.parametrize("options", [{}, {"regex": "[ab]+"}], ids=["free", "constrained"])
def test_a_begun_turn_is_continued(backend, engine, options):
    @sgl.function
    def turn(s):
        s += sgl.user("Count.")
        s += sgl.assistant(
            "One, two, three:" + sgl.gen("a", max_tokens=8, temperature=0, **options)
        )

    assert turn.run(backend=backend)["a"] == turn.run(backend=engine)["a"]
