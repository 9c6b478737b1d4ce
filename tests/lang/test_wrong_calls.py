"""Wrong calls of everything that is public: each is one of our errors, with the line of the program
that made it.
"""

# mypy: disable-error-code="arg-type, call-arg, call-overload, dict-item, list-item"
# The calls are wrong on purpose.

import asyncio
import re
import runpy
import sys
import warnings

import numpy as np
import pytest
from pydantic import BaseModel

import sglang_lite as sgl
from sglang_lite.lang.ir import SglConstantText, SglExprList, SglGen, SglRoleBegin
from sglang_lite.runtime.config import EngineConfig

BACKEND = sgl.ScriptedBackend(default="x")
NAN = float("nan")
program = sgl.function(lambda s, x=1: None)


def tool(a: int) -> int:
    return a


def image(source):
    return sgl.user(sgl.image(source))


# What is called, with the state of a program that runs.
CALLS = [
    lambda s: s + "text",
    # generations
    lambda s: sgl.gen(["a"]),
    lambda s: sgl.gen("a", "10"),
    lambda s: sgl.gen("a", 1.5),
    lambda s: sgl.gen("a", True),
    lambda s: sgl.gen("a", max_new_tokens=5),
    lambda s: sgl.gen_string("a", max_new_tokens=5),
    lambda s: sgl.gen("a", n="2"),
    lambda s: sgl.gen("a", temperature="0"),
    lambda s: sgl.gen("a", temperature=[1]),
    lambda s: sgl.gen("a", temperature=True),
    lambda s: sgl.gen("a", top_p=1j),
    lambda s: sgl.gen("a", top_k=1.0),
    lambda s: sgl.gen("a", stop=3),
    lambda s: sgl.gen("a", stop=[None]),
    lambda s: sgl.gen("a", stop=b"x"),
    lambda s: sgl.gen("a", stop_token_ids="12"),
    lambda s: sgl.gen("a", stop_token_ids=12),
    lambda s: sgl.gen("a", stop_token_ids=["a"]),
    lambda s: sgl.gen("a", stop_regex=[3]),
    lambda s: sgl.gen("a", logit_bias=[1]),
    lambda s: sgl.gen("a", logit_bias={"a": 1}),
    lambda s: sgl.gen("a", logit_bias={1: "x"}),
    lambda s: sgl.gen("a", seed="x"),
    lambda s: sgl.gen("a", seed=1.0),
    lambda s: sgl.gen("a", ignore_eos=1),
    lambda s: sgl.gen("a", return_logprob="yes"),
    lambda s: sgl.gen("a", top_logprobs_num="x"),
    lambda s: sgl.gen("a", timeout="x"),
    lambda s: sgl.gen("a", timeout=True),
    lambda s: sgl.gen("a", timeout=NAN),
    lambda s: sgl.gen("a", timeout=float("inf")),
    lambda s: sgl.gen("a", retries="x"),
    lambda s: sgl.gen("a", check="x"),
    lambda s: sgl.gen("a", check=False),
    lambda s: sgl.gen("a", backend=sgl.ScriptedBackend),
    lambda s: sgl.gen("a", backend=EngineConfig()),
    lambda s: sgl.gen("a", reasoning=3),
    lambda s: sgl.gen("a", reasoning=["qwen3"]),
    lambda s: sgl.gen_int(3),
    lambda s: sgl.gen_int("a", seed=3),
    lambda s: sgl.gen_int("a", 1, n=1, regex="x"),
    lambda s: sgl.gen("a", 1, 0, min_tokens=0),
    lambda s: sgl.gen_string("a", temperature="x"),
    # constraints
    lambda s: sgl.gen("a", dtype=[int]),
    lambda s: sgl.gen("a", dtype=list[int]),
    lambda s: sgl.gen("a", regex=b"x"),
    lambda s: sgl.gen("a", json_schema=3),
    lambda s: sgl.gen("a", json_schema=[1]),
    lambda s: sgl.gen("a", json_schema={"a": {1, 2}}),
    lambda s: sgl.gen("a", type=sys),
    lambda s: sgl.gen("a", type=3),
    lambda s: sgl.gen("a", constraint=sgl.Grammar(3)),
    lambda s: sgl.gen("a", constraint=sgl.Grammar("root ::= (")),
    lambda s: sgl.gen("a", constraint=sgl.Grammar("start: (")),
    lambda s: sgl.gen("a", constraint=3),
    lambda s: sgl.gen("a", constraint=[1]),
    lambda s: sgl.gen("a", constraint=sgl.Regex(None)),
    lambda s: sgl.Choices(3),
    lambda s: sgl.Choices("abc"),
    lambda s: s.grammar(3),
    lambda s: s.grammar(sgl.Regex("(")),
    # selections
    lambda s: sgl.select(3, ["a"]),
    lambda s: sgl.select("a", 3),
    lambda s: sgl.select("a", (c for c in "")),
    lambda s: sgl.select("a", [None]),
    lambda s: sgl.select("a", [["a"]]),
    lambda s: sgl.gen("a", choices=3),
    lambda s: sgl.gen("a", choices=["a"], temperature="hot"),
    lambda s: sgl.gen("a", choices=["a"], choices_method="best"),
    lambda s: sgl.select("a", ["a"], choices_method=3),
    lambda s: sgl.select("a", ["a"], choices_method=type(sgl.greedy_token_selection)),
    lambda s: sgl.select("a", ["a"], choices_method=None),
    lambda s: sgl.select("a", ["a"], True),
    lambda s: sgl.select("a", ["a"], None),
    lambda s: sgl.select("a", ["a"], NAN),
    lambda s: sgl.select("a", ["a"], multi="x"),
    lambda s: sgl.select("a", ["a"], multi=None),
    # expressions
    lambda s: s.__iadd__(SglGen("x")),
    lambda s: s.__iadd__(SglConstantText(3)),
    lambda s: s.__iadd__(SglExprList([3])),
    lambda s: s.__iadd__(SglRoleBegin(3)),
    lambda s: s.__iadd__(s.get("a")),
    lambda s: s.__iadd__(sgl.gen("a") + s.get("a")),
    lambda s: s.__iadd__(sgl.user(s.get("a"))),
    lambda s: s.__iadd__(s),
    lambda s: s.__iadd__(sgl.gen),
    lambda s: s.__iadd__(program),
    lambda s: s.__iadd__(c for c in "ab"),
    lambda s: sgl.user(3),
    lambda s: sgl.assistant(["a"]),
    lambda s: sgl.system(b"x"),
    lambda s: s.user(3),
    lambda s: sgl.separate_reasoning(sgl.gen("a"), 3),
    lambda s: sgl.separate_reasoning("x", "qwen3"),
    lambda s: s.__iadd__(sgl.separate_reasoning(sgl.gen(), "qwen3")),
    # images
    lambda s: s.__iadd__(image(None)),
    lambda s: s.__iadd__(image(3)),
    lambda s: s.__iadd__(image(b"")),
    lambda s: s.__iadd__(image("/tmp")),
    lambda s: s.__iadd__(image("a\0b")),
    lambda s: s.__iadd__(image("a" * 5000)),
    lambda s: s.__iadd__(image(np.zeros((2, 2)))),
    lambda s: s.__iadd__(image(np.array([None]))),
    lambda s: s.__iadd__(sgl.user(sgl.video("/nowhere", "2"))),
    # branches, variables, streams
    lambda s: s.fork("2"),
    lambda s: s.fork(2.0),
    lambda s: s.fork(-1),
    lambda s: s.fork(2).__iadd__(3),
    lambda s: s.fork(2).__iadd__(c for c in "ab"),
    lambda s: s.fork(2).__iadd__(lambda i: None),
    lambda s: s.fork(2).__iadd__(["a", 3]),
    lambda s: s.fork(2).__setitem__(0, 3),
    lambda s: s.fork(2).join("x"),
    lambda s: s.fork(2).join(["x"]),
    lambda s: s.var_scope(3),
    lambda s: s.var_scope([3]),
    lambda s: s[3],
    lambda s: s[[3]],
    lambda s: s.__setitem__([1], 2),
    lambda s: s.__setitem__(3, 2),
    lambda s: s.set_var(None, 2),
    lambda s: s.get_meta_info(3),
    lambda s: s.usage([3]),
    lambda s: s.selection([1]).probs,
    lambda s: list(s.text_iter(3)),
    lambda s: list(s.text_iter([3])),
    lambda s: list(s.partial_iter(3)),
    lambda s: s.checkpoint().rollback(),
    # programs inside
    lambda s: s.call(3),
    lambda s: s.call(len),
    lambda s: s.call(program, 1, 2, 3),
    lambda s: s.call(program, nope=3),
    lambda s: s.__iadd__(program(1, 2, 3)),
    lambda s: s.__iadd__(program(zz=3)),
    lambda s: program(1, 2, 3)["a"],
    # tools
    lambda s: sgl.gen("a", tools="abc"),
    lambda s: sgl.gen("a", tools=len),
    lambda s: sgl.gen("a", tools=3),
    lambda s: sgl.gen("a", tools=[3]),
    lambda s: sgl.gen("a", tools=[print]),
    lambda s: sgl.gen("a", tools=[lambda x: 1]),
    lambda s: sgl.gen("a", tools=[int]),
    lambda s: sgl.gen("a", tools=[tool], tool_choice=3),
    lambda s: sgl.gen("a", tools=[tool], tool_choice=[tool]),
    lambda s: sgl.use_tools(s, None),
    lambda s: sgl.use_tools(s, []),
    lambda s: sgl.use_tools(s, [3]),
    lambda s: sgl.use_tools(3, [tool]),
    lambda s: sgl.use_tools(s, [tool], max_steps="x"),
    lambda s: sgl.use_tools(s, [tool], name=3),
    # programs
    lambda s: sgl.function(3),  # type: ignore[call-overload] # wrong on purpose
    lambda s: sgl.function("x"),  # type: ignore[call-overload] # wrong on purpose
    lambda s: sgl.function(dict),
    lambda s: sgl.function(lambda: None),
    lambda s: sgl.function(lambda *s: None),
    lambda s: program.run(1, 2, 3),
    lambda s: program.run(zz=1),
    lambda s: program.run(max_new_tokens="x"),
    lambda s: program.run(stream="x"),
    lambda s: program.run(use_thread="x"),
    lambda s: program.run(seed="x"),
    lambda s: program.run(seed=1.5),
    lambda s: program.run(timeout="x"),
    lambda s: program.run(timeout=NAN),
    lambda s: program.run(retries="x"),
    lambda s: program.run(backend="x"),
    lambda s: program.run(backend=sgl.ScriptedBackend),
    lambda s: program.run_batch(None),
    lambda s: program.run_batch([{}], max_tokens=3),
    lambda s: program.run_batch(3),
    lambda s: program.run_batch([3]),
    lambda s: program.run_batch({"x": 1}),
    lambda s: program.run_batch("abc"),
    lambda s: program.run_batch([{1: 2}]),
    lambda s: program.run_batch([{"z": 2}]),
    lambda s: program.run_batch([(1,)], num_threads="x"),
    lambda s: program.run_batch([(1,)], on_error=[]),
    lambda s: program.run_batch([(1,)], progress_bar="x"),
    lambda s: program.run_batch([(1,)], generator_style="x"),
    lambda s: program.run_batch([(1,)], ordered="x"),
    lambda s: program.run_batch([(1,)], seed="x"),
    lambda s: program.run_batch([(1,)], checkpoint=3),
    lambda s: program.run_batch([(1,)], checkpoint=b"x"),
    lambda s: program.run_batch([(1,)], checkpoint="a\0b"),
    lambda s: program.run_batch([(1,)], checkpoint=""),
    lambda s: program.run_batch([(1,)], skip_damaged="x"),
    lambda s: program.bind(z=3),
    lambda s: program.trace(z=3),
    lambda s: program.trace(backend="x"),
    lambda s: program.cache("x"),
    lambda s: sgl.set_default_backend("x"),
    lambda s: sgl.flush_cache("x"),
    lambda s: sgl.get_server_info("x"),
    lambda s: sgl.ScriptedBackend(3),
    lambda s: sgl.grammar.check(3),
    lambda s: sgl.grammar.matches("x", 3),
]


