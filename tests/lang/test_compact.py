"""`s.compact()`: turns are dropped, a summary takes their place, and the text before stays known."""

import asyncio
import itertools
import json
import threading
from dataclasses import replace

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.execution.reading import completion_variable
from sglang_lite.protocol import Generation
from sglang_lite.testing import Say
from sglang_lite.text.chat_template import JinjaTemplate
from tests.constraints.test_generation import random_model
from tests.lang.test_approval import model
from tests.lang.test_last_answers import PROVIDERS
from tests.lang.test_tool_prompts import SIGNS, TEMPLATE
from tests.lang.test_tools import Native, answer, call, qwen

SYSTEM = {"role": "system", "content": "Be kind."}


def turn(role, content):
    return {"role": role, "content": content}


def summary(text):
    return turn("user", f"Summary of the conversation so far:\n{text}")


def play(*texts):
    """A model that writes these texts, and the prompts that it was shown."""
    left = iter(texts)
    shown = []

    def write(request):
        shown.append(request.prompt.text)
        return next(left)

    return sgl.ScriptedBackend(write), shown


def add_rounds(s, count):
    s += sgl.system("Be kind.")
    for i in range(count):
        s += sgl.user(f"Q{i}")
        s += sgl.assistant(sgl.gen(f"a{i}"))


@sgl.function
def chat(s, /, **options):
    add_rounds(s, 3)
    s["given"] = s.compact(**options)
    s += sgl.user("Q3")
    s += sgl.assistant(sgl.gen("a3"))


def run_chat(**options):
    backend, shown = play("A0", "A1", "A2", "all of it", "A3")
    return chat.run(**{"keep": 2, **options}, backend=backend), shown


ROUNDS = [[turn("user", f"Q{i}"), turn("assistant", f"A{i}")] for i in range(4)]


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 4, 5])
def test_a_summary_stands_in_place_of_what_is_dropped(keep):
    state, shown = run_chat(keep=keep)
    before = [SYSTEM, *ROUNDS[0], *ROUNDS[1], *ROUNDS[2]]
    kept = before[len(before) - keep :]
    assert state.messages() == [SYSTEM, summary("all of it"), *kept, *ROUNDS[3]]
    assert state["summary"] == state["given"] == "all of it"
    assert [state[f"a{i}"] for i in range(4)] == ["A0", "A1", "A2", "A3"]
    # the model is asked for the summary behind what is dropped, and nothing else
    dropped = before[: len(before) - keep]
    assert shown[3].startswith("".join(as_text(each) for each in dropped) + "<|im_start|>user\n")
    assert shown[4] == "".join(map(as_text, state.messages()[:-1])) + "<|im_start|>assistant\n"
    assert state.text() == "".join(map(as_text, state.messages()))


def as_text(message):
    return f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"


@pytest.mark.parametrize("keep", [6, 7, 100])
def test_nothing_happens_where_there_is_nothing_to_drop(keep):
    backend, shown = play("A0", "A1", "A2", "A3")
    state = chat.run(keep=keep, backend=backend)
    assert state["given"] is None
    assert "summary" not in state
    assert len(shown) == 4
    assert state.messages() == [SYSTEM, *ROUNDS[0], *ROUNDS[1], *ROUNDS[2], *ROUNDS[3]]


def test_the_wording_the_limit_and_the_name_are_the_callers():
    state, shown = run_chat(prompt="In three words?", max_tokens=7, name="memory")
    assert state["memory"] == "all of it"
    assert "<|im_start|>user\nIn three words?<|im_end|>" in shown[3]
    assert state.trace().nodes[0].kind == "text"
    nodes = sgl.function(lambda s: (add_rounds(s, 2), s.compact(max_tokens=7, keep=1))).trace()
    found = [node.node for node in nodes.graph().nodes if node.name == "summary"]
    assert [node.params.max_tokens for node in found] == [7]


