"""A line of JSON is one line for every reader."""

import json

import msgspec

import sglang_lite as sgl
from sglang_lite import protocol, wire

LINE_ENDS = "one\x85two\u2028three\u2029four\x0bfive\x1esix"


def test_json_is_one_line_however_its_reader_splits_lines():
    record = protocol.Generation(LINE_ENDS)
    written = wire.encode(record)
    assert len(written.decode().splitlines()) == 1
    assert wire.decode(written) == record
    assert wire.decode(msgspec.json.encode(msgspec.json.decode(written))) == record  # not escaped


def test_files_of_json_lines_have_a_record_a_line_however_they_are_split(tmp_path):
    @sgl.function
    def program(s, x):
        s += sgl.gen("a")

    files = {name: tmp_path / name for name in ("checkpoint", "recording", "trace")}
    with sgl.record(files["recording"], sgl.ScriptedBackend(default=LINE_ENDS)) as backend:
        (state,) = program.run_batch([(1,)], backend=backend, checkpoint=files["checkpoint"])
    state.trace().save(files["trace"])
    for name, file in files.items():
        texts = [json.loads(line) for line in file.read_bytes().decode().splitlines()]
        assert LINE_ENDS in repr(texts).encode().decode("unicode_escape"), name