@pytest.mark.parametrize("call", CALLS, ids=[str(i) for i in range(len(CALLS))])
def test_a_wrong_call_is_one_of_our_errors_at_its_line(call):
    with pytest.raises(sgl.SglError) as caught:
        state = sgl.function(lambda s: call(s)).run(backend=BACKEND)
        state.sync()
    error = caught.value
    assert type(error.__cause__) is not AssertionError
    assert error.where is not None
    assert (error.where.file, error.where.line) == (__file__, call.__code__.co_firstlineno)


def test_an_unawaited_read_says_that_it_is_to_be_awaited():
    async def body(s):
        s += sgl.gen("a")
        s += s.get("a")

    with pytest.raises(
        sgl.ParameterError, match=r"\+=: a coroutine can't be added to a program. Await it first"
    ):
        asyncio.run(sgl.function(body).arun(backend=BACKEND))


@pytest.mark.parametrize(
    "choices", [("a", "b"), {"a": 1, "b": 2}, (c for c in "ab")], ids=lambda c: type(c).__name__
)
@pytest.mark.parametrize(
    "method",
    ["greedy", "greedy_token_selection", sgl.greedy_token_selection],
    ids=["short", "long", "object"],
)
def test_choices_may_be_anything_that_gives_texts_and_methods_have_names(choices, method):
    # one that was gone through is empty
    texts = choices if isinstance(choices, tuple | dict) else (c for c in "ab")
    for node in (
        sgl.select("x", texts, choices_method=method),
        sgl.gen("x", choices=["a", "b"], choices_method=method),
    ):
        assert node.choices == ("a", "b")
        assert node.choices_method is sgl.greedy_token_selection


