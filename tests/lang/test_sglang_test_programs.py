"""Programs of the kinds that SGLang's own tests run (`sglang/test/test_programs.py`), in other
words: what they check of a result, but for what a model has to know.
"""

import re
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.ir import REGEX_FLOAT, REGEX_INT, REGEX_STR
from tests.server.conftest import serving


@pytest.fixture(autouse=True)
def _default(small_engine):
    sgl.set_default_backend(small_engine)


def test_few_shots_with_a_stop_string_alone_and_in_a_batch():
    @sgl.function
    def answer(s, question):
        s += "Q: Which colour has snow?\nA: White\n" + f"Q: {question}\n" + "A:"
        s += sgl.gen("answer", stop="\n", temperature=0, max_tokens=8)

    asked = [
        {"question": question}
        for question in ("Which colour has grass?", "Which has coal?", "And blood?")
    ]
    states = [answer.run(question="Which has the sky?"), *answer.run_batch(asked, temperature=0.1)]
    answers = [state["answer"] for state in states]
    assert len(answers) == 4
    assert not any("\n" in each for each in answers)


def test_turns_as_calls_and_as_blocks_are_messages():
    @sgl.function
    def talk(s, first, second):
        s += sgl.system("Be brief.") + sgl.user(first) + sgl.assistant(sgl.gen("one"))
        with s.user():
            s += second
        with s.assistant():
            s += sgl.gen("two")

    state = talk.run(first="Hello?", second="Again?", temperature=0.7, max_new_tokens=6)
    assert [message["role"] for message in state.messages()] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert state.text().index("Again?") < state.text().rindex(state["two"])


def test_a_selection_is_one_of_its_choices():
    @sgl.function
    def judge(s, claim):
        s += f"Claim: {claim}\nVerdict:" + sgl.select("verdict", ["right", "wrong", "open"])

    assert judge.run(claim="Two is even.")["verdict"] in ("right", "wrong", "open")


def test_integers_are_integers():
    @sgl.function
    def count(s):
        s += (
            "Hours of a day: "
            + sgl.gen_int("hours")
            + "\nDays of a week: "
            + sgl.gen_int("days")
            + "\n"
        )

    state = count.run(temperature=0.1, max_new_tokens=6)
    assert [str(int(state[name])) for name in ("hours", "days")] == [
        state["hours"].strip(),
        state["days"].strip(),
    ]


def by_regexes(s):
    s += (
        '  "name": '
        + sgl.gen(regex=REGEX_STR)
        + ',\n  "people": '
        + sgl.gen(regex=REGEX_INT, stop=[" ", "\n"])
    )
    s += ',\n  "width": ' + sgl.gen(regex=REGEX_FLOAT, stop=[" ", "\n"]) + "\n"


def by_dtypes(s):
    s += (
        '  "name": '
        + sgl.gen_string()
        + ',\n  "people": '
        + sgl.gen_int()
        + ',\n  "area": '
        + sgl.gen(dtype=int)
    )
    s += ',\n  "land": ' + sgl.gen(dtype=str) + "\n"


@pytest.mark.parametrize("members", [by_regexes, by_dtypes])
def test_the_text_of_a_scope_is_a_variable(members):
    @sgl.function
    def city(s):
        s += "A city as JSON:\n"
        with s.var_scope("json"):
            s += "{\n"
            members(s)
            s += "}"

    state = city.run(temperature=0, max_new_tokens=24)
    text = state["json"]
    assert text.startswith('{\n  "name": "')
    assert state.text().endswith(text)
    generated = re.sub(r'"(name|people|width|area|land)": ', "", text)
    # neither a string nor a number was cut
    if generated.count('"') % 2 == 0 and re.search(r"\d", generated):
        assert text.endswith("\n}")


def test_a_value_is_read_in_the_middle_of_a_program():
    @sgl.function
    def expert(s, question):
        s += (
            f"Question: {question}\nWho knows it:"
            + sgl.gen("who", stop=[".", "\n"], max_tokens=5)
            + ".\n"
        )
        s += "So " + s["who"] + " says" + sgl.gen("answer", stop=".", max_tokens=5) + "."

    state = expert.run(question="Where is Rome?", temperature=0.1)
    assert f"So {state['who']} says{state['answer']}." in state.text()


