"""The ladder: chooses the strategy with which an API serves a node, or returns the reason why the
node is rejected.

The best comes first: native structured outputs, a forced tool call, log-probabilities of tokens,
and finally an emulation that asks again. Then the node's parameters are sent, emulated, left out or
rejected. One function, `choose_strategy`, decides. The check of a node before it is queued, the
call that serves it and `explain` all use it, so the behaviour is always what `explain` reports.
Opens no connection and builds no request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from sglang_lite.constraints.emit.gbnf import to_gbnf
from sglang_lite.constraints.emit.lark import to_lark
from sglang_lite.constraints.emit.regex import to_rust_regex
from sglang_lite.constraints.json_schema.keywords import REPEATS
from sglang_lite.constraints.json_schema.quotes import KEYWORD, without_documents
from sglang_lite.constraints.json_schema.repeats import has_repeats_keyword
from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.number_text import PATTERNS
from sglang_lite.constraints.syntax.regex import parse
from sglang_lite.lang.backend.apis.api import (
    ApiTool,
    GrammarTool,
    JsonFormat,
    JsonTool,
    OwnField,
    Tools,
)
from sglang_lite.lang.backend.capabilities import (
    CONSTRAINT_NAMES,
    BegunTurns,
    Capabilities,
    Demands,
    TurnRules,
)
from sglang_lite.lang.backend.ladder.object_constraints import NUMBER_FORMS, json_form
from sglang_lite.lang.backend.ladder.schema_fit import Fit, fit_schema
from sglang_lite.lang.backend.ladder.strategy import REPAIRS, Policy, Refusal, Strategy
from sglang_lite.lang.backend.profiles.profile import Profile
from sglang_lite.lang.expressions import NUMBER_STOPS
from sglang_lite.protocol import (
    ArgumentList,
    Choices,
    Constraint,
    Continuation,
    Ebnf,
    InOrder,
    JsonSchema,
    Lark,
    Number,
    OneOf,
    Regex,
    Repeated,
    StructuralTag,
    TaggedObject,
    Unset,
)
from sglang_lite.protocol.sampling import given_values
from sglang_lite.text.tool_use import ToolUse, tool_use_from_constraint

# Types of constraint that remote models can serve. Excluded are Continuation, which would be
# continued in mid-turn, and InOrder, which describes reasoning before a value, because these
# servers send reasoning separately.
SERVED: Final = frozenset(CONSTRAINT_NAMES) - {Continuation, InOrder}
ANY_CHOICE: Final = Choices(("a", "b"))
_TEXT = JsonSchema(
    '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], '
    '"additionalProperties": false}'
)
_SAMPLES: Final[Mapping[type, Constraint]] = {
    Regex: Regex("[a-z]"),
    JsonSchema: _TEXT,
    Choices: ANY_CHOICE,
    Number: Number("integer"),
    Ebnf: Ebnf('root ::= "a"'),
    Lark: Lark('start: "a"'),
    OneOf: OneOf((ANY_CHOICE,)),
    Repeated: Repeated(ANY_CHOICE, 1, 2),
}


def choose_strategy(profile: Profile, policy: Policy, demands: Demands) -> Strategy | Refusal:
    """Returns the strategy with which a model serves a node, or the reason why the node is
    rejected.
    """
    if _may_stop_inside_value(demands):
        return Refusal("stop together with a constraint", "Leave stop out.")
    found = _strategy_for_constraint(profile, policy, demands)
    return (
        found
        if isinstance(found, Refusal)
        else adapt_to_parameters(found, profile, policy, demands)
    )


def _may_stop_inside_value(demands: Demands) -> bool:
    """Returns True if a stop string could cut a constrained value short. For a number, stop strings
    at which it ends anyway don't count.
    """
    stops = demands.params.stop
    if isinstance(stops, Unset) or demands.constraint is None:
        return False
    number = isinstance(demands.constraint, Number) or json_form(demands.constraint) in NUMBER_FORMS
    return not number or not set(stops) <= set(NUMBER_STOPS)


def _strategy_for_constraint(
    profile: Profile, policy: Policy, demands: Demands
) -> Strategy | Refusal:
    constraint = demands.constraint
    if constraint is None:
        return Strategy("free", profile.api)
    if has_repeats_keyword(constraint):
        return Refusal(
            REPEATS, "Leave the keyword out of the schema, or use a local engine for this node."
        )
    unfit: Refusal | None = None
    steps = chain(native_strategies(profile, demands), _repair_strategy(profile, policy, demands))
    for step in steps:
        if isinstance(step, Refusal):
            unfit = unfit or step
        # only a call can show that it is useless
        elif step.name == "token_logprobs" and not demands.scores:
            behind = (
                adapt_to_parameters(each, profile, policy, demands)
                for each in steps
                if isinstance(each, Strategy)
            )
            other = next((each for each in behind if isinstance(each, Strategy)), None)
            return (
                step
                if other is None
                else replace(step, fallback=other, calls=(1, 1 + other.calls[1]))
            )
        else:
            return step
    if unfit is not None:
        return unfit
    if demands.scores:
        return Refusal("the choices' probabilities", _SCORED)
    if demands.kind == "select":
        return Refusal(
            "select", _TOKENS if profile.api == "completions" else _suggest_supported_kinds(profile)
        )
    return Refusal(CONSTRAINT_NAMES[type(constraint)], _suggest_supported_kinds(profile))


_SCORED = (
    "It only picks a choice, or has probabilities only for choices that begin with different characters. Leave "
    "scores out (choices_method, temperature, multi), or use a local engine."
)
_TOKENS = (
    "Give its tokenizer: OpenAI(…, tokenizer=tiktoken.encoding_for_model(…)). Or generate text and compare, "
    "or use another backend."
)


def _repair_strategy(profile: Profile, policy: Policy, demands: Demands) -> Iterator[Strategy]:
    """Yields the strategy of last resort, if the policy allows it. The prompt describes the
    constraint. If the answer is invalid, the model is shown its error and asked again. Where the
    API accepts JSON schemas, the schema is also sent as a hint.
    """
    if policy == "strict" or demands.scores or type(demands.constraint) not in SERVED:
        return
    if profile.api == "completions":  # base models follow no instructions
        return
    name = CONSTRAINT_NAMES[type(demands.constraint)]
    warning = f"{name} is not enforced by the provider: it is stated in the prompt, checked and asked for again"
    hint = (
        json_form(demands.constraint)
        if profile.api == "chat" and profile.supports("json_schema")
        else None
    )
    shape = (
        None
        if hint is None
        else JsonFormat(format_schema_for_prompt(hint.constraint.schema), strict=False)
    )
    yield Strategy(
        "repair", profile.api, False, (1, 1 + REPAIRS), form=hint, shape=shape, warnings=(warning,)
    )


def _suggest_supported_kinds(profile: Profile) -> str:
    kinds = served_constraint_kinds(profile, "strict")
    if not kinds:
        unknown = (
            ""
            if profile.lacks("json_schema")
            else "Whether it enforces one is not known: set profile=. "
        )
        return f'{unknown}Leave it out, use policy="emulate", or another backend for this node: gen(backend=…).'
    enforced = ", ".join(sorted(CONSTRAINT_NAMES[kind] for kind in kinds))
    other = 'use policy="emulate", which checks and asks again, or another backend for this node: gen(backend=…).'
    return f"It enforces: {enforced}. Or {other}"


def served_constraint_kinds(profile: Profile, policy: Policy) -> frozenset[type]:
    """Returns the types of constraint that a backend with this profile and policy can serve."""
    if policy != "strict" and profile.api != "completions":
        return SERVED
    return frozenset(
        kind
        for kind, each in _SAMPLES.items()
        if any(native_strategies(profile, Demands(constraint=each)))
    )


def capabilities_of(profile: Profile, policy: Policy) -> Capabilities:
    """Returns the capabilities of a backend with this profile. The language compares them with the
    demands of nodes.
    """
    selection = choose_strategy(profile, policy, Demands("select", constraint=ANY_CHOICE))
    scored = choose_strategy(profile, policy, Demands("select", constraint=ANY_CHOICE, scores=True))
    continues = profile.supports("continues")
    continues_last = profile.supports("continue_final_message")
    prefill = profile.supports("prefill") or continues_last
    otherwise: BegunTurns = "refused" if policy == "strict" else "asked"
    rules = TurnRules(
        "continued" if continues or prefill else otherwise,
        "continued" if continues or continues_last else otherwise,
        OneOf in served_constraint_kinds(profile, "strict"),
    )
    return Capabilities(
        served_constraint_kinds(profile, policy),
        profile.params,
        select=isinstance(selection, Strategy),
        scores=isinstance(scored, Strategy),
        continues=continues,
        prefill=prefill,
        images=profile.supports("images"),
        turns=rules,
        caches_prompts=profile.supports("cache_control") or profile.supports("prompt_cache_key"),
    )


# Parameters of OpenAI's Responses API (openai 3.54.0: types/responses/response_create_params.py).
RESPONSES_PARAMS: Final = frozenset({"max_tokens", "temperature", "top_p"})
# Parameters that this API also has, but only for answers in text.
_OF_TEXT: Final = frozenset({"return_logprob", "top_logprobs_num", "return_text_in_logprobs"})


def adapt_to_parameters(
    strategy: Strategy, profile: Profile, policy: Policy, demands: Demands
) -> Strategy | Refusal:
    """Adapts a strategy to a node's parameters, or returns the reason why they are rejected."""
    params = demands.params
    constraint = demands.constraint
    if demands.effort is None or profile.supports("reasoning_effort"):
        strategy = replace(strategy, effort=demands.effort)
    elif policy == "warn":  # the API would report an error or ignore it
        strategy = strategy.mark_as_emulated(
            "reasoning_effort is left out: the model does not accept it"
        )
    else:
        instead = f"Leave it out of the backend. {_unknown_support_hint(profile, 'reasoning_effort')}".strip()
        return Refusal("reasoning_effort", instead)
    stops = () if isinstance(params.stop, Unset) or constraint is not None else params.stop
    in_text = not isinstance(strategy.shape, Tools | GrammarTool | OwnField)
    for name in given_values(params):
        here = (
            strategy.api != "responses"
            or name in RESPONSES_PARAMS
            or (in_text and name in _OF_TEXT)
        )
        if name == "thinking" and profile.supports(name) and not isinstance(params.thinking, int):
            return Refusal("thinking in seconds or as a share", "Give a number of tokens.")
        if name == "stop" or (profile.supports(name) and here):
            continue
        if name == "thinking" and policy != "warn" and profile.supports("reasoning_effort"):
            return Refusal(
                name, 'Leave it out, and give the backend an amount: reasoning_effort="low".'
            )
        if name == "n" and policy != "strict":
            count, (best, worst) = params.samples, strategy.calls
            strategy = replace(strategy, samples=count, calls=(best * count, worst * count))
            strategy = strategy.mark_as_emulated(f"{count} samples are {count} calls")
        elif policy == "warn":
            strategy = _without_parameter(strategy, name)
        elif profile.supports(name) and constraint is not None:
            return Refusal(
                f"{name} together with {CONSTRAINT_NAMES[type(constraint)]}", f"Leave {name} out."
            )
        else:
            elsewhere = "Leave it out, or use another backend for this node: gen(backend=…)."
            return Refusal(
                name,
                f"{elsewhere} {_unknown_support_hint(profile, name)}{_accepted_parameters_hint(profile)}",
            )
    both = not isinstance(params.temperature, Unset) and not isinstance(params.top_p, Unset)
    if both and not profile.supports("temperature_with_top_p") and "top_p" not in strategy.left_out:
        if policy != "warn":
            return Refusal("temperature and top_p together", "Set one of them.")
        strategy = _without_parameter(strategy, "top_p")
    return _adapt_to_stops(strategy, profile, policy, stops) if stops else strategy


