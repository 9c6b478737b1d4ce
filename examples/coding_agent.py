"""Changes code in a folder that it can't leave. Run: python examples/coding_agent.py [MODEL]"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import sglang_lite as sgl


class Folder:
    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def _find(self, name: str) -> Path:
        """Raises ValueError if a path leads out of the folder: absolute, by `..` or by a link."""
        return self.root / (self.root / name).resolve().relative_to(self.root)

    def list_files(self) -> list[str]:
        """Names of all files."""
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*.py"))

    def read_file(self, name: str) -> str:
        """Text of a file."""
        return self._find(name).read_text()

    def replace(self, name: str, old: str, new: str) -> str:
        """Replaces a piece of a file's text by another. A file that does not exist is empty."""
        text = self.read_file(name) if self._find(name).exists() else ""
        if (count := text.count(old)) != 1:
            raise sgl.ToolError(f"{name} has the old text {count} times. Give text it has once.")
        return f"{self._find(name).write_text(text.replace(old, new))} characters were written"

    def run_tests(self) -> str:
        """Runs all tests and returns what they print."""
        tests = [sys.executable, "-B", "-m", "unittest"]
        done = subprocess.run(tests, cwd=self.root, env={}, capture_output=True, timeout=60)
        return done.stderr.decode().replace(f"{self.root}/", "")


@sgl.function
def program(s: sgl.ProgramState, task: str, at: Folder) -> str:
    how = "You are a programmer. Use one tool at a time. If the tests pass, say so in one sentence."
    s += sgl.system(how) + sgl.user(task)
    tools = (at.list_files, at.read_file, at.replace, at.run_tests)
    return str(sgl.use_tools(s, tools, max_calls=6, max_tokens=200, temperature=0))


def main() -> None:
    backend = sgl.Engine(sys.argv[1]) if sys.argv[1:] else None
    with tempfile.TemporaryDirectory() as root:
        shutil.copytree(Path(__file__).with_name("data") / "project", root, dirs_exist_ok=True)
        task = "Run the tests, read area.py, replace what is wrong and run the tests again."
        program.run(task, folder := Folder(Path(root)), backend=backend)
        print(folder.read_file("area.py") + folder.run_tests().split()[-1])


if __name__ == "__main__":
    main()
