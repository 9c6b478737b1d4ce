"""Programs on a scripted backend: what is added, what is read, and when."""

import asyncio
import re
import threading
from collections import Counter

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.backend.scripted import ScriptedRequest
from sglang_lite.protocol import UNSET, Generation, JsonSchema, Number, Regex, Usage
from tests.conformance.case import Never
from tests.constraints.test_generation import random_model
from tests.lang.fakes import Gated, within


def echo(call: ScriptedRequest) -> str:
    """Answers with how long the prompt is, so that every answer depends on everything before it."""
    return f"<{len(call.prompt.text)}>"


def test_text_and_generations_alternate():
    @sgl.function
    def program(s, name):
        s += f"Hello {name}, "
        s += "you are " + sgl.gen("a") + " and " + sgl.gen("b") + "."
        s += sgl.gen()

    state = program.run("Ann", backend=sgl.ScriptedBackend(echo))
    assert state.text() == "Hello Ann, you are <19> and <28>.<33>"
    assert (state["a"], state["b"]) == ("<19>", "<28>")
    assert state.messages() == []
    assert repr(state) == f"ProgramState({state.text()})"


def test_roles_are_rendered_by_the_template_and_kept_as_messages():
    @sgl.function
    def program(s):
        s += sgl.system("Be brief.")
        s += sgl.user("Hi" + sgl.gen("extra"))
        with s.assistant():
            s += "I say: "
            s += sgl.gen("answer")
        s.user("Bye")
        s += s.assistant("Ciao")  # adds the turn once
        s += sgl.user_begin() + "x" + sgl.user_end() + sgl.assistant()

    state = program.run(backend=sgl.ScriptedBackend({"I say": "yes", "Hi": "!"}))
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "I say: yes"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Ciao"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": ""},
    ]
    assert state.text().startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
    )
    assert state.messages() is not state.messages()


def test_the_prompt_of_a_turn_carries_messages_role_and_what_is_written_so_far():
    backend = sgl.ScriptedBackend(default="ok")

    @sgl.function
    def program(s):
        s += sgl.user("Q")
        s += sgl.assistant("The answer: " + sgl.gen("a"))

    program.run(backend=backend).sync()
    prompt = backend.calls[0].prompt
    assert [m.role for m in prompt.messages] == ["user"]
    assert (prompt.role, prompt.partial) == ("assistant", "The answer: ")


def test_node_settings_win_over_run_settings_and_unset_stays_unset():
    backend = sgl.ScriptedBackend(default="x")

    @sgl.function
    def program(s):
        s += sgl.gen("a", 7, stop="\n", temperature=0.5)
        s += sgl.gen("b")

    program.run(backend=backend, max_new_tokens=9, top_p=0.9, stop=["a", "b"]).sync()
    a, b = (call.params for call in backend.calls)
    assert (a.max_tokens, a.stop, a.temperature, a.top_p, a.top_k) == (7, ("\n",), 0.5, 0.9, UNSET)
    assert (b.max_tokens, b.stop, b.temperature) == (9, ("a", "b"), UNSET)
    program.run(backend=backend).sync()
    assert backend.calls[-1].params.max_tokens is UNSET


def test_constraints_reach_the_backend():
    backend = sgl.ScriptedBackend()

    @sgl.function
    def program(s):
        s += (
            sgl.gen("i", dtype=int)
            + sgl.gen("r", regex="[ab]{3}")
            + sgl.gen("j", json_schema={"type": "boolean"})
        )
        s += (
            sgl.gen("b", dtype="bool")
            + sgl.gen_string("s")
            + sgl.gen_int("n", 9)
            + sgl.gen("f", dtype=float)
        )

    state = program.run(backend=backend)
    assert int(state["i"]) is not None
    assert set(state["r"]) <= set("ab")
    assert state["j"] in ("true", "false")
    assert state["b"] in ("True", "False")
    assert state["s"].startswith('"')
    assert state["s"].endswith('"')
    assert float(state["f"]) is not None
    kinds = [type(call.constraint) for call in backend.calls]
    assert kinds == [Number, Regex, JsonSchema, Regex, Regex, Number, Number]
    assert backend.calls[0].params.stop is UNSET


def test_typed_values_and_their_text():
    @sgl.function
    def program(s):
        s += "age: " + sgl.gen("age", type=int)
        s += "list: " + sgl.gen("list", type=list[int])

    state = program.run(backend=sgl.ScriptedBackend({"age: ": "42 years", "list: ": "[1, 2]"}))
    assert (state["age"], state.raw("age")) == (42, "42")
    assert (state["list"], state.raw("list")) == ([1, 2], "[1, 2]")


