"""Scripts by which shells complete commands and flags."""

import shutil
import subprocess

import pytest

from sglang_lite.cli import main


def script(shell, capsys):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["sglang-lite", "ru"], {"run"}),
        (["sglang-lite", "run", "--ro"], {"--rows"}),
        (["sglang-lite", "models", "pu"], {"pull"}),
        (["sglang-lite", "completion", "z"], {"zsh"}),
        (
            ["sglang-lite", "chat", "--"],
            {"--model", "--system", "--max-tokens", "--temperature", "--help"},
        ),
        (["sglang-lite", "nonsense", "--"], set()),
    ],
)
def test_bash_offers_what_begins_so(words, offered, capsys, tmp_path):
    code = script("bash", capsys)
    code += f"\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _sglang_lite\n"
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    ran = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert set(ran.stdout.split()) == offered, ran.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command_and_its_flags(shell, capsys, tmp_path):
    code = script(shell, capsys)
    for word in ("init", "doctor", "chat", "run", "lint", "completion"):
        assert word in code
    assert ("-l rows" if shell == "fish" else "--rows") in code
    if shutil.which(shell):
        (tmp_path / "script").write_text(code)
        assert subprocess.run([shell, "-n", tmp_path / "script"]).returncode == 0
