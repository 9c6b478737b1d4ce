"""A recorded run replays offline: equal texts, values, errors and usage; what is not the same is
refused with its place.
"""

import asyncio
import itertools
import json
import os
import random
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite import wire
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.protocol.recording import RecordedCall, RecordingEnd, RecordingHead
from sglang_lite.testing import Fail, Say, no_network, overload
from tests.conformance.case import cases, outcome

# What a program stops may have come further in another run: what nobody asked for then is not
# recorded.
CASES = {name: case for name, case in cases().items() if not name.startswith("cancel")}
SECRET = "sk-secret-0123456789"


@sgl.function
def story(s, topic="bees"):
    s += sgl.system("Be brief.")
    s += sgl.user(f"Name a story about {topic}.")
    s += sgl.assistant(sgl.gen("title", max_tokens=8, temperature=0.5))
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += sgl.user(f"Write part {i}.") + sgl.assistant(sgl.gen("part", max_tokens=8))
    forks.join()
    s += sgl.user("Is it sad?") + sgl.assistant(sgl.select("sad", ["yes", "no"]))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.jsonl"


def scripted(**options):
    answers: Any = {
        "Name": "The hive",
        "part 0": "One.",
        "part 1": "Two.",
        "part 2": "Three.",
        "sad": "no",
    }
    return sgl.ScriptedBackend(answers, **options)


def recorded(file, backend=None, **options):
    with sgl.record(file, backend or scripted()) as recorder:
        return story.run(backend=recorder, **options)


def lines(file):
    return [wire.decode(line) for line in file.read_bytes().splitlines()]


def test_a_run_replays_with_the_same_text_values_and_usage(file):
    first = recorded(file)
    replay = sgl.Replay(file)
    with no_network():
        again = story.run(backend=replay)
        assert again.text() == first.text()
        assert again["part"] == first["part"] == ["One.", "Two.", "Three."]
        assert again.selection("sad").probs == first.selection("sad").probs
    one, other = again.usage(), first.usage()
    assert (one.prompt_tokens, one.completion_tokens) == (
        other.prompt_tokens,
        other.completion_tokens,
    )
    assert replay.left == 0


def test_what_is_in_the_file(file):
    recorded(file, scripted(latency=0.0001))
    head, *calls, end = lines(file)
    assert isinstance(head, RecordingHead)
    assert (head.backend, head.model) == ("ScriptedBackend", "scripted")
    assert end == RecordingEnd(5, end.after)
    assert {(call.program, call.name) for call in calls} == {
        ("story", "title"),
        ("story", "part"),
        ("story", "sad"),
    }
    assert len({call.place for call in calls}) == 5
    for call in calls:
        assert call.at >= 0
        assert 0 < call.events[-1].at <= call.ended


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_conformance_programs_replay(name, file):
    case = CASES[name]
    with sgl.record(file, sgl.ScriptedBackend(case.answers)) as recorder:
        first = outcome(case, recorder)
    with no_network():
        assert outcome(case, sgl.Replay(file)) == first


def test_an_engine_replays_with_its_own_template(file, engine_process):
    first = recorded(file, engine_process, temperature=0)
    with no_network():
        again = story.run(backend=sgl.Replay(file), temperature=0)
        assert again.text() == first.text()
        assert again.messages() == first.messages()


@pytest.mark.parametrize("kind", [sgl.OpenAI, sgl.Anthropic])
def test_a_provider_is_recorded_once_and_needed_no_more(file, api, connected, kind):
    api.answers = {"Name": "The hive", "part": "A part.", "sad": "no"}
    backend = connected(
        kind,
        "gpt-4o" if kind is sgl.OpenAI else "claude-opus-5",
        path="/v1" if kind is sgl.OpenAI else "",
    )
    options: Any = {"temperature": 0.5} if kind is sgl.OpenAI else {}

    @sgl.function
    def program(s):
        s += sgl.user("Name it.") + sgl.assistant(sgl.gen("title", max_tokens=8, **options))
        s += sgl.user("Is it sad?") + sgl.assistant(sgl.select("sad", ["yes", "no"]))

    with sgl.record(file, backend) as recorder:
        first = program.run(backend=recorder)
        first.sync()
    asked = len(api.requests)
    with no_network():
        again = program.run(backend=sgl.Replay(file))
        assert (again["title"], again["sad"]) == ("The hive", "no")
        assert again.text() == first.text()
    assert len(api.requests) == asked


def test_a_stream_replays_piece_by_piece(file):
    with sgl.record(file, scripted()) as recorder:
        first = list(story.run(backend=recorder, stream=True).text_iter())
    assert list(story.run(backend=sgl.Replay(file), stream=True).text_iter()) == first
    slow = story.run(backend=sgl.Replay(file, timing=True), stream=True)
    assert "".join(slow.text_iter()) == "".join(first)


