"""Programs on the real engine: samples, failures, streams; as one program or one by one."""

import asyncio

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.default import as_backend


@pytest.fixture(autouse=True)
def _default(engine):
    sgl.set_default_backend(engine)


def test_what_was_generated_is_not_computed_again():
    @sgl.function
    def program(s):
        s += "Once upon a time" + sgl.gen("a", max_tokens=8, temperature=0)
        s += " and then" + sgl.gen("b", max_tokens=4, temperature=0)

    state = program.run()
    usage = state.usage("b")
    assert usage.prompt_tokens - usage.cached_tokens <= len(["and", "then"]) + 1


def test_several_samples_with_a_seed():
    @sgl.function
    def program(s):
        s += "My favourite colour is" + sgl.gen("a", n=3, max_tokens=5)

    one, two = program.run(seed=1)["a"], program.run(seed=1)["a"]
    assert one == two
    assert len(set(one)) > 1


def test_failures_come_from_the_engine_with_the_line():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", temperature=-3)

    with pytest.raises(sgl.ParameterError, match="temperature: -3") as caught:
        program.run()["a"]
    assert caught.value.where.line == program.func.__code__.co_firstlineno + 2

    @sgl.function
    def refused(s):
        s += "x" + sgl.gen("a", json_schema={"type": "integer", "multipleOf": 1234577})

    with pytest.raises(sgl.ConstraintError, match="multipleOf"):
        refused.run()["a"]


def test_a_stopped_program_stops_its_requests(engine):
    @sgl.function
    def program(s):
        s += "Tell me everything:" + sgl.gen("a", max_tokens=4000, ignore_eos=True)
        raise LookupError("changed my mind")

    with pytest.raises(LookupError):
        program.run()
    # comes after the abort
    sgl.function(lambda s: s.__iadd__("x" + sgl.gen("a", max_tokens=2))).run().sync()
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_a_run_is_one_program(engine):
    """Programs asked node by node and handed over at once give the same."""

    @sgl.function
    def program(s):
        s += sgl.user("Name a country.") + sgl.assistant(
            "It is" + sgl.gen("country", max_tokens=5, temperature=0)
        )
        s += sgl.user("And its capital?")
        with s.var_scope("turn"), s.assistant():
            s += sgl.gen("capital", max_tokens=8, temperature=0)
        s += sgl.user("Is it big?") + sgl.assistant(
            sgl.select("size", ["yes", "no"], temperature=1.0)
        )
        s += sgl.user("Founded when?") + sgl.assistant(sgl.gen("year", type=int, temperature=0))
        s += sgl.user("Say more.") + sgl.assistant(sgl.gen("more", temperature=1.0, max_tokens=12))

    before = engine.stats()
    whole = program.run(backend=engine, seed=1)
    text, messages = whole.text(), whole.messages()
    assert engine.stats()["programs_opened"] == before["programs_opened"] + 1
    assert engine.stats()["requests_submitted"] == before["requests_submitted"]
    streamed = program.run(backend=engine, seed=1, stream=True)
    assert "".join(streamed.text_iter()) == text
    single = program.run(backend=engine, seed=1, push_down=False)
    assert (single.text(), single.messages()) == (text, messages)
    assert engine.stats()["requests_submitted"] == before["requests_submitted"] + 5
    for name in ("country", "capital", "turn", "size", "year", "more"):
        assert single[name] == whole[name] == streamed[name]


def test_what_is_wrong_with_one_node_of_a_program_is_told_at_its_line(engine):
    @sgl.function
    def program(s):
        s += "Once" + sgl.gen("a", max_tokens=3, temperature=0)
        s += sgl.gen("b", max_tokens=3, temperature=5000)
        s += sgl.gen("c", max_tokens=3)

    state = program.run(backend=engine)
    assert state["a"]
    with pytest.raises(sgl.ParameterError, match="temperature") as caught:
        state["c"]
    assert caught.value.where.line == program.func.__code__.co_firstlineno + 3


def test_pieces_of_a_stream_have_their_logprobs_and_the_counts_so_far(engine):
    """Assertions of SGLang's own program for streamed log-probabilities."""

    @sgl.function
    def program(s):
        s += sgl.user("Tell me about Hawaii.")
        s += sgl.assistant(sgl.gen("answer", return_logprob=True, max_tokens=24, temperature=0))

    async def read():
        state = program.run(backend=engine, stream=True)
        pairs = [pair async for pair in state.text_async_iter("answer", return_meta_data=True)]
        return pairs, state.get_meta_info("answer")

    pairs, whole = asyncio.run(read())
    tokens = 0
    for text, meta in pairs:
        assert text
        tokens += len(meta["output_token_logprobs"])
        assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == tokens
    assert whole["completion_tokens"] == whole["output_token_logprobs_length"] == tokens == 24


def test_settings_of_a_started_engine_are_fixed(engine):
    with pytest.raises(
        sgl.ParameterError, match="chat_template: an engine's settings are fixed"
    ) as caught:
        engine.chat_template = "chatml"
    assert "sgl.Engine(…, chat_template=…)" in caught.value.hint
    assert callable(engine.chat_template)
    cure = as_backend(engine).template_cure
    assert cure == 'start the engine with one: sgl.Engine(…, chat_template="template.jinja").'


def test_a_template_that_an_engine_starts_with_gives_roles_their_text(small_file, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    )

    @sgl.function
    def program(s):
        s += sgl.user("hi")

    with sgl.Engine(small_file, chat_template=str(file), in_process=True) as engine:
        assert program.run(backend=engine).text() == "<user>hi</user>"