def _without_parameter(strategy: Strategy, name: str) -> Strategy:
    return strategy.mark_as_emulated(f"{name} is left out: the model does not accept it", name)


def _adapt_to_stops(
    strategy: Strategy, profile: Profile, policy: Policy, stops: tuple[str, ...]
) -> Strategy | Refusal:
    limit = profile.limits.get("stop")
    if not profile.supports("stop") or strategy.api == "responses":
        feature = "stop"
        instead = f"Leave it out. {_unknown_support_hint(profile, 'stop')}{_accepted_parameters_hint(profile)}"
    elif limit is not None and len(stops) > limit:
        feature = f"{len(stops)} stop strings"
        instead = f"Give at most {limit}."
    elif profile.lacks("blank_stops") and not all(map(str.strip, stops)):
        feature = "a stop string of whitespace only"
        instead = "Ask for one line in the prompt, or use a stop string that is visible."
    else:
        return strategy
    if policy == "strict":
        return Refusal(feature, instead)
    warning = f"{feature}: the whole answer is generated and cut afterwards"
    return replace(strategy, stops=stops).mark_as_emulated(warning, "stop")


def _unknown_support_hint(profile: Profile, name: str) -> str:
    if name in profile.features:
        return ""
    return f"Whether it accepts {name} is not known: set profile= or capabilities=. "


