"""Programs in the ways that SGLang's own unit tests write theirs (test_programs.py of 0.5.23), on the default engine with
few tokens: they run, their variables are set and of the right types. What a small model knows is not asked."""

import asyncio
import json
import re

import pytest

import sglang_lite as sgl
from sglang_lite.lang.ir import REGEX_FLOAT, REGEX_INT, REGEX_STR

pytestmark = pytest.mark.slow

FEW = 6  # tokens


@pytest.fixture(autouse=True)
def _default(engine):
    sgl.set_default_backend(engine)


def run(program, *args, **options):
    """The state of a program that has been executed without an error."""
    state = program.run(*args, **{"max_new_tokens": FEW, "temperature": 0, **options})
    state.sync()
    assert state.error() is None
    return state


def test_few_shots_alone_and_in_a_batch():
    @sgl.function
    def few_shot(s, question):
        s += "Questions with answers.\n\nQ: What is the capital of France?\nA: Paris\n"
        s += "Q: " + question + "\nA:" + sgl.gen("answer", stop="\n", temperature=0)

    questions = [f"What is the capital of {country}?" for country in ("Italy", "Japan")]
    states = few_shot.run_batch([{"question": q} for q in questions], temperature=0.1, max_new_tokens=FEW)
    for state, question in zip(states, questions):
        assert state["answer"] == run(few_shot, question=question)["answer"] != ""
        assert "\n" not in state["answer"]


def test_turns_by_functions_and_by_with():
    @sgl.function
    def chat(s, first, second):
        s += sgl.system("You are a helpful assistant.")
        s += sgl.user(first)
        s += sgl.assistant(sgl.gen("answer_1"))
        with s.user():
            s += second
        with s.assistant():
            s += sgl.gen("answer_2")

    state = run(chat, first="Write about Hawaii.", second="Shorter.", temperature=0.7)
    assert [m["role"] for m in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert state.messages()[2]["content"] == state["answer_1"].lstrip()
    assert isinstance(state["answer_2"], str)


def test_a_choice_among_three():
    @sgl.function
    def judge(s, statement):
        s += "Statement: The capital of France is Pairs.\nAnswer: True\nStatement: " + statement
        s += "\nAnswer:" + sgl.select("answer", ["True", "False", "Unknown"])

    assert run(judge, statement="The capital of Canada is Tokyo.")["answer"] in ("True", "False", "Unknown")


def test_numbers_of_gen_int():
    @sgl.function
    def decode(s):
        s += "The number of hours in a day is " + sgl.gen_int("hours") + "\n"
        s += "The number of days in a year is " + sgl.gen_int("days") + "\n"

    state = run(decode, max_new_tokens=20)
    assert isinstance(int(state["hours"]) + int(state["days"]), int)


def test_json_piece_by_piece_from_regexes():
    @sgl.function
    def decode(s):
        s += "A JSON object of basic information about the city of Paris:\n"
        with s.var_scope("json"):
            s += '{\n  "name": ' + sgl.gen(regex=REGEX_STR, max_tokens=24) + ",\n"
            s += '  "population": ' + sgl.gen(regex=REGEX_INT, stop=[" ", "\n"]) + ",\n"
            s += '  "latitude": ' + sgl.gen(regex=REGEX_FLOAT, stop=[" ", "\n"]) + "\n}"

    found = json.loads(run(decode, max_new_tokens=36)["json"])
    assert {key: type(value) for key, value in found.items()}.items() >= {"name": str, "population": int}.items()
    assert isinstance(found["latitude"], int | float)


def test_json_piece_by_piece_from_types():
    @sgl.function
    def decode(s):
        s += "A JSON object of basic information about the city of Paris:\n"
        with s.var_scope("json"):
            s += '{\n  "name": ' + sgl.gen_string() + ",\n"
            s += '  "population": ' + sgl.gen_int() + ",\n"
            s += '  "area": ' + sgl.gen(dtype=int) + ",\n"
            s += '  "timezone": ' + sgl.gen(dtype=str) + "\n}"

    found = json.loads(run(decode, max_new_tokens=40)["json"])
    assert [type(value) for value in found.values()] == [str, int, int, str]


def test_a_variable_in_the_text_that_follows():
    @sgl.function
    def expert(s, question):
        s += "Question: " + question + "\n"
        s += "A good person to answer this question is" + sgl.gen("expert", stop=[".", "\n"]) + ".\n"
        s += "For example," + s["expert"] + " would answer that " + sgl.gen("answer", stop=".") + "."

    state = run(expert, question="What is the capital of France?")
    assert f"For example,{state['expert']} would answer that {state['answer']}." in state.text()


def test_a_tool_of_pythons_in_the_middle():
    @sgl.function
    def compute(s, left, right):
        s += "For example,\ncalculate(1+2)=3\ncalculate(3*4)=12\n"
        s += f"Question: What is the product of {left} and {right}?\nAnswer: calculate("
        s += sgl.gen("expression", regex=r"[0-9]+\*[0-9]+", stop=")") + ") = "
        with s.var_scope("answer"):
            left, right = s["expression"].split("*")
            s += str(int(left) * int(right or 0))

    state = run(compute, 257, 983, max_new_tokens=16)
    assert int(state["answer"]) >= 0
    assert state.text().endswith(") = " + state["answer"])


def test_a_loop_that_a_choice_ends():
    @sgl.function
    def react(s, question):
        s += "Question: " + question + "\n"
        for i in range(1, 3):
            s += f"Thought {i}:" + sgl.gen(stop=[".", "\n"]) + ".\n"
            s += f"Action {i}: " + sgl.select(f"action_{i}", ["Search", "Finish"])
            if s[f"action_{i}"] == "Finish":
                s += " [" + sgl.gen("answer", stop="]") + "].\n"
                break
            s += " [" + sgl.gen(stop="]") + "].\nObservation:" + sgl.gen(stop=[".", "\n"]) + ".\n"

    state = run(react, question="What country does the creator of Linux live in?")
    actions = [state[f"action_{i}"] for i in (1, 2) if f"action_{i}" in state]
    assert set(actions) <= {"Search", "Finish"}
    assert ("answer" in state) == (actions[-1] == "Finish")


def test_branches_that_are_joined_and_read():
    @sgl.function
    def tips(s, topic):
        s += "Three concise tips for " + topic + ":\n"
        for i in range(1, 4):
            s += f"{i}." + sgl.gen(max_tokens=3, stop=[".", "\n"]) + ".\n"
        forks = s.fork(3)
        for i in range(3):
            forks[i] += f"Tip {i + 1} in detail:"
            forks[i] += sgl.gen("detail", 4, stop=["\n\n"])
        forks.join()
        for i in range(3):
            s += f"Tip {i + 1}:" + forks[i]["detail"] + "\n"
        s += "\nIn summary," + sgl.gen("summary", max_tokens=4)

    state = run(tips, topic="writing", temperature=0.3)
    assert isinstance(state["summary"], str)
    assert [type(detail) for detail in state["detail"]] == [str] * 3


def test_texts_of_branches_that_are_appended():
    @sgl.function
    def about(s, question, **contexts):
        s += "Memorize these statements.\n"
        forks = s.fork(len(contexts))
        forks += lambda i: f"Statement {i}: " + contexts[f"context_{i}"] + "\n"
        forks.join(mode="concate_and_append")
        s += "Question: " + question + "\nANSWER:" + sgl.gen("answer", max_tokens=FEW)

    state = run(about, question="Who is the father of Julian?", context_0="Ethan is.", context_1="Noah is.")
    assert "Statement 0: Ethan is.\nStatement 1: Noah is.\nQuestion" in state.text()
    assert isinstance(state["answer"], str)


@sgl.function
def qa(s, question):
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", return_logprob=True))


def test_streams_of_all_text_and_of_a_variable():
    def state():
        return qa(question="Hawaii?", stream=True, max_new_tokens=FEW, temperature=0)

    answer = run(qa, question="Hawaii?")["answer"]
    assert "".join(state().text_iter()).find(answer) > 0
    assert "".join(state().text_iter("answer")) == answer


def test_a_stream_with_log_probabilities():
    async def collect():
        state = qa(question="Hawaii?", stream=True, temperature=0, max_new_tokens=FEW)
        return [chunk async for chunk in state.text_async_iter("answer", return_meta_data=True)]

    before = 0
    for text, meta in asyncio.run(collect()):
        assert text
        assert meta["completion_tokens"] == meta["output_token_logprobs_length"]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] - before
        before = meta["completion_tokens"]
    assert before == FEW