def test_a_tool_is_called_between_two_generations():
    @sgl.function
    def add(s, a, b):
        s += (
            f"sum(1,2)=3\nsum({a},{b}): sum("
            + sgl.gen("arguments", regex=r"\d{1,3},\d{1,3}")
            + ")="
        )
        with s.var_scope("sum"):
            s += str(sum(map(int, s["arguments"].split(","))))

    state = add(a=25, b=98, temperature=0)  # type: ignore[call-arg]  # options in the call are SGLang's
    assert int(state["sum"]) == sum(map(int, state["arguments"].split(",")))


def test_a_selection_decides_how_a_loop_goes_on():
    @sgl.function
    def act(s, question):
        s += f"Question: {question}\n"
        for i in range(1, 4):
            s += f"Thought {i}:" + sgl.gen(stop=[".", "\n"], max_tokens=5) + ".\n"
            s += f"Action {i}: " + sgl.select(f"action_{i}", ["Look", "End"])
            if s[f"action_{i}"] == "End":
                s += " [" + sgl.gen("answer", stop="]", max_tokens=5) + "].\n"
                break
            s += f" [{i}].\n"

    state = act.run(question="Where does Linus live?", temperature=0.1)
    chosen = re.findall(r"Action \d: (Look|End)", state.text())
    assert chosen == ["Look"] * (len(chosen) - 1) + chosen[-1:]
    assert ("answer" in state) == (chosen[-1] == "End")


def test_branches_expand_what_a_list_began():
    @sgl.function
    def expand(s, topic):
        s += f"Tips for {topic}:\n"
        for i in range(3):
            s += f"{i}." + sgl.gen(max_tokens=4, stop=[".", "\n"]) + ".\n"
        forks = s.fork(3)
        for i in range(3):
            forks[i] += f"Tip {i} at length:"
            forks[i] += sgl.gen("long", 8, stop=["\n\n"])
        forks.join()
        for i in range(3):
            s += f"Tip {i}:" + forks[i]["long"] + "\n"
        s += "In short," + sgl.gen("short", max_tokens=8)

    state = expand.run(topic="writing", temperature=0.3)
    assert isinstance(state["short"], str)
    assert state.text().count("Tip ") == 3


def test_branches_that_are_appended_are_read_by_what_follows():
    @sgl.function
    def read(s, question, facts):
        s += "Facts:\n"
        forks = s.fork(len(facts))
        forks += lambda i: f"{i}: {facts[i]}\n"
        forks.join(mode="concate_and_append")
        s += f"Question: {question}\nAnswer:" + sgl.gen("answer", max_tokens=4)

    state = read.run(question="Who?", facts=["Ann is tall.", "Bob is small."], temperature=0)
    assert state.text().startswith(
        "Facts:\n0: Ann is tall.\n1: Bob is small.\nQuestion: Who?\nAnswer:"
    )


@pytest.mark.parametrize("name", [None, "answer"])
def test_a_stream_ends_with_all_of_its_text(name):
    @sgl.function
    def talk(s, question):
        s += (
            sgl.system("Be brief.")
            + sgl.user(question)
            + sgl.assistant(sgl.gen("answer", max_tokens=8))
        )

    state = talk(question="Hello?", stream=True)  # type: ignore[call-arg]  # options in the call are SGLang's
    pieces = list(state.text_iter(name) if name else state.text_iter())
    assert "".join(pieces) == (state[name] if name else state.text())


def test_a_regex_of_an_address():
    address = r"((25[0-5]|2[0-4]\d|[01]?\d\d?).){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"

    @sgl.function
    def lookup(s):
        s += "The address is " + sgl.gen("answer", temperature=0, regex=address)

    assert re.fullmatch(address, lookup.run()["answer"])


