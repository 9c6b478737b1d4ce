"""Rows of JSON Lines files."""

import json

import pytest

import sglang_lite as sgl
from sglang_lite.lint.files import read_json_lines


@pytest.fixture
def rows(tmp_path):
    """Reads the rows of a file with this text."""

    def read(text: str, encoding: str = "utf-8"):
        file = tmp_path / "rows.jsonl"
        file.write_bytes(text.encode(encoding))
        return read_json_lines(file)

    return read


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\x7f"])
def test_only_line_feeds_end_a_row(rows, end):
    row = {"text": f"one{end}two"}
    assert rows(json.dumps(row, ensure_ascii=False) + '\n{"text": "b"}\n') == [row, {"text": "b"}]


def test_line_ends_of_windows_and_a_byte_order_mark_are_no_part_of_a_row(rows):
    assert rows('{"a": 1}\r\n\r\n{"a": 2}', "utf-8-sig") == [{"a": 1}, {"a": 2}]


def test_a_row_that_is_not_an_object_is_named(rows):
    with pytest.raises(
        sgl.ParameterError, match=r"rows.jsonl:2: \[1\] is not an object\. Give arguments by name"
    ):
        rows('{"a": 1}\n[1]\n')