def _accepted_parameters_hint(profile: Profile) -> str:
    return f"It accepts: {', '.join(sorted(profile.params)) or 'no parameters'}."


def native_strategies(profile: Profile, demands: Demands) -> Iterator[Strategy | Refusal]:
    """Yields the strategies that the model is known to support, in order of preference. If the
    schema or the choices do not fit a strategy, yields a Refusal in its place.
    """
    constraint = demands.constraint
    assert constraint is not None
    use = tool_use_from_constraint(constraint)
    if (
        use is not None
        and profile.supports("tools")
        and (use.choice != "required" or profile.supports("forced_tools"))
    ):
        yield Strategy("tools", profile.api, shape=_convert_to_tools(use, profile))
    if demands.kind == "select":
        yield from selection_strategies(profile, demands)
        if demands.scores:
            return
    if profile.schema is not None:
        yield from _json_strategies(profile, demands)
    yield from custom_tool_strategies(profile, constraint)
    yield from dialect_field_strategies(profile, constraint)


def _convert_to_tools(use: ToolUse, profile: Profile) -> Tools:
    """Converts functions into tools of the provider. If a function's schema is not accepted in
    strict mode, it is sent as a hint, and the arguments are checked.
    """
    tools = list[ApiTool]()
    for function in use.functions:
        fit = (
            fit_schema(json.dumps(function.parameters), profile.schema)
            if profile.schema is not None
            else None
        )
        strict = fit is not None and not fit.refused
        schema = (
            fit.schema
            if fit is not None and strict
            else json.dumps(without_documents(function.parameters))
        )
        tools.append(ApiTool(function.name, function.description, schema, strict))
    return Tools(tuple(tools), use.choice, use.parallel)