@sgl.function
def forks_by_count(s):
    s.fork(count=2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: sgl.gen("a", max_new_tokens=5),
            "max_new_tokens: gen has no such argument. Use max_tokens= here.",
        ),
        (
            lambda: sgl.gen("a", temprature=0),
            "temprature: gen has no such argument. Did you mean temperature=?",
        ),
        (
            lambda: sgl.gen_int("a", max_token=5),
            "max_token: gen_int has no such argument. Did you mean max_tokens=?",
        ),
        (
            lambda: sgl.gen_string("a", schema={}),
            "schema: gen_string has no such argument. Its parameters: name, max_tokens",
        ),
        (
            lambda: sgl.select("a", options=["b"]),
            "options: select has no such argument. Use choices= here.",
        ),
        (
            lambda: sgl.image(path="a.png"),
            "path: image has no such argument. Its parameters: expr.",
        ),
        (lambda: sgl.user(content="a"), "content: user has no such argument. Use expr= here."),
        (
            lambda: sgl.assistant("a", nme="b"),
            "nme: assistant has no such argument. Its parameters: expr.",
        ),
        (lambda: sgl.system(exr="a"), "exr: system has no such argument. Did you mean expr=?"),
        (
            lambda: sgl.select(["a", "b"], name="x"),
            "name: select got two values for it: ['a', 'b'] and 'x'. Its parameters, in order: name, choices, temperature",
        ),
        (
            lambda: sgl.video("a"),
            "num_frames: video needs it. Its parameters, in order: path, num_frames.",
        ),
        (
            lambda: sgl.user("a", "b"),
            "user: too many positional arguments. Its parameters, in order: expr.",
        ),
        (
            lambda: program.run_batch([{}], backend=BACKEND, workers=3),
            "workers: run_batch has no such argument. Use num_threads= here.",
        ),
        (
            lambda: program.run(backend=BACKEND, max_new_toks=3),
            "run: <lambda>: got an unexpected keyword argument 'max_new_toks'. Did you mean max_new_tokens=?",
        ),
        (
            lambda: sgl.function(num_api_spec_token=3),  # type: ignore[call-overload] # wrong on purpose
            "num_api_spec_token: function has no such argument. Did you mean num",
        ),
        (
            lambda: forks_by_count.run(backend=BACKEND),
            "count: fork has no such argument. Use size= here.",
        ),
    ],
)
def test_an_argument_of_another_name_is_told_its_name_here(call, said):
    with pytest.raises(sgl.ParameterError, match=re.escape(said)) as caught:
        call()
    assert caught.value.where is not None
    assert caught.value.where.file == __file__