def test_several_samples_make_a_list_and_the_first_goes_on():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", n=3) + "y"

    state = program.run(backend=sgl.ScriptedBackend({"x": ["1", "2", "3"]}))
    assert state["a"] == ["1", "2", "3"]
    assert state.raw("a") == ["1", "2", "3"]
    assert state.text() == "x1y"
    assert state.usage("a").completion_tokens == 3
    assert len(state.get_meta_info("a")["samples"]) == 3


def test_select_by_name_and_through_gen():
    @sgl.function
    def program(s):
        s += "sky is " + sgl.select("sky", ["blue", "green"])
        s += " grass is " + sgl.gen(
            "grass", choices=["blue", "green"], choices_method=sgl.greedy_token_selection
        )
        s += sgl.select("any", ["p", "q"], temperature=1.0)

    backend = sgl.ScriptedBackend({"sky is ": "blue", "grass is ": "green"})
    state = program.run(backend=backend, seed=3)
    assert (state["sky"], state["grass"]) == ("blue", "green")
    assert state.selection("sky").probs["blue"] > 0.9
    assert sum(state.selection("sky").probs.values()) == pytest.approx(1)
    assert "normalized_prompt_logprobs" in (state.get_meta_info("sky") or {})
    assert "greedy_logprob_matrix" in (state.get_meta_info("grass") or {})
    assert state.raw("sky") == "blue"
    assert state["any"] == program.run(backend=backend, seed=3)["any"]


def test_variables_can_be_set_and_asked_for():
    @sgl.function
    def program(s):
        s["x"] = 3
        s.set_var("y", [1])
        s += sgl.gen("z")
        assert "z" in s
        assert "w" not in s
        return s["x"] + 1

    state = program.run(backend=sgl.ScriptedBackend(default="!"))
    assert (state["x"], state["y"], state.get_var("z"), state.ret_value) == (3, [1], "!", 4)
    assert state.get_meta_info("x") is None
    assert state.usage("x").prompt_tokens == 0
    assert state.stream_executor.variables == {"x": 3, "y": [1], "z": "!"}
    assert state.stream_executor.text_ == "!"


def test_var_scope_collects_text():
    @sgl.function
    def program(s):
        s += "a"
        with s.var_scope("part"):
            s += "b" + sgl.gen() + "c"
        s += "d"

    state = program.run(backend=sgl.ScriptedBackend(default="-"))
    assert state["part"] == "b-c"


def test_a_program_that_goes_on_with_itself_may_have_its_scope_open():
    inner = []

    @sgl.function
    def program(s, depth=0):
        with s.var_scope("part"):
            s += f"<{depth}"
            if depth < 2:
                s += program(depth + 1)
                inner.append(s["part"])
            s += ">"

    state = program.run(backend=sgl.ScriptedBackend())
    assert inner == ["<2>", "<1<2>>"]
    assert state["part"] == state.text() == "<0<1<2>>>"


def test_accounting_of_a_node_and_of_the_run():
    @sgl.function
    def program(s):
        s += "one two three" + sgl.gen("a")
        fork = s.fork(2)
        fork += sgl.gen("b")
        fork.join()

    state = program.run(backend=sgl.ScriptedBackend(default=" four five"))
    assert (state.usage("a").prompt_tokens, state.usage("a").completion_tokens) == (3, 2)
    assert state.usage("b").completion_tokens == 4
    assert state.usage().completion_tokens == 6
    assert state.usage().total_s > 0
    meta = state.get_meta_info("a")
    assert meta["finish_reason"] == {"type": "stop", "matched": None}
    assert meta["completion_tokens"] == 2


def test_truncation_is_told():
    @sgl.function
    def program(s):
        s += sgl.gen("a", max_tokens=2)

    meta = program.run(backend=sgl.ScriptedBackend(default="a b c")).get_meta_info("a")
    assert meta["finish_reason"] == {"type": "length", "length": 2}


def test_reading_waits_and_adding_does_not():
    backend, order = Gated("x"), []

    def answer():
        backend.asked.wait()
        order.append("answered")
        backend.open()

    @sgl.function
    def program(s):
        s += sgl.gen("a") + sgl.gen("b")
        order.append("added")
        threading.Thread(target=answer).start()
        assert s["a"] == "x"
        order.append("read")

    within(3, lambda: program.run(backend=backend))
    assert order == ["added", "answered", "read"]


