"""`import sglang_lite` is light, and every public name is there."""

import subprocess
import sys
import typing

import pytest

import sglang_lite as sgl
from sglang_lite.lang.function import SglFunction

HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "pydantic",
    "jsonschema",
    "openai",
    "anthropic",
    "xgrammar",
    "jinja2",
)


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_importing_loads_no_heavy_package():
    assert (
        run(f"import sys, sglang_lite; print([m for m in {HEAVY} if m in sys.modules])").strip()
        == "[]"
    )


def test_an_engine_process_is_started_before_heavy_packages_are_imported():
    """And what that process imports first, to start what compiles kernels."""
    modules = "sglang_lite.engine.engine_process, sglang_lite.compat.sglang.engine, sglang_lite.engine.child.main"
    assert (
        run(f"import sys, {modules}; print([m for m in {HEAVY} if m in sys.modules])").strip()
        == "[]"
    )
    light = run("import sys, sglang_lite.engine.child.main; print(*sys.modules)").split()
    assert not {"msgspec", "asyncio", "sglang_lite.wire", "sglang_lite.protocol"} & set(light)


def test_an_engine_on_a_cpu_needs_no_triton_and_no_xgrammar():
    """Which is a package of Linux on x86 only, and not in the extra `cpu`, as xgrammar, which
    requires it.
    """
    modules = (
        "core.engine_thread, loading.load_model, models.load_transformers, embedding.load, attention.torch, "
        "executor.cpu_runner, structured_output.llguidance"
    )
    names = ", ".join(f"sglang_lite.runtime.{name}" for name in modules.split(", "))
    run(f"import sys; sys.modules['triton'] = sys.modules['xgrammar'] = None; import {names}")


def test_a_program_can_be_defined_and_run_without_torch():
    code = (
        "import sys, sglang_lite as sgl\n"
        "@sgl.function\n"
        "def p(s): s += sgl.user('hi') + sgl.assistant(sgl.gen('a'))\n"
        "assert p.run(backend=sgl.ScriptedBackend(default='yes'))['a'] == 'yes'\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    assert run(code).strip() == "[]"


def test_importing_loads_itself_and_a_few_modules_of_the_standard_library():
    loaded = run(
        "import sys; before = set(sys.modules); import sglang_lite; print(*set(sys.modules) - before)"
    ).split()
    others = [name for name in loaded if name.partition(".")[0] not in sys.stdlib_module_names]
    assert sorted(others) == ["sglang_lite", "sglang_lite.version"]
    assert len(loaded) < 60


def test_every_public_name_loads_and_is_what_type_checkers_see():
    import ast
    import importlib
    import inspect

    tree = ast.parse(inspect.getsource(sgl))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in ast.walk(guarded) if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname or alias.name: node.module for node in imports for alias in node.names}
    assert typed.keys() | {"__version__"} == set(sgl.__all__)
    assert len(sgl.__all__) == len(set(sgl.__all__))
    # for type checkers, all backends are; at run time it is SGLang's class
    del typed["BaseBackend"]
    for name, module in typed.items():
        assert module is not None
        assert getattr(sgl, name) is (
            importlib.import_module(f"{module}.{name}")
            if module == "sglang_lite"
            else getattr(importlib.import_module(module), name)
        )


def test_what_is_shown_is_short_and_errors_are_shown_in_their_module():
    # 55, quote, mcp, audio, prose, describe, which most programs with a type need, plain, for what
    # users wrote, exact, a method of choosing beside SGLang's, and idempotent, for tools of agents.
    assert len(dir(sgl)) <= 63
    assert set(dir(sgl)) <= set(sgl.__all__)
    errors = {name for name in sgl.__all__ if name.endswith("Error")}
    assert len(errors) == 24
    assert all(getattr(sgl, name) is getattr(sgl.errors, name) for name in errors)
    assert not errors & set(dir(sgl))
    assert sgl.testing.server_for_tests is sgl.server_for_tests


def test_types_of_public_functions_can_be_resolved():
    for function in (
        sgl.gen,
        sgl.select,
        sgl.set_default_backend,
        SglFunction.run,
        SglFunction.run_batch,
    ):
        assert typing.get_type_hints(function)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        sgl.nonsense


def test_a_name_that_is_gone_tells_what_to_write():
    with pytest.raises(AttributeError, match=r"select\(…, multi=True\)"):
        sgl.Multi
    with pytest.raises(sgl.ParameterError, match=r"Use constraint=sgl.Grammar\(…\) here"):
        sgl.gen("a", lark='start: "a"')  # type: ignore[call-overload]  # as is tested
    with pytest.raises(AttributeError, match=r"s.selection\(name\).probs"):
        sgl.function(lambda s: None).run(backend=sgl.ScriptedBackend()).probs("a")