def test_who_compiles_a_program_is_told_to_leave_it_out():
    with pytest.raises(
        sgl.CompileError, match=r"Leave \.compile\(\) out: run and run_batch give the same"
    ) as caught:
        program.compile(BACKEND)
    assert caught.value.where is not None
    assert caught.value.where.file == __file__


@pytest.mark.parametrize("name", ["gen", "select", "image", "gen_int"])
def test_a_state_says_how_generations_are_added(name):
    state = program.run(backend=BACKEND)
    with pytest.raises(
        AttributeError, match=rf"a state has no {name}\. Write s \+= sgl\.{name}\(…\)"
    ):
        getattr(state, name)
    assert not hasattr(state, "temperature")


def test_a_branch_beyond_the_fork_is_said_to_be_beyond():
    @sgl.function
    def forks(s):
        s.fork(2)[2]

    with pytest.raises(IndexError, match="there is no branch 2: the fork has 2, numbered from 0"):
        forks.run(backend=BACKEND)


def test_a_batch_of_one_mapping_is_told_that_it_takes_a_list():
    with pytest.raises(
        sgl.ParameterError, match=r"one mapping.* Give a list: run_batch\(\[\{…\}, \{…\}\]\)"
    ):
        program.run_batch({"x": 1}, backend=BACKEND)