def test_errors_replay(file, api, connected):
    api.answers = [Fail(400, "No such thing."), overload()]
    backend = connected(sgl.OpenAI, "gpt-4o", path="/v1")

    @sgl.function
    def program(s):
        s += sgl.user("Hi") + sgl.assistant(sgl.gen("a"))

    with sgl.record(file, backend) as recorder:
        errors = [program.run(backend=recorder).error() for _ in range(2)]
    replay = sgl.Replay(file)
    again = [program.run(backend=replay).error() for _ in range(2)]
    assert [type(error) for error in again] == [sgl.BackendError, sgl.OverloadedError]
    assert [str(error) for error in again] == [str(error) for error in errors]


def test_attempts_replay_one_after_another(file):
    @sgl.function
    def number(s):
        s += sgl.user("Number?")
        s += sgl.assistant(sgl.gen("n", check=lambda text: text == "4", retries=2, temperature=0.5))

    with sgl.record(file, sgl.ScriptedBackend({"Number?": ["1", "4"]})) as recorder:
        first = number.run(backend=recorder)
        assert first["n"] == "4"
    again = number.run(backend=sgl.Replay(file))
    assert (again["n"], again.usage().thrown_away_tokens) == ("4", 1)


def test_a_node_gets_its_own_answer_whenever_it_asks(file):
    @sgl.function
    def program(s, order):
        s += "Say: "
        branches = s.fork(3)
        for i in order:
            branches[i] += sgl.gen("x")
            branches[i].sync()
        branches.join()

    numbers = itertools.count()
    with sgl.record(file, sgl.ScriptedBackend(lambda call: str(next(numbers)))) as recorder:
        assert program.run([2, 0, 1], backend=recorder)["x"] == ["1", "2", "0"]
    for match in ("request", "node"):
        for order in ([2, 0, 1], [0, 1, 2], [1, 2, 0]):
            assert program.run(order, backend=sgl.Replay(file, match=match))["x"] == ["1", "2", "0"]


def test_batches_and_coroutines_replay(file):
    rows = [{"topic": topic} for topic in ("bees", "ants", "moths", "flies")] * 3
    with sgl.record(file, scripted(latency=0.0001)) as recorder:
        first = [state.text() for state in story.run_batch(rows, backend=recorder)]
    assert [state.text() for state in story.run_batch(rows, backend=sgl.Replay(file))] == first

    async def main():
        return [state.text() for state in await story.arun_batch(rows, backend=sgl.Replay(file))]

    assert asyncio.run(main()) == first


# ----------------------------------------------------------------------------- what is not the same


def test_another_request_is_refused_with_the_first_difference(file):
    recorded(file)
    with pytest.raises(sgl.CapabilityError) as caught:
        story.run("wasps", backend=sgl.Replay(file)).sync()
    told = str(caught.value)
    assert "node '/1', variable 'title'" in told
    assert "first difference at /prompt/text" in told
    assert "about bees" in told
    assert "about wasps" in told
    assert "test_recording.py" in told

    @sgl.function
    def warmer(s):
        s += sgl.system("Be brief.")
        s += sgl.user("Name a story about bees.")
        s += sgl.assistant(sgl.gen("title", max_tokens=9, temperature=0.5))

    with pytest.raises(
        sgl.CapabilityError,
        match=r"first difference at /params/max_tokens: 8 was recorded, 9 is requested",
    ):
        warmer.run(backend=sgl.Replay(file))["title"]


def test_asking_more_often_than_recorded_is_refused(file):
    recorded(file)
    replay = sgl.Replay(file)
    story.run(backend=replay).sync()
    with pytest.raises(sgl.CapabilityError, match="once more that was recorded 1 times"):
        story.run(backend=replay).sync()


def test_by_node_prompts_may_have_changed(file):
    first = recorded(file)
    again = story.run("wasps", backend=sgl.Replay(file, match="node"))
    assert "wasps" in again.text()
    assert (again["title"], again["part"], again["sad"]) == (
        first["title"],
        first["part"],
        first["sad"],
    )


def test_by_node_an_answer_is_held_against_the_new_constraint(file):
    def program(kind):
        @sgl.function
        def number(s):
            s += sgl.user("Number?") + sgl.assistant(sgl.gen("n", **kind))

        return number

    with sgl.record(file, sgl.ScriptedBackend(default="four")) as recorder:
        program({}).run(backend=recorder).sync()
    with pytest.raises(sgl.ValueValidationError):
        program({"regex": "[0-9]+"}).run(backend=sgl.Replay(file, match="node"))["n"]


# ------------------------------------------------------------------------------------------ secrets


def test_keys_headers_and_queries_never_get_in(file, api, connected, monkeypatch):
    monkeypatch.setenv("OTHER_API_KEY", "another-secret-value")
    told = f"Bad key {SECRET} and another-secret-value at https://host/v1?api-version=1&key=abc#frag, Bearer abcdefghijklmnop"
    api.answers = [Fail(401, told), Say("ok", headers={"x-secret": "header-value-77"})]
    backend = connected(sgl.OpenAI, "gpt-4o", path="/v1?token=query-value-88")

    @sgl.function
    def program(s):
        s += sgl.user("Look: " + sgl.image("https://images/x.png?signature=signed-99"))
        s += sgl.assistant(sgl.gen("a"))

    with sgl.record(file, backend) as recorder:
        for _ in range(2):
            program.run(backend=recorder).error()
    content = file.read_text()
    for secret in (
        SECRET,
        "another-secret",
        "api-version",
        "abcdefghijklmnop",
        "header-value",
        "query-value",
        "signed-99",
    ):
        assert secret not in content, secret
    assert "https://images/x.png" in content


