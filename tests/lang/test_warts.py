"""Faults that SGLang's frontend is known for, none of which is here: one test for each complaint,
by its number in the list that docs/compatibility.md explains.
"""

import threading

import pytest

import sglang_lite as sgl
from tests.lang.fakes import Gated, Pieces, Scored, line_here, within

# ----------------------------------------------------------------- A: hangs, crashes, wrong results


@pytest.mark.parametrize("read", ["text", "sync", "error", "later", "messages"])
def test_a01_after_a_backend_error_nothing_that_comes_later_hangs(read):
    @sgl.function
    def program(s):
        s += sgl.gen("a")
        assert s.error() is not None  # it has failed before the rest is added
        s += "more" + sgl.gen("later")
        return within(1, lambda: s["later"] if read == "later" else getattr(s, read)())

    def run():
        return program.run(backend=sgl.ScriptedBackend(lambda call: str(1 / 0))).ret_value

    if read == "error":
        assert isinstance(run(), sgl.ProgramError)
    else:
        with pytest.raises(sgl.ProgramError, match="ZeroDivisionError"):
            run()


def test_a01_a_failed_program_leaves_no_thread_that_keeps_the_process_alive():
    before = set(threading.enumerate())
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("a"))).run(
        backend=sgl.ScriptedBackend(lambda call: str(1 / 0))
    )
    assert state.error() is not None
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)


def test_a02_texts_are_joined_even_where_a_backend_claims_to_join_caches():
    class Claims(sgl.BaseBackend):
        support_concate_and_append = True

        def generate(self, s, sampling_params):
            return "x", {}

        def concatenate_and_append(self, src_rids, dst_rid):
            raise AssertionError("the route does not exist")

    @sgl.function
    def program(s):
        s += "0"
        fork = s.fork(2)
        fork += lambda i: f" {i}:"
        fork += sgl.gen("x")
        fork.join("concate_and_append")
        s += "."

    state = program.run(backend=Claims())
    assert within(1, state.text) == "0 0:x 1:x."


@pytest.mark.parametrize(
    "method",
    [
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
    ],
)
def test_a03_every_method_takes_a_first_token_that_nothing_precedes(method):
    backend = Scored({"yes": [(1, -0.1, None)], "no": [(2, -2.0, None), (3, -2.0, -1.0)]})
    state = sgl.function(
        lambda s: s.__iadd__(sgl.select("x", ["yes", "no"], choices_method=method))
    ).run(backend=backend)
    assert state["x"] == "yes"


def test_a04_a_token_that_is_certain_counts_and_does_not_divide_by_zero():
    backend = Scored({"sure": [(1, 0.0, None)], "not": [(2, -0.5, None)]})
    state = sgl.function(lambda s: s.__iadd__("\n\n" + sgl.select("x", ["not", "sure"]))).run(
        backend=backend
    )
    assert state["x"] == "sure"
    assert state.get_meta_info("x")["normalized_prompt_logprobs"] == [-0.5, 0.0]


def test_a04_the_engine_selects_after_a_prompt_that_ends_with_the_same_token_twice(engine):
    @sgl.function
    def program(s):
        s += "Is the sky blue? Answer:\n\n\n\n" + sgl.select("x", ["Yes", "No"])

    state = program.run(backend=engine)
    assert state["x"] in ("Yes", "No")
    assert all(
        score.logprobs and None not in score.logprobs for score in state.selection("x").scores
    )


def test_a05_a_choice_is_scored_by_its_own_tokens_alone(smollm):
    """And by what generating that token gives: the last token of the prompt has no part in it."""

    @sgl.function
    def program(s):
        s += "The capital of France is"
        fork = s.fork(2)
        fork[0] += sgl.select("picked", [" Paris", " Rome"])
        fork[1] += sgl.gen("written", max_tokens=1, temperature=0, return_logprob=True)
        fork.join()

    state = program.run(backend=smollm)
    assert state["picked"][0] == state["written"][1] == " Paris"
    paris, _rome = state.get_meta_info("picked")["samples"][0]["input_token_logprobs"]
    written = state.get_meta_info("written")["samples"][1]["output_token_logprobs"]
    assert [token for _, token, _ in paris] == [token for _, token, _ in written]
    assert paris[0][0] == pytest.approx(written[0][0], abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_a06_several_samples_are_a_list_and_never_one_mixed_text(stream):
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", n=3) + "."

    backend = sgl.ScriptedBackend({"x": ["1 one", "2 two", "3 three"]})
    state = program.run(backend=backend, stream=stream)
    assert state["a"] == ["1 one", "2 two", "3 three"]
    assert "".join(state.text_iter()) == "x1 one."


def test_a07_pieces_of_a_stream_are_taken_as_they_are():
    """Cut by how much was there before, pieces that are not cumulative lose their beginnings:
    Helwor.
    """
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("a"))).run(
        stream=True, backend=Pieces("Hel", "lo ", "world!")
    )
    assert list(state.text_iter("a")) == ["Hel", "lo ", "world!"]
    assert state["a"] == "Hello world!"