def test_a_name_that_is_no_type_is_told_which_types_there_are():
    with pytest.raises(
        sgl.ConstraintError,
        match=r"Foo has no JSON schema.*Give the type itself: int, float.*pydantic",
    ):
        sgl.gen("a", type="Foo")


def test_a_check_that_raises_is_named_in_a_note():
    def polite(text):
        raise KeyError(text)

    @sgl.function
    def checked(s):
        s += sgl.gen("a", check=polite)

    with pytest.raises(sgl.ProgramError) as caught:
        checked.run(backend=BACKEND)["a"]
    assert caught.value.__cause__ is not None
    (note,) = caught.value.__cause__.__notes__
    assert note == f"in check=polite, {__file__}:{polite.__code__.co_firstlineno}"


@pytest.mark.parametrize("given", [False, True])
def test_a_flag_is_no_schema(given):
    with pytest.raises(
        sgl.ParameterError,
        match=f"^json_schema: {given} is not a schema. Leave it out for free text",
    ):
        sgl.gen("a", json_schema=given)


@pytest.mark.parametrize("given", [False, {"type": "object"}, "", " ", "\ud800"])
def test_what_is_no_type_is_told_where_schemas_go(given):
    with pytest.raises(
        sgl.ConstraintError, match=r"is no type. Give a schema as json_schema=…, or a type"
    ):
        sgl.gen("a", type=given)


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_turn_is_opened_by_the_state(role):
    @sgl.function
    def opens(s):
        with getattr(sgl, role)():
            s += "a"

    with pytest.raises(
        sgl.ParameterError, match=rf"Write with s\.{role}\(\):, or s \+= sgl\.{role}\(…\)"
    ) as caught:
        opens.run(backend=BACKEND)
    assert caught.value.where is not None
    assert caught.value.where.file == __file__


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize(
    "text",
    [
        lambda s: f"{s.get('a')}",
        lambda s: sgl.user(f"{program.arun()}"),
        lambda s: "x" + str(s.get("a")) + "y",
    ],
)
def test_a_coroutine_inside_a_text_is_refused(text):
    @sgl.function
    async def forgets(s):
        s += sgl.gen("a")
        s += text(s)

    with pytest.raises(
        sgl.ParameterError, match=r"a coroutine that was not awaited. Await it: text = await"
    ) as caught:
        forgets.run(backend=BACKEND)
    assert caught.value.where is not None
    assert caught.value.where.file == __file__


def test_a_run_that_is_added_is_told_to_add_the_program():
    @sgl.function
    def adds(s):
        s += program.arun()

    with pytest.raises(sgl.ParameterError, match=r"Add the program itself: s \+= program\(…\)"):
        adds.run(backend=BACKEND)


