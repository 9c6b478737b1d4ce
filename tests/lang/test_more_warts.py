"""Complaints about SGLang's language, B and C: silent misbehaviour, races; what is slow, awkward or
missing.
"""

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
from tests.lang.fakes import Answers, Gated, Pieces, line_here, with_logprob, within

# -------------------------------------------------------------------- B: silent misbehaviour, races


def test_b01_a_name_used_twice_waits_for_the_second_value():
    backend = Gated("second")

    @sgl.function
    def program(s):
        s += sgl.gen("a") + sgl.gen("a", backend=backend)
        assert backend.asked.wait(60)  # the first has its value
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
    reader.join()
    assert 0 < len(calls) < 500


def test_b03_no_reader_loses_the_end_however_it_meets_the_writer():
    pieces = [str(i) for i in range(20)]
    program = sgl.function(lambda s: s.__iadd__(sgl.gen("a")))

    def read():
        return "".join(program.run(stream=True, backend=Pieces(*pieces)).text_iter())

    assert {within(5, read) for _ in range(200)} == {"".join(pieces)}


def test_b04_bind_leaves_the_batch_as_it_was():
    program = sgl.function(lambda s, x, y: s.__iadd__(f"{x}{y}")).bind(y=2)  # type: ignore[call-arg]  # some of them, which type checkers refuse
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
    assert [m and m["completion_tokens"] for m in state.get_meta_info("one")["samples"]] == [
        None,
        None,
        1,
    ]
    with pytest.raises(sgl.ProgramError, match="OSError: gone"):
        state["bad"]
    assert state["all"] == ["x", "x", "x"]


@pytest.mark.parametrize(
    "expr",
    [
        sgl.user_begin() + "x" + sgl.assistant_end(),
        sgl.user_begin() + sgl.user("x"),
        sgl.assistant_end(),
    ],
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
    capabilities = Capabilities(
        constraints=frozenset(), params=frozenset({"max_tokens"}), select=False
    )


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
    assert [(p.regex, tuple(p.stop), p.temperature) for p in given] == [("[0-9]", (), 0.5)] * 2 + [
        (None, (), 0.5)
    ]


def test_b10_one_programs_value_can_be_added_to_another():
    @sgl.function
    def first(s):
        s += sgl.gen("a")

    @sgl.function
    def second(s, state):
        s += "It said " + state["a"]

    backend = sgl.ScriptedBackend(default="so")
    assert second.run(first.run(backend=backend), backend=backend).text() == "It said so"


@pytest.mark.parametrize(
    "stop", [None, "a", ("a", "b"), ["a", "b"], tuple(f"stop {i}" for i in range(40))]
)
@pytest.mark.parametrize("template_stop", [("<end>",), ["<end>"]])
def test_b11_stops_and_those_of_the_template_add_up_in_every_form(stop, template_stop):
    backend = sgl.ScriptedBackend()
    backend.chat_template = ChatTemplate(
        "own", None, {"assistant": ("A: ", "\n")}, stop_str=template_stop
    )
    sgl.function(lambda s: s.__iadd__(sgl.assistant(sgl.gen("a", stop=stop)))).run(
        backend=backend
    ).sync()
    own = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    assert backend.calls[0].params.stop == (*own, "<end>")


def test_b12_a_reader_that_lags_behind_loses_no_metadata():
    backend = Pieces(*(with_logprob(f"{i} ", i) for i in range(50)))
    state = sgl.function(lambda s: s.__iadd__(sgl.gen("a", return_logprob=True))).run(
        stream=True, backend=backend
    )
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
        sgl.function(
            lambda s: s.__iadd__(sgl.gen("a") + sgl.gen("b", backend=Then(default="y")))
        ).run(backend=backend)

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
        assert backend.asked.wait(60)
        raise LookupError("mine")

    before = threading.active_count()
    with pytest.raises(LookupError):
        program.run(backend=backend)
    assert backend.cancelled.wait(60)
    assert threading.active_count() <= before + 1  # the executor's, if it was not there before


# ------------------------------------------------------------------------ C: slow, awkward, missing


def test_c_an_exception_in_one_body_leaves_the_other_results():
    @sgl.function
    def program(s, i):
        s += f"{10 // i}"

    results = program.run_batch(
        [{"i": 5}, {"i": 0}, {"i": 2}], backend=sgl.ScriptedBackend(), on_error="return"
    )
    assert [r if isinstance(r, Exception) else r.text() for r in (results[0], results[2])] == [
        "2",
        "5",
    ]
    assert isinstance(results[1], ZeroDivisionError)


def test_c_a_whole_number_has_an_end():
    import re

    assert re.fullmatch(REGEX_INT, "1" * 16)
    assert not re.fullmatch(REGEX_INT, "1" * 17)


def test_c_minimum_and_seed_can_be_asked_for():
    backend = sgl.ScriptedBackend()
    sgl.function(lambda s: s.__iadd__(sgl.gen("a", min_tokens=3, seed=4))).run(
        backend=backend
    ).sync()
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
    backend.chat_template = ChatTemplate(
        "own", None, {"user": ("Q: ", "\n"), "assistant": ("A: ", "\n")}
    )
    state = sgl.function(lambda s: s.__iadd__(sgl.user("2+2?") + sgl.assistant(sgl.gen("a")))).run(
        backend=backend
    )
    assert state.text() == "Q: 2+2?\nA: 4\n"
