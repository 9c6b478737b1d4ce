"""The page of files: of each module the first sentence of its docstring."""

import ast
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "files.md"
HEAD = """# Files

Every file of the package, with the first sentence of its docstring. To renew it: `python -m tests.test_files_page`.
"""


def sentence_of(file):
    """Returns the first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".")


def page_of(package):
    """Returns the page of a package's files."""
    parts = [HEAD]
    files = sorted(
        package.rglob("*.py"), key=lambda file: (file.parent.relative_to(package).parts, file.name)
    )
    for folder, inside in groupby(files, key=lambda file: file.parent):
        name = folder.relative_to(package.parent).as_posix()
        about = sentence_of(folder / "__init__.py")
        lines = [
            f"- `{file.name}`: {sentence_of(file)}" for file in inside if file.name != "__init__.py"
        ]
        parts.append(f"## {name}\n\n{about}.\n" + ("\n" + "\n".join(lines) + "\n" if lines else ""))
    return "\n".join(parts)


def test_the_page_has_every_file():
    assert PAGE.read_text(encoding="utf-8") == page_of(ROOT / "sglang_lite"), (
        "python -m tests.test_files_page"
    )


def test_a_file_is_told_by_its_first_sentence(tmp_path):
    (tmp_path / "__init__.py").write_text('"""Package."""\n')
    (tmp_path / "part.py").write_text(
        '"""One part of it,\nin two lines. And more.\n\nDetails."""\n'
    )
    assert page_of(tmp_path).splitlines()[-1] == "- `part.py`: One part of it, in two lines"


if __name__ == "__main__":
    PAGE.write_text(page_of(ROOT / "sglang_lite"), encoding="utf-8")
