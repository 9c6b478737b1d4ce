"""Programs, states and backends as SGLang's users write them."""

import re
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.lang import ir
from tests.server.sglang.surface import read_decisions, read_surface

# ----------------------------------------------------------------------------------- building nodes


def test_gen_makes_a_generation_or_a_selection():
    assert type(sgl.gen("a")) is ir.SglGen
    assert type(sgl.gen("a", choices=["x"])) is ir.SglSelect
    assert sgl.gen("a", choices=["x"]).choices_method is sgl.token_length_normalized
    assert type(sgl.gen_int("a")) is type(sgl.gen_string("a")) is ir.SglGen
    assert sgl.gen().name is None


def test_gen_takes_its_parameters_in_sglangs_order():
    values: dict[str, Any] = dict(
        max_tokens=1, min_tokens=2, n=3, stop="s", stop_token_ids=[4], stop_regex="r", temperature=0.5, top_p=0.6,
        top_k=7, min_p=0.1, frequency_penalty=0.2, presence_penalty=0.3, ignore_eos=True, return_logprob=True,
        logprob_start_len=8, top_logprobs_num=9, return_text_in_logprobs=True,
    )  # fmt: skip
    by_name, in_order = sgl.gen("x", **values), sgl.gen("x", *values.values())
    assert by_name == in_order
    assert (
        by_name.node.params.max_tokens,
        by_name.node.params.stop,
        by_name.node.params.top_logprobs_num,
    ) == (
        1,
        ("s",),
        9,
    )
    assert sgl.gen("x", *[None] * 17, int) == sgl.gen("x", dtype=int)
    assert sgl.gen("x", *[None] * 18, ["a"]) == sgl.select("x", ["a"])
    values.pop("min_tokens")
    assert sgl.gen_int("x", *values.values()) == sgl.gen("x", dtype=int, **values)
    assert sgl.gen_string("x", *values.values()) == sgl.gen("x", dtype=str, **values)


def test_a_node_gives_its_parameters_as_sglangs_backends_read_them():
    given = sgl.gen("x", 5, min_tokens=1, stop=["a"], regex="[0-9]").sampling_params
    assert given == ir.SglSamplingParams(
        max_new_tokens=5, min_new_tokens=1, stop=["a"], regex="[0-9]"
    )
    assert given.clone() == given
    assert given.clone() is not given
    assert (
        sgl.gen("x", json_schema={"type": "null"}).sampling_params.json_schema == '{"type": "null"}'
    )
    assert sgl.gen("x", type=bool).sampling_params.regex == "true|false"


def test_a_bad_regex_is_an_error_where_it_is_written():
    with pytest.raises(ValueError, match="regex"):
        sgl.gen("x", regex="(")


def test_expressions_add_up_to_flat_lists():
    class Text(str):
        pass

    expr = "a" + sgl.gen("x") + Text("b") + (sgl.gen("y") + "c")
    assert type(expr) is ir.SglExprList
    assert [repr(node) for node in expr.expr_list] == [
        "Text('a')", "Gen('x')", "Text('b')", "Gen('y')", "Text('c')"
    ]  # fmt: skip


def test_an_expression_prints_its_nodes(capsys):
    ("a" + sgl.gen("x")).print_graph_dfs()
    assert capsys.readouterr().out == "%0 = Text('a')\n%1 = Gen('x')\n"


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_role_wraps_text_an_expression_or_nothing(role):
    begin, end = getattr(sgl, f"{role}_begin")(), getattr(sgl, f"{role}_end")()
    turn = getattr(sgl, role)
    assert list(turn().expr_list) == [begin, end] == [ir.SglRoleBegin(role), ir.SglRoleEnd(role)]
    assert list(turn("hi").expr_list) == [begin, ir.SglConstantText("hi"), end]
    assert list(turn(sgl.gen("x")).expr_list) == [begin, sgl.gen("x"), end]


