"""The structure of the tree: what no linter here looks at."""

import ast
import contextlib
import functools
import gc
import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import sglang_lite

PACKAGE = Path(sglang_lite.__file__).parent
ROOT = Path(__file__).parent.parent
PARTS = ("tests", "benchmarks", "examples")  # beside the package


@pytest.fixture(autouse=True, scope="module")
def _no_garbage():
    """Trees of all files have a million nodes and no circles: no collection of garbage passes
    through them.
    """
    gc.disable()
    yield
    for kept in (nodes, statements, parsed):
        kept.cache_clear()
    gc.enable()


@functools.cache
def parsed(file):
    return ast.parse(file.read_text())


@functools.cache
def nodes(file):
    """All nodes of a file, as `ast.walk` finds them: several tests look at a million."""
    found = [parsed(file)]
    for node in found:  # which grows
        for field, value in vars(node).items():
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and field != "ctx":
                found.append(value)
    return found


@functools.cache
def statements(file):
    """All statements of a file, and its handlers and cases: far fewer than its nodes."""
    found, left = [], [parsed(file)]
    while left:
        found.append(node := left.pop())
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, field, ())
    return found


def our_files():
    return [
        file
        for part in (PACKAGE, *(ROOT / name for name in PARTS))
        for file in sorted(part.rglob("*.py"))
    ]


