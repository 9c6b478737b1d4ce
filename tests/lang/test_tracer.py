"""Tracing: the nodes of a program without running it, and an error where it can't be known what it
would do.
"""

import asyncio
import threading

import pytest

import sglang_lite as sgl
from sglang_lite.lang.ir import SglArgument, SglVariable
from sglang_lite.lang.tracer import TracerProgramState, TracingScope, trace_program
from sglang_lite.program.nodes import Gen, Text
from sglang_lite.protocol import SamplingParams


def trace(body, **arguments):
    return sgl.function(body).trace(**arguments)


def shown(state):
    return [repr(node) for node in state.nodes]


def test_text_generations_and_turns_are_recorded_in_order():
    @sgl.function
    def program(s, topic):
        s += sgl.system("Be brief.")
        with s.user():
            s += "About "
            s += topic
        s += sgl.assistant("Well, " + sgl.gen("a") + sgl.select("b", ["x", "y"]))
        return "end"

    state = program.trace()
    assert shown(state) == [
        "Text('<|im_start|>system\\n')", "TurnBegin('system')", "Text('Be brief.', special=False)", "TurnEnd('system')",
        "Text('<|im_end|>\\n')",
        "Text('<|im_start|>user\\n')", "TurnBegin('user')", "Text('About ', special=False)", "Argument(name='topic')",
        "TurnEnd('user')", "Text('<|im_end|>\\n')",
        "Text('<|im_start|>assistant\\n')", "TurnBegin('assistant')", "Text('Well, ', special=False)",
        "Gen('a', params=SamplingParams(stop=('<|im_end|>',)))", "Select('b', ('x', 'y'), special=False)",
        "TurnEnd('assistant')", "Text('<|im_end|>\\n')",
    ]  # fmt: skip
    assert type(state) is TracerProgramState
    assert isinstance(state, sgl.ProgramState)
    assert state.last_node is state.nodes[-1]
    assert list(state.variables) == ["a", "b"]
    assert state.variables["a"].source is state.nodes[14]
    assert state.ret_value == "end"
    assert state.flatten_nodes() == state.nodes
    assert repr(state) == "TracerProgramState(18 nodes)"


def test_the_template_is_the_backends():
    class Classic(sgl.ScriptedBackend):
        def get_chat_template(self):
            from sglang_lite.lang.chat_template import get_chat_template

            return get_chat_template("vicuna_v1.1")

    script = Classic()
    state = trace(lambda s: s.user("Hi"), backend=script)
    assert [node.text for node in state.nodes if isinstance(node, Text)][-3:] == [
        "USER:",
        "Hi",
        " ",
    ]
    assert "curious user" in "".join(node.text for node in state.nodes if isinstance(node, Text))
    assert script.calls == []


@pytest.mark.parametrize(
    "write",
    [
        lambda x: f"a {x} b",
        lambda x: "a " + x + " b",
        lambda x: "a {} b".format(x),  # noqa: UP032 # one of the ways
        lambda x: "a %s b" % x,  # noqa: UP031
        lambda x: "a " + str(x) + " b",
        lambda x: "a " + f"{x}" + " b",
    ],
)
def test_a_symbol_can_be_written_into_text(write):
    state = trace(lambda s, x: s.__iadd__(write(x)))
    assert shown(state) == ["Text('a ')", "Argument(name='x')", "Text(' b')"]


def test_items_and_attributes_of_a_symbol_are_symbols():
    def body(s, x):
        s += f"{x.name}, {x.value}, {x['key']}, {x[0].source}"
        s += sgl.gen("v")
        s += f" {s['v'].title}"

    assert [node for node in shown(trace(body)) if "Text" not in node] == [
        "Argument(name='x.name')", "Argument(name='x.value')", "Argument(name=\"x['key']\")",
        "Argument(name='x[0].source')", "Gen('v')", "Variable('v.title')",
    ]  # fmt: skip


def test_outside_a_trace_a_symbol_is_a_plain_record():
    argument, variable = SglArgument("x", 3), SglVariable("v", "node")
    assert (argument.name, argument.value, variable.name, variable.source) == ("x", 3, "v", "node")
    assert str(argument) == f"{argument}" == repr(argument) == "Argument(name='x')"
    state = trace(lambda s, x: s.__iadd__(f"a{x}"))
    assert str(state.nodes[1]) == "Argument(name='x')"


def test_a_symbol_of_one_trace_can_be_an_argument_of_another():
    symbol = trace(lambda s, x: s.__iadd__(f"{x}")).nodes[0]
    state = trace(lambda s, y: s.__iadd__(f"<{y}>"), y=symbol)
    assert shown(state) == ["Text('<')", "Argument(name='x')", "Text('>')"]


