"""What SGLang's frontend is known to get wrong, and that none of it is here: one test for each complaint, by its number
in the list that docs/compatibility.md explains."""

import asyncio
import gc
import sys
import threading

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.base_backend import Capabilities
from sglang_lite.lang.chat_template import ChatTemplate
from sglang_lite.lang.ir import REGEX_INT
from sglang_lite.protocol import UNSET
from tests.lang.fakes import Answers, Gated, Pieces, Scored, line_here, with_logprob, within

# ------------------------------------------------------------------------- A: hangs, crashes, wrong results


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
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("a"))).run(backend=sgl.ScriptedBackend(lambda call: str(1 / 0)))
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
    "method", [sgl.token_length_normalized, sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized]
)
def test_a03_every_method_takes_a_first_token_that_nothing_precedes(method):
    backend = Scored({"yes": [(1, -0.1, None)], "no": [(2, -2.0, None), (3, -2.0, -1.0)]})
    state = sgl.function(lambda s: s.__iadd__(sgl.select("x", ["yes", "no"], choices_method=method))).run(
        backend=backend
    )
    assert state["x"] == "yes"


def test_a04_a_token_that_is_certain_counts_and_does_not_divide_by_zero():
    backend = Scored({"sure": [(1, 0.0, None)], "not": [(2, -0.5, None)]})
    state = sgl.function(lambda s: s.__iadd__("\n\n" + sgl.select("x", ["not", "sure"]))).run(backend=backend)
    assert state["x"] == "sure"
    assert state.get_meta_info("x")["normalized_prompt_logprobs"] == [-0.5, 0.0]


def test_a04_the_engine_selects_after_a_prompt_that_ends_with_the_same_token_twice(engine):
    @sgl.function
    def program(s):
        s += "Is the sky blue? Answer:\n\n\n\n" + sgl.select("x", ["Yes", "No"])

    state = program.run(backend=engine)
    assert state["x"] in ("Yes", "No")
    assert all(score.logprobs and None not in score.logprobs for score in state.selection("x").scores)


def test_a05_a_choice_is_scored_by_its_own_tokens_alone(engine):
    """And by what generating that token gives: the last token of the prompt has no part in it."""

    @sgl.function
    def program(s):
        s += "The capital of France is"
        fork = s.fork(2)
        fork[0] += sgl.select("picked", [" Paris", " Rome"])
        fork[1] += sgl.gen("written", max_tokens=1, temperature=0, return_logprob=True)
        fork.join()

    state = program.run(backend=engine)
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
    """Cut by how much was there before, pieces that are not cumulative lose their beginnings: Helwor."""
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("a"))).run(stream=True, backend=Pieces("Hel", "lo ", "world!"))
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

    program.run_batch([{"language": "en"}, {"language": "fr"}], backend=sgl.ScriptedBackend(default="x"))
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
    state = program(backend=sgl.ScriptedBackend(default="run"))
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
        {"one?": "<think>I wonder</think>Two.", "three?": "<think>Hm</think>Four.", "Free:": "<think>So</think>Five."}
    )

    @sgl.function
    def program(s):
        s += sgl.user("one?")
        s += sgl.separate_reasoning(sgl.assistant(sgl.gen("a")), model_type="qwen3")
        s += sgl.user("three?")
        s += sgl.separate_reasoning(sgl.assistant(sgl.gen("b") + " Sure? " + sgl.gen("c")), model_type="qwen3")
        s += "Free:" + sgl.separate_reasoning(sgl.gen("d"), model_type="qwen3")

    state = program.run(backend=backend, stream=stream)
    thoughts = {name: within(1, lambda n=name: state[f"{n}_reasoning_content"]) for name in "abd"}
    assert thoughts == {"a": "I wonder", "b": "Hm", "d": "So"}
    assert [state[name] for name in "abd"] == ["Two.", "Four.", "Five."]
    assert [m["content"] for m in state.messages()] == ["one?", "Two.", "three?", f"Four. Sure? {state['c']}"]
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
    state = sgl.function(lambda s: s.__iadd__("x" + sgl.gen("a", dtype=kind, stop=stop))).run(backend=backend)
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


# --------------------------------------------------------------------------- B: silent misbehaviour, races


def test_b01_a_name_used_twice_waits_for_the_second_value():
    backend = Gated("second")

    @sgl.function
    def program(s):
        s += sgl.gen("a") + sgl.gen("a", backend=backend)
        backend.asked.wait(5)  # the first has its value
        threading.Thread(target=backend.open).start()
        return s["a"]

    assert program.run(backend=sgl.ScriptedBackend(default="first ")).ret_value == "second"


def test_b01_generations_without_a_name_do_not_share_one():
    @sgl.function
    def program(s):
        s += "1" + sgl.gen() + "2" + sgl.gen() + "3" + sgl.select(choices=["x", "y"])

    state = program.run(backend=sgl.ScriptedBackend({"1": "a", "2": "b", "3": "y"}))
    assert state.text() == "1a2b3y"
    assert state.stream_executor.variables == {}


