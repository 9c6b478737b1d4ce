"""`gen(repair=True)`: an attempt after a refusal shows the model its answer and what was wrong, in
turns that are no part of the text.
"""

import pytest

import sglang_lite as sgl
from sglang_lite import Engine
from sglang_lite.lang.backend.local import LocalBackend
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.lang.execution import retries
from sglang_lite.protocol import Generation, Message
from tests.constraints.test_generation import random_model


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    """Between attempts."""
    monkeypatch.setattr(retries, "_FIRST_PAUSE", 0)


class Says(sgl.BaseBackend):
    """Says one text after another, whatever is asked for."""

    def __init__(self, *texts):
        super().__init__()
        self._texts, self.prompts = list(texts), []
        self.chat_template = get_chat_template("chatml")

    async def agenerate(self, prompt, params, constraint, *, stream):
        self.prompts.append(prompt)
        yield Generation(self._texts.pop(0))


def short(value):
    if len(value) > 3:
        raise ValueError(f"{value!r} is longer than three letters.")
    return True


def asking(**options):
    @sgl.function
    def program(s):
        s += sgl.user("A word.")
        s += sgl.assistant(sgl.gen("word", retries=2, repair=True, **options))
        s += sgl.user("Thanks.")

    return program


def test_the_next_attempt_shows_the_answer_and_what_was_wrong():
    backend = sgl.ScriptedBackend(
        {"A word.": ["giraffe", "cow"], "giraffe": "horse", "horse": "cow"}
    )
    state = asking(check=short).run(backend=backend)
    assert state["word"] == "cow"
    first, second, third = (call.prompt for call in backend.calls)
    asked = Message("user", ("A word.",))
    told = (
        "That will not do: 'giraffe' is longer than three letters. Answer again, and nothing else."
    )
    assert first.messages == (asked,)
    assert second.messages == (asked, Message("assistant", ("giraffe",)), Message("user", (told,)))
    assert third.messages[1] == Message("assistant", ("horse",))
    chatml = get_chat_template("chatml")
    turns = [{"role": message.role, "content": message.content[0]} for message in second.messages]
    assert (
        second.text
        == chatml.get_prompt(turns) + chatml.get_prefix_and_suffix("assistant", turns)[0]
    )
    assert (second.role, second.partial) == ("assistant", "")
    assert [message["content"] for message in state.messages()] == ["A word.", "cow", "Thanks."]
    assert "giraffe" not in state.text()
    usage = state.usage()
    assert (usage.completion_tokens, usage.thrown_away_tokens) == (3, 2)


def test_a_check_that_says_no_and_a_value_that_is_none_are_told():
    backend = sgl.ScriptedBackend({"A word.": "no", "refused": "yes"})
    assert asking(check=lambda value: value == "yes").run(backend=backend)["word"] == "yes"
    says = Says("one", "1")
    assert asking(type=int).run(backend=says)["word"] == 1
    assert says.prompts[1].messages[1] == Message("assistant", ("one",))


def test_what_a_model_wrote_names_no_special_tokens_when_it_is_shown():
    backend = Says("<|im_end|>", "cow")
    asking(check=short).run(backend=backend).sync()
    (span,) = [span for span in backend.prompts[1].spans if span.text == "<|im_end|>"]
    assert not span.special


def test_at_temperature_0_a_shown_answer_is_worth_another_attempt():
    backend = sgl.ScriptedBackend({"A word.": "giraffe", "longer": "cow"})
    assert asking(check=short, temperature=0).run(backend=backend)["word"] == "cow"

    @sgl.function
    def again(s):
        s += sgl.user("A word.")
        s += sgl.assistant(sgl.gen("word", retries=2, check=short, temperature=0))

    backend = sgl.ScriptedBackend({"A word.": "giraffe"})
    with pytest.raises(sgl.ProgramError, match="longer") as caught:
        again.run(backend=backend)["word"]
    assert len(backend.calls) == 1
    assert any(
        "set a temperature, or repair=True" in note for note in caught.value.__cause__.__notes__
    )


def test_in_a_turn_that_has_begun_only_the_rest_is_asked_for_again():
    @sgl.function
    def program(s):
        s += sgl.user("A word.")
        s += sgl.assistant("It is " + sgl.gen("word", retries=1, repair=True, check=short) + ".")

    backend = sgl.ScriptedBackend({"It is ": "giraffe", "longer": "cow"})
    state = program.run(backend=backend)
    assert state.messages()[-1]["content"] == "It is cow."
    _, shown, told = backend.calls[1].prompt.messages
    assert shown == Message("assistant", ("It is giraffe",))
    assert told.content[0].endswith("Write again only what comes after 'It is', and nothing else.")


def test_a_failure_of_the_backend_shows_nothing():
    backend = sgl.ScriptedBackend({"A word.": [sgl.BackendError("lost"), "cow"]})
    assert asking(check=short).run(backend=backend)["word"] == "cow"
    assert [len(call.prompt.messages) for call in backend.calls] == [1, 1]


@pytest.mark.parametrize(
    ("body", "error", "told"),
    [
        (
            lambda s: s.__iadd__(sgl.user("x") + sgl.assistant(sgl.gen("a", repair=True))),
            sgl.ParameterError,
            "retries",
        ),
        (
            lambda s: s.__iadd__(
                sgl.user("x") + sgl.assistant(sgl.gen("a", repair=True, retries=1, n=2))
            ),
            sgl.ParameterError,
            "one sample only",
        ),
        (
            lambda s: s.__iadd__("x" + sgl.gen("a", repair=True, retries=1)),
            sgl.CapabilityError,
            "outside an assistant",
        ),
    ],
)
def test_what_can_not_be_shown_is_refused_where_it_is_added(body, error, told):
    backend = sgl.ScriptedBackend()
    with pytest.raises(error, match=told):
        sgl.function(lambda s: body(s)).run(backend=backend)
    assert backend.calls == []


def test_repair_is_true_or_false_and_goes_with_no_choices():
    with pytest.raises(sgl.ParameterError, match="repair"):
        sgl.gen("a", repair="yes")  # type: ignore[call-overload] # wrong on purpose
    with pytest.raises(sgl.ParameterError, match="repair"):
        sgl.gen("a", choices=["a", "b"], repair=True)  # type: ignore[call-overload]  # wrong on purpose


class Hooks(sgl.BaseBackend):
    """SGLang's blocking hooks."""

    def generate(self, s, sampling_params):
        return "x", {}


def test_blocking_hooks_are_refused_by_name():
    with pytest.raises(sgl.CapabilityError, match="repair with SGLang's blocking hooks"):
        asking(check=short).run(backend=Hooks())


def test_an_engine_that_plays_whole_programs_repairs_as_one_that_is_asked_node_by_node():
    def told(push_down):
        seen = []

        def third(value):
            seen.append(value)
            return len(seen) == 3

        @sgl.function
        def program(s):
            s += sgl.user("A word.")
            s += sgl.assistant(
                sgl.gen("word", retries=2, repair=True, check=third) + sgl.gen("more")
            )
            s += sgl.user("And?") + sgl.assistant(sgl.gen("last"))

        state = program.run(
            backend=backend, seed=3, temperature=1.0, max_new_tokens=5, push_down=push_down
        )
        return seen, state["word"], state["more"], state["last"], state.text()

    with Engine.of(random_model(), max_running=8) as engine:
        backend = LocalBackend(engine)
        backend.chat_template = get_chat_template("chatml")
        whole, single = told(True), told(False)
    assert whole == single
    assert whole[0][2] == whole[1]
    assert whole[0][0] not in whole[4].replace(whole[1], "")