def test_images_and_videos_are_nodes():
    assert type(sgl.image("a.png")) is ir.SglImage
    assert sgl.image("a.png").path == "a.png"
    node = sgl.video("a.mp4", 4)
    assert (type(node), node.path, node.num_frames) == (ir.SglVideo, "a.mp4", 4)


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (ir.REGEX_INT, ["0", "-12", "+3 ", "4\n"]),
        (ir.REGEX_FLOAT, ["1", "-1.5", "0.25 "]),
        (ir.REGEX_BOOL, ["True", "False"]),
        (ir.REGEX_STR, ['""', '"two words"', '"a, \\"quoted\\" one"']),
    ],
)
def test_the_regexes_of_dtypes_match_such_values(pattern, texts):
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert not re.fullmatch(pattern, "x")


# ------------------------------------------------------------------------------------------ running


@sgl.function(num_api_spec_tokens=64)
def program(s, question, style="short"):
    s += sgl.system(f"Be {style}.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", 7, stop="."))
    return "done"


def test_a_program_knows_its_arguments():
    assert type(program) is ir.SglFunction
    assert (program.arg_names, program.arg_defaults) == (["question", "style"], ["short"])
    assert (program.num_api_spec_tokens, program.bind_arguments) == (64, {})
    bound = program.bind(style="long")  # type: ignore[call-arg]  # some of them, which type checkers refuse
    assert bound.bind_arguments == {"style": "long"}
    assert bound.num_api_spec_tokens == 64
    assert bound.func is program.func


def test_run_gives_a_state_with_the_shapes_of_sglang():
    state = program.run("Why?", temperature=0, backend=sgl.ScriptedBackend(default="So. And so"))
    assert type(state) is sgl.ProgramState
    assert state["answer"] == state.get_var("answer") == "So"  # the stop is no part of it
    assert "answer" in state
    assert state.ret_value == "done"
    assert state.error() is None
    assert state.messages() == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So"},
    ]
    meta = state.get_meta_info("answer")
    assert meta["finish_reason"] == {"type": "stop", "matched": "."}
    assert {"prompt_tokens", "completion_tokens", "cached_tokens"} <= meta.keys()
    executor = state.stream_executor
    assert executor.variables == {"answer": "So"}
    assert executor.text_ == state.text()
    assert executor.messages_ == state.messages()
    assert (executor.images_, executor.cur_role) == ([], None)
    assert executor.meta_info == {"answer": meta}
    assert executor.backend.get_model_name() == "scripted"
    assert (
        executor.sid
        == executor.sid
        != program.run("", backend=sgl.ScriptedBackend()).stream_executor.sid
    )


def test_api_drafts_change_nothing_where_there_is_no_api():
    def body(s):
        s += "a" + sgl.gen("x", stop=".") + "b" + sgl.gen("y", 2)

    plain, hinted = (
        sgl.ScriptedBackend(default="one two three"),
        sgl.ScriptedBackend(default="one two three"),
    )
    texts = [
        sgl.function(body).run(backend=plain).text(),
        sgl.function(num_api_spec_tokens=64)(body).run(backend=hinted).text(),
    ]
    assert texts == ["aone two threebone two"] * 2
    assert plain.calls == hinted.calls


def test_calling_a_program_runs_it():
    sgl.set_default_backend(sgl.ScriptedBackend(default="x"))
    assert program("Why?")["answer"] == "x"


def test_every_sampling_parameter_of_run_reaches_the_node():
    script = sgl.ScriptedBackend(default="x")
    given: dict[str, Any] = dict(
        max_new_tokens=3, n=2, stop=["s"], stop_token_ids=[1], stop_regex=["r"], temperature=0.1, top_p=0.2, top_k=3,
        min_p=0.4, frequency_penalty=0.5, presence_penalty=0.6, ignore_eos=True, return_logprob=True,
        logprob_start_len=7, top_logprobs_num=8, return_text_in_logprobs=True,
    )  # fmt: skip

    @sgl.function
    def bare(s):
        s += sgl.gen("a")

    bare.run(backend=script, **given).sync()
    bare.run_batch([{}], backend=script, **given)
    params, of_batch = (call.params for call in script.calls)
    assert params == of_batch
    given["max_tokens"] = given.pop("max_new_tokens")
    assert {name: getattr(params, name) for name in given} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }


