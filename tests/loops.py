"""Tests that send signals or depend on threads, again and again: `pytest -p tests.loops --loops 200
tests/engine`.

A test is one of them if it, its fixtures or what it calls in its file use a module of `SOURCES`.
"""

import copy
import inspect
import types

SOURCES = {"signal", "tests.children", "tests.waiting", "threading"}


def pytest_addoption(parser):
    parser.addoption("--loops", type=int, default=20, help="how often each of them runs")


def pytest_collection_modifyitems(config, items):
    chosen = [item for item in items if not SOURCES.isdisjoint(_modules(item))]
    config.hook.pytest_deselected(items=[*set(items) - set(chosen)])
    items[:] = [_again(item) for _ in range(config.option.loops) for item in chosen]


def _again(item):
    """The same test as another item: pytest ends a test's fixtures only where the next item is
    another one.
    """
    again = copy.copy(item)
    again.user_properties = []
    again._initrequest()  # noqa: SLF001 # as pytest-rerunfailures does
    return again


def _modules(item):
    """Names of the modules from which a test, and what it calls in its file, have what they use."""
    left, seen = [item.function.__name__, *item.fixturenames], set()
    while left:
        if (name := left.pop()) in seen or not hasattr(item.module, name):
            continue
        seen.add(name)
        value = inspect.unwrap(getattr(item.module, name))
        module = getattr(value, "__module__", value.__name__ if inspect.ismodule(value) else None)
        yield module
        if module == item.module.__name__:
            left += [
                name
                for each in (value, *vars(value).values())
                for name in _names(getattr(each, "__code__", None))
            ]


def _names(code):
    """Names that a function uses, also in functions inside it."""
    if isinstance(code, types.CodeType):
        yield from code.co_names
        for constant in code.co_consts:
            yield from _names(constant)