def test_b02_waiting_for_a_stream_leaves_the_event_loop_to_others():
    backend = Gated("x")

    async def main():
        state = sgl.function(lambda s: s.__iadd__(sgl.gen("a"))).run(stream=True, backend=backend)
        reader = asyncio.ensure_future(anext(state.text_async_iter("a")))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not reader.done()
        backend.open()
        return await reader

    assert within(5, lambda: asyncio.run(main())) == "x"


def test_b02_waiting_for_a_stream_takes_no_processor_time():
    backend = Gated("x")
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("a"))).run(stream=True, backend=backend)
    calls = []

    def read():
        sys.setprofile(lambda *event: calls.append(event))
        list(state.text_iter("a"))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(100):  # others have their turn, and it has one between them
        within(5, lambda: None)
    backend.open()
    reader.join(5)
    assert 0 < len(calls) < 500


def test_b03_no_reader_loses_the_end_however_it_meets_the_writer():
    pieces = [str(i) for i in range(20)]
    program = sgl.function(lambda s: s.__iadd__(sgl.gen("a")))

    def read():
        return "".join(program.run(stream=True, backend=Pieces(*pieces)).text_iter())

    assert {within(5, read) for _ in range(200)} == {"".join(pieces)}


def test_b04_bind_leaves_the_batch_as_it_was():
    program = sgl.function(lambda s, x, y: s.__iadd__(f"{x}{y}")).bind(y=2)
    items = [{"x": 1}, {"x": 3}]
    program.run_batch(items, backend=sgl.ScriptedBackend())
    assert items == [{"x": 1}, {"x": 3}]


def test_b05_joined_lists_keep_places_names_metadata_and_errors():
    @sgl.function
    def program(s):
        s["parents"] = "old"
        fork = s.fork(3)
        fork[2] += "2" + sgl.gen("one")
        fork[1]["parents"] = "new"
        fork += sgl.gen("all")
        fork[0] += "0" + sgl.gen("bad")
        fork.join()

    state = program.run(backend=sgl.ScriptedBackend({"0": OSError("gone")}, default="x"))
    assert state["one"] == [None, None, "x"]
    assert state["parents"] == [None, "new", None]
    assert [m and m["completion_tokens"] for m in state.get_meta_info("one")["samples"]] == [None, None, 1]
    with pytest.raises(sgl.ProgramError, match="OSError: gone"):
        state["bad"]
    assert state["all"] == ["x", "x", "x"]


@pytest.mark.parametrize(
    "expr", [sgl.user_begin() + "x" + sgl.assistant_end(), sgl.user_begin() + sgl.user("x"), sgl.assistant_end()]
)
def test_b06_turns_that_do_not_fit_together_are_refused_at_their_line(expr):
    @sgl.function
    def program(s):
        s += "fine"
        s += expr  # here

    with pytest.raises(sgl.ProgramError, match="turn") as caught:
        program.run(backend=sgl.ScriptedBackend())
    assert caught.value.where.line == line_here(program)


class Narrow(sgl.ScriptedBackend):
    capabilities = Capabilities(constraints=frozenset(), params=frozenset({"max_tokens"}), select=False)


class Hooks(sgl.BaseBackend):
    def generate(self, s, sampling_params):
        return "x", {}


@pytest.mark.parametrize(
    ("backend", "node", "named"),
    [
        (Narrow(), sgl.gen("a", top_k=3), "top_k"),
        (Narrow(), sgl.gen("a", regex="x"), "regex"),
        (Narrow(), sgl.gen("a", json_schema="{}"), "JSON schema"),
        (Narrow(), sgl.gen("a", dtype=int), "regex"),
        (Narrow(), sgl.select("a", ["x"]), "select"),
        (Hooks(), sgl.gen("a", seed=1), "seed"),
        (Hooks(), sgl.gen("a", logit_bias={1: 2.0}), "logit_bias"),
    ],
)
def test_b07_what_a_backend_can_not_honour_is_refused_by_name(backend, node, named):
    @sgl.function
    def program(s):
        s += node  # here

    with pytest.raises(sgl.CapabilityError, match=f"can't honour .*{named}") as caught:
        program.run(backend=backend)
    assert caught.value.where.line == line_here(program)


