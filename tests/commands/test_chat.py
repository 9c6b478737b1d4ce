"""A conversation in a terminal, with a scripted model and with a real one."""

import io
import json

import pytest

import sglang_lite as sgl
from sglang_lite.cli import main
from sglang_lite.commands.chat import Dialogue, chat


def talked(lines, answers):
    """What is printed, the conversation at the end, and the prompts that the model saw."""
    out, prompts = io.StringIO(), []

    def answer(request):
        prompts.append(request.prompt.text)
        return answers[len(prompts) - 1]

    backend = sgl.ScriptedBackend(answer)
    after = chat(
        io.StringIO("\n".join(lines)), out, backend, Dialogue(), max_tokens=20, temperature=0
    )
    return out.getvalue(), after, prompts


def test_answers_are_printed_and_the_next_question_has_the_conversation():
    printed, after, prompts = talked(["Hi", "", "And you?"], ["Hello.", "Fine."])
    assert printed == "Hello.\nFine.\n"
    assert [text for _, text in after.turns] == ["Hi", "Hello.", "And you?", "Fine."]
    for text in ("Hi", "Hello.", "And you?"):
        assert text in prompts[1]


def test_a_system_turn_begins_a_new_conversation():
    _, after, prompts = talked(["Hi", "/system Be brief.", "Hi again"], ["Hello.", "Yes."])
    assert "Be brief." in prompts[1]
    assert "Hello." not in prompts[1]
    assert after.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi again"},
        {"role": "assistant", "content": "Yes."},
    ]


def test_a_schema_holds_for_answers_until_it_is_taken_back(tmp_path):
    file = tmp_path / "age.json"
    file.write_text('{"type": "integer"}')
    printed, after, _ = talked([f"/json {file}", "How old?", "/json", "Really?"], ["34", "Yes."])
    assert printed == "Answers are JSON of the schema.\n34\nAnswers are text.\nYes.\n"
    assert after.schema is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/json {", "sglang-lite: "),
        ("/json nowhere.json", "sglang-lite: /json: nowhere.json: No such file or directory."),
        (
            "/save /nowhere/x",
            "sglang-lite: /save: '/nowhere/x' can't be written: No such file or directory. Make its folder first",
        ),
        ("/save", "/save is no command, or lacks something."),
        ("/sytem x", "/sytem is no command, or lacks something."),
    ],
)
def test_a_command_that_can_not_be_done_is_told_and_the_conversation_goes_on(line, told):
    printed, after, _ = talked([line, "Hi"], ["Hello."])
    assert printed.startswith(told)
    assert printed.endswith("Hello.\n")
    assert len(after.turns) == 2


def test_a_failed_answer_leaves_the_conversation_as_it_was():
    def fails(request):
        raise sgl.ProgramError("no answer today.")

    out = io.StringIO()
    after = chat(
        io.StringIO("Hi\n"),
        out,
        sgl.ScriptedBackend(fails),
        Dialogue(),
        max_tokens=5,
        temperature=0,
    )
    assert "no answer today" in out.getvalue()
    assert after == Dialogue()


def test_a_saved_conversation_is_messages(tmp_path):
    talked(["Grüße", f"/save {tmp_path / 'a.json'}", "/quit", "not read"], ["Hi."])
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == [
        {"role": "user", "content": "Grüße"},
        {"role": "assistant", "content": "Hi."},
    ]


def test_a_model_can_not_send_escape_sequences_to_the_terminal():
    printed, _, _ = talked(["Hi"], ["\x1b]0;title\x07<b>"])
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert "<b>" in printed


def test_the_command_talks_with_a_model(small_file, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO('/json {"enum": ["yes"]}\nIs it?\n'))
    assert main(["chat", "--model", str(small_file), "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == 'Answers are JSON of the schema.\n"yes"\n'


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--max-tokens", "-1"], "max_tokens: -1 is outside its range: at least 0."),
        (["--model", "no-such-model"], "model 'no-such-model' is not an alias"),
    ],
)
def test_flags_that_can_not_be_are_one_line(arguments, told, capsys):
    assert main(["chat", *arguments]) == 1
    assert told in capsys.readouterr().err