def test_images_are_digests(file):
    picture = (
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU\x00\x00\x00\n"
        b"IDATx\x9cc\xf8\x0f\x00\x01\x01\x01\x00\x1b\xb6\xeeV\x00\x00\x00\x00IEND\xaeB`\x82"
    )

    @sgl.function
    def program(s, image):
        s += sgl.user(sgl.image(image) + "What is it?") + sgl.assistant(sgl.gen("a"))

    with sgl.record(file, sgl.ScriptedBackend(default="a dot")) as recorder:
        program.run(picture, backend=recorder).sync()
    assert "sha256:" in file.read_text()
    assert program.run(picture, backend=sgl.Replay(file))["a"] == "a dot"
    with pytest.raises(sgl.CapabilityError, match=r"/prompt/(messages|images)"):
        program.run(picture.replace(b"IEND", b"IEND "), backend=sgl.Replay(file))["a"]


# ---------------------------------------------------------------------------------------- bad files


def test_a_file_that_was_changed_is_refused_with_its_line(file):
    recorded(file)
    whole = file.read_bytes()
    broken = {
        whole.replace(b"The hive", b"The hove", 1): "line 3: the line before it was changed",
        whole.replace(b'"version":1', b'"version":9', 1): "line 1: version 9 of the format",
        b"".join(
            whole.splitlines(True)[:2] + whole.splitlines(True)[3:]
        ): "line 3: the line before",
        whole + b"{}\n": "the recording has 5 calls",
        b"": "empty",
        b"<html>\n": "record it again",
        whole.replace(b"RecordingHead", b"Usage", 1): "line 1",
        b"\n".join(whole.splitlines()[1:]): "line 1: a RecordedCall is not the head",
    }
    for content, told in broken.items():
        file.write_bytes(content)
        with pytest.raises(sgl.SglError) as caught:
            sgl.Replay(file)
        assert told in str(caught.value), content[:80]
    file.unlink()
    with pytest.raises(sgl.ParameterError, match="can't be read"):
        sgl.Replay(file)


def test_a_recording_that_was_cut_short_says_so_and_can_be_taken(file):
    recorded(file)
    content = file.read_bytes().splitlines(True)
    for cut in (b"".join(content[:-1]), b"".join(content[:-1])[:-40]):
        file.write_bytes(cut)
        with pytest.raises(sgl.SglError, match="cut short after"):
            sgl.Replay(file)
        replay = sgl.Replay(file, partial=True)
        assert story.run(backend=replay)["title"] == "The hive"


def test_any_byte_may_be_wrong(file):
    recorded(file)
    whole, draw = file.read_bytes(), random.Random(7)
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        file.write_bytes(damaged)
        try:
            sgl.Replay(file)
        except sgl.SglError:
            continue
        assert (
            bytes(damaged) == whole
            or json.loads(damaged.splitlines()[-1])["type"] == "RecordingEnd"
        )


def test_a_line_without_an_end_is_not_read_into_memory(file):
    head = recorded(file) and file.read_bytes().splitlines(True)[0]
    with open(file, "wb") as out:
        out.write(head)
        out.truncate(len(head) + wire.LIMITS.bytes + 5_000_000)
    with pytest.raises(sgl.SglError, match="line 2"):
        sgl.Replay(file)


def test_what_cannot_be_recorded_or_replayed_is_refused(file, tmp_path):
    class Hooks(sgl.BaseBackend):
        def generate(self, s, sampling_params):
            return "a", {}

    with pytest.raises(sgl.CapabilityError, match="hooks"):
        sgl.record(file, Hooks())
    with pytest.raises(sgl.ParameterError, match="can't be written"):
        sgl.record(tmp_path / "nowhere" / "run.jsonl", scripted())
    with pytest.raises(sgl.ParameterError, match="match"):
        sgl.Replay(file, match="all")  # type: ignore[arg-type] # on purpose


def test_a_template_of_ones_own_has_to_be_given_again(file):
    class Plain:
        name, default_system_prompt, stop_str = "plain", None, ()

        def get_prefix_and_suffix(self, role, hist_messages):
            return f"{role}: ", "\n"

    backend = scripted()
    backend.chat_template = Plain()  # type: ignore[assignment] # shaped like one
    first = recorded(file, backend)
    with pytest.raises(sgl.TemplateError):
        story.run(backend=sgl.Replay(file)).sync()
    assert story.run(backend=sgl.Replay(file, chat_template=Plain())).text() == first.text()  # type: ignore[arg-type] # as above
    assert get_chat_template("chatml").name == "chatml"


def test_the_default_backend_is_recorded(file):
    sgl.set_default_backend(scripted())
    with sgl.record(file) as recorder:
        assert story.run(backend=recorder)["title"] == "The hive"
    assert isinstance(lines(file)[1], RecordedCall)
    assert os.path.getsize(file) > 0
