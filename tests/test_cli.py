"""The command line."""

import re

import pytest

from sglang_lite.cli import main


@pytest.fixture
def written(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_grammar_check_tells_what_is_kept(written, capsys):
    file = written(
        "a.json", '{"type": "object", "properties": {"a": {"type": "integer"}}, "maxProps": 3}'
    )
    assert main(["grammar", "check", file, "--match", '{"a" : 3}']) == 0
    out = capsys.readouterr().out
    for line in (
        "enforced: /type, /properties, /properties/a/type",
        "says nothing: /maxProps",
        "matches: yes",
    ):
        assert line in out
    assert main(["grammar", "check", file, "--match", "[]"]) == 1
    assert "matches: no" in capsys.readouterr().out


def test_grammar_check_tells_what_is_refused_and_what_is_left_to_a_check(written, capsys):
    file = written("a.json", '{"type": "integer", "multipleOf": 1234577}')
    assert main(["grammar", "check", file]) == 1
    assert (
        "refused: /multipleOf: multiples of 1.23458e+06 can't be enforced"
        in capsys.readouterr().out
    )
    assert main(["grammar", "check", file, "--best-effort", "--match", "3"]) == 1
    out = capsys.readouterr().out
    assert "checked afterwards: /multipleOf" in out
    assert "matches: no" in out


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.regex", "a+b\n", "aab"),
        ("a.gbnf", 'root ::= "a" | "(" root ")"', "((a))"),
        ("a.lark", 'start: "a" start | "b"', "aab"),
        (
            "a.tag.json",
            '{"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}',
            "x<a>1</a>",
        ),
    ],
)
def test_grammar_check_takes_every_kind_of_grammar(written, capsys, name, text, match):
    assert main(["grammar", "check", written(name, text), "--match", match]) == 0
    assert "matches: yes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "does not end in"),
        ("a.json", "{", "not JSON"),
        ("a.json", '{"type": 3}', "type must be one of"),
    ],
)
def test_what_can_not_be_checked_is_one_line_on_stderr(written, capsys, name, text, message):
    assert main(["grammar", "check", written(name, text)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("sglang-lite: ")
    assert message in err


def test_a_file_that_is_not_there_is_one_line_on_stderr(tmp_path, capsys):
    assert main(["grammar", "check", str(tmp_path / "a.json")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_grammar_check_for_a_models_tokens(written, capsys, model_file):
    file = written("a.json", '{"enum": ["one", "two"]}')
    assert main(["grammar", "check", file, "--model", str(model_file), "--match", '"two"']) == 0
    assert "matches: yes" in capsys.readouterr().out
    assert main(["grammar", "check", file, "--model", "no-such-model"]) == 1


def shown_help(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_lists_each_command_in_its_group_and_each_has_an_example_and_its_defaults(capsys):
    overview = shown_help(capsys)
    groups = re.split(r"^(?=begin:|programs:|models:|options:)", overview, flags=re.MULTILINE)[1:-1]
    names = [name for group in groups for name in re.findall(r"^  (\w+)  ", group, re.MULTILINE)]
    assert len(groups) == 3
    assert len(names) == len(set(names)) == 20
    for name in names:
        text = shown_help(capsys, name)
        assert f"example: sglang-lite {name}" in text
        if name in (
            "grammar",
            "serve",
        ):  # actions of its own; settings of an engine, whose docstrings have the defaults
            continue
        options = text.partition("\noptions:\n")[2].partition("\nexample:")[0]
        for option in re.split(r"\n  (?=-)", options):
            if re.match(r"\s*-\S+ [A-Z]{2,}", option) and "ROWS" not in option:
                assert "default" in option, option


@pytest.mark.parametrize("arguments", [["models"], ["models", "list"]])
def test_models_are_listed(arguments, capsys):
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("smollm2-135m")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "--prt", "1"], "unrecognized arguments: --prt 1; did you mean --port?"),
        (["warm", "--quux"], "unrecognized arguments: --quux. See sglang-lite warm --help."),
    ],
)
def test_a_misspelt_flag_is_told_of_the_nearest_one(arguments, told, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    said = capsys.readouterr().err
    assert said.startswith(f"sglang-lite {arguments[0]}: ")
    assert said.count("\n") == 1
    assert told in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--repeat", "0"], "--repeat: 0 is not a whole number of at least 1."),
        (["--repeat", "-1"], "--repeat: -1 is not a whole number of at least 1."),
        (
            ["--json", "/nowhere/x.json"],
            "--json: /nowhere/x.json can't be written: there is no folder /nowhere.",
        ),
        (["--json", "/"], "--json: / can't be written: it is a folder."),
    ],
)
def test_a_benchmark_checks_its_options_before_it_begins(arguments, told, capsys):
    assert main(["bench", *arguments]) == 1
    assert capsys.readouterr().err == f"sglang-lite: {told}\n"