def test_a_default_said_aloud_is_sent_and_an_unsaid_one_is_not():
    from sglang_lite.protocol import UNSET

    script = sgl.ScriptedBackend(default="x")
    bare = sgl.function(lambda s: s.__iadd__(sgl.gen("a")))
    bare.run(backend=script, temperature=1.0, top_k=-1).sync()
    bare.run(backend=script).sync()
    said, unsaid = (call.params for call in script.calls)
    assert (said.temperature, said.top_k) == (1.0, -1)
    assert (unsaid.temperature, unsaid.top_k) == (UNSET, UNSET)


def test_results_of_dtypes_stay_text():
    @sgl.function
    def typed(s):
        s += "i" + sgl.gen("i", dtype="int") + "f" + sgl.gen("f", dtype=float)
        s += "b" + sgl.gen("b", dtype=bool) + "s" + sgl.gen("s", dtype="str")

    state = typed.run(
        backend=sgl.ScriptedBackend({"i": "42", "f": "1.5", "b": "True", "s": '"x, y!"'})
    )
    assert [state[name] for name in "ifbs"] == ["42", "1.5", "True", '"x, y!"']


def test_separate_reasoning_makes_two_variables():
    @sgl.function
    def thinking(s):
        s += sgl.user("1+1?")
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("sum"), model_type="qwen3"))

    state = thinking.run(backend=sgl.ScriptedBackend(default="<think>easy</think>2"))
    assert (state["sum"], state["sum_reasoning_content"]) == ("2", "easy")
    assert state.messages()[-1]["content"] == "2"
    with pytest.raises(ValueError, match="has no name"):
        sgl.function(lambda s: s.__iadd__(sgl.separate_reasoning(sgl.gen(), "qwen3"))).run(
            backend=sgl.ScriptedBackend()
        )
    with pytest.raises(ValueError, match="'unheard-of' is unknown"):
        sgl.separate_reasoning(sgl.gen("a"), "unheard-of")


def test_of_several_samples_each_has_its_reasoning():
    @sgl.function
    def thinking(s):
        s += "1+1?" + sgl.separate_reasoning(sgl.gen("sum", n=2), model_type="qwen3")

    backend = sgl.ScriptedBackend({"1+1": ["<think>easy</think>2", "<think>hard</think>3"]})
    state = thinking.run(backend=backend)
    assert (state["sum"], state["sum_reasoning_content"]) == (["2", "3"], ["easy", "hard"])


def test_sglangs_names_for_reasoning_models_are_known():
    known = read_surface()["reasoning_parsers"].keys() - read_decisions("reasoning_parsers").keys()
    for name in sorted(known):
        assert sgl.separate_reasoning(sgl.gen("a"), name)


def test_a_group_takes_what_sglangs_takes():
    @sgl.function
    def forking(s):
        s += "q"
        group = s.fork(2)
        group += " a "
        group += [sgl.gen("x"), sgl.gen("x")]
        group += lambda i: f" {i}"
        group[1] += "!"
        group.join()
        return [type(group), group.states[0].text(), group[1].text(), group.src_state is s]

    state = forking.run(backend=sgl.ScriptedBackend(default="-"))
    assert state["x"] == ["-", "-"]
    assert state.ret_value == [sgl.ProgramStateGroup, "q a - 0", "q a - 1!", True]
    assert state.text() == "q"


def test_text_iter_of_a_finished_program_gives_all_at_once():
    state = program.run("Why?", backend=sgl.ScriptedBackend(default="So it is"))
    assert list(state.text_iter()) == [state.text()]
    assert list(state.text_iter("answer")) == ["So it is"]


