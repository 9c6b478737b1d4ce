"""Prompts in files: their texts are edited, compared and reviewed without the program.
Run: python examples/prompts_in_files.py"""

from pathlib import Path

import sglang_lite as sgl

PROMPTS = Path(__file__).with_name("prompts")


def prompt(name: str, **values: str) -> str:
    """Text of a file, with `{name}` replaced by values. A value that is not in the file is a
    KeyError.
    """
    return PROMPTS.joinpath(f"{name}.txt").read_text().strip().format(**values)


topic = sgl.gen("topic", max_tokens=8, stop="\n", temperature=0)


@sgl.function
def headline(s: sgl.ProgramState, version: str, text: str) -> None:
    s += prompt(version, text=text) + topic


def main() -> None:
    text = "The bridge was closed on Monday after inspectors found cracks in its beams."
    for version in ("topic_v1", "topic_v2"):
        print(f"{version}:{headline(version, text).run()[topic]}")


if __name__ == "__main__":
    main()
