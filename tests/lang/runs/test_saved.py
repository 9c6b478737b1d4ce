"""States that are saved, loaded, copied, and run again with another answer."""

import concurrent.futures
import copy
import decimal
import enum
import fractions
import json
import multiprocessing
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

import sglang_lite as sgl
from sglang_lite.errors import WireError
from sglang_lite.lang.backend.local import LocalBackend


class Person(BaseModel):
    name: str
    age: int


@dataclass
class Outside:
    n: int


def story(call):
    """An answer that depends on all of the prompt."""
    return f"<{sum(map(ord, call.prompt.text)) % 997}>"


def scripted():
    return sgl.ScriptedBackend(story)


@sgl.function
def report(s, topic):
    s += sgl.system("Be brief.")
    s += sgl.user(f"Plan a report on {topic}.") + sgl.assistant(sgl.gen("plan"))
    forks = s.fork(3)
    forks += lambda i: sgl.user(f"Part {i}?") + sgl.assistant(sgl.gen("part"))
    forks.join()
    s += sgl.user(f"{topic}: sum up {s['part']}") + sgl.assistant(sgl.gen("end"))
    return s["end"]


@sgl.function
def tree(s):
    s += "Begin " + sgl.gen("a")
    with s.copy() as c:
        c += " aside " + sgl.gen("aside")
    s += " then " + sgl.select("way", ["left", "right"]) + " and " + sgl.gen("b")


SOLO = {"a": "one", "b": "two", "way": "left"}


def same(one, other):
    assert one.text() == other.text()
    assert one.messages() == other.messages()
    names = list(one.branch.names.variables)
    assert list(other.branch.names.variables) == names
    assert [one[name] for name in names] == [other[name] for name in names]
    assert [one.get_meta_info(name) for name in names] == [
        other.get_meta_info(name) for name in names
    ]
    assert one.usage() == other.usage()
    assert one.ret_value == other.ret_value


def add(state, expression):
    state += expression


def saved(state, tmp_path, *args, **kwargs):
    state.save(tmp_path / "state.json")
    return sgl.load(tmp_path / "state.json", *args, **kwargs)


@pytest.mark.parametrize(
    "program",
    [lambda: report.run("bees", backend=scripted()), lambda: tree.run(backend=scripted())],
)
def test_a_loaded_state_has_all_that_was_saved(program, tmp_path):
    state = program()
    same(state, saved(state, tmp_path))
    same(state, copy.deepcopy(state))
    same(state, pickle.loads(pickle.dumps(state)))


def test_a_loaded_state_continues_as_the_other_would_have(tmp_path):
    state = report.run("bees", backend=scripted(), seed=3)
    loaded = saved(state, tmp_path, backend=scripted())
    for each in (state, loaded):
        add(each, sgl.user("And?") + sgl.assistant(sgl.gen("more")))
    assert loaded["more"] == state["more"]
    assert loaded.messages() == state.messages()
    asked = [each.branch.backend.calls[-1] for each in (state, loaded)]
    assert asked[0] == asked[1]  # messages and seed included


def test_a_state_is_saved_in_an_open_turn(tmp_path):
    backends = [scripted(), scripted()]

    @sgl.function
    def program(s, path):
        s += sgl.user("Hello") + sgl.assistant_begin() + "I say " + sgl.gen("a")
        s.save(path)
        s += sgl.gen("b") + sgl.assistant_end()

    state = program.run(tmp_path / "state.json", backend=backends[0])
    loaded = sgl.load(tmp_path / "state.json", backend=backends[1])
    loaded += sgl.gen("b") + sgl.assistant_end()
    assert loaded.messages() == state.messages()
    assert backends[1].calls == backends[0].calls[1:]