def test_use_thread_false_waits_for_everything():
    @sgl.function
    def program(s):
        s += sgl.gen("a")

    state = program.run(backend=sgl.ScriptedBackend(default="x", latency=0.02), use_thread=False)
    assert state.branch.names.variables["a"].done


def test_the_same_name_twice_reads_the_latest():
    @sgl.function
    def program(s):
        s += "1" + sgl.gen("a")
        s += "2" + sgl.gen("a")
        return s["a"]

    assert program.run(backend=sgl.ScriptedBackend(echo, latency=0.01)).ret_value == "<5>"


def test_first_parameter_may_have_any_name_and_arguments_any_kind():
    class Agent:
        def ask(self, state, /, *parts, sep="-", **more):
            state += sep.join(parts) + str(sorted(more))

    program = sgl.function(Agent().ask)
    assert program.run("a", "b", sep="+", z=1, backend=sgl.ScriptedBackend()).text() == "a+b['z']"
    assert program.arg_names == []


def test_own_arguments_win_over_settings_of_the_same_name():
    backend = sgl.ScriptedBackend(default="x")

    @sgl.function
    def program(s, n, stop=None, stream=False):
        s += f"{n} {stop} {stream} " + sgl.gen("a")

    assert program.run(n=5, stop="here", stream="yes", backend=backend).text() == "5 here yes x"  # type: ignore[arg-type]  # the body takes a `stream` of its own
    assert (backend.calls[0].params.n, backend.calls[0].params.stop) == (UNSET, UNSET)


def test_own_arguments_are_what_was_given_whatever_the_setting_is_by_default():
    @sgl.function
    def program(s, priority, stream=True):
        s += f"{priority} {stream}"

    backend = sgl.ScriptedBackend()
    assert program.run(priority=0, stream=False, backend=backend).text() == "0 False"
    assert program.run(priority=0, backend=backend).text() == "0 True"
    with pytest.raises(
        sgl.ParameterError, match="program: missing a required argument: 'priority'"
    ):
        program.run(backend=backend)


def test_a_batchs_settings_are_never_taken_for_arguments_which_its_items_have():
    backend = sgl.ScriptedBackend(default="x")

    @sgl.function
    def program(s, n, temperature=0.5, backend="mine"):
        s += f"{n} {temperature} {backend} " + sgl.gen("a")

    (state,) = program.run_batch([{"n": 5}], temperature=0, backend=backend)
    assert state.text() == "5 0.5 mine x"
    assert (backend.calls[0].params.n, backend.calls[0].params.temperature) == (UNSET, 0)


def test_bind_gives_arguments_that_later_ones_override():
    @sgl.function
    def program(s, a, b=2):
        s += f"{a}{b}"

    bound = program.bind(a=1)
    backend = sgl.ScriptedBackend()
    assert bound.run(backend=backend).text() == "12"
    assert bound.run(b=3, backend=backend).text() == "13"  # type: ignore[call-arg]  # arguments again, which type checkers refuse
    assert bound.run(a=7, backend=backend).text() == "72"  # type: ignore[call-arg]  # arguments again, which type checkers refuse
    assert bound.run(8, backend=backend).text() == "82"  # type: ignore[arg-type]  # arguments again, which type checkers refuse
    assert bound.bind(b=9)(backend=backend).text() == "19"  # type: ignore[call-arg]  # arguments again, which type checkers refuse
    with pytest.raises(sgl.ParameterError, match="program: got an unexpected keyword argument 'c'"):
        program.bind(c=1)  # type: ignore[call-arg]  # wrong on purpose


def test_the_decorator_keeps_the_name_and_takes_parentheses():
    @sgl.function()
    def program(s):
        """Says nothing."""

    assert (program.__name__, program.__doc__, program.arg_names) == (
        "program",
        "Says nothing.",
        [],
    )


def test_a_nested_run_uses_the_enclosing_backend():
    backend = sgl.ScriptedBackend(default="inner")

    @sgl.function
    def sub(s):
        s += sgl.gen("a")

    @sgl.function
    def program(s):
        s += sub.run()["a"]

    assert program.run(backend=backend).text() == "inner"


def test_default_backend_flush_and_info():
    assert sgl.flush_cache() is False
    assert sgl.get_server_info() is None
    sgl.set_default_backend(sgl.ScriptedBackend(default="x"))

    @sgl.function
    def program(s):
        s += sgl.gen("a")

    assert program.run()["a"] == "x"
    assert sgl.flush_cache() is False
    assert sgl.get_server_info() is None


