"""Native rungs: ways in which a model is known to enforce a constraint by itself, in order of preference."""

from __future__ import annotations

import json
from collections.abc import Iterator

from sglang_lite.lang.backend.ladder.object_constraints import json_form
from sglang_lite.lang.backend.ladder.rung import Demands, Refusal, Rung
from sglang_lite.lang.backend.ladder.schema_fit import Fit, fitted
from sglang_lite.lang.backend.ladder.selection_rungs import selection_rungs
from sglang_lite.lang.backend.ladder.vendor_fields import as_field, as_tool
from sglang_lite.lang.backend.profiles.profile import Profile
from sglang_lite.text.tool_use import Function, ToolUse, tool_use_of


def native_rungs(profile: Profile, demands: Demands) -> Iterator[Rung | Refusal]:
    """Yields the rungs that the model is known to support, in order of preference, and a Refusal for a rung that a
    schema or the choices do not fit."""
    constraint = demands.constraint
    assert constraint is not None
    use = tool_use_of(constraint)
    if use is not None and profile.supports("tools") and (not use.required or profile.supports("forced_tools")):
        yield Rung("tools", profile.api, field=_tools(use, profile))
    if demands.kind == "select":
        yield from selection_rungs(profile, demands)
        if demands.scores:
            return
    if profile.schema is not None:
        yield from _as_json(profile, demands)
    yield from as_tool(profile, constraint)
    yield from as_field(profile, constraint)


def _tools(use: ToolUse, profile: Profile) -> tuple[ToolUse, tuple[tuple[Function, str, bool], ...]]:
    """Field of the rung "tools": the use of tools, and each function with the schema of its arguments and a flag for
    strict mode. A schema that the provider does not take in strict mode is a hint, and the arguments are checked."""
    found = list[tuple[Function, str, bool]]()
    for function in use.functions:
        plain = json.dumps(function.parameters)
        fit = fitted(plain, profile.schema) if profile.schema is not None else None
        strict = fit is not None and not fit.refused
        found.append((function, fit.schema if fit is not None and strict else plain, strict))
    return use, tuple(found)


def _as_json(profile: Profile, demands: Demands) -> Iterator[Rung | Refusal]:
    """Yields the rungs of strict outputs and of strict tools: JSON whose schema is fitted to the provider."""
    form = json_form(demands.constraint)
    if form is None:
        return
    assert profile.schema is not None
    fit = fitted(form.constraint.schema, profile.schema)
    if form.wrapped:
        fit = fit.subschema_report("/properties/value")
    for name in ("json_schema", "strict_tool"):
        if not profile.supports(name) or (name == "strict_tool" and not profile.supports("forced_tools")):
            continue
        if fit.refused:
            yield Refusal("this JSON schema", _unfit(fit), fit.refused)
        else:
            rung = "enum" if demands.kind == "select" and name == "json_schema" else name
            yield Rung(rung, profile.api, form=form, fit=fit)


def _unfit(fit: Fit) -> str:
    changes = "; ".join(f"{pointer or '/'}: {why}" for pointer, why in fit.refused[:3])
    more = f" (and {len(fit.refused) - 3} more)" if len(fit.refused) > 3 else ""
    return f'Change {changes}{more}. Or use policy="emulate", which checks and asks again.'