def test_given_arguments_are_values_and_others_are_symbols_even_those_with_defaults():
    def body(s, a, b=2, *more, c, d=4, **rest):
        s += f"{a}{b}{c}{d}{rest}"

    assert shown(trace(body, a=1, c=3, e=5)) == [
        "Text('1')", "Argument(name='b')", "Text('3')", "Argument(name='d')", "Text(\"{'e': 5}\")"
    ]  # fmt: skip
    bound = sgl.function(lambda s, a, b: s.__iadd__(f"{a}{b}")).bind(a="x", b="y")
    assert shown(bound.trace(b="z")) == ["Text('xz')"]


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(sgl.ParameterError, match="unexpected keyword argument 'z'"):
        trace(lambda s, x: None, z=1)


# ----------------------------------------------------------------------------------------- deciding


def ask_true(s, x):
    if x:
        s += "yes"


def ask_equal(s, x):
    if x == "a":
        s += "yes"


def ask_unequal(s, x):
    while x != "a":
        s += "again"


def ask_among(s, x):
    if x in ("a", "b"):
        s += "yes"


def ask_in_set(s, x):
    if x in {"a", "b"}:
        s += "yes"


def ask_contains(s, x):
    if "a" in x:
        s += "yes"


def ask_lookup(s, x):
    s += {"a": "yes"}[x]


def ask_lookup_default(s, x):
    s += {"a": "yes"}.get(x, "no")


def ask_less(s, x):
    if x < 3:
        s += "yes"


def ask_between(s, x):
    if 1 <= x <= 3:
        s += "yes"


def ask_range(s, x):
    for i in range(x):
        s += str(i)


def ask_iteration(s, x):
    for each in x:
        s += each


def ask_unpacking(s, x):
    a, _ = x
    s += a


def ask_length(s, x):
    s += str(len(x))


def ask_int(s, x):
    s += str(int(x))


def ask_float(s, x):
    s += str(float(x))


def ask_sum(s, x):
    s += str(x + 1)


def ask_product(s, x):
    s += str(2 * x)


def ask_repeat(s, x):
    s += "ab" * x


def ask_method(s, x):
    s += x.strip()


def ask_call(s, x):
    s += x(s)


def ask_format(s, x):
    s += f"{x:>10}"


def ask_stops(s, x):
    s += sgl.gen("a", stop=x)


ASKING = [body for name, body in list(globals().items()) if name.startswith("ask_")]


@pytest.mark.parametrize("body", ASKING, ids=lambda body: body.__name__)
def test_a_body_that_asks_a_symbol_anything_is_an_error_at_that_line(body):
    with pytest.raises(
        sgl.TraceError, match=r"Argument.*only known when the program runs\."
    ) as caught:
        trace(body)
    assert caught.value.where.file == __file__
    assert caught.value.where.line == body.__code__.co_firstlineno + 1
    assert isinstance(caught.value, sgl.ProgramError)


def test_a_body_that_decides_by_a_result_is_an_error_at_that_line():
    def body(s):
        s += sgl.gen("a", type=int)
        if s["a"] > 3:
            s += "big"

    with pytest.raises(sgl.TraceError, match=r"compare it: Variable\('a'\)") as caught:
        trace(body)
    assert caught.value.where.line == body.__code__.co_firstlineno + 2


@pytest.mark.parametrize("read", ["text", "messages"])
def test_reading_the_text_is_an_error_at_that_line(read):
    def body(s):
        s += "x" + sgl.gen("a")
        return getattr(s, read)()

    with pytest.raises(sgl.TraceError, match="can't read the text or the messages") as caught:
        trace(body)
    assert caught.value.where.line == body.__code__.co_firstlineno + 2


def test_what_needs_no_answer_can_be_asked():
    def body(s, x):
        s += sgl.gen("a", max_tokens=x)
        s.sync()
        return ("a" in s, "b" in s, s.error(), s["a"] == s["a"], x == x)

    assert trace(body).ret_value == (True, False, None, True, True)


def test_misuse_is_an_error_in_a_trace_too():
    with pytest.raises(sgl.ProgramError, match="begins inside a 'user' turn"):
        trace(lambda s: s.user(sgl.user("x")))
    with pytest.raises(sgl.ParameterError, match="an int can't be added"):
        trace(lambda s: s.__iadd__(3))
    with pytest.raises(sgl.ParameterError, match="size: 0"):
        trace(lambda s: s.fork(0))
    with pytest.raises(sgl.ParameterError, match="position_ids_offset"):
        trace(lambda s: s.fork(2, [1, 2]))
    with pytest.raises(sgl.UnknownVariableError, match="no variable 'b'"):
        trace(lambda s: s["b"])
    with pytest.raises(LookupError, match="mine"):
        trace(lambda s: (_ for _ in ()).throw(LookupError("mine")))


