"""Names of SGLang's that are for reading: a branch's executor, templates by path, tracing,
selections as it takes them.
"""

import threading

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang import chat_template, interpreter, tracer
from sglang_lite.lang.backend.openai import TokenUsage
from tests.lang.fakes import Gated, run
from tests.runtime import scripted

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 30


@sgl.function(num_api_spec_tokens=7)
def asks(s, question, hint="none"):
    s += sgl.user(question + sgl.image(PNG) + hint) + sgl.assistant(sgl.gen("answer"))


def test_the_executor_tells_how_the_program_was_called():
    state = asks.run(
        "Why?",
        hint="x",
        temperature=0.5,
        stop=["."],
        use_thread=False,
        backend=sgl.ScriptedBackend(),
    )
    executor = state.stream_executor
    assert executor.arguments == {"hint": "x"}
    assert (executor.default_sampling_para.temperature, executor.default_sampling_para.stop) == (
        0.5,
        ["."],
    )
    assert executor.default_sampling_para.max_new_tokens == 128
    assert executor.num_api_spec_tokens == 7
    assert executor.use_thread is False
    assert asks.bind(hint="y").run(question="Why?", backend=sgl.ScriptedBackend()).stream_executor.arguments == {  # type: ignore[call-arg]  # some of them, which type checkers refuse
        "question": "Why?", "hint": "y",
    }  # fmt: skip
    plain = run("a", backend=sgl.ScriptedBackend()).stream_executor
    assert plain.use_thread is True
    assert plain.num_api_spec_tokens is None


def test_variables_can_be_written_through_the_executor():
    @sgl.function
    def program(s):
        variables = s.stream_executor.variables
        variables["a"] = [1]
        variables.update(b=2)
        assert variables.setdefault("a", 3) == [1]
        s += "a" + sgl.gen("c")
        assert s["a"] == [1]
        variables["a"].append(4)

    state = program.run(backend=sgl.ScriptedBackend(default="!"))
    assert state.stream_executor.variables == {"a": [1, 4], "b": 2, "c": "!"}
    assert repr(state.stream_executor.variables) == "{'a': [1, 4], 'b': 2, 'c': '!'}"
    assert len(state.stream_executor.variables) == 3
    assert "d" not in state.stream_executor.variables
    with pytest.raises(sgl.ProgramError, match="'a' can't be deleted"):
        del state.stream_executor.variables["a"]


def test_an_event_is_set_when_its_variable_has_come():
    backend = Gated()

    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")

    state = program.run(backend=backend)
    event = state.stream_executor.variable_event["x"]
    assert not event.is_set()
    assert not event.wait(0)
    threading.Thread(target=backend.open).start()
    assert event.wait()
    assert event.is_set()


def test_the_executor_tells_where_a_branch_began_and_what_the_turn_shows():
    seen = []

    @sgl.function
    def program(s):
        s += "ab"
        with s.user():
            s += sgl.image(PNG)
            branches = s.fork(2)
            s.sync()
            seen.append(s.stream_executor.cur_images)
        s.sync()
        seen.append(s.stream_executor.cur_images)
        assert [b.stream_executor.fork_start_text_pos for b in branches] == [
            len(branches[0].text())
        ] * 2
        assert s.stream_executor.fork_start_text_pos is None

    program.run(backend=sgl.ScriptedBackend())
    assert [len(images) for images in seen] == [1, 0]


def test_metadata_of_an_unknown_name_is_none():
    state = run("a" + sgl.gen("x"), backend=sgl.ScriptedBackend())
    assert state.get_meta_info("x")
    assert state.get_meta_info("nothing") is None
    assert state.stream_executor.get_meta_info("nothing") is None


def test_a_program_is_cached_by_the_interpreters_name():
    cached = []

    class Caching(sgl.ScriptedBackend):
        def cache_prefix(self, prefix_str):
            cached.append(prefix_str)

    @sgl.function
    def program(s, word):
        s += "x" * 65
        s += word

    interpreter.cache_program(program, Caching())
    assert cached == ["x" * 65]