def test_verbosity_prints_the_text(capsys, monkeypatch):
    monkeypatch.setattr(sgl.global_config, "verbosity", 2)
    sgl.function(lambda s: s.user("x")).run(backend=sgl.ScriptedBackend())
    assert "<|im_start|>user\nx" in capsys.readouterr().out


def test_seeds_depend_on_place_alone():
    @sgl.function
    def program(s):
        s += sgl.gen("a") + sgl.gen("b", seed=5)
        fork = s.fork(2)
        fork += sgl.gen("c")
        fork.join()
        s.sync()

    def seeds(seed):
        backend = sgl.ScriptedBackend(default="x")
        program.run(backend=backend, seed=seed).sync()
        return [call.params.seed for call in backend.calls]

    first = seeds(1)
    assert first == seeds(1)
    assert first != seeds(2)
    assert first[1] == 5
    assert len(set(first)) == 4


def test_programs_add_no_threads():
    @sgl.function
    def program(s):
        s += "x"
        fork = s.fork(8)
        fork += sgl.gen("a")
        fork.join()

    backend = sgl.ScriptedBackend(default="x", latency=0.05)
    before = threading.active_count()
    states = [program.run(backend=backend) for _ in range(50)]
    assert threading.active_count() <= before + 1
    assert all(state["a"] == ["x"] * 8 for state in states)


def test_the_usage_of_a_run_is_that_of_all_its_branches():
    class Counting(sgl.BaseBackend):
        async def agenerate(self, prompt, params, constraint, *, stream):
            for _ in range(20 * ("b" in prompt.text)):
                await asyncio.sleep(0)
            yield Generation("x", usage=Usage(completion_tokens=1))

    @sgl.function
    def program(s):
        s += "a"
        for branch in s.fork(8):
            branch += "b" + sgl.gen("x")
        s += "c" + sgl.gen("y")

    for _ in range(5):
        state = program.run(backend=Counting())
        assert state.usage().completion_tokens == 9


def live_threads():
    return Counter(re.sub(r"_\d+$", "", thread.name) for thread in threading.enumerate())


def test_ten_thousand_live_states_have_one_thread():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")

    before = live_threads()
    states = [program.run(backend=Never()) for _ in range(10_000)]
    assert not (live_threads() - before).keys() - {"sglang_lite-executor"}
    assert live_threads()["sglang_lite-executor"] == 1
    for state in states:
        state.cancel()


def test_states_that_are_alive_at_an_engine_share_its_threads():
    @sgl.function
    def program(s):
        s += "x"
        fork = s.fork(3)
        fork += "y" + sgl.gen("a", max_tokens=2)
        fork.join()
        s += "z" + sgl.gen("b", max_tokens=2)

    before = live_threads()
    with Engine.of(random_model()) as engine:
        states = [program.run(backend=LocalBackend(engine)) for _ in range(300)]
        most = live_threads() - before
        assert all(isinstance(state["b"], str) for state in states)
        most |= live_threads() - before
    assert most.keys() <= {"sglang_lite-executor", "sglang_lite-engine", "sglang_lite-encode"}
    assert most["sglang_lite-engine"] == 1
    assert most["sglang_lite-encode"] <= 4


def test_works_inside_a_running_event_loop():
    @sgl.function
    def program(s):
        s += sgl.gen("a")
        return s["a"]

    async def notebook():
        return program.run(backend=sgl.ScriptedBackend(default="x")).ret_value

    assert asyncio.run(notebook()) == "x"


def test_own_arguments_of_a_settings_name_may_be_given_in_any_way():
    @sgl.function
    def program(s, n, stop):
        s += f"{n} {stop}"

    backend = sgl.ScriptedBackend()
    assert program.run(5, "here", backend=backend).text() == "5 here"
    assert program.run(5, None, backend=backend).text() == "5 None"
    assert program.run(n=1, stop=None, backend=backend).text() == "1 None"
    assert program.bind(n=7, stop="there").run(backend=backend).text() == "7 there"
    assert program.bind(n=7).run_batch([{"stop": "x"}], backend=backend)[0].text() == "7 x"  # type: ignore[call-arg]  # some of them, which type checkers refuse
    with pytest.raises(sgl.ParameterError, match="missing a required argument: 'n'"):
        program.run(stop="here", backend=backend)