def test_b09_parameters_of_one_node_do_not_get_into_another():
    given = []

    class Spoils(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            given.append(sampling_params.clone())
            sampling_params.stop += ("spoiled",)
            sampling_params.regex = "spoiled"
            return "1", {}

    @sgl.function
    def program(s):
        s += sgl.gen("a", regex="[0-9]") + sgl.gen("b", regex="[0-9]") + sgl.gen("c")

    program.run(backend=Spoils(), temperature=0.5).sync()
    assert [(p.regex, tuple(p.stop), p.temperature) for p in given] == [("[0-9]", (), 0.5)] * 2 + [(None, (), 0.5)]


def test_b10_one_programs_value_can_be_added_to_another():
    @sgl.function
    def first(s):
        s += sgl.gen("a")

    @sgl.function
    def second(s, state):
        s += "It said " + state["a"]

    backend = sgl.ScriptedBackend(default="so")
    assert second.run(first.run(backend=backend), backend=backend).text() == "It said so"


@pytest.mark.parametrize("stop", [None, "a", ("a", "b"), ["a", "b"], tuple(f"stop {i}" for i in range(40))])
@pytest.mark.parametrize("template_stop", [("<end>",), ["<end>"]])
def test_b11_stops_and_those_of_the_template_add_up_in_every_form(stop, template_stop):
    backend = sgl.ScriptedBackend()
    backend.chat_template = ChatTemplate("own", None, {"assistant": ("A: ", "\n")}, stop_str=template_stop)
    sgl.function(lambda s: s.__iadd__(sgl.assistant(sgl.gen("a", stop=stop)))).run(backend=backend).sync()
    own = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    assert backend.calls[0].params.stop == (*own, "<end>")


def test_b12_a_reader_that_lags_behind_loses_no_metadata():
    backend = Pieces(*(with_logprob(f"{i} ", i) for i in range(50)))
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("a", return_logprob=True))).run(stream=True, backend=backend)
    assert state["a"].endswith("49 ")  # everything has come before the first read

    async def read():
        return [meta async for _, meta in state.text_async_iter("a", return_meta_data=True)]

    tokens = [entry[1] for meta in asyncio.run(read()) for entry in meta["output_token_logprobs"]]
    assert tokens == list(range(50))


def test_b13_a_program_whose_state_nobody_holds_runs_to_its_end():
    backend = Gated("x")
    done = threading.Event()

    class Then(sgl.ScriptedBackend):
        async def agenerate(self, *args, **options):
            done.set()
            async for event in super().agenerate(*args, **options):
                yield event

    def run():
        sgl.function(lambda s: s.__iadd__(sgl.gen("a") + sgl.gen("b", backend=Then(default="y")))).run(backend=backend)

    run()
    assert backend.asked.wait(60)
    gc.collect()
    backend.open()
    assert done.wait(60)


def test_b13_an_exception_after_a_fork_stops_the_branches():
    backend = Gated()

    @sgl.function
    def program(s):
        fork = s.fork(4)
        fork += sgl.gen("a")
        backend.asked.wait(5)
        raise LookupError("mine")

    before = threading.active_count()
    with pytest.raises(LookupError):
        program.run(backend=backend)
    assert backend.cancelled.wait(60)
    assert threading.active_count() <= before + 1  # the executor's, if it was not there before


# ------------------------------------------------------------------------------- C: slow, awkward, missing


def test_c_an_exception_in_one_body_leaves_the_other_results():
    @sgl.function
    def program(s, i):
        s += f"{10 // i}"

    results = program.run_batch([{"i": 5}, {"i": 0}, {"i": 2}], backend=sgl.ScriptedBackend(), on_error="return")
    assert [r if isinstance(r, Exception) else r.text() for r in (results[0], results[2])] == ["2", "5"]
    assert isinstance(results[1], ZeroDivisionError)


def test_c_a_whole_number_has_an_end():
    import re

    assert re.fullmatch(REGEX_INT, "1" * 16)
    assert not re.fullmatch(REGEX_INT, "1" * 17)


def test_c_minimum_and_seed_can_be_asked_for():
    backend = sgl.ScriptedBackend()
    sgl.function(lambda s: s.__iadd__(sgl.gen("a", min_tokens=3, seed=4))).run(backend=backend).sync()
    assert (backend.calls[0].params.min_tokens, backend.calls[0].params.seed) == (3, 4)


def test_c_a_setting_of_the_run_is_not_sent_twice():
    backend = sgl.ScriptedBackend()

    @sgl.function
    def program(s):
        s += sgl.gen("a", temperature=0.1) + sgl.gen("b")

    program.run(backend=backend, temperature=0.9).sync()
    assert [call.params.temperature for call in backend.calls] == [0.1, 0.9]
    assert backend.calls[0].params.top_p is UNSET


def test_c_roles_follow_a_template_of_ones_own():
    backend = Answers(lambda text: "4")
    backend.chat_template = ChatTemplate("own", None, {"user": ("Q: ", "\n"), "assistant": ("A: ", "\n")})
    state = sgl.function(lambda s: s.__iadd__(sgl.user("2+2?") + sgl.assistant(sgl.gen("a")))).run(backend=backend)
    assert state.text() == "Q: 2+2?\nA: 4\n"
