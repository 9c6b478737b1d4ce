"""A JSON value with its members in the order in which they are generated: by asking the normaliser's sets of values,
which is also a second opinion on what is in them."""

import itertools
import json

from sglang_lite.constraints.automaton import accepts
from sglang_lite.constraints.normal import document_of
from sglang_lite.constraints.normal.formulas import At
from sglang_lite.constraints.normal.numbers import exact
from sglang_lite.constraints.normal.reader import Reader


def styled(constraint, value):
    """The text of a value in the style that is generated; None if the sets say that it is not valid."""
    document = document_of(constraint)
    reader = Reader(document, assert_format=constraint.format == "assert")
    found = _ordered(reader, At(document.start), value)
    return None if found is None else json.dumps(found[0], ensure_ascii=False, separators=constraint.separators)


def orders(value):
    """The value with its members in every order."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*map(orders, value)))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for values in itertools.product(*(orders(value[name]) for name in names)):
                yield dict(zip(names, values))
    else:
        yield value


def _ordered(reader, formula, value):
    """The value in a tuple of one, or None."""
    values = reader.values(formula)
    if value is None:
        return (value,) if values.null else None
    if isinstance(value, bool):
        return (value,) if value in values.booleans else None
    if isinstance(value, int | float):
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        return (whole,) if any(exact(value) in piece for piece in values.numbers) else None
    if isinstance(value, str):
        return (value,) if accepts(values.strings, value) else None
    shapes, order = (values.arrays, _items) if isinstance(value, list) else (values.objects, _members)
    return next((found for shape in shapes if (found := order(reader, shape, value)) is not None), None)


def _items(reader, shape, value):
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        return None
    for formula, start, least, most in shape.contains:
        count = sum(_ordered(reader, formula, item) is not None for item in value[start:])
        if count < least or (most is not None and count > most):
            return None
    if shape.unique is not None and any(_same(a, b) for i, a in enumerate(value) for b in value[:i]):
        return None
    items = [_ordered(reader, shape.item(i), item) for i, item in enumerate(value)]
    return None if None in items else ([item for (item,) in items],)


def _same(a, b):
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return a == b


def _members(reader, shape, value):
    if len(value) < shape.least or (shape.most is not None and len(value) > shape.most):
        return None
    if any(member.required and member.name not in value for member in shape.members):
        return None
    for names, formula in shape.needs:
        if not any(accepts(names, k) and _ordered(reader, formula, v) is not None for k, v in value.items()):
            return None
    first = [member.name for member in shape.members if member.name in value]
    names = [*first, *(name for name in value if name not in first)]
    found = {name: _ordered(reader, shape.named(name).formula, value[name]) for name in names}
    return None if None in found.values() else ({name: item for name, (item,) in found.items()},)