def module_of(file):
    return ".".join(("sglang_lite", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def imports_of_files(*, annotations=False):
    """The modules that each module imports when it is loaded or used, and those for annotations
    alone if asked for. A name that a package re-exports counts as one of the module that has it.
    """
    files = {module_of(file): file for file in PACKAGE.rglob("*.py")}
    homes = {
        (module_of(file), alias.name): node.module
        for file in PACKAGE.rglob("__init__.py")
        for node in statements(file)
        if isinstance(node, ast.ImportFrom) and node.module != module_of(file)
        for alias in node.names
    }

    def home(module, name):
        while (module, name) in homes:
            module = homes[module, name]
        return inner if (inner := f"{module}.{name}") in files else module

    found = {}
    for name, file in files.items():
        left_out = {
            inner
            for node in statements(file)
            if isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
            for inner in ast.walk(node)
            if not annotations
        }
        modules = set()
        for node in set(statements(file)) - left_out:
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules |= {home(node.module, alias.name) for alias in node.names}
        found[name] = modules & files.keys() - {name}
    return found


def test_no_circle_of_imports():
    left = imports_of_files()
    while ready := [name for name, modules in left.items() if not modules & left.keys()]:
        for name in ready:
            del left[name]
    # What is left is circles, and what leads to them.
    while outside := [
        name for name in left if not any(name in modules for modules in left.values())
    ]:
        for name in outside:
            del left[name]
    assert sorted(left) == []


def test_circles_with_annotations_stay_inside_a_package_and_have_at_most_five_files():
    """A package is a folder of the package or of `lang`. What import-linter lets import upwards is
    left out.
    """
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    listed = {
        tuple(each.split(" -> "))
        for contract in contracts
        for each in contract.get("ignore_imports", ())
    }
    imports = {
        name: {each for each in modules if (name, each) not in listed}
        for name, modules in imports_of_files(annotations=True).items()
    }

    def reached(name):
        found, left = set(), [name]
        while left:
            left += (new := imports[left.pop()] - found)
            found |= new
        return found

    reach = {name: reached(name) for name in imports}
    circles = {
        frozenset(each for each in reach[name] if name in reach[each])
        for name in reach
        if name in reach[name]
    }
    folders = {
        module_of(file): file.relative_to(PACKAGE).parts[:-1][: 2 if "lang" in file.parts else 1]
        for file in PACKAGE.rglob("*.py")
    }
    too_wide = [
        circle
        for circle in circles
        if len({folders[name] for name in circle}) > 1 or len(circle) > 5
    ]
    assert sorted(map(sorted, too_wide)) == []


@functools.cache
def known_words():
    """Every word of the package's files, and the names of all files of ours."""
    known = set(re.findall(r"\w+", "".join(file.read_text() for file in PACKAGE.rglob("*.py"))))
    return known | {file.stem for file in (*ROOT.glob("*.toml"), *our_files())}


def missing_names(text, roots, path=r"[\w/]+/[\w.]+"):
    """Returns the files and names that a page writes as code, outside of blocks, and that are not
    there.

    Args:
        roots: folders that paths are relative to.
        path: pattern of what is a path.
    """
    missing = []
    for code in re.findall(
        r"`((?![^`\n]*NAME)[^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    ):
        if re.fullmatch(path, code):
            missing += [] if any((root / code).exists() for root in roots) else [code]
        else:
            missing += [
                word for word in re.findall(r"[A-Za-z_]\w{3,}", code) if word not in known_words()
            ]
    return missing


def test_names_in_the_pages_for_readers_of_the_code_are_there():
    """Files, and what is written as code outside of blocks."""
    unknown = []
    pages = [ROOT / f"docs/{name}.md" for name in ("architecture", "runtime", "glossary")]
    for page in (*pages, *(ROOT / "docs/internals").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        if page.name == "files.md":  # sentences of the modules
            continue
        text = page.read_text().rpartition("## How to add …")[2]
        unknown += [
            (page.name, name) for name in missing_names(text, (ROOT, PACKAGE, PACKAGE / "runtime"))
        ]
    assert unknown == []


# Rooms with a README of one page. docs/internals/README.md lists them.
ROOMS = (
    "constraints", "engine", "lang", "lang/backend", "lang/execution", "runtime/adapters", "runtime/core", "runtime/executor",
    "runtime/kernels", "runtime/kv_cache", "runtime/models", "runtime/scheduler", "runtime/structured_output", "server",
)  # fmt: skip


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_a_readme_and_what_it_names_is_there(room):
    """Paths are relative to the room, the package or the repository."""
    text = (PACKAGE / room / "README.md").read_text(encoding="utf-8")
    path = r"[\w/]+/[\w.]*|\w+\.(?:cpp|md|py|toml)"
    commands = [
        code
        for code in re.findall(r"`([^`\n]+)`", text)
        if code.startswith((".venv/bin/python -m", "make "))
    ]
    for command in commands:
        assert [
            part for part in command.split() if "tests/" in part and not (ROOT / part).exists()
        ] == []
        text = text.replace(f"`{command}`", "")
    assert missing_names(text, (PACKAGE / room, PACKAGE, ROOT), path) == []
    assert commands, "how to test the room"


def test_the_page_of_rooms_lists_every_readme_of_the_package():
    page = ROOT / "docs/internals/README.md"
    listed = re.findall(
        r"\]\(\.\./\.\./(sglang_lite/[\w/]+README\.md)\)", page.read_text(encoding="utf-8")
    )
    found = [file.relative_to(ROOT).as_posix() for file in PACKAGE.rglob("README.md")]
    assert (
        sorted(listed) == sorted(found) == sorted(f"sglang_lite/{room}/README.md" for room in ROOMS)
    )


def test_the_page_on_installing_says_what_each_dependency_is_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["local"], *extras["server"], *extras["gateway"]]
    names = {re.match(r"[\w-]+", each)[0] for each in needed}
    page = (ROOT / "docs" / "install.md").read_text()
    assert (
        sorted(name for name in names - {"sglang-lite"} if not re.search(rf"\b{name}\b", page))
        == []
    )
    assert sorted(extra for extra in extras if f"`{extra}`" not in page) == []


def test_nothing_that_is_ignored_is_committed():
    """A link in the place of the folder `.venv` replaced the environment where it was pulled."""
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == ""


def test_long_counts_are_in_make_and_in_contributing():
    tests = (file.read_text() for file in (ROOT / "tests").rglob("*.py"))
    used = {
        found for text in tests for found in re.findall(r'environ\.get\("SGLANG_LITE_(\w+)"', text)
    }
    used -= {"FIRST", "REAL_MODELS", "TEST_GPU"}
    table = re.findall(
        r"^\| `SGLANG_LITE_(\w+)` .*$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    counts = re.search(r"^LONG := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert used == set(table) == {count.partition("=")[0] for count in counts}


# Tests that may wait, or look at a clock: the reason.
MAY_WAIT = {
    "bench/fakes/fake_peer.py": "puts a clock that stands still in the place of the real one",
    "constraints/test_bad_constraints.py": "puts a clock that runs by hours in the place of the real one",
    "runtime/core/test_sleep.py": "engines sleep",
    "runtime/core/test_sleep_whole.py": "engines sleep",
    "runtime/media/test_encoder_weights.py": "engines sleep",
    "runtime/models/test_gguf.py": "engines sleep",
    "runtime/models/test_state_pairs.py": "engines sleep",
    "constraints/test_fuzz.py": "ends what hangs after 20 s on the CPU",
    "runtime/structured_output/test_compiler.py": "has a worker that waits for longer than it may compute",
    "waiting.py": "looks again after a while, for a condition and not for a time",
    "test_structure.py": "names what the others may not use",
}
CLOCKS = {
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
    "setitimer",
    "thread_time",
}
# in the text of whatever may wait
WAITS = re.compile(rf"\b({'|'.join(CLOCKS)}|sleep|wait|time|timeit)\b")


def waits(tree):
    """Lines of a test that sleep, or look at a clock, also in the code of another process."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="sleep") | ast.Name(id="sleep"),
                args=[ast.Constant(value=0)],
            ):
                pass  # the others' turn
            case ast.Call(func=ast.Attribute(attr="sleep") | ast.Name(id="sleep")):
                yield node.lineno
            # `Event().wait(1)`
            case ast.Call(func=ast.Attribute(value=ast.Call(), attr="wait"), args=[_, *_]):
                yield node.lineno
            case (
                ast.Attribute(value=ast.Name(id="time"), attr="time" | "sleep")
                | ast.alias(name="time" | "timeit")
            ):
                yield node.lineno
            case ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=name) if (
                name in CLOCKS
            ):
                yield node.lineno
            case ast.Constant(value=str(text)) if "\n" in text or ";" in text:
                with contextlib.suppress(SyntaxError):
                    yield from (node.lineno + line - 1 for line in waits(ast.parse(text)))


def test_files_of_tests_that_are_in_no_package_have_names_of_their_own():
    """Pytest imports them by these."""
    names = [
        path.name
        for path in (ROOT / "tests").rglob("test_*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_no_test_sleeps_or_looks_at_a_clock():
    tests = Path(__file__).parent
    found = {
        str(file.relative_to(tests)): lines
        for file in sorted(tests.rglob("*.py"))
        if WAITS.search(file.read_text()) and (lines := sorted(set(waits(parsed(file)))))
    }
    assert {file: lines for file, lines in found.items() if file not in MAY_WAIT} == {}
    assert found.keys() == MAY_WAIT.keys()


# Tests whose code sends signals, or has the system send them: the reason. Text is other processes'
# code.
MAY_SIGNAL = {
    "effects/hidden.py": "forks, which are its own, and what they left behind",
    "children.py": "sends them to processes that a test has started, and in such a one to itself",
    "constraints/test_fuzz.py": "computes in a process of its own",
    "lang/backend/test_forked.py": "ends a forked copy that hangs",
}
SIGNALS = {
    "os.abort", "os.kill", "os.killpg", "signal.alarm", "signal.pidfd_send_signal", "signal.pthread_kill",
    "signal.raise_signal", "signal.setitimer", "_thread.interrupt_main",
}  # fmt: skip


def signals(file):
    """Lines of a test that name a function which sends a signal."""
    for node in nodes(file):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if (
                f"{module}.{name}" in SIGNALS
            ):
                yield node.lineno
            case ast.ImportFrom(module=module, names=names) if any(
                f"{module}.{each.name}" in SIGNALS for each in names
            ):
                yield node.lineno


def test_no_worker_of_pytest_gets_a_signal():
    """One would end it, and with it the run. `tests/children.py` sends signals to processes of a
    test's own.
    """
    tests = Path(__file__).parent
    found = {
        str(file.relative_to(tests)): lines
        for file in tests.rglob("*.py")
        if (lines := [*signals(file)])
    }
    assert {file: lines for file, lines in found.items() if file not in MAY_SIGNAL} == {}
    assert found.keys() == MAY_SIGNAL.keys()


def public_functions(body):
    """Functions of a module or class, and of its public classes, that have no underscore in front."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            not node.name.startswith("_") or node.name.endswith("__")
        ):
            yield node


def test_any_in_a_public_signature_has_its_reason_beside_it():
    """In a comment in or above the signature, or by a name of `protocol/anything.py`."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        lines = file.read_text().splitlines()
        for node in public_functions(parsed(file).body):
            signature = (*ast.walk(node.args), *ast.walk(node.returns or ast.Pass()))
            anything = any(isinstance(each, ast.Name) and each.id == "Any" for each in signature)
            above = lines[node.lineno - 2].strip() if node.lineno > 1 else ""
            signature_text = "".join(lines[node.lineno - 1 : node.body[0].lineno])
            if anything and "#" not in signature_text and not above.startswith("#"):
                found.append(f"{file.relative_to(PACKAGE)}:{node.lineno} {node.name}")
    assert found == []


# Private names of other packages that have no public one for the same.
OTHERS_PRIVATE = {
    "_Options", "_active", "_convert_weight_to_int4pack_for_cpu", "_current_frames", "_devices", "_exit", "_experts_implementation", "_fields",
    "_get_np_dtype", "_get_running_loop", "_getframe", "_grouped_mm", "_initrequest", "_ipython_display_",
    "_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_avx512_supported", "_is_mkldnn_bf16_supported", "_is_vnni_supported",
    "_linear_pointwise", "_parse", "_patch_builtin", "_patch_lang", "_reorder_linear_weight", "_repr_html_",
    "_scaled_mm", "_timeout", "_unwrap_if_constexpr", "_weight_int4pack_mm_for_cpu",
}  # fmt: skip


def test_no_object_reaches_into_another():
    """Ruff lets an object reach into one of its own class, and a function into what it has
    annotated with a class.
    """
    found = [
        (str(file.relative_to(ROOT)), node.lineno, ast.unparse(node))
        for file in our_files()
        for node in nodes(file)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert [each for each in found if each[2].rpartition(".")[2] not in OTHERS_PRIVATE] == []
    assert {text.rpartition(".")[2] for _, _, text in found} == OTHERS_PRIVATE


# Public names of classes that stand in more than one module: the reason. Torch twins of kernels may
# share any name.
SHARED_NAMES = {
    **dict.fromkeys(
        ("Allowed", "AssistantMessage", "CustomTool", "FunctionTool", "InputImage", "OutputText",
         "SystemMessage", "UserMessage"),
        "providers' protocols name them",
    ),
    "Engine": "`sgl.Engine` is the engine with SGLang's methods",
    "Request": "users of `testing` read it",
    "ToolCall": "users read it, of a program and of `testing`",
}  # fmt: skip


def test_a_public_name_of_a_class_stands_in_one_module():
    modules = {}
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name != "reference":
            for node in statements(file):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    modules.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    shared = {name: files for name, files in modules.items() if len(files) > 1}
    assert {name: files for name, files in shared.items() if name not in SHARED_NAMES} == {}
    assert shared.keys() == SHARED_NAMES.keys()


@functools.cache
def names_in(file):
    """Names that a file defines or uses, and those of the file and its folders."""
    fields = ("id", "attr", "arg", "name", "asname")
    found = {getattr(node, field, None) for node in nodes(file) for field in fields}
    return {name for name in found if isinstance(name, str)}.union(
        file.relative_to(PACKAGE).with_suffix("").parts
    )


@functools.cache
def words_of(name):
    """Words of a name: those of capitals alone are constants', and stay as they are."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return tuple(words if name.isupper() else map(str.lower, words))


def glossary():
    """Words that are explained, and (word, folder) of those that are not said."""
    explained, said_so = (ROOT / "docs/glossary.md").read_text().split("## Say it so")
    words = [
        word
        for row in re.findall(r"^\| ([a-z, ]+) \| [^|]+\|$", explained, re.MULTILINE)
        for word in row.split(", ")
    ]
    unsaid = []
    for row in re.findall(r"^\| [^|]+ \| ([^|]+) \|$", said_so, re.MULTILINE)[1:]:
        listed, _, folders = row.partition(" in ")
        found = re.findall(r"`([\w/]+)`", folders) or [""]
        unsaid += [(word.strip("`"), folder) for word in listed.split(", ") for folder in found]
    return [word for word in words if word != "word"], unsaid


def test_the_glossary_explains_few_words_and_all_are_in_names():
    words, _ = glossary()
    known = " ".join(
        {"".join(words_of(name)) for file in PACKAGE.rglob("*.py") for name in names_in(file)}
    )
    assert len(words) == len(set(words)) <= 40
    assert [word for word in words if word.replace(" ", "") not in known] == []


def test_one_thing_has_one_name():
    """No name has a word for which the glossary has another one."""
    _, unsaid = glossary()
    wrong = {}
    for file in PACKAGE.rglob("*.py"):
        for word, folder in unsaid:
            if file.is_relative_to(PACKAGE / folder):
                found = [
                    name
                    for name in names_in(file)
                    if f" {word} " in f" {' '.join(words_of(name))} "
                ]
                wrong |= {f"{file.relative_to(PACKAGE)}: {name}": word for name in found}
    assert wrong == {}


def test_folders_of_tests_are_folders_of_the_package():
    tests = Path(__file__).parent
    folders = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")}
    # Programs that mean the same on all backends, tables, `lang/backend`, the programs of the docs,
    # and real models.
    folders -= {
        Path("conformance"),
        Path("effects"),
        Path("lang/backend"),
        Path("docs"),
        Path("real"),
    }
    assert sorted(folder for folder in folders if not (PACKAGE / folder).is_dir()) == []


def test_each_room_has_a_folder_of_tests():
    """Rooms are the folders of the package and of its runtime, and those with a README. `srt` has
    only SGLang's import paths, which `tests/compat` tests.
    """
    parents = (PACKAGE, PACKAGE / "runtime")
    rooms = {file.parent for parent in parents for file in parent.glob("*/__init__.py")}
    rooms |= {file.parent for file in PACKAGE.rglob("README.md")}
    names = {room.relative_to(PACKAGE).as_posix() for room in rooms}
    tested = {name for name in names if any((ROOT / "tests" / name).rglob("test_*.py"))}
    assert names - tested == {"srt"}


RUNTIME = PACKAGE / "runtime"
# What plans, records and runs steps, and the features that it must not name.
TRUNK = [
    *sorted((RUNTIME / "scheduler").glob("*.py")),
    *(RUNTIME / "core" / name for name in ("engine_core.py", "step_loop.py")),
    RUNTIME / "executor/step_record.py",
]
FEATURES = [
    *(RUNTIME / "adapters").glob("*.py"), *(RUNTIME / "models/lora").glob("*.py"), *(RUNTIME / "media").glob("*.py"),
    *(RUNTIME / "core" / name for name in ("adapters_part.py", "media_part.py", "encoding.py", "encoder_step.py")),
]  # fmt: skip
FEATURE_WORDS = re.compile("adapter|lora|media(?!n)|image|video|sound|tower|feature", re.I)


def names_of_code(file):
    """Every name that the code of a file uses or defines, with parameters and modules."""
    for node in nodes(file):
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def test_the_trunk_of_the_runtime_names_no_part():
    """By words, and by the names of what the parts' files define, so that renaming does not pass."""
    defined = {
        node.name
        for file in FEATURES
        for node in parsed(file).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    } - {"encode"}  # also of text, and of messages
    assert {"AdapterSlots", "MediaRows", "Encoding", "AdapterPool"} <= defined
    found = {
        (file.name, name)
        for file in TRUNK
        for name in names_of_code(file)
        if FEATURE_WORDS.search(name) or name.rpartition(".")[2] in defined
    }
    assert found == set()


def test_the_scheduler_names_no_tier():
    """Tiers are a `PageSource` to it, and to the step loop."""
    kv_cache = RUNTIME / "kv_cache"
    tiers = [*kv_cache.glob("*_tier.py"), kv_cache / "tiers.py", kv_cache / "page_store.py"]
    defined = {
        node.name for file in tiers for node in parsed(file).body if isinstance(node, ast.ClassDef)
    }
    assert {"Tiers", "HostTier", "DiskTier"} <= defined
    found = {
        (file.name, name)
        for file in TRUNK
        for name in names_of_code(file)
        if file.name != "engine_core.py" and (re.search("tier|disk", name, re.I) or name in defined)
    }
    assert found == set()
