"""Jinja environment for untrusted templates. Counts work and size, and stops rendering at a limit.

A step is roughly the evaluation of one node of the template. A character is counted every time it
is written. Everything that can loop or allocate is counted:

- loops (recursive ones, and those with `if`), macros, `call` blocks and blocks: each iteration or
  call, by the size of the body;
- output, `{% set %}…{% endset %}`, `{% filter %}`, texts of macros: each `{{ … }}`, by its
  characters;
- `+`, `*`, `%`, `**` and the other arithmetic, `~`: before the result is computed; integers also
  have a maximum size;
- lists, tuples and dictionaries, `dict(…)`, `namespace(…)`: their size with all nested values,
  which sharing makes exponential (`[x, x]`); this also bounds the cost of writing, comparing,
  sorting and hashing them;
- comparisons, `in`, tests and slices: by the size of their operands;
- calls: only listed methods of texts, lists and dictionaries are available, and the size of the
  result is checked before methods that allocate are called (`center`, `replace`, `join`, `format`
  …);
- filters: those that iterate accept a limited number of items; those that allocate are checked like
  methods. `lipsum` is removed, and so are unbounded filters that no prompt needs (`pprint`,
  `striptags`, `urlize`, `wordwrap`, `xmlattr`, `filesizeformat`).

Constant folding is off, so all of this is counted during rendering, not during compilation.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from sglang_lite.protocol.anything import UserValue
from sglang_lite.text.loop_memo import LoopMemo, LoopText, LoopWalk
from sglang_lite.text.loop_reads import REMEMBER, LoopReads, rewrite_loops

MAX_STEPS = 10_000_000
MAX_CHARS = 10_000_000  # written by one rendering; also the limit of one value
MAX_ITEMS = 100_000  # in one value, including nested values
MAX_BITS = 4_096  # size of an integer
MAX_WIDTH = 10_000  # width of a formatted field

_TURN = 10  # steps of a call or filter, and of a loop's iteration in addition to its body
_PER_STEP = 64  # characters copied or compared in roughly one step
_ONLY_TEXT: set[type] = {str}  # not Markup, which escapes what is added to it
_CONTAINERS: tuple[type, ...] = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_LOOP_POSITIONS = frozenset(
    {"first", "last", "length", "index", "index0", "revindex", "revindex0", "depth", "depth0"}
)
_FORMAT = re.compile(r"%(?:\([^()]*\))?[#0 +-]*(\*|\d*)(?:\.(\*|\d*))?")


class LimitError(Exception):
    """Raised if a template exceeds a limit on work or size."""


@dataclass(frozen=True, slots=True)
class _Iteration:
    """Iteration that is being executed.

    Attributes:
        walk: progress through the loop's list; None if the text can't be remembered.
        steps, chars: work of the rendering before this iteration.
    """

    walk: LoopWalk | None
    steps: int
    chars: int


class _Meter:
    """Counts of one rendering, and its place in a loop that remembers its iterations."""

    __slots__ = ("chars", "iteration", "known_bytes", "steps", "walks")

    def __init__(self) -> None:
        self.steps = 0
        self.chars = 0
        self.walks: dict[int, LoopWalk] = {}  # by the loop's number
        self.known_bytes: dict[int, tuple[UserValue, bytes | None]] = {}  # see LoopWalk
        self.iteration: _Iteration | LoopText = _Iteration(None, 0, 0)  # the current one


_meter: ContextVar[_Meter] = ContextVar("_meter")


@contextmanager
def meter_rendering() -> Iterator[None]:
    """Counts the work within the block as one rendering, with fresh limits."""
    before = _meter.set(_Meter())
    try:
        yield
    finally:
        _meter.reset(before)


def _count_steps(count: int) -> None:
    meter = _meter.get()
    meter.steps += count
    if meter.steps > MAX_STEPS:
        raise LimitError(
            f"rendering takes more than {MAX_STEPS:,} steps. Simplify the loops of the template."
        )


def _count_output(count: int) -> None:
    meter = _meter.get()
    meter.chars += count
    if meter.chars > MAX_CHARS:
        raise LimitError(f"the template writes more than {MAX_CHARS:,} characters.")


def _count_text(chars: int) -> None:
    """Counts a text of `chars` characters as work. Raises LimitError if the text is too long."""
    if chars > MAX_CHARS:
        raise LimitError(
            f"the template makes a text of {chars:,} characters; the limit is {MAX_CHARS:,}."
        )
    _count_steps(1 + chars // _PER_STEP)


def _raise_too_many(items: int) -> NoReturn:
    raise LimitError(
        f"the template makes a value of {items:,} items or more; the limit is {MAX_ITEMS:,}."
    )


def _count_nested_value(value: Any) -> int:
    """Counts a value and everything nested in it as work. Returns its number of characters."""
    if type(value) is str:
        _count_text(len(value))
        return len(value)
    items = chars = 0
    stack = [value]
    while stack:
        part = stack.pop()
        inside: Iterable[Any] = ()
        if isinstance(part, str | bytes):
            chars += len(part)
        elif isinstance(part, Mapping):
            inside = (*part.keys(), *part.values())
            items = items + 2 * len(part)
        elif isinstance(part, Namespace):
            attributes: dict[str, Any] = object.__getattribute__(part, "_Namespace__attrs")
            inside = attributes.values()
            items = items + len(attributes)
        elif isinstance(part, _CONTAINERS):
            inside = cast(Collection[Any], part)
            items = items + len(cast(Collection[Any], part))
        elif isinstance(part, int):
            chars += part.bit_length() // 3
        if items > MAX_ITEMS:
            _raise_too_many(items)
        stack.extend(inside)
    _count_text(chars)
    _count_steps(3 * items)
    return chars


def _count_read(value: Any) -> Any:
    """Counts the work of reading a whole value, and returns the value."""
    if not isinstance(value, bool | float | types.NoneType):
        _count_nested_value(value)
    return value


def _to_text(value: Any) -> str:
    if not isinstance(value, str):
        _count_read(value)
    return str(value)


def _collect_items(value: Any) -> list[Any]:
    """Returns the items of an iterable as a list, and counts them."""
    found = []
    for item in value:
        _count_steps(1)
        found.append(item)
        if len(found) > MAX_ITEMS:
            _raise_too_many(len(found))
    return found


# ---------------------------------------------------------------------------------- growing texts


def _check_width(value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_CHARS:
        _count_text(abs(value))


def _check_replace(text: str, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    _count_text(len(text))
    _count_text(len(text) + text.count(str(old)) * len(str(new)))


def _check_join(separator: str, items: Sequence[Any]) -> None:
    _count_text(
        sum(len(item) if isinstance(item, str) else _count_nested_value(item) for item in items)
        + len(items) * len(separator)
    )


def _check_indent(text: str, width: Any = 4, *_: Any, **__: Any) -> None:
    _check_width(width)
    _count_text(
        len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else int(width))
    )


def _check_printf(text: str, values: Any) -> None:
    """Checks the size of `text % values` before it is computed."""
    if len(text) > MAX_WIDTH:
        raise LimitError(
            f"the template formats with a text of {len(text):,} characters; the limit is {MAX_WIDTH:,}."
        )
    fields = 0
    for match in _FORMAT.finditer(text):
        fields += 1
        for width in match.groups():
            if width == "*" or (width and int(width) > MAX_WIDTH):
                raise LimitError(
                    f"the template formats a field {width} wide; the limit is {MAX_WIDTH:,}."
                )
    _count_text(
        len(text) + fields * (_count_nested_value(values) + (MAX_WIDTH if fields > 16 else 0))
    )


class _Formatter(SandboxedFormatter):
    """Formatter for `text.format(…)` with limits."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        _count_read(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        _count_read(value)
        for number in re.findall(r"\d+", format_spec[: 4 * MAX_WIDTH]):
            if len(number) > 9 or int(number) > MAX_WIDTH:
                raise LimitError(
                    f"the template formats a field {number} wide; the limit is {MAX_WIDTH:,}."
                )
        text = super().format_field(value, format_spec)
        _count_output(len(text))
        return text