# ------------------------------------------------------------------------- the rest of the language


def test_scopes_images_reasoning_and_unnamed_nodes():
    def body(s, x):
        with s.var_scope("part"):
            s += "in " + x
        s += sgl.image(x) + sgl.image("nowhere.png")
        s += sgl.gen() + sgl.select(choices=["p"])
        s += sgl.separate_reasoning(sgl.gen("r"), "qwen3")
        s += s["part"]
        s += f"{s['r_reasoning_content']}"

    state = trace(body)
    assert shown(state) == [
        "ScopeBegin('part')", "Text('in ')", "Argument(name='x')", "ScopeEnd('part')",
        "Image(Argument(name='x'))", "Image('nowhere.png')", "Gen(None)", "Select(None, ('p',))", "Gen('r')",
        "Variable('part')", "Variable('r_reasoning_content')",
    ]  # fmt: skip
    assert list(state.variables) == ["part", "gen_1", "select_2", "r"]


def test_forks_are_child_states():
    def body(s, x):
        s += "start"
        fork = s.fork(2)
        fork += lambda i: f" {i} {x} "
        fork += sgl.gen("a")
        fork.join()
        s += s["a"][0]
        fork[1] += s["a"][1]

    state = trace(body)
    assert shown(state) == [
        "Text('start')",
        "Fork(2)",
        "Join(mode='gather_variable')",
        "Variable('a')",
    ]
    assert [shown(child) for child in state.child_states] == [
        ["GetForkItem(0)", "Text(' 0 ')", "Argument(name='x')", "Text(' ')", "Gen('a')"],
        [
            "GetForkItem(1)",
            "Text(' 1 ')",
            "Argument(name='x')",
            "Text(' ')",
            "Gen('a')",
            "Variable('a')",
        ],
    ]


def test_joined_texts_and_copies():
    def body(s):
        with s.user():
            fork = s.fork(2)
            fork += sgl.gen("a")
            fork.join("concate_and_append")
        with s.copy() as branch:
            branch += "side" + sgl.gen("b")
        s += s["b"]

    state = trace(body)
    assert shown(state)[2:] == [
        "Fork(2)", "Join()", "TurnEnd('user')", "Text('<|im_end|>\\n')", "Fork(1)", "Variable('b')"
    ]  # fmt: skip
    assert shown(state.child_states[2]) == ["GetForkItem(0)", "Text('side')", "Gen('b')"]


@sgl.function
def sub(s, word):
    s += f"sub {word}" + sgl.gen("inner")


def test_nested_programs_are_inlined_where_added_and_children_where_read():
    def body(s, x):
        s += sub(x)
        s += sub("k")["inner"]
        s += sub(word=x)["inner"]

    state = trace(body)
    assert (
        shown(state)
        == ["Text('sub ')", "Argument(name='x')", "Gen('inner')"] + ["Variable('inner')"] * 2
    )
    assert [shown(child)[0] for child in state.child_states] == ["Text('sub k')", "Text('sub ')"]


def test_a_called_program_has_the_template_of_its_callers_backend_and_may_have_settings_of_a_run():
    class Plain(sgl.ScriptedBackend):
        def get_chat_template(self):
            from sglang_lite.lang.chat_template import get_chat_template

            return get_chat_template("vicuna_v1.1")

    @sgl.function
    def asks(s, word):
        s += sgl.user(word) + sgl.assistant(sgl.gen("answer"))

    def body(s):
        s += asks("hi", temperature=0)["answer"]  # type: ignore[call-arg]  # options in the call are SGLang's

    state = trace(body, backend=Plain())
    texts = [node.text for node in state.child_states[0].nodes if isinstance(node, Text)]
    assert "USER:" in texts
    assert "<|im_start|>user\n" not in texts


def test_an_argument_is_no_variable_as_in_a_run():
    with pytest.raises(sgl.UnknownVariableError, match="no variable 'x'"):
        trace(lambda s, x: s["x"])


def test_a_symbol_beside_a_generation_with_reasoning():
    state = trace(
        lambda s, x: s.__iadd__(sgl.separate_reasoning(f"{x}" + sgl.gen("r") + x, "qwen3"))
    )
    assert shown(state) == ["Argument(name='x')", "Gen('r')", "Argument(name='x')"]


def test_the_graph_prints_branches_indented(capsys):
    def body(s):
        fork = s.fork(1)
        fork += "x"

    trace(body).print_graph_dfs()
    assert capsys.readouterr().out == "%0 = Fork(1)\n  %0 = GetForkItem(0)\n  %1 = Text('x')\n"