def test_error_tells_what_went_wrong_and_nothing_else_is_needed():
    state = program.run("Why?", backend=sgl.ScriptedBackend(lambda call: str(1 / 0)))
    assert isinstance(state.error(), Exception)
    assert isinstance(state.stream_executor.error(), Exception)
    assert isinstance(state.stream_executor.error_, Exception)


def test_global_config_has_its_attributes():
    from sglang_lite.lang.global_config import GlobalConfig

    assert isinstance(sgl.global_config, GlobalConfig)
    assert (GlobalConfig().verbosity, GlobalConfig().default_backend) == (0, None)


# -------------------------------------------------------------------------------- backends of users


class Classic(sgl.BaseBackend):
    """A backend as SGLang's users write them: blocking hooks, parameters with every default filled
    in.
    """

    def __init__(self):
        super().__init__()
        self.seen = []

    def generate(self, s, sampling_params):
        self.seen.append((s.text_, sampling_params))
        if sampling_params.n > 1:
            return [f"{i}" for i in range(sampling_params.n)], {"id": "many"}
        return "said", {"completion_tokens": 1, "prompt_tokens": 2}

    def generate_stream(self, s, sampling_params):
        for piece in ("sa", "id"):
            yield piece, {"piece": piece}

    def select(self, s, choices, temperature, choices_method):
        from sglang_lite.lang.choices import ChoicesDecision

        return ChoicesDecision(choices[-1], {"scores": [0.0] * len(choices)})


@sgl.function
def mixed(s):
    s += sgl.user("q") + sgl.assistant("A: " + sgl.gen("a", 9) + sgl.select("b", ["no", "yes"]))
    s += sgl.gen("c", n=2)


def test_a_backend_with_sglangs_blocking_hooks_runs_programs():
    backend = Classic()
    state = mixed.run(backend=backend, temperature=0.5)
    assert (state["a"], state["b"], state["c"]) == ("said", "yes", ["0", "1"])
    assert state.text() == "USER:q\nASSISTANT:A: saidyes\n0"
    text, params = backend.seen[0]
    assert text == "USER:q\nASSISTANT:A: "
    assert params == ir.SglSamplingParams(max_new_tokens=9, temperature=0.5)
    assert state.get_meta_info("b")["scores"] == [0.0, 0.0]
    assert state.get_meta_info("a")["prompt_tokens"] == 2


def test_a_backend_with_sglangs_blocking_hooks_streams():
    state = mixed.run(backend=Classic(), stream=True)
    assert list(state.text_iter("a")) == ["sa", "id"]


def test_a_backend_has_sglangs_attributes():
    backend = Classic()
    assert backend.support_concate_and_append is False
    assert backend.get_chat_template().name == "default"
    assert backend.flush_cache() is backend.get_server_info() is None
    assert backend.shutdown() is None


def test_a_choices_method_of_ones_own_is_called_with_sglangs_keywords():
    from sglang_lite.lang.choices import ChoicesDecision, ChoicesSamplingMethod

    seen = {}

    class Last(ChoicesSamplingMethod):
        @property
        def requires_unconditional_logprobs(self):
            return True

        def __call__(self, **keywords):
            seen.update(keywords)
            return ChoicesDecision(keywords["choices"][-1], {"mine": 1})

    state = sgl.function(
        lambda s: s.__iadd__(sgl.select("a", ["x", "y z"], choices_method=Last()))
    ).run(backend=sgl.ScriptedBackend())
    assert (state["a"], state.get_meta_info("a")["mine"]) == ("y z", 1)
    assert seen["choices"] == ["x", "y z"]
    assert [len(entries) for entries in seen["input_token_logprobs"]] == [1, 2]
    assert seen["unconditional_token_logprobs"][1][0][0] is None
    assert len(seen["normalized_prompt_logprobs"]) == len(seen["output_token_logprobs"]) == 2