def test_variables_of_dtypes_can_be_set_to_their_values():
    @sgl.function
    def values(s):
        s += (
            "Name: "
            + sgl.gen("text", dtype=str, stop="\n")
            + "\nYear: "
            + sgl.gen("whole", dtype=int)
        )
        s += (
            "\nPi: "
            + sgl.gen("real", dtype=float)
            + "\nBlue: "
            + sgl.gen("flag", dtype=bool)
            + "\n"
        )

    state = values.run(max_new_tokens=6)
    state["whole"], state["real"], state["flag"] = (
        int(state["whole"]),
        float(state["real"]),
        bool(state["flag"]),
    )
    assert (type(state["whole"]), type(state["real"]), type(state["flag"])) == (int, float, bool)


def test_api_drafts_over_several_generations_of_one_turn():
    @sgl.function(num_api_spec_tokens=64)
    def character(s):
        s += sgl.user("A character, please.")
        s += sgl.assistant(
            "Name:" + sgl.gen("name", stop="\n") + "\nJob:" + sgl.gen("job", stop="\n")
        )

    state = character(max_new_tokens=6)  # type: ignore[call-arg]  # options in the call are SGLang's
    state.sync()
    assert f"Name:{state['name']}\nJob:{state['job']}" in state.text()


def test_a_batch_is_the_same_as_a_list_and_as_an_iterator():
    @sgl.function
    def end(s, text, endings):
        s += text + " " + sgl.select("end", choices=endings)

    rows = [{"text": f"Row {i} is", "endings": [f"{i}", "none", "all of them"]} for i in range(12)]
    options: dict[str, Any] = {"temperature": 0, "num_threads": 8, "progress_bar": False}
    listed = end.run_batch(rows, generator_style=False, **options)
    iterated = end.run_batch(rows, generator_style=True, **options)
    assert [state["end"] for state in listed] == [state["end"] for state in iterated]


def test_min_tokens_is_a_lower_limit(small_engine):
    @sgl.function
    def talk(s):
        s += sgl.user("Hello?") + sgl.assistant(sgl.gen("answer", min_tokens=24, max_tokens=32))

    assert sgl.global_config.default_backend.endpoint.get_model_name() == small_engine.model_name
    assert talk.run().get_meta_info("answer")["completion_tokens"] >= 24


# ------------------------------------------------------------------------------ tokens of a backend


@pytest.fixture(scope="module")
def url(small_engine):
    with serving(small_engine) as url:
        yield url


@sgl.function
def several(s):
    s += (
        "Say"
        + sgl.gen("a", max_tokens=4, n=2, ignore_eos=True)
        + " or"
        + sgl.select("b", ["this", "that"])
    )
    forks = s.fork(2)
    forks += " and" + sgl.gen("c", max_tokens=3, ignore_eos=True)
    forks.join()


@sgl.function(num_api_spec_tokens=8)
def guessed(s):
    s += (
        "Name:"
        + sgl.gen("a", stop="\n", max_tokens=4)
        + "\nJob:"
        + sgl.gen("b", stop="\n", max_tokens=4)
    )


@pytest.mark.parametrize("program", [several, guessed])
@pytest.mark.parametrize("push_down", [True, False])
@pytest.mark.parametrize("kind", ["engine", "server", "scripted"])
def test_a_backend_counts_the_tokens_that_its_programs_use(
    small_engine, url, kind, push_down, program
):
    backend: Any = (
        sgl.ScriptedBackend(default="one two\nthree")
        if kind == "scripted"
        else LocalBackend(small_engine)
    )
    if "server" in kind:
        backend = sgl.RuntimeEndpoint(url)
    assert backend.endpoint is backend
    total = backend.token_usage
    state = program.run(backend=backend, push_down=push_down)
    state.sync()
    usage = state.usage()
    assert (total.prompt_tokens, total.completion_tokens) == (
        usage.prompt_tokens,
        usage.completion_tokens,
    )
    assert total.completion_tokens
    total.reset()
    assert (total.prompt_tokens, total.completion_tokens) == (0, 0)
    if "server" in kind:
        backend.shutdown()