def test_a_regex_of_an_address():
    pattern = r"((25[0-5]|2[0-4]\d|[01]?\d\d?).){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"

    @sgl.function
    def address(s):
        s += "Q: What is the IP address of the Google DNS servers?\nA: "
        s += sgl.gen("answer", temperature=0, regex=pattern)

    assert re.fullmatch(pattern, run(address, max_new_tokens=20)["answer"])


def test_types_by_dtype():
    @sgl.function
    def types(s):
        s += "A: The full name is " + sgl.gen("str", dtype=str, stop="\n") + "\n"
        s += "Q: Which year was DNS invented?\nA: " + sgl.gen("int", dtype=int) + "\n"
        s += "Q: What is the value of pi?\nA: " + sgl.gen("float", dtype=float) + "\n"
        s += "Q: Is the sky blue?\nA: " + sgl.gen("bool", dtype=bool) + "\n"

    state = run(types, max_new_tokens=24)
    assert isinstance(int(state["int"]), int)
    assert isinstance(float(state["float"]), float)
    assert state["bool"] in ("True", "False")
    assert state["str"].startswith('"')


def test_a_program_with_sglangs_hint_for_remote_apis():
    @sgl.function(num_api_spec_tokens=256)
    def character(s):
        s += sgl.user("Construct a character.")
        s += sgl.assistant("Name:" + sgl.gen("name", stop="\n") + "\nJob:" + sgl.gen("job", stop="\n"))

    state = character(max_new_tokens=FEW)
    state.sync()
    assert [type(state[name]) for name in ("name", "job")] == [str, str]


def test_at_least_so_many_tokens(engine):
    @sgl.function
    def capital(s):
        s += sgl.user("What is the capital of the United States?")
        s += sgl.assistant(sgl.gen("answer", min_tokens=14, max_tokens=16))

    assert run(capital).get_meta_info("answer")["completion_tokens"] >= 14