def test_another_process_reads_the_file_without_running_any_of_it(tmp_path):
    report.run("bees", backend=scripted()).save(tmp_path / "state.json")
    code = f"""
import sglang_lite as sgl, sys
state = sgl.load({str(tmp_path / "state.json")!r}, backend=sgl.ScriptedBackend(default="over"))
state += sgl.user("And?") + sgl.assistant(sgl.gen("more"))
print(state["more"], len(state.messages()), "tests.lang.runs.test_saved" in sys.modules, "torch" in sys.modules)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.split() == ["over", "7", "False", "False"]


def test_typed_values_need_their_classes(tmp_path):
    @sgl.function
    def program(s):
        s += "a " + sgl.gen("person", type=Person)
        s["outside"] = Outside(3)
        s["many"] = {1: (2, {3})}

    state = program.run(backend=sgl.ScriptedBackend(lambda call: '{"name": "Ann", "age": 3}'))
    state.save(tmp_path / "state.json")
    with pytest.raises(
        sgl.ProgramError, match=r"test_saved:Person, which is not known here.*types=\["
    ):
        sgl.load(tmp_path / "state.json")
    loaded = sgl.load(tmp_path / "state.json", types=[Person, Outside])
    assert loaded["person"] == Person(name="Ann", age=3)
    assert loaded["outside"] == Outside(3)
    assert loaded["many"] == {1: (2, {3})}
    # of the program's module
    assert sgl.load(tmp_path / "state.json", program)["outside"] == Outside(3)


def plus(a: int, b: int = 1) -> int:
    return a + b


def test_calls_of_tools_need_their_functions(tmp_path):
    @sgl.function
    def program(s):
        s += "1+2 " + sgl.gen("call", tools=[plus])

    state = program.run(
        backend=sgl.ScriptedBackend(lambda call: '{"tool": "plus", "arguments": {"a": 2}}')
    )
    state.save(tmp_path / "state.json")
    for known in (None, program):  # a file could name any function of the program's module
        with pytest.raises(
            sgl.ProgramError, match=r"test_saved:plus, which is not known here.*types=\["
        ):
            sgl.load(tmp_path / "state.json", known)
    loaded = sgl.load(tmp_path / "state.json", types=[plus])["call"]
    assert loaded == state["call"] == sgl.ToolCall("plus", {"a": 2, "b": 1}, plus)
    assert loaded.run() == 3


def test_a_state_without_a_backend_says_so(tmp_path):
    loaded = saved(tree.run(backend=scripted()), tmp_path)
    loaded += sgl.gen("more")
    with pytest.raises(
        sgl.CapabilityError, match=r"loaded without a backend.*sgl.load\(path, backend="
    ):
        loaded["more"]
    with pytest.raises(sgl.CapabilityError, match="loaded without a backend"):
        saved(tree.run(backend=scripted()), tmp_path).__iadd__(sgl.user("Go on."))


# ------------------------------------------------------------------------------------ running again


def test_only_what_depends_on_a_changed_answer_is_asked_again(tmp_path):
    for again in (
        lambda state: state,
        lambda state: saved(state, tmp_path, report, backend=scripted()),
    ):
        state = report.run("bees", backend=scripted())
        kept = again(state)
        before = len(kept.branch.backend.calls)
        rerun = kept.rerun("plan", "Another plan.")
        assert rerun["plan"] == "Another plan."
        assert len(kept.branch.backend.calls) == before + 4  # three parts, and the end
        assert (
            rerun.text()
            == report.run(
                "bees",
                backend=sgl.ScriptedBackend(
                    {"Plan a": "Another plan.", "Part": story, "sum up": story}
                ),
            ).text()
        )
        before = len(kept.branch.backend.calls)
        again_the_end = kept.rerun("end", "Over.")
        assert len(kept.branch.backend.calls) == before
        assert again_the_end["part"] == state["part"]
        assert again_the_end.ret_value == "Over."
        assert again_the_end.usage().completion_tokens == 0


def test_an_answer_is_asked_for_again():
    backend = sgl.ScriptedBackend(
        lambda call: "left" if call.choices else f"[{len(backend.calls)}]"
    )
    state = tree.run(backend=backend)
    with pytest.raises(
        sgl.ParameterError, match=r"no node of the program set 'nobody'\. Nodes set: 'a'"
    ):
        state.rerun("nobody")
    before, calls = state["b"], len(backend.calls)
    rerun = state.rerun("b")
    assert rerun["b"] != before
    assert rerun.text() == state.text().removesuffix(before) + rerun["b"]
    assert len(backend.calls) == calls + 1


def test_a_run_that_failed_runs_again_from_where_it_did():
    backend = sgl.ScriptedBackend({"first": "one", "second": [sgl.BackendError("down"), "two"]})

    @sgl.function
    def program(s):
        s += "first" + sgl.gen("a") + "second" + sgl.gen("b")

    state = program.run(backend=backend)
    assert isinstance(state.error(), sgl.BackendError)
    assert state.rerun("a", "one").text() == "firstonesecondtwo"
    assert len(backend.calls) == 3


def test_a_choice_is_changed():
    state = tree.run(backend=scripted())
    other = {"left": "right", "right": "left"}[state["way"]]
    calls = len(state.branch.backend.calls)
    rerun = state.rerun("way", other)
    assert rerun["way"] == other
    assert (rerun["a"], rerun["aside"]) == (state["a"], state["aside"])
    assert rerun["b"] != state["b"]
    assert len(state.branch.backend.calls) == calls + 1
    with pytest.raises(sgl.ParameterError, match="'up' is not one of the choices"):
        state.rerun("way", "up").sync()


def test_a_value_is_held_against_the_nodes_constraint():
    @sgl.function
    def program(s):
        s += sgl.gen("n", regex="[0-9]+")

    state = program.run(backend=sgl.ScriptedBackend(default="7"))
    assert state.rerun("n", "12")["n"] == "12"
    with pytest.raises(
        sgl.ParameterError, match="'twelve' is not possible for 'n': 'twelve' is not what Regex"
    ):
        state.rerun("n", "twelve")
    with pytest.raises(sgl.ParameterError, match=r"12.* is not a string"):
        state.rerun("n", Path("12"))  # type: ignore[arg-type] # wrong on purpose


def test_attempts_rollbacks_and_grammars_keep_their_answers():
    backend = sgl.ScriptedBackend(
        lambda call: {"7": "8"}.get(str(len(backend.calls)), str(len(backend.calls)))
    )

    @sgl.function
    def program(s):
        s += sgl.gen("checked", check=lambda text: int(text) > 2, retries=5)
        with s.checkpoint() as c:
            s += " x" + sgl.gen("lost")
            s.sync()
            c.rollback()
        with s.grammar(sgl.Regex("y[0-9]+z")):
            s += "y" + sgl.gen("within", regex="[0-9]+") + "z"
        s += " end " + sgl.gen("last")

    state = program.run(backend=backend, seed=1, use_thread=False)  # all calls are counted
    calls = len(backend.calls)
    assert state.rerun("last", "now").text() == state.text().replace(
        " end " + state["last"], " end now"
    )
    assert len(backend.calls) == calls


def test_states_continue_from_an_earlier_answer(tmp_path):
    state = report.run("bees", backend=scripted())
    for each in (state, saved(state, tmp_path, backend=scripted())):
        group = each.fork_at("plan", 2)
        assert [len(branch.messages()) for branch in group] == [2, 2]
        add(group, sgl.assistant_end() + sgl.user("Other?") + sgl.assistant(sgl.gen("other")))
        assert [branch["plan"] for branch in group] == [state["plan"]] * 2
        assert "end" not in group[0]
        assert group[0]["other"] == group[1]["other"]
        assert group[0].messages()[2] == {"role": "assistant", "content": state["plan"]}
        with pytest.raises(
            sgl.ParameterError, match=r"no node of this text set 'part'\. Nodes set: 'plan', 'end'"
        ):
            each.fork_at("part")
    seeded = tree.run(backend=scripted(), seed=5)
    group = seeded.fork_at("a", 3)
    group += sgl.gen("x")
    assert all(branch["x"] for branch in group)  # so that all have asked
    assert len({call.params.seed for call in seeded.branch.backend.calls[-3:]}) == 3


def test_what_can_not_run_again_says_why(tmp_path):
    loaded = saved(tree.run(backend=scripted()), tmp_path, backend=scripted())
    with pytest.raises(
        sgl.ProgramError,
        match=r"this state has no program to run again.*sgl.load\(path, program, backend=…\)",
    ):
        loaded.rerun("a")
    loaded = saved(tree.run(backend=scripted()), tmp_path)
    with pytest.raises(
        sgl.ProgramError,
        match=r"is of the program 'tree', not of 'report'.* Load it with tree, or without a program",
    ):
        sgl.load(tmp_path / "state.json", report)


def test_a_program_that_has_changed_is_named(tmp_path):
    def of(code):
        space: dict[str, Any] = {"sgl": sgl, "__name__": "changing"}
        exec(f"def program(s):\n    s += {code} + sgl.gen('a')", space)
        return sgl.function(space["program"])

    of("'one'").run(backend=scripted()).save(tmp_path / "state.json")
    assert sgl.load(tmp_path / "state.json", of("'one'"), backend=scripted()).rerun("a")["a"]
    with pytest.raises(
        sgl.ProgramError, match=r"since this was saved, the code of program 'program' has changed"
    ):
        sgl.load(tmp_path / "state.json", of("'two'"))


# ------------------------------------------------------------------------------------------ engines


@sgl.function
def told(s, name):
    s += sgl.user(f"Greet {name}.") + sgl.assistant(sgl.gen("a", max_tokens=8))
    s += sgl.user("Again.") + sgl.assistant(sgl.gen("b", max_tokens=8))


def test_on_an_engine_tokens_are_what_they_were(engine, tmp_path):
    backend = LocalBackend(engine)
    state = told.run("Ann", backend=backend, seed=1, temperature=0.8)
    loaded = saved(state, tmp_path, told, backend=backend)
    assert loaded.restored == "tokens"
    prompts = [each.branch.player.transcript.prompt() for each in (state, loaded)]
    assert prompts[0] == prompts[1]
    for each in (state, loaded):
        add(each, sgl.user("And now?") + sgl.assistant(sgl.gen("c", max_tokens=8)))
    assert loaded["c"] == state["c"]
    before = engine.stats()["requests_submitted"]
    assert loaded.rerun("b", "Hi!")["a"] == state["a"]
    assert engine.stats()["requests_submitted"] == before
    on_another = saved(state, tmp_path, backend=scripted())
    assert on_another.restored == "text"
    on_another += sgl.user("?") + sgl.assistant(sgl.gen("d"))
    assert on_another["d"]
    assert all(span.ids is None for span in on_another.branch.backend.calls[-1].prompt.spans)


# ---------------------------------------------------------------------------------------- bad files


def damaged(content):
    """Contents of files that are no saved state."""
    good = json.loads(content)
    yield b""
    yield content[: len(content) // 2]
    yield b"\xff" + content
    yield b"[" * 100_000
    yield json.dumps({**good, "version": 2}).encode()
    yield json.dumps({**good, "type": "Usage", "data": {}}).encode()
    yield json.dumps({**good, "data": {**good["data"], "run": "import os"}}).encode()
    for name, value in (
        ("pieces", [{"spans": []}]), ("pieces", [{"spans": [{"text": 3}]}]), ("turn", ["user", "x"]),
        ("variables", [{"name": "a", "value": {"$type": "os:system", "$value": "true"}}]),
        ("variables", [{"name": "a", "value": {"$type": "subprocess:Popen", "$value": {"args": "true"}}}]),
        ("variables", [{"name": "a", "value": {"$type": "builtins:dict", "$value": 3}}]),
        ("variables", [{"name": "a", "value": {"$type": 3, "$value": 3}}]),
        ("messages", [{"role": "user", "content": [3]}]), ("seed", "x"),
    ):  # fmt: skip
        yield json.dumps({**good, "data": {**good["data"], name: value}}).encode()


def test_a_file_of_another_format_is_refused_by_name(tmp_path):
    path = tmp_path / "state.json"
    tree.run(backend=scripted()).save(path)
    good = json.loads(path.read_bytes())
    earlier = {name: value for name, value in good["data"].items() if name != "format"}
    answers = [
        {
            "asked": "0",
            "name": "a",
            "answers": [{"kind": "SavedChoice", "decision": "x"}],
            "node": "/1",
        }
    ]
    second = {**good["data"], "answers": answers, "format": 2}
    for told, data in (
        ("saved in format 1; this version reads format 3", earlier), ("unknown field `answers`", second),
        ("saved in format 4; this version reads format 3", {**good["data"], "format": 4}),
    ):  # fmt: skip
        path.write_text(json.dumps({**good, "data": data}))
        with pytest.raises(
            WireError, match=rf"{told} .* If another version .* has saved it, run the program again"
        ):
            sgl.load(path, tree, backend=scripted())


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "state.json"
    tree.run(backend=scripted()).save(path)
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises((sgl.ProgramError, sgl.ParameterError, sgl.SglError)) as caught:
            sgl.load(path, backend=scripted())
        assert isinstance(caught.value, sgl.SglError), content[:200]
    path.write_bytes(b'{"version":')
    with pytest.raises(WireError, match=r"truncated .* It is in '.*state\.json'"):
        sgl.load(path)
    with pytest.raises(sgl.ParameterError, match=r"can't be read: [^']*$"):
        sgl.load(tmp_path / "none.json")
    path.write_bytes(b" " * (2**26 + 1))
    with pytest.raises(sgl.ParameterError, match="the limit is 67,108,864"):
        sgl.load(path)


def test_what_can_not_be_saved_says_why_and_leaves_the_file(tmp_path):
    path = tmp_path / "state.json"
    state = tree.run(backend=scripted())
    state.save(path)
    before = path.read_bytes()

    @sgl.function
    def program(s, path):
        with s.var_scope("open"):
            s += "x"
            s.save(path)

    with pytest.raises(sgl.ProgramError, match="the scope 'open' is open"):
        program.run(path, backend=scripted())
    state["odd"] = object()
    with pytest.raises(sgl.ProgramError, match="'odd' is a object, which can't be saved"):
        state.save(path)
    with pytest.raises(sgl.ParameterError, match="can't be written"):
        tree.run(backend=scripted()).save(tmp_path / "no" / "folder")
    assert path.read_bytes() == before
    assert [each.name for each in Path(tmp_path).iterdir()] == ["state.json"]


def test_a_called_program_continues_a_loaded_state(tmp_path):
    @sgl.function
    def more(s):
        s += " and " + sgl.gen("more")

    @sgl.function
    def again(s):
        loaded = sgl.load(tmp_path / "state.json", backend=sgl.ScriptedBackend(default="over"))
        loaded += more()
        return loaded.text()

    state = tree.run(backend=scripted())
    state.save(tmp_path / "state.json")
    assert again.run(backend=scripted()).ret_value == state.text() + " and over"


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n", b"hello", b"[1]", b'{"a": 1}'])
def test_a_file_of_something_else_is_told_what_was_expected(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(
        WireError, match=r"It is in '.*other'\. Was that written by state\.save\(path\)\?"
    ):
        sgl.load(path)


def test_what_is_no_file_is_told(tmp_path):
    for path, said in [(None, "None is not a path"), (b"x", "b'x' is not a path")]:
        with pytest.raises(
            sgl.ParameterError,
            match=rf"path: .*{said}\. Give the file that state\.save\(path\) wrote",
        ):
            sgl.load(path)  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(sgl.ParameterError, match=r"path: .* can't be read: Is a directory"):
        sgl.load(tmp_path)


def test_a_file_has_neither_lines_of_code_nor_errors_of_attempts(tmp_path):
    @sgl.function
    def number(s):
        s += sgl.gen("n", check=lambda text: text == "4", retries=1, temperature=0.5)

    state = number.run(backend=sgl.ScriptedBackend({"": ["1", "4"]}))
    (node,) = state.trace().nodes
    assert len(node.attempts) == 1
    state.save(tmp_path / "state.json")
    content = (tmp_path / "state.json").read_text()
    assert __file__ not in content
    assert "attempts" not in content


# ------------------------------------------------------------------------------- values and classes


class Outer:
    @dataclass
    class Inner:
        n: int


@dataclass
class Holder:
    inner: Outer.Inner
    person: Person | None = None


class Named(BaseModel):
    name: str = Field(alias="fullName")
    due: decimal.Decimal


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@sgl.function
def keeps(s, value):
    s["value"] = value
    s += "x" + sgl.gen("a")


def kept(value: Any) -> Any:
    return keeps.run(value, backend=scripted())


@pytest.mark.parametrize(
    ("value", "types"),
    [
        (Outer.Inner(1), [Outer]),
        (Holder(Outer.Inner(2), Person(name="Ann", age=3)), [Holder]),
        ([Named(fullName="Bo", due=decimal.Decimal("1.50"))], [Named]),
        (Rights.READ | Rights.WRITE, [Rights]),
        (fractions.Fraction(1, 3), []),
    ],
)
def test_one_rule_finds_the_classes_of_values(value, types, tmp_path):
    """A listed class brings the classes of its fields and those inside it, as a program's module
    brings all of its.
    """
    state = kept(value)
    for given in ({"types": types}, {"program": keeps}):
        assert saved(state, tmp_path, **given)["value"] == value
    assert pickle.loads(pickle.dumps(state))["value"] == copy.deepcopy(state)["value"] == value
    assert state.fork_at("a")[0]["value"] == value
    # an argument is one, too
    assert saved(state, tmp_path, keeps, backend=scripted()).rerun("a")["value"] == value


def test_a_class_that_the_programs_module_imports_is_known(tmp_path):
    space: dict[str, Any] = {"sgl": sgl, "__name__": "importing", "Outside": Outside}
    exec("def program(s, value):\n    s['value'] = value\n    s += sgl.gen('a')", space)
    program = sgl.function(space["program"])
    state = program.run(Outside(3), backend=scripted())
    assert saved(state, tmp_path, program)["value"] == Outside(3)
    with pytest.raises(sgl.ProgramError, match=r"test_saved:Outside, which is not known here"):
        sgl.load(tmp_path / "state.json")


def test_a_value_of_a_local_class_is_copied(tmp_path):
    @dataclass
    class Local:
        n: list[int]

    state = kept(Local([1]))
    for other in (
        copy.deepcopy(state),
        copy.copy(state),
        state.fork_at("a")[0],
        copy.deepcopy(copy.copy(state)),
    ):
        assert other["value"] == Local([1])
        other += " and " + sgl.gen("b")
        assert other["b"]
    copy.deepcopy(state)["value"].n.append(2)
    state.fork_at("a")[0]["value"].n.append(3)
    assert state["value"] == Local([1])
    assert copy.deepcopy(state).rerun("a", "again")["value"] == Local([1])
    with pytest.raises(
        sgl.ProgramError,
        match=r"'value' is a Local, which can't be pickled: .*at the top of a module",
    ):
        pickle.dumps(state)
    with pytest.raises(
        sgl.ProgramError, match=r"'value' is a Local, which can't be saved to a file"
    ):
        state.save(tmp_path / "state.json")


def test_a_pickle_has_values_that_a_file_can_not_have():
    state = kept({"odd": range(3), "half": "\ud800"})
    assert pickle.loads(pickle.dumps(state))["value"] == {"odd": range(3), "half": "\ud800"}


def test_a_value_that_can_not_be_copied_is_named():
    with pytest.raises(
        sgl.ProgramError, match=r"'value' is a lock, which can't be copied: .*plain data, or fork"
    ):
        copy.deepcopy(kept(threading.Lock()))


# --------------------------------------------------------------------------------------- open turns


@sgl.function
def opened(s, question):
    s += sgl.user(question) + sgl.assistant_begin() + "I say " + sgl.gen("a")


def opened_elsewhere(question: str) -> Any:
    return opened.run(question, backend=scripted())


def test_an_open_turn_ends_as_it_would_have_without_a_backend(tmp_path):
    state = opened.run("Hello", backend=scripted())
    forked = report.run("bees", backend=scripted()).fork_at("plan")[0]
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        from_pool = pool.submit(opened_elsewhere, "Hello").result()
    for original, others in (
        (state, [saved(state, tmp_path), pickle.loads(pickle.dumps(state)), from_pool]),
        (forked, [saved(forked, tmp_path), pickle.loads(pickle.dumps(forked))]),
    ):
        add(original, sgl.assistant_end())
        for other in others:
            add(other, sgl.assistant_end())
            assert (other.text(), other.messages()) == (original.text(), original.messages())
    add(from_pool, sgl.gen("b"))
    with pytest.raises(
        sgl.CapabilityError,
        match=r"Save it, and load it with a backend: state\.save\(path\), sgl\.load",
    ):
        from_pool["b"]


def test_a_file_without_the_ends_of_turns_asks_the_backend_for_them(tmp_path):
    path = tmp_path / "state.json"
    state = opened.run("Hello", backend=scripted())
    state.save(path)
    data = json.loads(path.read_text())
    del data["data"]["suffixes"]
    path.write_text(json.dumps(data))
    add(state, sgl.assistant_end())
    continued = sgl.load(path, backend=scripted())
    add(continued, sgl.assistant_end())
    assert continued.text() == state.text()
    read = sgl.load(path)
    assert read["a"] == state["a"]
    with pytest.raises(
        sgl.CapabilityError, match=r"loaded without a backend.*sgl.load\(path, backend="
    ):
        add(read, sgl.assistant_end())


def test_a_file_that_was_read_and_saved_again_has_its_program_and_its_tokens(engine, tmp_path):
    state = told.run("Ann", backend=LocalBackend(engine), seed=1)
    again = saved(saved(pickle.loads(pickle.dumps(saved(state, tmp_path))), tmp_path), tmp_path)
    loaded = saved(again, tmp_path, told, backend=LocalBackend(engine))
    assert loaded.restored == "tokens"
    assert loaded.branch.player.transcript.prompt() == state.branch.player.transcript.prompt()
    assert loaded.rerun("b", "Hi!")["a"] == state["a"]


def test_a_state_of_no_program_says_so(tmp_path):
    with pytest.raises(
        sgl.ProgramError,
        match=r"belongs to no program, so 'report' can't run .* Load it without a program: sgl.load\(",
    ):
        saved(report.run("bees", backend=scripted()).fork_at("plan")[0], tmp_path, report)
