"""The page of mistakes: of each in tests/mistakes.toml what is wrong, and the message."""

import textwrap
from pathlib import Path

from tests.test_mistakes import MISTAKES, of_command, of_program

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mistakes.md"
HEAD = """# Mistakes and their messages

What newcomers write by mistake, and what they are told: what is wrong, where, and what to write instead. In programs the line
that is wrong says `# here`. Each begins with `import sglang_lite as sgl` and two empty lines, which count in the line numbers.
Below each message is a line, or a program, that follows its advice; names such as `ADDRESS` stand for what you have.
`make docs` makes all these mistakes and compares the messages, and the tests run what is corrected.
"""


def section(mistake, folder, capsys):
    if "code" in mistake:
        wrong = f"```py\n{mistake['code'].strip()}\n```\n"
    else:
        wrong = f"```sh\n{mistake['command']}\n```\n"
    message = of_program(mistake["code"]) if "code" in mistake else of_command(mistake, capsys)
    told = message.replace(f"{folder}/", "").replace(str(folder), "/home/you").strip()
    return f"## {mistake['title']}\n\n{wrong}\n```text\n{told}\n```\n\n{right(mistake)}"


def right(mistake):
    """What is written instead."""
    if "command" in mistake:
        return "```sh\n" + "\n".join(mistake["corrected"]) + "\n```\n"
    return (
        f"```py\n{textwrap.dedent(mistake.get('instead') or mistake['corrected']).strip()}\n```\n"
    )


def test_the_page_has_the_message_of_each_mistake(tmp_path, monkeypatch, capsys):
    parts = [HEAD]
    for number, mistake in enumerate(MISTAKES):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        parts.append(section(mistake, folder, capsys))
    made = ROOT / "build" / "mistakes.md"
    made.parent.mkdir(exist_ok=True)
    made.write_text("\n".join(parts), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == made.read_text(encoding="utf-8"), (
        f"if it is right: cp {made} {PAGE}"
    )