def test_choices_in_the_place_of_the_name_are_told_that_it_comes_first():
    with pytest.raises(
        sgl.ParameterError,
        match=r"^name: \['a', 'b'\] is not a string. The name comes first: select\(",
    ):
        sgl.select(["a", "b"])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: sgl.RuntimeEndpoint("http://localhost:1", key="x"),
            "key: RuntimeEndpoint has no such argument. Did",
        ),
        (
            lambda: sgl.RuntimeEndpoint(url="http://localhost:1"),
            "url: RuntimeEndpoint has no such argument. Use base_u",
        ),
        (
            lambda: sgl.OpenAI(model="gpt-4o-mini"),
            "model_name: OpenAI needs it. model= is called model_name= here.",
        ),
        (
            lambda: sgl.OpenAI("m", key="x"),
            "key: AsyncOpenAI has no such argument. Did you mean api_key=?",
        ),
        (
            lambda: sgl.Anthropic("m", api_base="x"),
            "api_base: AsyncAnthropic has no such argument. Use base_url= here",
        ),
        (lambda: sgl.OpenAI(5, api_key="x"), "model_name: 5 is not a string."),
        (lambda: sgl.Anthropic(5, api_key="x"), "model_name: 5 is not a string."),
        (lambda: sgl.LiteLLM(5, profile="vllm"), "model_name: 5 is not a string."),
        (lambda: sgl.VertexAI(5, project="p"), "model_name: 5 is not a string."),
        (lambda: sgl.Crusoe(5, api_key="x"), "model_name: 5 is not a string."),
        (
            lambda: sgl.LiteLLM("m", key="x"),
            "key: LiteLLM has no such argument. Did you mean api_key=?",
        ),
        (lambda: sgl.VertexAI(), "model_name: VertexAI needs it."),
        (
            lambda: sgl.Crusoe(model="m"),
            "model_name: Crusoe needs it. model= is called model_name= here.",
        ),
        (
            lambda: sgl.ScriptedBackend(anwsers={}),
            "anwsers: ScriptedBackend has no such argument. Did you mean answers=?",
        ),
        (lambda: sgl.Replay(), "path: Replay needs it."),
        (
            lambda: sgl.Fallback(sgl.ScriptedBackend(), sgl.ScriptedBackend()),
            "Fallback: too many positional arguments.",
        ),
        (
            lambda: sgl.RateLimit(rpm=3),
            "rpm: RateLimit has no such argument. Use requests_per_minute= here.",
        ),
        (
            lambda: sgl.Price(1, 2, cache=3),
            "cache: Price has no such argument. Did you mean cached=?",
        ),
        (
            lambda: sgl.Price(input=1),
            "output: Price needs it. Its parameters, in order: input, output, cached",
        ),
    ],
)
def test_a_constructor_tells_what_its_arguments_are_called(make, said):
    with pytest.raises(sgl.ParameterError, match=re.escape(said)) as caught:
        make()
    assert caught.value.where is not None
    assert caught.value.where.file == __file__


def test_an_engine_tells_which_setting_was_meant():
    with pytest.raises(
        sgl.ParameterError, match=r"devcie: Engine has no such parameter. Did you mean device=\?"
    ):
        sgl.Engine("x", devcie="cpu")


def test_an_engine_tells_what_a_model_can_be():
    with pytest.raises(sgl.ParameterError, match=r"^model: 5 is not a name, a folder or a file\."):
        sgl.Engine(5)


def test_a_list_of_answers_is_told_how_to_be_given():
    with pytest.raises(
        sgl.ParameterError, match=r'a list is not .* in order, give \{"": \["first", "second"\]\}'
    ):
        sgl.ScriptedBackend(["a", "b"])


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (
            (sgl.user("a"), sgl.user("b")),
            "a tuple can't be added to a program. Add the parts with +",
        ),
        ([sgl.user("a")], "a list can't be added to a program. Add the parts with +"),
        (
            {"role": "user", "content": "a"},
            "a dict can't be added to a program. Add a message with its role",
        ),
    ],
)
def test_parts_and_messages_that_are_added_are_told_how(added, said):
    @sgl.function
    def adds(s):
        s += added

    with pytest.raises(sgl.ParameterError, match=re.escape(said)):
        adds.run(backend=BACKEND)


def test_a_variable_read_as_an_attribute_is_told_how_it_is_read():
    name = "answer"
    state = program.run(backend=BACKEND)
    with pytest.raises(
        AttributeError, match=r"no attribute 'answer'\. A variable is read as s\['answer'\]\."
    ):
        getattr(state, name)


@pytest.mark.parametrize(
    ("names", "read"),
    [
        ([], "is read as s['answer']."), (["answer"], "is read as s['answer']."), (["b", "c"], "are read as s['b'], s['c']."),
    ],
)  # fmt: skip
def test_the_variables_that_there_are_are_named(names, read):
    @sgl.function
    def sets(s):
        for name in names:
            s[name] = 1

    with pytest.raises(AttributeError, match=re.escape(read)):
        _ = sets.run(backend=BACKEND).answer


def test_the_name_of_a_file_is_no_schema():
    with pytest.raises(
        sgl.ConstraintError, match=r"json_schema: not JSON.* of a file, what it has: json\.load"
    ):
        sgl.gen("a", json_schema="person.json")