def test_a08_an_error_in_the_middle_of_a_stream_is_raised_by_the_iterator():
    backend = Pieces("half ", RuntimeError("the server gave up"))
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("a"))).run(stream=True, backend=backend)
    pieces = []
    with pytest.raises(sgl.ProgramError, match="the server gave up"):
        for piece in state.text_iter("a"):
            pieces.append(piece)
    assert pieces == ["half "]


def test_a09_a_batch_runs_each_body_once_and_with_its_own_arguments():
    seen = []

    @sgl.function
    def program(s, language):
        seen.append(language)
        s += {"en": "Hello", "fr": "Bonjour"}[language] + " " * 70 + sgl.gen("a")

    program.run_batch(
        [{"language": "en"}, {"language": "fr"}], backend=sgl.ScriptedBackend(default="x")
    )
    assert sorted(seen) == ["en", "fr"]


def test_a09_a_batch_of_agents_that_loop_until_they_are_done_ends():
    @sgl.function
    def agent(s, name):
        while True:
            s += sgl.gen("action")
            if s["action"] == "done":
                break

    backend = sgl.ScriptedBackend({"": ["look", "look", "done"]})
    states = within(5, lambda: agent.run_batch([{"name": "a"}, {"name": "b"}], backend=backend))
    assert [state["action"] for state in states] == ["done", "done"]


def test_a10_tracing_in_one_thread_does_not_trace_what_another_runs():
    tracing, ran = threading.Event(), threading.Event()

    @sgl.function
    def traced(s):
        s += "text"
        tracing.set()
        assert ran.wait(60)

    @sgl.function
    def program(s):
        s += "really " + sgl.gen("a")

    tracer = threading.Thread(target=traced.trace)
    tracer.start()
    assert tracing.wait(60)
    state = program(backend=sgl.ScriptedBackend(default="run"))  # type: ignore[call-arg]  # options in the call are SGLang's
    ran.set()
    tracer.join()
    assert state.text() == "really run"


def test_a11_programs_with_turns_scopes_images_and_other_programs_can_be_traced(capsys):
    @sgl.function
    def inner(s, word):
        s += word + sgl.gen("b")

    @sgl.function
    def program(s, name):
        with s.user():
            s += f"Hello {name}!" + sgl.image("cat.png")
        with s.assistant(), s.var_scope("part"):
            s += sgl.gen("a")
        s += inner("word")

    traced = program.trace()
    assert {"a", "b", "part"} <= traced.variables.keys()
    traced.print_graph_dfs()
    assert "cat.png" in capsys.readouterr().out


def test_a11_a_decision_by_an_unknown_value_is_an_error_and_no_silent_else():
    @sgl.function
    def program(s):
        s += sgl.gen("tool")
        if s["tool"] == "calc":  # here
            s += "2 + 2 ="

    with pytest.raises(sgl.TraceError, match="compare") as caught:
        program.trace()
    assert caught.value.where.line == line_here(program)


@pytest.mark.parametrize("stream", [False, True])
def test_a12_gen_int_and_gen_string_say_the_limit_once_in_a_stream_too(stream):
    backend = sgl.ScriptedBackend()

    @sgl.function
    def program(s):
        s += sgl.gen_int("i", max_tokens=7) + sgl.gen_string("s", max_tokens=9)

    "".join(program.run(backend=backend, stream=stream).text_iter())
    assert [call.params.max_tokens for call in backend.calls] == [7, 9]


