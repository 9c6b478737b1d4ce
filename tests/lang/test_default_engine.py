"""The engine that starts by itself where no backend is set."""

import sglang_lite as sgl


def test_the_default_engine_starts_by_itself_and_says_so(model_file, caplog):
    @sgl.function
    def capital(s, country):
        s += sgl.user(f"What is the capital of {country}?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))

    assert capital.run("France")["answer"].endswith("Paris.")
    assert caplog.text.count("the default engine is started") == 1
    sgl.global_config.default_backend.shutdown()