def test_a_body_may_stop_the_tracing_of_its_prefix():
    @sgl.function
    def program(s):
        s += "x" * 65
        raise tracer.StopTracing

    assert tracer.extract_prefix_by_tracing(program, None) == "x" * 65


def test_the_prefix_of_a_program_that_begins_with_a_turn_is_its_templates_text():
    @sgl.function
    def program(s, question):
        s += sgl.user("Answer: " + question)

    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    with Engine.of(scripted.loaded(), chat_template=template) as engine:
        assert tracer.extract_prefix_by_tracing(program, engine) == "<user>Answer: "
    assert (
        tracer.extract_prefix_by_tracing(program, sgl.ScriptedBackend())
        == "<|im_start|>user\nAnswer: "
    )


@pytest.mark.parametrize(
    ("match", "path", "name"),
    [
        ("match_deepseek", "deepseek-ai/DeepSeek-R1", "deepseek-v3"), ("match_orion", "OrionStar/Orion-14B", "claude"),
        ("match_deepseek_janus_pro", "deepseek-ai/Janus-Pro-7B", "janus-pro"),
        ("match_dbrx", "databricks/dbrx-instruct", "dbrx-instruct"), ("match_vicuna", "lmsys/vicuna-7b", "vicuna_v1.1"),
        ("match_llama2_chat", "meta-llama/Llama-2-7b-chat-hf", "llama-2-chat"),
        ("match_mistral", "mistralai/Mistral-7B-Instruct-v0.2", "mistral"),
        ("match_llama3_instruct", "meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-instruct"),
        ("match_chat_ml", "Qwen/Qwen2.5-7B-Instruct", "qwen"), ("match_chat_ml", "Qwen/Qwen2-VL-7B", "qwen2-vl"),
        ("match_chat_yi", "01-ai/Yi-1.5-6B-Chat", "yi-1.5"), ("match_gemma", "google/gemma-2-2b-it", "gemma-it"),
        ("match_openbmb_minicpm", "openbmb/MiniCPM-V-2_6", "minicpmv"),
        ("match_c4ai_command_r", "CohereForAI/c4ai-command-r-v01", "c4ai-command-r"),
        ("match_granite_instruct", "ibm-granite/granite-3.0-8b-instruct", "granite-3-instruct"),
        ("match_internvl_chat", "OpenGVLab/InternVL2_5-8B", "internvl-2-5"),
        ("match_interns1_chat", "internlm/Intern-S1", "interns1"),
    ],
)  # fmt: skip
def test_a_matching_function_knows_its_models_and_no_others(match, path, name):
    function = getattr(chat_template, match)
    assert function(path) == name
    assert function("some/other-model") is None
    assert function in chat_template.matching_function_registry


def test_token_usage_is_a_record():
    usage = TokenUsage(3, 4)
    usage.prompt_tokens += 1
    assert usage == TokenUsage(prompt_tokens=4, completion_tokens=4)
    usage.reset()
    assert usage == TokenUsage()


# --------------------------------------------------------------------------------------- selections


def test_of_choices_that_are_there_twice_the_first_counts():
    with pytest.warns(UserWarning, match="'b' is given twice"):
        choice = sgl.select("x", ["b", "c", "b"])
    state = run("a" + choice, backend=sgl.ScriptedBackend(answers={"a": "b"}))
    assert state["x"] == "b"
    assert len(state.get_meta_info("x")["normalized_prompt_logprobs"]) == 3
    assert state.selection("x").probs.keys() == {"b", "c"}
    assert sum(state.selection("x").probs.values()) == pytest.approx(1)


def test_of_several_answers_each_choice_is_taken_once():
    for choices in (["a", "a"], ["a", ""]):
        with pytest.raises(sgl.ParameterError, match="takes each at most once"):
            sgl.select("x", choices, multi=True)


def test_an_empty_choice_is_a_choice():
    state = run(
        "a" + sgl.select("x", ["b", ""]) + "!", backend=sgl.ScriptedBackend(answers={"a": ""})
    )
    assert state["x"] == ""
    assert state.text() == "a!"