async def coroutine(s, x):
    s += f"{x}" + sgl.gen("a")
    await s.async_sync()
    s += await s.get("a")


def test_async_programs_are_traced_with_and_without_a_running_loop():
    expected = ["Argument(name='x')", "Gen('a')", "Variable('a')"]
    assert shown(trace(coroutine)) == expected

    async def notebook():
        return trace(coroutine)

    assert shown(asyncio.run(notebook())) == expected


# ------------------------------------------------------------------------------------ who is traced


def test_inside_a_scope_calls_are_traced_as_children():
    outer = trace_program(sgl.function(lambda s: None), {}, None)
    with TracingScope(outer) as scope:
        assert TracingScope.get_current_scope() is scope
        inner = sub("w")
    assert TracingScope.get_current_scope() is None
    assert outer.child_states == [inner]
    assert shown(inner) == ["Text('sub w')", "Gen('inner')"]


def test_other_threads_run_their_programs_meanwhile():
    sgl.set_default_backend(sgl.ScriptedBackend(default="really"))
    results = []

    def body(s):
        thread = threading.Thread(target=lambda: results.append(sub("w").state))
        thread.start()
        thread.join()

    trace(body)
    assert type(results[0]) is sgl.ProgramState
    assert results[0]["inner"] == "really"


def test_a_run_inside_a_traced_body_is_a_run():
    def body(s):
        return sub.run("w", backend=sgl.ScriptedBackend(default="really"))["inner"]

    assert trace(body).ret_value == "really"


def test_running_never_traces():
    ran = []

    @sgl.function
    def program(s, x):
        ran.append(x)
        s += "a constant text that is quite a bit longer than sixty-four characters: " + x

    class Noting(sgl.ScriptedBackend):
        def cache_prefix(self, prefix_str):
            ran.append("cache_prefix")

    program.run_batch([{"x": "1"}, {"x": "2"}, {"x": "3"}], backend=Noting())
    assert sorted(ran) == ["1", "2", "3"]


# --------------------------------------------------------------------------------------- the prefix


class Prefixes(sgl.ScriptedBackend):
    def __init__(self):
        super().__init__()
        self.prefixes = []

    def cache_prefix(self, prefix_str):
        self.prefixes.append(prefix_str)


LONG = "This constant text is a bit longer than the sixty-four characters needed. "


def cached(body, **bound):
    backend = Prefixes()
    sgl.function(body).bind(**bound).cache(backend)
    return backend.prefixes


def test_the_prefix_ends_at_the_first_thing_that_is_not_constant():
    assert cached(lambda s, x: s.__iadd__(LONG + "and " + x + " more")) == [LONG + "and "]
    assert cached(lambda s, x: s.__iadd__(f"{LONG}{x}")) == [LONG]
    assert cached(lambda s: s.__iadd__(LONG + sgl.gen("a") + "more")) == [LONG]
    assert cached(lambda s: (s.__iadd__(LONG), s.fork(2), s.__iadd__("more"))) == [LONG]
    assert cached(lambda s, x: s.__iadd__(LONG + x), x="given") == [LONG + "given"]


def test_the_prefix_has_the_turns_of_the_backends_template():
    assert cached(lambda s, x: s.system(LONG) and s.user(x)) == [
        f"<|im_start|>system\n{LONG}<|im_end|>\n<|im_start|>user\n"
    ]


@pytest.mark.parametrize("length", [64, 65])
def test_a_prefix_is_worth_it_from_65_characters_on(length):
    assert cached(lambda s: s.__iadd__("x" * length)) == (["x" * length] if length > 64 else [])


def test_a_loop_until_an_answer_is_not_gone_through():
    def body(s, x):
        s += LONG
        while True:
            s += sgl.gen("step")
            if "done" in s["step"]:
                break

    assert cached(body) == [LONG]


@pytest.mark.parametrize("error", [KeyError, ValueError, TypeError])
def test_what_a_body_can_not_do_with_symbols_ends_the_prefix(error):
    def body(s, x):
        s += LONG
        raise error

    assert cached(body) == [LONG]


def test_no_body_can_swallow_the_end_of_the_prefix():
    went_on = []

    def body(s):
        s += LONG
        try:
            s += sgl.gen("a")
        except Exception:
            went_on.append(True)
        went_on.append(True)

    assert cached(body) == [LONG]
    assert went_on == []


def test_nodes_are_values():
    first, second = (trace(lambda s: s.__iadd__("x" + sgl.gen("a", 3))) for _ in range(2))
    assert first.nodes == second.nodes == [Text("x"), Gen("a", SamplingParams(max_tokens=3))]
    assert type(first.nodes[1]) is Gen