def format_schema_for_prompt(schema: str) -> str:
    """Formats a JSON Schema as text for the model to read. If values have to quote from documents,
    the documents are left out of the text.
    """
    return (
        json.dumps(without_documents(json.loads(schema)), ensure_ascii=False)
        if KEYWORD in schema
        else schema
    )


def _json_strategies(profile: Profile, demands: Demands) -> Iterator[Strategy | Refusal]:
    """Yields the strategies that use strict outputs or strict tools. They request JSON under a
    schema that is fitted to the provider.
    """
    form = json_form(demands.constraint)
    if form is None:
        return
    assert profile.schema is not None
    fit = fit_schema(form.constraint.schema, profile.schema)
    if form.wrapped:
        fit = fit.subschema_report("/properties/value")
    for name in ("json_schema", "strict_tool"):
        if not profile.supports(name) or (
            name == "strict_tool" and not profile.supports("forced_tools")
        ):
            continue
        if fit.refused:
            yield Refusal("this JSON schema", _unfit_schema_hint(fit), fit.refused)
        elif name == "strict_tool":
            yield Strategy(name, profile.api, form=form, fit=fit, shape=JsonTool(fit.schema))
        else:
            strategy = "enum" if demands.kind == "select" else name
            yield Strategy(
                strategy, profile.api, form=form, fit=fit, shape=JsonFormat(fit.schema, strict=True)
            )


def _unfit_schema_hint(fit: Fit) -> str:
    changes = "; ".join(f"{pointer or '/'}: {why}" for pointer, why in fit.refused[:3])
    more = f" (and {len(fit.refused) - 3} more)" if len(fit.refused) > 3 else ""
    return f'Change {changes}{more}. Or use policy="emulate", which checks and asks again.'


# chat APIs that generate a single token on request; others need more
_ONE_TOKEN = ("chat", "generate_content")
# Maximum number of alternatives that OpenAI's protocol reports for a token.
_MAX_ALTERNATIVES = 20


def selection_strategies(profile: Profile, demands: Demands) -> Iterator[Strategy | Refusal]:
    """Yields the strategies for a selection in order of preference. If the choices rule out a
    strategy, may yield a Refusal in its place.
    """
    assert isinstance(demands.constraint, Choices)
    choices = demands.constraint.options
    fits = 2 <= len(choices) <= profile.limits.get("choices", 0)
    if profile.supports("decisions") and fits and demands.effort is None:
        yield Strategy("decisions", profile.api)
    if _reports_first_token(profile, demands) and first_characters_differ(choices):
        count = min(profile.limits.get("top_logprobs_num", _MAX_ALTERNATIVES), _MAX_ALTERNATIVES)
        yield Strategy("token_logprobs", profile.api, alternatives=count)
    if profile.supports("logit_bias_steps") and not demands.scores:
        if any(other != each and other.startswith(each) for each in choices for other in choices):
            hint = "Use choices where none begins with another, or another backend for this node: gen(backend=…)."
            yield Refusal("a choice that begins with another one", hint)
        else:  # one call for each step at which the remaining choices' tokens differ
            yield Strategy(
                "logit_bias_steps", profile.api, calls=(min(1, len(choices) - 1), len(choices) - 1)
            )