# ------------------------------------------------------------------------------------------ methods

_READ_METHODS = (
    "count", "endswith", "find", "index", "rfind", "rindex", "startswith", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "partition", "rpartition", "removeprefix",
    "removesuffix", "split", "rsplit", "splitlines", "strip", "lstrip", "rstrip", "capitalize", "casefold", "lower",
    "swapcase", "title", "upper",
)  # fmt: skip
_TEXT_METHODS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(_READ_METHODS, lambda text, *_, **__: _count_text(len(text))),
    **dict.fromkeys(
        ("center", "ljust", "rjust", "zfill"), lambda text, width, *_: _check_width(width)
    ),
    "expandtabs": lambda text, tabsize=8: _count_text(len(text) + text.count("\t") * int(tabsize)),
    "replace": _check_replace,
}
_METHODS: dict[type, frozenset[str]] = {
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    int: frozenset({"bit_length", "is_integer"}),
    float: frozenset({"is_integer"}),
}


def _check_method(
    owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Checks a method call before it is made, and returns its positional arguments. Raises
    LimitError if the method is not allowed or would exceed a limit.
    """
    if isinstance(owner, str):
        if name == "join" and len(args) == 1:
            args = (_collect_items(args[0]),)
            _check_join(owner, args[0])
            return args
        if name in _TEXT_METHODS:
            _TEXT_METHODS[name](owner, *args, **kwargs)
            return args
    for kind, names in _METHODS.items():
        if isinstance(owner, kind) and name in names:
            if name in ("count", "index"):
                _count_read(owner)
            return args
    raise LimitError(
        f"the template calls {type(owner).__name__}.{name}, which is not for templates."
    )


# ------------------------------------------------------------------------------------------ filters


def _check_sum(value: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):  # Python adds no text or list to a number
        raise LimitError("the filter sum begins with a value that is no number.")


def _check_batch(value: Any, *args: Any, **kwargs: Any) -> None:
    for count in (*args, *kwargs.values()):
        if isinstance(count, int) and count > MAX_ITEMS:
            _raise_too_many(count)


def _check_round(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(precision, int) and abs(precision) > 300:
        raise LimitError(f"the template rounds to {precision:,} digits; the limit is 300.")


def _check_int(value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str) and len(value) > MAX_BITS // 4:
        raise LimitError(
            f"the template reads an integer of {len(value):,} digits; the limit is {MAX_BITS // 4:,}."
        )


def _check_json(
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> None:
    _count_read(value)
    if isinstance(indent, int | str) and (indent if isinstance(indent, int) else len(indent)) > 100:
        raise LimitError("the template indents JSON by more than 100 characters.")
    if isinstance(separators, list | tuple) and any(
        isinstance(each, str) and len(each) > 100 for each in separators
    ):
        raise LimitError("the template separates parts of JSON by more than 100 characters.")


def _no_check(*_: Any, **__: Any) -> None:
    pass


def _count_whole_value(value: Any, *_: Any, **__: Any) -> None:
    _count_read(value)


# Available filters, each with the check that runs before it: first those that iterate over their
# value, then the others.
_ITERATED: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("list", "map", "select", "reject", "selectattr", "rejectattr"), _no_check),
    **dict.fromkeys(("sort", "unique", "min", "max", "groupby"), _count_whole_value),
    **dict.fromkeys(("batch", "slice"), _check_batch),
    "join": lambda value, d="", *_, **__: _check_join(str(d), value),
    "sum": _check_sum,
}
_FILTERS: dict[str, Callable[..., None]] = {
    **_ITERATED,
    **dict.fromkeys(("abs", "attr", "count", "d", "default", "first", "float", "last", "length", "random"), _no_check),
    **dict.fromkeys((
        "capitalize", "dictsort", "e", "escape", "forceescape", "items", "lower", "reverse", "safe", "string", "title",
        "trim", "truncate", "upper", "urlencode", "wordcount",
    ), _count_whole_value),
    "center": lambda value, width=80: _check_width(width),
    "format": lambda value, *args, **kwargs: _check_printf(_to_text(value), kwargs or args),
    "indent": lambda value, *args, **kwargs: _check_indent(_to_text(value), *args, **kwargs),
    "int": _check_int,
    "replace": lambda value, *args, **kwargs: _check_replace(_to_text(value), *args, **kwargs),
    "round": _check_round,
    "tojson": _check_json,
}  # fmt: skip
_COMPARING = (  # tests that compare
    "==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le", ">", "gt", "greaterthan", ">=", "ge", "in",
    "upper", "lower",
)  # fmt: skip


def _measure_result(value: Any) -> Any:
    """Counts the result of a call or filter, and returns it."""
    if isinstance(value, str | list | tuple | dict):
        _count_nested_value(value)
    return value


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    check = _FILTERS[name]
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _count_steps(_TURN)
        before = args[:at]
        value = args[at]
        rest = args[at + 1 :]
        if name in _ITERATED:
            value = _collect_items(value)
        check(value, *rest, **kwargs)
        result = function(*before, value, *rest, **kwargs)
        # Generators run here, so their work counts toward the filter.
        return _measure_result(
            _collect_items(result) if isinstance(result, types.GeneratorType) else result
        )

    return run


def _forget_iteration(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter or test whose result depends on more than the iteration reads, so that the
    iteration's text is not remembered.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        meter = _meter.get()
        meter.iteration = _Iteration(None, meter.steps, meter.chars)
        return function(*args, **kwargs)

    return run


def _bounded_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _count_steps(1)
        if name in _COMPARING:
            for arg in args:
                _count_read(arg)
        return function(*args, **kwargs)

    return run


# ---------------------------------------------------------------------------------- the environment


class _Generation(Extension):
    """Block `{% generation %}…{% endgeneration %}`, rendered as its contents. Templates mark an
    assistant's text this way for training.
    """

    tags = frozenset({"generation"})  # type: ignore[assignment] # jinja2 declares a set, and only looks tags up

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class _DirectCalls(CodeGenerator):
    """Compiles the calls of the environment that are inserted into a template as plain calls, which
    need no check.
    """

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.visit(node.node, frame)
        self.write("(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox for templates, with limits. Templates must be rendered within `meter_rendering()`,
    and raise LimitError at a limit.

    Args:
        filters, functions: additions to Jinja's own filters and global functions, by name.
    """

    code_generator_class = _DirectCalls
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(
        self,
        filters: Mapping[str, Callable[..., UserValue]],
        functions: Mapping[str, Callable[..., UserValue]],
    ) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_finalize,
        )
        self.filters |= filters
        self.filters = {name: _bounded_filter(name, self.filters[name]) for name in _FILTERS}
        tests = dict[str, Any](self.tests)
        tests["sameas"] = _forget_iteration(tests["sameas"])
        self.tests = {name: _bounded_test(name, test) for name, test in tests.items()}
        self.filters["random"] = _forget_iteration(self.filters["random"])
        self.filters[REMEMBER] = self._remember_iteration
        del self.globals["lipsum"]
        self.globals.update(functions)
        self._memo = LoopMemo(self.globals)
        self._loops: list[LoopReads] = []

    def parse_unchanged(self, source: str) -> nodes.Template:
        """Parses a template without the changes that count its work."""
        return super()._parse(source, None, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        self._loops += rewrite_loops(tree, len(self._loops))
        _Counting().visit(tree)
        tree.set_environment(self)
        return tree

    # --------------------------------------------------------- what templates are rewritten to call

    def count_steps(self, count: int) -> bool:
        _count_steps(count)
        return True

    def count_value(self, value: object) -> UserValue:
        return _count_read(value)

    def start_loop(
        self, number: int, items: Sequence[UserValue], *read: UserValue
    ) -> Sequence[UserValue]:
        """Prepares a loop that remembers its iterations. Returns its items.

        Args:
            read: values of the lists, and then of the constants, in the loop's LoopReads.
        """
        meter = _meter.get()
        meter.walks.pop(number, None)
        reads = self._loops[number]
        count = len(reads.lists)
        lists: Any = read[:count]
        if all(type(each) is list or type(each) is tuple for each in (items, *lists)):
            tree, work = self._memo.find_tree(number, reads, items, lists, read[count:])
            _count_steps(work)
            if tree is not None:
                meter.walks[number] = LoopWalk(
                    self._memo, tree, reads, items, lists, meter.known_bytes
                )
        return items

    def is_new_iteration(self, number: int, loop: LoopContext) -> bool:
        """Returns False if the text of this iteration is known. In that case, also advances the loop
        past the following iterations whose texts are known.
        """
        meter = _meter.get()
        walk = meter.walks.get(number)
        known = None
        if walk is not None:
            known = walk.skip_known(loop.index0)
            _count_steps(walk.take_work())
        if known is None:
            meter.iteration = _Iteration(walk, meter.steps, meter.chars)
            return True
        for _ in range(known.iterations - 1):
            next(loop)
        _count_steps(known.steps)
        _count_output(known.chars)
        meter.iteration = known
        return False

    def concatenate(self, *values: UserValue) -> str:
        texts = [_to_text(value) for value in values]
        _count_text(sum(map(len, texts)))
        return "".join(texts)

    def add(self, *values: UserValue) -> UserValue:
        """Adds values from left to right. Most are texts, of which a chat template adds many."""
        if {*map(type, values)} == _ONLY_TEXT:
            texts = cast(tuple[str, ...], values)
            _count_text(sum(map(len, texts)))
            return "".join(texts)
        return functools.reduce(lambda left, right: self._compute("+", left, right), values)

    def _remember_iteration(self, text: str) -> str:
        meter = _meter.get()
        iteration = meter.iteration
        if isinstance(iteration, LoopText):
            return iteration.text
        if iteration.walk is not None:
            work = meter.steps - iteration.steps, meter.chars - iteration.chars
            iteration.walk.remember(LoopText(text, *work))
        return text

    # ------------------------------------------------------------------------------- jinja2's hooks

    def getattr(self, obj: Any, attribute: str) -> Any:  # any value of a template
        # A template reads its loop's position for each message, and the sandbox's checks are slow.
        if attribute in _LOOP_POSITIONS and type(obj) is LoopContext:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    # any callable and value
    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _count_steps(_TURN)
        owner = getattr(function, "__self__", None)
        is_method = isinstance(function, types.BuiltinFunctionType | types.MethodType)
        # Jinja's own loops and cyclers do little
        if is_method and not type(owner).__module__.startswith("jinja2."):
            args = _check_method(owner, function.__name__, args, kwargs)
        return _measure_result(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> UserValue:
        return self._compute(operator, left, right)

    def _compute(self, operator: str, left: object, right: object) -> UserValue:
        for number in (left, right):
            if isinstance(number, int) and number.bit_length() > MAX_BITS:
                raise LimitError(
                    f"the template computes with an integer of {number.bit_length():,} bits; the limit is {MAX_BITS:,}."
                )
        if operator == "%" and isinstance(left, str):
            _check_printf(left, right)
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            _count_text(len(left) + len(right))
        elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            if len(left) + len(right) > MAX_ITEMS:
                _raise_too_many(len(left) + len(right))
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, str):
                    _count_text(len(value) * times)
                elif (
                    isinstance(times, int)
                    and isinstance(value, list | tuple)
                    and len(value) * times > MAX_ITEMS
                ):
                    _raise_too_many(len(value) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right)
            if bits > MAX_BITS:
                raise LimitError(
                    f"the template computes an integer of up to {bits:,} bits; the limit is {MAX_BITS:,}."
                )
        return _measure_result(self.binop_table[operator](left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # any callable
        if super().wrap_str_format(value) is None:
            return None
        text = str(value.__self__)
        is_map = value.__name__ == "format_map"

        def format_bounded(*args: Any, **kwargs: Any) -> str:
            _count_text(len(text))
            return _Formatter(self).vformat(
                text, () if is_map else args, args[0] if is_map else kwargs
            )

        return format_bounded


@pass_context
def _finalize(context: Context, value: Any) -> str:
    text = _to_text(value)
    _count_steps(_TURN)
    _count_output(len(text))
    return text


class _Counting(NodeTransformer):
    """Transformer that makes a template count its work as it renders."""

    def _insert_step_count(self, node: Any) -> Any:
        self.generic_visit(node)
        _insert_body_count(node.body)
        return node

    visit_Macro = visit_CallBlock = visit_Block = _insert_step_count

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        _insert_body_count(_find_executed_body(node))
        if node.test is not None:
            node.test = nodes.And(
                _environment_call(
                    "count_steps", nodes.Const(_TURN + _count_body_steps([node.test]))
                ),
                node.test,
            )
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        self.generic_visit(node)
        terms = [node.left]
        if isinstance(node.left, nodes.Call) and node.left.node == nodes.EnvironmentAttribute(
            "add"
        ):
            terms = node.left.args
        return _environment_call("add", *terms, node.right)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("concatenate", *node.nodes)

    def _count_literal(self, node: Any) -> Any:
        self.generic_visit(node)
        if (
            getattr(node, "ctx", "load") != "load"
            or not node.items
            or all(isinstance(i, nodes.Const) for i in node.items)
        ):
            return node
        return _environment_call("count_value", node)

    visit_List = visit_Tuple = visit_Dict = _count_literal

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _wrap_in_count(node.expr)
        for operand in node.ops:
            operand.expr = _wrap_in_count(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _wrap_in_count(node.node)
        return node


def _insert_body_count(body: list[nodes.Node]) -> None:
    """Inserts a statement at the beginning of a body that counts the body's steps."""
    steps = nodes.Const(_TURN + _count_body_steps(body))
    body.insert(0, nodes.ExprStmt(_environment_call("count_steps", steps)))


def _find_executed_body(loop: nodes.For) -> list[nodes.Node]:
    """Returns the body of a loop. If the loop remembers its iterations, returns the part that only
    new iterations execute, so that its steps are remembered too.
    """
    match loop.body:
        case [nodes.FilterBlock(filter=nodes.Filter(name=name), body=[nodes.If(body=body)])]:
            return body if name == REMEMBER else loop.body
    return loop.body


def _environment_call(name: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


def _wrap_in_count(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _environment_call("count_value", node)


def _count_body_steps(body: Iterable[nodes.Node]) -> int:
    """Returns the number of steps of a body, from its nodes and its literal text."""
    weight = 0
    stack = list(body)
    while stack:
        node = stack.pop()
        weight += 1
        if isinstance(node, nodes.TemplateData):
            weight += len(node.data) // _PER_STEP
        stack.extend(node.iter_child_nodes())
    return weight
