"""Compiled grammars on disk: used again by another engine, never when they are not exactly what
would be compiled.
"""

import hashlib
import os
import pickle
import subprocess
import sys
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_lite import Engine
from sglang_lite.protocol import ConstraintError, Ebnf, JsonSchema, Lark, Regex, SamplingParams
from sglang_lite.runtime.structured_output import compiler as compiling
from sglang_lite.runtime.structured_output import disk_cache as keeping
from sglang_lite.runtime.structured_output import worker
from sglang_lite.runtime.structured_output.disk_cache import GrammarDiskCache
from sglang_lite.runtime.structured_output.vocabulary import Vocabulary
from tests.constraints.test_generation import random_model

LARK = Lark('start: WORD ("," WORD)* "."\nWORD: /[a-d]{1,3}/')
BY_ENGINE = {
    "llguidance": LARK,
    "xgrammar": Ebnf("root ::= [a-c]{2,9} [.]"),
    "outlines": Regex("[a-c]{2,9}([.]{1,9}){1,200}"),
}
PARAMS = SamplingParams(max_tokens=60, seed=3, temperature=1.0)


def signed(packed):
    return hashlib.sha256(packed).digest() + packed


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Everything is slow enough to be kept."""
    monkeypatch.setenv("SGLANG_LITE_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "SLOW_S", -1.0)
    return tmp_path / "grammars"


class Shared(worker.Worker):
    """A process that outlives the engines that use it. It is started by a thread of its own, as it
    ends with that.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.thread = ThreadPoolExecutor(1)

    def prepare(self, constraint):
        return self.thread.submit(super().prepare, constraint).result()

    def close(self):
        pass


@pytest.fixture(scope="module")
def processes():
    """Processes that compile, by backend: to start one takes longer than the rest of a test."""
    made: dict[str, Shared] = {}
    yield made
    for process in made.values():
        worker.Worker.close(process)
        process.thread.shutdown()


@pytest.fixture(autouse=True)
def _shared_processes(processes, monkeypatch):
    monkeypatch.setattr(
        compiling,
        "Worker",
        lambda vocabulary, backend, *limits: (
            processes.get(backend)
            or processes.setdefault(backend, Shared(vocabulary, backend, *limits))
        ),
    )


def generated(constraint, backend="auto"):
    """A text, and how many grammars came from the disk."""
    with Engine.of(random_model(), constraint_backend=backend) as engine:
        return engine.complete("x", PARAMS, constraint).text, engine.stats()["grammars_from_disk"]


@pytest.mark.parametrize("backend", BY_ENGINE)
def test_another_engine_finds_what_one_has_compiled(backend, folder, monkeypatch):
    text, found = generated(BY_ENGINE[backend], backend)
    assert found == 0
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(Shared, "prepare", None)  # to be called
    assert generated(BY_ENGINE[backend], backend) == (text, 1)


def test_blanks_in_a_schema_make_no_difference():
    schema = '{"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": true}'
    text, found = generated(JsonSchema(schema))
    assert found == 0
    assert generated(JsonSchema(schema.replace(" ", "\n"))) == (text, 1)


def test_another_engine_of_constraints_or_vocabulary_or_constraint_is_something_else(folder):
    generated(LARK)
    assert generated(LARK, "xgrammar")[1] == 0
    assert generated(Lark(LARK.grammar.replace("1,3", "1,4")))[1] == 0
    assert len(list(folder.iterdir())) == 3
    vocabularies = (
        Vocabulary((b"a", b"b"), (1,)),
        Vocabulary((b"a", b"b"), (0,)),
        Vocabulary((b"ab", b""), (1,)),
    )
    stores = [GrammarDiskCache(folder, vocabulary, "auto") for vocabulary in vocabularies]
    stores[0].store_grammar(LARK, "x")
    assert [store.read_grammar(LARK) for store in stores] == ["x", None, None]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-3],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda data: b"",
        lambda data: b"[1]\n",
        lambda data: signed(zlib.compress(pickle.dumps("no pair")))[: len(data)],
        lambda data: signed(zlib.compress(pickle.dumps(("llguidance", os.getcwd)))),
        lambda data: signed(b"not compressed"),
        lambda data: b"\xff" * 100,
    ],
)
def test_a_damaged_file_is_compiled_again_and_replaced(folder, damage):
    text, _ = generated(LARK)
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert generated(LARK) == (text, 0)
    assert generated(LARK) == (text, 1)


def test_what_an_engine_can_not_load_is_compiled_again(folder):
    text, _ = generated(LARK)
    with Engine.of(random_model()) as engine:
        engine.core.compiler.disk_cache().store_grammar(LARK, "{}")
    assert generated(LARK) == (text, 0)


REGEX = Regex("a")