def test_a_state_is_no_text():
    @sgl.function
    def inner(s):
        s += f"{s}"

    with pytest.raises(sgl.ParameterError, match="a state can't be written into a string"):
        inner.run(backend=BACKEND)
    state = program.run(backend=BACKEND)
    with pytest.raises(sgl.ParameterError, match=r"s\.text\(\)"):
        f"{state}"
    assert f"{state!r}" == "ProgramState()"


@pytest.mark.parametrize(
    "use",
    [
        bool,
        lambda x: x == "a",
        lambda x: x != "a",
        lambda x: x < 3,
        lambda x: "a" in x,
        lambda x: not x,
    ],
)
def test_a_value_that_was_not_awaited_is_no_value(use):
    @sgl.function
    async def asks(s):
        s += sgl.gen("x")
        use(s.get("x"))

    with pytest.raises(sgl.ProgramError, match=r"Await it: await s\.get"):
        asyncio.run(asks.arun(backend=BACKEND))


def test_a_value_may_be_awaited_in_every_way():
    async def main():
        state = await sgl.function(lambda s: s.__iadd__(sgl.gen("x"))).arun(backend=BACKEND)
        task = asyncio.create_task(state.get("x"))
        return (
            await task,
            await asyncio.wait_for(state.get("x"), 60),
            *await asyncio.gather(state.get("x")),
        )

    assert asyncio.run(main()) == ("x", "x", "x")


class Endless(BaseModel):
    next: "Endless"


@sgl.function
def endless(s):
    s += sgl.gen("a", type=Endless)


@sgl.function
def hasty(s, q):
    s += "x"
    sgl.gen("lost")
    s.fork(2)[0].__iadd__(sgl.gen("beside"))


CIRCLE: dict[str, object] = {}
CIRCLE["self"] = CIRCLE


@pytest.mark.filterwarnings("ignore:sgl.gen")  # which `hasty` adds to nothing
@pytest.mark.parametrize(
    ("call", "problem", "cure"),
    [
        (
            lambda: endless.run(backend=BACKEND)["a"],
            "no text satisfies it",
            "let it be null or missing",
        ),
        (lambda: sgl.grammar.json_schema(CIRCLE), "Circular reference", '{"$ref": "#"}'),
        (lambda: hasty.run("q", backend=BACKEND)["lost"], "no variable", "`s += gen(…)`"),
        (lambda: hasty.run("q", backend=BACKEND)["beside"], "no variable", "`join()`"),
        (lambda: hasty.run("q", sgl.ScriptedBackend()), "too many positional", "run(…, backend=…)"),
        (
            lambda: sgl.Engine("gpt-5-mini", in_process=True),
            "not an alias",
            "sgl.OpenAI('gpt-5-mini')",
        ),
    ],
)
def test_a_first_mistake_is_told_its_cure(call, problem, cure):
    with pytest.raises(sgl.SglError, match=problem) as told:
        call()
    assert cure in told.value.hint


def test_what_is_added_to_nothing_is_told_once_at_its_line():
    @sgl.function
    def program(s):
        s += sgl.user("Hi")
        sgl.assistant(sgl.gen("a"))

    def twice_and_in_a_batch():
        for _ in range(2):
            program.run(backend=BACKEND)
        program.run_batch([{}, {}], backend=BACKEND)

    with pytest.warns(
        UserWarning, match=r"^sgl\.assistant\(…\) is added to nothing\. Write s \+= sgl\.assi"
    ) as told:
        twice_and_in_a_batch()
    (warning,) = told
    assert (warning.filename, warning.lineno) == (
        __file__,
        program.func.__code__.co_firstlineno + 3,
    )


def test_the_same_line_of_another_file_is_warned_about_as_well(tmp_path):
    files = [tmp_path / name for name in ("one.py", "other.py")]
    for file in files:
        file.write_text("import sglang_lite as sgl\n@sgl.function\ndef f(s):\n    sgl.user('Hi')\n")
    programs = [runpy.run_path(str(file))["f"] for file in files]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for program in programs:
            program.run(backend=BACKEND)
    assert [each.filename for each in told] == list(map(str, files))


def test_a_value_that_contains_itself_is_not_saved(tmp_path):
    @sgl.function
    def program(s):
        s["kept"] = CIRCLE
        s += "x"

    state = program.run(backend=sgl.ScriptedBackend())
    with pytest.raises(sgl.ProgramError, match="'kept' contains itself") as told:
        state.save(tmp_path / "run.json")
    assert told.value.hint