def test_it_can_be_compacted_again_and_again():
    @sgl.function
    def program(s):
        s += sgl.system("Be kind.")
        for i in range(50):
            s += sgl.user(f"Q{i}")
            s += sgl.assistant(sgl.gen("a"))
            s.compact(keep=2)

    prompts = []

    def write(request):
        prompts.append(request.prompt.text)
        return f"<{len(prompts)}>"

    state = program.run(backend=sgl.ScriptedBackend(write))
    assert [each["role"] for each in state.messages()] == ["system", "user", "user", "assistant"]
    assert len(prompts) == 50 + 49
    assert max(map(len, prompts)) < 1200
    assert state["summary"] == "<99>"


ALTERNATING = JinjaTemplate(
    """{% for m in messages %}
{%- if loop.index0 and m['role'] == messages[loop.index0 - 1]['role'] -%}
{{ raise_exception('roles must alternate') }}
{%- endif -%}
<{{ m['role'] }}>{{ m['content'] }}</>
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
)


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("keep", range(5))
def test_a_template_may_require_that_roles_alternate(keep, system):
    @sgl.function
    def program(s):
        if system:
            s += sgl.system("Be kind.")
        s += sgl.user("<a>") + sgl.assistant(sgl.gen("a"))
        s += sgl.user("<b>") + sgl.assistant(sgl.gen("b"))
        s += sgl.user("<c>")
        s.compact(keep=keep, prompt="Sum up!")
        s += sgl.assistant(sgl.gen("c"))

    backend, shown = play("A", "B", "S", "C")
    backend.chat_template = ALTERNATING
    state = program.run(backend=backend)
    turns = [
        ("user", "<a>"),
        ("assistant", "A"),
        ("user", "<b>"),
        ("assistant", "B"),
        ("user", "<c>"),
    ]
    head = [("system", "Be kind.")] * system
    dropped, kept = [*head, *turns[: 5 - keep]], turns[5 - keep :]
    text = "Summary of the conversation so far:\nS"
    if kept and kept[0][0] == "user":
        text += f"\n\n{kept.pop(0)[1]}"
    expected = [*head, ("user", text), *kept, ("assistant", "C")]
    assert [(each["role"], each["content"]) for each in state.messages()] == expected
    assert state.text() == written_out(expected)
    if dropped[-1][0] == "user":
        asked = [*dropped[:-1], ("user", f"{dropped[-1][1]}\n\nSum up!")]
    else:
        asked = [*dropped, ("user", "Sum up!")]
    assert shown[2] == written_out(asked) + "<assistant>"


def written_out(turns):
    return "".join(f"<{role}>{text}</>" for role, text in turns)


@pytest.mark.parametrize("keep", [0, 1])
def test_a_summary_alone_is_not_summarized_again(keep):
    @sgl.function
    def program(s):
        add_rounds(s, 2)
        return [s.compact(keep=keep) for _ in range(3)]

    backend, shown = play("A0", "A1", "S")
    state = program.run(backend=backend)
    assert state.ret_value == ["S", None, None]
    assert len(shown) == 3
    assert state.messages() == [SYSTEM, summary("S"), *ROUNDS[1][2 - keep :]]


@pytest.mark.parametrize("stops", [{"stop": " of"}, {"stop_regex": " .f"}])
def test_stops_of_the_run_do_not_cut_the_summary(stops):
    backend, _ = play("A0", "A1", "A2", "all of it", "A3 of B")
    state = chat.run(keep=2, backend=backend, **stops)
    assert (state["summary"], state["a3"]) == ("all of it", "A3")


@pytest.mark.parametrize("text", ["", " \n "])
def test_an_empty_summary_is_an_error_and_drops_nothing(text):
    @sgl.function
    def program(s):
        add_rounds(s, 3)
        with pytest.raises(sgl.ValueValidationError, match="an empty summary") as caught:
            s.compact(keep=2)
        assert "prompt=" in caught.value.hint

    state = program.run(backend=play("A0", "A1", "A2", text)[0])
    assert state.messages() == [SYSTEM, *ROUNDS[0], *ROUNDS[1], *ROUNDS[2]]
    assert "summary" not in state


def search(text: str) -> str:
    """Searches."""
    return f"found {text}"


@sgl.function
def agent(s, rounds, keep=2):
    s += sgl.system("Use tools.")
    for i in range(rounds):
        s += sgl.user(f"Task {i}")
        sgl.use_tools(s, [search], f"r{i}")
        s.compact(keep=keep)
    return s[f"r{rounds - 1}"]


def test_an_agent_works_for_fifty_rounds():
    asked = []

    def write(request):
        prompt = request.prompt.text
        asked.append(len(prompt))
        if "Summarize the conversation" in prompt.rsplit("<|im_start|>user", 1)[1]:
            return answer("so far, so good")
        if prompt.rsplit("<|im_start|>user\n", 1)[1].startswith("Result of search"):
            return answer("done")
        return call("search", text="x")

    state = agent.run(50, backend=sgl.ScriptedBackend(write))
    assert state.ret_value == "done"
    assert max(asked) < 3000
    assert len(state.messages()) < 8
    assert state["summary"] == "so far, so good"


@pytest.mark.parametrize("form", ["JSON", "own"])
@pytest.mark.parametrize("keep", range(6))
def test_results_stay_with_their_calls(form, keep):
    call_, answer_ = (call, answer) if form == "JSON" else (qwen, str)

    @sgl.function
    def program(s):
        s += sgl.user("Task")
        sgl.use_tools(s, [search])
        s.compact(keep=keep)

    left = iter([*(call_("search", text=str(i)) for i in range(3)), answer_("done"), answer_("S")])
    kind = sgl.ScriptedBackend if form == "JSON" else Native
    messages = program.run(backend=kind(lambda _: next(left))).messages()[1:]
    results = [i for i, each in enumerate(messages) if "Result of" in each["content"]]
    results += [i for i, each in enumerate(messages) if each["content"].startswith("found")]
    assert all(
        messages[i - 1]["role"] == "assistant" and "search" in messages[i - 1]["content"]
        for i in results
        if i
    )
    assert 0 not in results
    assert len(messages) - keep in (0, 1)


def test_the_prompt_for_the_summary_shows_the_tools_as_before():
    says = [Say(calls=(sgl_call("x"),)), Say("done"), Say("the summary"), Say("bye")]

    @sgl.function
    def program(s):
        s += sgl.system("Be kind.") + sgl.user("Task")
        sgl.use_tools(s, [search])
        s.compact(keep=1)
        s += sgl.user("Bye")
        s += sgl.assistant(sgl.gen("bye"))

    for make, choice in PROVIDERS.values():
        with sgl.server_for_tests(says) as server:
            backend = make(server)
            state = program.run(backend=backend)
            assert (state["summary"], state["bye"]) == ("the summary", "bye")
            bodies = [request.body for request in server.requests]
            backend.shutdown()
        assert bodies[2]["tools"] == bodies[1]["tools"]
        assert bodies[2]["tool_choice"] == choice
        sent = bodies[3].get("messages") or bodies[3]["input"]
        said = json.dumps(sent)
        assert "the summary" in said
        assert "Task" not in said
        assert "Be kind." in json.dumps(bodies[3])


def sgl_call(text):
    from sglang_lite.testing import ToolCall

    return ToolCall("search", {"text": text})


# ------------------------------------------------------------------------------ before and after


def test_fork_at_knows_the_texts_before_and_after():
    state, _ = run_chat()
    whole = [SYSTEM, *ROUNDS[0], *ROUNDS[1], *ROUNDS[2]]
    assert state.fork_at("a1")[0].messages() == whole[:4]
    after = [SYSTEM, summary("all of it"), *ROUNDS[2]]
    assert state.fork_at("summary")[0].messages() == after
    assert state.fork_at("a3")[0].messages() == [*after, ROUNDS[3][0]]
    fork = state.fork_at("a2")[0]
    fork += sgl.assistant_end()
    backend, _ = play("again", "more")
    assert fork.messages() == whole
    loaded = chat_forked_again(fork, backend)
    assert loaded.messages() == [SYSTEM, summary("again"), ROUNDS[2][1], turn("assistant", "more")]


def chat_forked_again(fork, backend):
    """Compacts a state that continues from a node before its first compaction."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fork"
        fork.save(path)
        loaded = sgl.load(path, backend=backend)
    loaded.compact(keep=1)
    loaded += sgl.assistant(sgl.gen("more"))
    return loaded


def test_a_saved_state_has_the_texts_before(tmp_path):
    state, _ = run_chat()
    state.save(tmp_path / "s")
    backend, _ = play("B1", "B2", "other", "B3")
    loaded = sgl.load(tmp_path / "s", chat, backend=backend)
    assert loaded.text() == state.text()
    assert loaded.messages() == state.messages()
    for name in ("a0", "a2", "summary", "a3"):
        assert loaded.fork_at(name)[0].text() == state.fork_at(name)[0].text()
    again = loaded.rerun("a1")
    assert again["a0"] == "A0"
    assert again.messages() == [
        SYSTEM,
        summary("other"),
        turn("user", "Q2"),
        turn("assistant", "B2"),
        turn("user", "Q3"),
        turn("assistant", "B3"),
    ]


def test_a_rerun_keeps_the_summary_or_takes_another():
    backend, shown = play("A0", "A1", "A2", "all of it", "A3", "B3", "C3")
    state = chat.run(keep=2, backend=backend)
    again = state.rerun("a3")
    assert again.messages()[:-1] == state.messages()[:-1]
    assert again["a3"] == "B3"
    given = state.rerun("summary", "nothing")
    assert given.messages()[1] == summary("nothing")
    assert given["a3"] == "C3"
    assert len(shown) == 7


def test_a_journal_continues_before_and_behind_a_compaction(tmp_path):
    texts = ["A0", "A1", "A2", "all of it", "A3"]
    whole = tmp_path / "whole.jsonl"
    text = chat.run(keep=2, backend=play(*texts)[0], journal=whole).text()
    head, *answers = whole.read_bytes().splitlines(keepends=True)
    assert len(answers) == len(texts)
    for known in range(len(texts) + 1):
        path = tmp_path / f"{known}.jsonl"
        path.write_bytes(b"".join([head, *answers[:known]]))
        backend, shown = play(*texts[known:])
        assert chat.run(keep=2, backend=backend, journal=path).text() == text
        assert len(shown) == len(texts) - known


def refund(order: str) -> str:
    """Pays back an order."""
    return f"{order} paid"


@sgl.function
def cashier(s):
    add_rounds(s, 2)
    s.compact(keep=0)
    s += sgl.user("Refund 7.")
    sgl.use_tools(s, [refund], approve="ask")
    s.compact(keep=2)


def test_a_suspended_run_is_resumed_behind_a_compaction(tmp_path):
    texts = ["A0", "A1", "S1", call("refund", order="7"), answer("Done."), answer("S2")]
    suspended = cashier.run(backend=model(*texts[:4]))
    suspended.save(tmp_path / "s")
    loaded = sgl.load(tmp_path / "s", cashier, backend=model(*texts[4:]), types=[refund])
    state = loaded.resume([loaded.pending()[0].approve()])
    assert state.messages() == [
        SYSTEM,
        summary("S2"),
        turn("assistant", call("refund", order="7")),
        turn("user", 'Result of refund: "7 paid"'),
        turn("assistant", answer("Done.")),
    ]
    assert (state["summary"], state["answer"]) == ("S2", "Done.")


def test_a_rollback_undoes_a_compaction():
    @sgl.function
    def program(s):
        add_rounds(s, 2)
        with s.checkpoint() as mark:
            for i in range(2):
                s.compact(keep=i)
                s += sgl.user("More")
                mark.rollback()
        s += sgl.user("Q2")
        s += sgl.assistant(sgl.gen("a2"))

    backend, _ = play("A0", "A1", "S", "S", "A2")
    state = program.run(backend=backend)
    assert state.messages() == [SYSTEM, *ROUNDS[0], *ROUNDS[1], *ROUNDS[2]]
    assert "summary" not in state
    assert state.fork_at("a1")[0].messages() == [SYSTEM, *ROUNDS[0], ROUNDS[1][0]]
    nodes = state.trace().nodes
    assert [node.rejected for node in nodes if node.kind == "compact"] == [True, True]


# ------------------------------------------------------------------------------------ beside others


def test_branches_are_compacted_by_themselves():
    @sgl.function
    def program(s):
        add_rounds(s, 2)
        forks = s.fork(2)
        forks[0].compact(keep=0)
        forks += sgl.user("Q2") + sgl.assistant(sgl.gen("b"))
        s.compact(keep=2)
        forks.join()
        s += sgl.user("Q3")
        s += sgl.assistant(sgl.gen("c"))
        s["texts"] = [fork.messages() for fork in forks]

    def write(request):
        return f"[{request.prompt.text.count('Q')} {request.prompt.text.count('Summary of')}]"

    state = program.run(backend=sgl.ScriptedBackend(write))
    one, other = state["texts"]
    assert one[1:3] == [summary("[2 0]"), turn("user", "Q2")]
    assert [each["content"] for each in other[:2]] == ["Be kind.", "Q0"]
    assert state["b"] == ["[1 1]", "[3 0]"]
    assert state["summary"] == ["[2 0]", None]
    assert state["c"] == "[2 1]"


def test_the_text_of_a_compacted_branch_is_not_appended():
    @sgl.function
    def program(s):
        add_rounds(s, 1)
        forks = s.fork(2)
        forks[1].compact(keep=0)
        forks.join("concate_and_append")

    with pytest.raises(sgl.ProgramError, match="no longer continues") as caught:
        program.run(backend=play("A0", "S")[0])
    assert "group.join()" in caught.value.hint

    @sgl.function
    def before(s):
        add_rounds(s, 1)
        s.compact(keep=0)
        forks = s.fork(2)
        forks += sgl.user("x")
        forks.join("concate_and_append")

    assert len(before.run(backend=play("A0", "S")[0]).text().split("user\nx")) == 3


async def _async_chat(s):
    add_rounds(s, 2)
    given = await s.compact(keep=1)
    s += sgl.user("Q2")
    s += sgl.assistant(sgl.gen("a2"))
    return given


def test_a_coroutine_awaits_it():
    program = sgl.function(_async_chat)
    texts = ["A0", "A1", "S", "A2"]
    state = asyncio.run(program.arun(backend=play(*texts)[0]))
    assert state.ret_value == "S"
    assert state.messages() == [SYSTEM, summary("S"), ROUNDS[1][1], *ROUNDS[2]]
    assert program.run(backend=play(*texts)[0]).text() == state.text()


def test_what_is_added_meanwhile_is_an_error():
    added = threading.Event()

    class Waits(sgl.BaseBackend):
        chat_template = get_chat_template("chatml")

        async def agenerate(self, prompt, params, constraint, *, stream):
            if "Summarize" in prompt.text:
                await asyncio.to_thread(added.wait)
            yield Generation("A")

    @sgl.function
    async def program(s):
        add_rounds(s, 2)
        waiting = asyncio.ensure_future(s.compact(keep=1))
        await asyncio.sleep(0)
        s += sgl.user("Q2")
        added.set()
        await waiting

    with pytest.raises(sgl.ProgramError, match="while it was compacted"):
        asyncio.run(program.arun(backend=Waits()))

    @sgl.function
    async def compared(s):
        add_rounds(s, 2)
        return s.compact(keep=1) == "S"

    with pytest.raises(sgl.ProgramError, match="a coroutine, not yet its value"):
        asyncio.run(compared.arun(backend=play("A0", "A1", "S")[0]))


class Slow(sgl.BaseBackend):
    """Writes A, and no summary in time."""

    chat_template = get_chat_template("chatml")

    def __init__(self):
        super().__init__()
        self.asked = threading.Event()

    async def agenerate(self, prompt, params, constraint, *, stream):
        if "Summarize" in prompt.text:
            self.asked.set()
            await asyncio.Event().wait()
        yield Generation("A")


AS_BEFORE = [
    SYSTEM,
    *itertools.chain(*([turn("user", f"Q{i}"), turn("assistant", "A")] for i in (0, 1))),
]


@pytest.mark.parametrize("stream", [False, True])
def test_an_interrupted_compaction_leaves_the_text_as_before(stream):
    backend = Slow()

    @sgl.function
    async def program(s):
        add_rounds(s, 2)
        waiting = asyncio.ensure_future(s.compact(keep=2))
        await asyncio.to_thread(backend.asked.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        s["known"] = "summary" in s
        s += sgl.user("Q2")
        s += sgl.assistant(sgl.gen("a2"))

    async def play():
        state = await program.arun(backend=backend, stream=stream)
        await state.async_sync()
        return state

    state = asyncio.run(play())
    assert state.messages() == [*AS_BEFORE, turn("user", "Q2"), turn("assistant", "A")]
    assert state["known"] is False


def test_what_was_added_meanwhile_is_undone():
    backend = Slow()

    @sgl.function
    async def program(s):
        add_rounds(s, 2)
        waiting = asyncio.ensure_future(s.compact(keep=1))
        await asyncio.to_thread(backend.asked.wait)
        s += sgl.user("Q2")
        forks = s.fork(2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(sgl.RequestAbortedError, match="removed its fork"):
            forks += sgl.user("Q3")

    assert asyncio.run(program.arun(backend=backend)).messages() == AS_BEFORE


def test_a_body_goes_on_after_a_summary_that_failed():
    left = iter(["A0", "A1", "A2", OSError("gone"), "A3"])

    def write(_):
        text = next(left)
        if isinstance(text, OSError):
            raise text
        return text

    @sgl.function
    def program(s):
        add_rounds(s, 3)
        with pytest.raises(sgl.SglError, match="gone"):
            s.compact(keep=2)
        s += sgl.user("Q3")
        s += sgl.assistant(sgl.gen("a3"))

    state = program.run(backend=sgl.ScriptedBackend(write))
    assert state.messages() == [SYSTEM, *ROUNDS[0], *ROUNDS[1], *ROUNDS[2], *ROUNDS[3]]


def test_a_stream_goes_on_with_what_is_written():
    backend, _ = play("A0", "A1", "A2", "all of it", "A3")
    state = chat.run(keep=2, backend=backend, stream=True)
    streamed = "".join(state.text_iter())
    state.sync()
    whole = "".join(map(as_text, [SYSTEM, *ROUNDS[0], *ROUNDS[1], *ROUNDS[2]]))
    assert streamed.startswith(f"{whole}<|im_start|>user\nSummarize")
    assert streamed.endswith(
        as_text(turn("assistant", "all of it")) + "".join(map(as_text, ROUNDS[3]))
    )
    assert state.text() == run_chat()[0].text()
    assert "".join(state.text_iter("summary")) == "all of it"


def test_a_batch():
    def write(request):
        return f"{len(request.prompt.text)}"

    states = chat.run_batch([{"keep": 0}, {"keep": 2}], backend=sgl.ScriptedBackend(write))
    alone = chat.run(keep=2, backend=sgl.ScriptedBackend(write))
    assert states[1].text() == alone.text() != states[0].text()


def test_it_may_be_compacted_when_the_body_has_ended():
    backend, _ = play("A0", "A1", "A2", "all of it", "A3", "S", "A4")
    state = chat.run(keep=2, backend=backend)
    assert state.compact(keep=1) == "S"
    state += sgl.assistant(sgl.gen("a4"))
    assert state.messages() == [SYSTEM, summary("S"), ROUNDS[3][1], turn("assistant", "A4")]


# -------------------------------------------------------------------------------- traces and usage


def test_the_trace_shows_what_was_dropped(tmp_path):
    state, _ = run_chat()
    trace = state.trace()
    (node,) = [node for node in trace.nodes if node.kind == "compact"]
    dropped = "".join(map(as_text, [*ROUNDS[0], *ROUNDS[1]]))
    assert (node.dropped.turns, node.dropped.text, node.dropped.images) == (4, dropped, 0)
    assert node.dropped.tokens == len(dropped) // 3 + 1  # the estimate
    assert node.name == "summary"
    assert node.text == "".join(map(as_text, [SYSTEM, summary("all of it"), *ROUNDS[2]]))
    assert node.where[1] == chat.func.__code__.co_firstlineno + 3
    assert "4 turns" in node._repr_html_()
    trace.save(tmp_path / "t.jsonl")
    assert type(trace).load(tmp_path / "t.jsonl").nodes == trace.nodes
    trace.save(tmp_path / "t.html")
    assert "compact" in (tmp_path / "t.html").read_text()


def test_dropped_images_are_counted(tmp_path):
    class Sees(sgl.ScriptedBackend):
        capabilities = replace(sgl.ScriptedBackend.capabilities, images=True)

    pixel = b"\x89PNG\r\n\x1a\n" + bytes(40)
    (tmp_path / "a.png").write_bytes(pixel)

    @sgl.function
    def program(s):
        for name in "ab":
            s += sgl.user("Look: " + sgl.image(str(tmp_path / "a.png")))
            s += sgl.assistant(sgl.gen(name))
        s.compact(keep=2)

    left = iter(["A", "B", "S"])
    state = program.run(backend=Sees(lambda _: next(left)))
    (node,) = [node for node in state.trace().nodes if node.kind == "compact"]
    assert node.dropped.images == 1
    kinds = [part["type"] for part in state.messages()[1]["content"]]
    assert kinds == ["text", "image_url", "text"]


def test_the_graph_has_a_node_for_it():
    graph = chat.trace(keep=2).graph()
    (node,) = [node for node in graph.nodes if node.kind == "Compact"]
    assert (node.node.keep, node.node.turns) == (2, 4)
    assert "compact: 4 turns dropped, 2 kept" in str(graph)
    assert sgl.Graph.from_json(graph.to_json()) == graph


# --------------------------------------------------------------------------------------- on an engine


@pytest.fixture(scope="module")
def chatting():
    loaded = replace(random_model(), context_length=8192)
    with Engine.of(
        loaded, max_running=8, chat_template=TEMPLATE.replace("SIGNS", SIGNS["qwen"])
    ) as engine:
        yield engine


@sgl.function
def long_chat(s, forks=False):
    s += sgl.system("Be kind. " + "very " * 60)
    for i in range(5):
        s += sgl.user(f"Question {i}? " + "more " * 20)
        s += sgl.assistant(sgl.gen(f"a{i}"))
        if i in (2, 4):
            s.compact(keep=2, max_tokens=20)
            if forks:
                group = s.fork(2)
                group += sgl.user("x") + sgl.assistant(sgl.gen("f"))
                group[0].compact(keep=0, max_tokens=5)
                group += sgl.user("y") + sgl.assistant(sgl.gen("g"))
                group.join()
        if i == 3:
            with s.checkpoint() as mark:
                s.compact(keep=1, max_tokens=5)
                mark.rollback()
    s += sgl.user("More?")
    s += sgl.assistant(sgl.gen("last"))


def finished(state):
    completion_variable(state.branch.player).wait()
    return state


@pytest.mark.parametrize("forks", [False, True])
def test_an_engine_plays_it_as_programs_and_frees_them(chatting, forks):
    settings = {"backend": chatting, "seed": 1, "temperature": 1.0, "max_new_tokens": 8}
    before = chatting.stats()
    one = finished(long_chat.run(forks, **settings))
    again = finished(long_chat.run(forks, **settings))
    assert chatting.stats()["programs_opened"] - before["programs_opened"] >= 10
    single = finished(long_chat.run(forks, push_down=False, **settings))
    assert one.text() == again.text() == single.text()
    assert one.messages() == single.messages()
    assert [one[name] for name in ("a4", "summary", "last")] == [
        single[name] for name in ("a4", "summary", "last")
    ]
    after = chatting.stats()
    assert (after["programs_open"], after["running"], after["pages_without_owner"]) == (0, 0, 0)


def test_only_the_system_turn_is_cached_behind_it_and_the_reason_is_told(chatting):
    state = finished(long_chat.run(backend=chatting, seed=7, temperature=1.0, max_new_tokens=8))
    nodes = [node for node in state.trace().nodes if node.kind in ("gen", "compact")]
    behind = [node for before, node in itertools.pairwise(nodes) if before.kind == "compact"]
    system = len(chatting.tokenizer.encode(as_template(state.messages()[0])))
    for node in (behind[0], behind[-1]):
        assert node.miss is not None
        assert node.miss.reason == "compacted"
        assert system - 16 <= node.usage.cached_tokens <= system + 64
        assert node.usage.prompt_tokens - node.usage.cached_tokens > 64
    (first, *_) = [node for node in nodes if node.kind == "compact" and not node.rejected]
    assert first.dropped is not None
    assert first.dropped.tokens == len(chatting.tokenizer.encode(first.dropped.text))
    # of the run, the tokens of summaries included
    summaries = [node for node in nodes if node.name == "summary" and node.kind == "gen"]
    assert all(node.usage.completion_tokens > 0 for node in summaries)
    total = sum(node.usage.prompt_tokens for node in nodes)
    assert state.usage().prompt_tokens == total
    page = sgl_page(state)
    assert "compacted" in page


def as_template(message):
    return f"<|{message['role']}|>{message['content']}<|end|>\n"


def sgl_page(state):
    return state.trace()._repr_html_()


@pytest.fixture(scope="module")
def answering_in_json():
    loaded = replace(random_model(), context_length=8192)
    with Engine.of(loaded, chat_template=TEMPLATE.replace("SIGNS", "")) as engine:
        yield engine


def test_a_summary_that_is_cut_is_told_like_other_answers(chatting, answering_in_json):
    @sgl.function
    def program(s, tools=None):
        s += sgl.user("Hi")
        shown = {} if tools is None else {"tools": tools, "tool_choice": "none"}
        s += sgl.assistant(sgl.gen("a", max_tokens=300, **shown))
        s.compact(keep=0, max_tokens=14)

    settings = {"seed": 1, "ignore_eos": True, "shortened": "keep"}
    for tools in (None, [search]):
        state = program.run(tools, backend=chatting, **settings)
        assert state.get_meta_info("summary")["finish_reason"]["type"] == "length"
        assert state.usage("summary").completion_tokens == 14
    with pytest.raises(sgl.TruncatedError, match="'summary' was cut after 14 tokens"):
        program.run([search], backend=answering_in_json, seed=0)


# -------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"keep": -1}, "keep"),
        ({"keep": True}, "keep"),
        ({"keep": 1.5}, "keep"),
        ({"keep": "2"}, "keep"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"name": None}, "name"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(options, named):
    with pytest.raises(sgl.ParameterError) as caught:
        chat.run(**options, backend=play("A0", "A1", "A2")[0])
    assert caught.value.parameter == named
    assert caught.value.where.line == chat.func.__code__.co_firstlineno + 3


def in_turn(s):
    with s.user():
        s.compact()


def in_scope(s):
    add_rounds(s, 1)
    with s.var_scope("x"):
        s.compact()


def in_grammar(s):
    with s.grammar(sgl.Regex("[0-9]+")):
        s.compact()


def without_turns(s):
    s += "Once upon a time" + sgl.gen("a")
    s.compact()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (in_turn, "the 'user' turn is open"),
        (in_scope, "a scope is open"),
        (in_grammar, "a grammar is open"),
        (without_turns, "it has no turns"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_places_where_it_is_not_possible_are_named(body, problem):
    with pytest.raises(sgl.ProgramError, match=problem) as caught:
        sgl.function(body).run(backend=play("A0", "A1")[0])
    assert caught.value.where.function == body.__qualname__
    assert caught.value.hint


def test_a_backend_that_keeps_the_text_itself_refuses_it():
    class Hooks(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            return "A0", {}

    with pytest.raises(sgl.CapabilityError, match="replacing the text"):
        chat.run(backend=Hooks())


def test_a_summary_that_fails_is_the_programs_failure():
    left = iter(["A0", "A1", "A2"])

    def write(prompt):
        for text in left:
            return text
        raise OSError("gone")

    with pytest.raises(sgl.SglError, match="gone") as caught:
        chat.run(backend=sgl.ScriptedBackend(write))
    assert caught.value.where.line == chat.func.__code__.co_firstlineno + 3