def _reports_first_token(profile: Profile, demands: Demands) -> bool:
    """Returns True if a chat model reports log-probabilities for the first token of its answer. A
    model that may reason first counts only if the node needs scores, because then no other strategy
    can serve it.
    """
    if profile.api not in _ONE_TOKEN or demands.effort is not None:
        return False
    logprobs = profile.supports("return_logprob") and profile.supports("top_logprobs_num")
    return logprobs and (demands.scores or not profile.supports("reasoning_effort"))


def first_characters_differ(choices: Sequence[str]) -> bool:
    """Returns True if all texts begin with different characters. Leading whitespace is ignored. In
    this case no token can begin two of the texts.
    """
    first = {choice.lstrip()[:1] for choice in choices}
    return len(choices) > 1 and len(first) == len(choices) and "" not in first


_GRAMMARS = frozenset({Lark, Ebnf, OneOf, Repeated, StructuralTag, TaggedObject, ArgumentList})
# Syntax of llguidance that Lark does not have.
_BEYOND_LARK = re.compile(r"%json|%regex|%llguidance|\[[a-z_]+\s*[,=\]]|(?<![/\\])[&~](?![^\n]*/)")
_ESCAPED: Final = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def custom_tool_strategies(profile: Profile, constraint: Constraint) -> Iterator[Strategy]:
    """Yields the strategies that use a custom tool. The tool's input follows a regex or grammar."""
    if isinstance(constraint, Regex) and profile.supports("regex_tool"):
        yield Strategy(
            "regex_tool",
            "responses",
            shape=GrammarTool("regex", to_rust_regex(parse(constraint.pattern))),
        )
    elif profile.supports("lark_tool") and type(constraint) in _GRAMMARS:
        grammar = (
            constraint.grammar
            if isinstance(constraint, Lark)
            else to_lark(language_for_constraint(constraint))
        )
        if not _BEYOND_LARK.search(grammar):
            yield Strategy("lark_tool", "responses", shape=GrammarTool("lark", grammar))


def dialect_field_strategies(profile: Profile, constraint: Constraint) -> Iterator[Strategy]:
    """Yields the strategies that use request fields of one server's dialect, such as
    `structured_outputs`. The answer then needs no conversion.
    """

    def own(name: str, value: Any) -> Strategy:
        return Strategy(name, profile.api, shape=OwnField({name: value}))

    if isinstance(constraint, JsonSchema):
        if profile.supports("structured_outputs"):
            yield own("structured_outputs", {"json": json.loads(constraint.schema)})
        elif profile.supports("json_schema") and profile.schema is None:
            yield Strategy(
                "json_schema", profile.api, shape=JsonFormat(constraint.schema, strict=True)
            )
        return
    pattern = _regex_pattern(constraint)
    if profile.supports("structured_outputs"):
        if isinstance(constraint, Choices):
            yield own("structured_outputs", {"choice": list(constraint.options)})
        elif pattern is not None:
            yield own("structured_outputs", {"regex": pattern})
        else:
            yield own("structured_outputs", {"grammar": constraint_to_gbnf(constraint)})
    if profile.supports("regex") and pattern is not None:
        yield own("regex", pattern)
    for name in ("ebnf", "grammar"):
        if profile.supports(name) and (pattern is None or name == "grammar"):
            yield own(name, constraint_to_gbnf(constraint))


def constraint_to_gbnf(constraint: Constraint) -> str:
    """Returns a grammar in llama.cpp's GBNF for the texts that a constraint allows."""
    return (
        constraint.grammar
        if isinstance(constraint, Ebnf)
        else to_gbnf(language_for_constraint(constraint))
    )


def _regex_pattern(constraint: Constraint) -> str | None:
    match constraint:
        case Regex(pattern):
            return pattern
        case Number(kind):
            return PATTERNS[kind]
        case Choices(options):
            return f"({'|'.join(map(_escape_literally, options))})"
    return None


def _escape_literally(text: str) -> str:
    """Returns a regex that matches a text literally, in the syntax that the dialects of all engines
    share.
    """
    return re.sub(r"[^\w ]", lambda found: _ESCAPED.get(found[0], "\\" + found[0]), text)