@pytest.mark.parametrize("stream", [False, True])
def test_a19_separated_reasoning_is_all_there_and_nowhere_else(stream):
    backend = sgl.ScriptedBackend(
        {
            "one?": "<think>I wonder</think>Two.",
            "three?": "<think>Hm</think>Four.",
            "Free:": "<think>So</think>Five.",
        }
    )

    @sgl.function
    def program(s):
        s += sgl.user("one?")
        s += sgl.separate_reasoning(sgl.assistant(sgl.gen("a")), model_type="qwen3")
        s += sgl.user("three?")
        s += sgl.separate_reasoning(
            sgl.assistant(sgl.gen("b") + " Sure? " + sgl.gen("c")), model_type="qwen3"
        )
        s += "Free:" + sgl.separate_reasoning(sgl.gen("d"), model_type="qwen3")

    state = program.run(backend=backend, stream=stream)
    thoughts = {name: within(1, lambda n=name: state[f"{n}_reasoning_content"]) for name in "abd"}
    assert thoughts == {"a": "I wonder", "b": "Hm", "d": "So"}
    assert [state[name] for name in "abd"] == ["Two.", "Four.", "Five."]
    assert [m["content"] for m in state.messages()] == [
        "one?",
        "Two.",
        "three?",
        f"Four. Sure? {state['c']}",
    ]
    assert state.text().startswith(
        "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n<think>I wonder</think>Two.<|im_end|>\n"
    )
    assert state.text().count("Five.") == 1
    if stream:
        assert "".join(state.text_iter("a")) == "Two."
        assert "".join(state.text_iter("a_reasoning_content")) == "I wonder"


def test_a19_an_answer_is_never_seen_before_its_reasoning_is_split_off():
    backend = Gated("<think>hm</think>yes")

    @sgl.function
    def program(s):
        s += sgl.separate_reasoning(sgl.gen("a"), model_type="qwen3")
        assert not s.stream_executor.variables
        backend.open()
        return s["a"]

    assert program.run(backend=backend).ret_value == "yes"


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("stop", [".", (".", ";"), [".", ";"]])
def test_a20_numbers_take_stops_in_every_form(kind, stop):
    backend = sgl.ScriptedBackend({"x": "12\n"})
    state = sgl.function(lambda s: s.__iadd__("x" + sgl.gen("a", dtype=kind, stop=stop))).run(
        backend=backend
    )
    assert state["a"] == "12"
    assert set(backend.calls[0].params.stop) == set(stop)  # type: ignore[arg-type]  # set above


def test_a21_no_choices_are_an_error_and_no_free_text():
    with pytest.raises(sgl.ParameterError, match="choices"):
        sgl.gen("a", choices=[])


def test_a22_a_stream_can_be_read_when_all_is_over_and_again():
    @sgl.function
    def program(s):
        s += "Say: " + sgl.gen("v")

    state = program.run(stream=True, backend=Pieces("a", "b"))
    assert state["v"] == "ab"
    for _ in range(2):
        assert within(1, lambda: list(state.text_iter("v"))) == ["a", "b"]
        assert within(1, lambda: "".join(state.text_iter())) == "Say: ab"


@pytest.mark.parametrize("where", ["in the body", "in the backend"])
def test_a22_a_scope_can_be_read_after_an_exception_in_it(where):
    @sgl.function
    def program(s):
        try:
            with s.var_scope("part"):
                s += "before "
                if where == "in the body":
                    raise LookupError
                s += sgl.gen("a")
        except LookupError:
            pass
        return within(1, lambda: s["part"])

    def run():
        return program.run(backend=sgl.ScriptedBackend(lambda call: str(1 / 0))).ret_value

    if where == "in the body":
        assert run() == "before "
    else:
        with pytest.raises(sgl.ProgramError, match="ZeroDivisionError"):
            run()


class Hinted(sgl.BaseBackend):
    """Notes the texts that it is told many continuations of will follow."""

    def __init__(self):
        super().__init__()
        self.hints = []

    def generate(self, s, sampling_params):
        return "x", {}

    def commit_lazy_operations(self, s):
        self.hints.append(s.text_)


def test_a23_a_fork_right_after_text_gives_the_hint_with_all_of_it():
    backend = Hinted()

    @sgl.function
    def program(s):
        for i in range(100):
            s += f"{i} "
            s.fork(2)
        s.sync()

    program.run(backend=backend)
    assert backend.hints == ["".join(f"{j} " for j in range(i + 1)) for i in range(100)]


def test_a23_an_empty_state_can_be_forked():
    @sgl.function
    def program(s):
        fork = s.fork(2)
        fork += sgl.gen("a")
        fork.join()

    assert program.run(backend=Hinted())["a"] == ["x", "x"]