@pytest.fixture
def store(folder, monkeypatch):
    """A store with a grammar, and room for little."""
    monkeypatch.setattr(keeping, "MAX_BYTES", 5000)
    store = GrammarDiskCache(folder, Vocabulary((b"a",), (0,)), "auto")
    store.store_grammar(REGEX, "prepared")
    assert store.read_grammar(REGEX) == "prepared"
    return store


def enlarged(path):
    with path.open("ab") as file:
        file.truncate(1 << 40)


def others(path):
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (enlarged, "more than 5,000 bytes"),
        (
            lambda path: path.write_bytes(signed(zlib.compress(bytes(10**6)))),
            "more than 5,000 bytes",
        ),
        (
            lambda path: path.write_bytes(
                signed(zlib.compress(pickle.dumps(("xgrammar", "x")))[:-3])
            ),
            "no end",
        ),
        (lambda path: path.chmod(0o620), "somebody else"),
        pytest.param(
            others,
            "somebody else",
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root may give"),
        ),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "the checksum"),
    ],
)
def test_a_file_that_may_be_a_trap_is_not_used_and_said_once(store, change, said, caplog):
    change(store.path_of(REGEX))
    tracemalloc.start()
    assert store.read_grammar(REGEX) is None
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert store.read_grammar(REGEX) is None
    (message,) = caplog.messages
    assert "is not used" in message
    assert said in message


def test_what_is_too_large_is_not_kept(store, folder):
    store.store_grammar(Regex("b"), bytes(10**6))  # a few when compressed
    assert store.read_grammar(Regex("b")) is None
    assert store.read_grammar(REGEX) is not None
    assert len(list(folder.iterdir())) == 1


def test_what_can_not_be_written_takes_no_space(store, folder, monkeypatch, caplog):
    def full(source, target):
        raise OSError(28, "No space left on device")

    before = set(folder.iterdir())
    monkeypatch.setattr(keeping.os, "replace", full)
    store.store_grammar(Regex("b"), "prepared")
    assert "could not be kept" in caplog.text
    assert set(folder.iterdir()) == before


def test_a_folder_in_the_cache_is_left_alone(store, folder, caplog):
    (folder / "notes").mkdir()
    os.utime(folder / "notes", (0, 0))
    for i in range(12):
        store.store_grammar(Regex(f"b{i}"), os.urandom(1000))
    assert caplog.text == ""
    assert (folder / "notes").is_dir()
    assert len(list(folder.iterdir())) == 5


def test_what_is_compiled_quickly_is_not_kept(folder, monkeypatch):
    monkeypatch.setattr(compiling, "SLOW_S", keeping.SLOW_S)
    generated(LARK)
    assert not folder.exists()


def test_what_is_refused_is_not_kept(folder):
    with Engine.of(random_model()) as engine, pytest.raises(ConstraintError, match="uniqueItems"):
        engine.complete(
            "x",
            PARAMS,
            JsonSchema('{"type": "array", "contains": {"minLength": 1}, "uniqueItems": true}'),
        )
    assert not folder.exists()


def test_the_files_used_longest_ago_go_first(folder, monkeypatch):
    store = GrammarDiskCache(folder, Vocabulary((b"a",), (0,)), "auto")
    monkeypatch.setattr(keeping, "MAX_BYTES", 2500)
    names = [Regex(f"a{{{i}}}") for i in range(5)]
    for i, name in enumerate(names):
        store.store_grammar(name, os.urandom(500))
        os.utime(store.path_of(name), (i, i))
        store.read_grammar(names[0])
    kept = [store.read_grammar(name) is not None for name in names]
    assert kept[0]
    assert kept[4]
    assert kept != [True] * 5
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2500


def test_a_file_whose_time_can_not_be_set_is_used(folder, monkeypatch):
    """Another user's, say."""
    store = GrammarDiskCache(folder, Vocabulary((b"a",), (0,)), "auto")
    store.store_grammar(Regex("a"), "prepared")

    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(os, "utime", refuse)
    assert store.read_grammar(Regex("a")) == "prepared"


def test_a_disk_that_takes_nothing_does_no_harm(folder):
    folder.write_text("no folder")
    assert generated(LARK)[1] == 0
    assert generated(LARK)[1] == 0


def test_the_name_of_a_file_is_the_same_in_every_process(folder):
    store = GrammarDiskCache(folder, Vocabulary((b"a", b"\xff"), (1,)), "auto")
    code = (
        "import sys, pathlib\nfrom sglang_lite.runtime.structured_output.disk_cache import GrammarDiskCache\n"
        "from sglang_lite.runtime.structured_output.vocabulary import Vocabulary\nfrom sglang_lite.protocol import Lark\n"
        "store = GrammarDiskCache(pathlib.Path(sys.argv[1]), Vocabulary((b'a', b'\\xff'), (1,)), 'auto')\n"
        "print(store.path_of(Lark('start: \"\\ud800é\"')).name)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == store.path_of(Lark('start: "\ud800é"')).name
