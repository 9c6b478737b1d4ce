"""The table of sampling parameters, and all that is written out beside it for readers and type
checkers.

`python -m tests.protocol.test_sampling_parameters` writes the table of docs/sampling.md anew.
"""

import dataclasses
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import sglang_lite as sgl
from sglang_lite.lang.function import SglFunction
from sglang_lite.lang.ir import SglArgument, SglSamplingParams
from sglang_lite.protocol import SamplingParams
from sglang_lite.protocol.parameter import UNSET
from sglang_lite.protocol.sampling import (
    PARAMETERS,
    GenSamplingOptions,
    SamplingOptions,
    given_values,
    parameters_for,
)
from sglang_lite.runtime.requests.resolved_params import ResolvedParams, resolve_params
from sglang_lite.server.sglang.request import read_request, read_sampling

DOCS = Path(__file__).parents[2] / "docs" / "sampling.md"
IDS = [each.name for each in PARAMETERS]
TYPES = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "strings": "tuple[str, ...]",
    "token ids": "tuple[int, ...]",
    "biases": "tuple[tuple[int, float], ...]",
    "order": "SamplingOrder",
    "budget": "int | tuple[str, ...]",
    "exactness": "Exactness",
}
OPTION_TYPES = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "strings": "str | Sequence[str]",
    "token ids": "Sequence[int]",
    "biases": "Mapping[int, float]",
    "order": "SamplingOrder",
    "budget": "int | str",
    "exactness": "Exactness",
}
# A value that is not the default, as a user may write it and as the record has it.
SAID = {
    "int": (np.int64(3), 3),
    "float": (np.float32(0.5), 0.5),
    "strings": ("a", ("a",)),
    "token ids": ([np.int32(7), 8], (7, 8)),
    "budget": ("30s", ("30s",)),
    "biases": ({"4": 1, 5: np.float64(-2.5)}, ((4, 1.0), (5, -2.5))),
    "order": ("sequential", "sequential"),
    "exactness": ("weighted", "weighted"),
}
WRONG = {
    "int": ("is not a whole number", ["3", 1.5, True, [1]]),
    "float": (
        "is not a (finite )?number",
        ["hot", True, 1j, float("nan"), float("inf"), 10**400, [1]],
    ),
    "bool": ("is neither True nor False", [1, "yes"]),
    "strings": (
        "is not a (non-empty string|tuple or list of strings)|unpaired surrogates",
        [3, [None], b"x", {"a": 1}, "", "\ud800"],
    ),
    "token ids": (
        "is not a (whole number|tuple or list of token ids)|outside its range",
        ["12", 12, ["a"], [True], [-1]],
    ),
    "order": (
        "is neither 'joint' nor 'sequential'",
        ["", "Joint", "vllm", 1, True, ("joint",), ["joint"]],
    ),
    "exactness": (
        "is neither True, False, 'bound' nor 'weighted'",
        [1, "yes", "Weighted", ["weighted"]],
    ),
    "budget": (
        "is not a whole number|is neither seconds|outside its range",
        [1.5, True, -1, "long", "-3s", "120%"],
    ),
    "biases": (
        "is not a|outside its range",
        [{"a": 1}, {1: "x"}, {1: float("inf")}, [1], "x", {-1: 0}],
    ),
}


def said(parameter):
    return (not parameter.default,) * 2 if parameter.kind == "bool" else SAID[parameter.kind]


def parameters_of(function):
    return list(inspect.signature(function).parameters.values())


# ------------------------------------------------------------------------------ what is written out


def test_gen_has_the_parameters_of_the_table_in_its_order():
    takes = [p for p in parameters_of(sgl.gen) if p.name in IDS]
    assert [p.name for p in takes] == list(parameters_for("gen"))
    assert {p.default for p in takes} == {None}
    assert [p.name for p in takes if p.kind is p.POSITIONAL_OR_KEYWORD] == list(
        parameters_for("hooks")
    )


@pytest.mark.parametrize("short", [sgl.gen_int, sgl.gen_string])
def test_short_forms_of_gen_have_those_of_run(short):
    takes = parameters_of(short)
    assert [p.name for p in takes] == [
        "name",
        *(each.name for each in PARAMETERS if "run" in each.places),
    ]
    assert {p.default for p in takes} == {None}


@pytest.mark.parametrize("way", ["run", "arun", "run_batch", "arun_batch"])
def test_the_ways_to_run_have_sglangs_names_and_defaults(way):
    takes = [p for p in parameters_of(getattr(SglFunction, way)) if p.kind is p.KEYWORD_ONLY]
    expected = parameters_for("run", sglang=True)
    assert [p.name for p in takes][: len(expected)] == list(expected)
    for p, parameter in zip(takes, expected.values()):
        shown = "request" not in parameter.places and parameter.default != ()
        assert p.default == (parameter.default if shown else None)
    assert not {p.name for p in takes[len(expected) :]} & set(IDS) - {"seed"}  # the run's own


def test_what_hooks_are_given_has_sglangs_names_and_defaults():
    fields = {field.name: field.default for field in dataclasses.fields(SglSamplingParams)}
    expected = parameters_for("hooks", sglang=True)
    assert list(fields)[: len(expected)] == list(expected)
    for name, parameter in expected.items():
        assert fields[name] == (None if "request" in parameter.places else parameter.default)
    assert list(fields)[len(expected) :] == ["json_schema", "dtype", "regex"]


def test_generate_has_the_requests_fields():
    assert set(parameters_for("request", sglang=True)) <= {
        p.name for p in parameters_of(read_request)
    }


@pytest.mark.parametrize("parameter", PARAMETERS, ids=IDS)
def test_records_have_a_field_of_its_type(parameter):
    kind = TYPES[parameter.kind]
    fields = {"order": "_OrderField", "exactness": "_ExactField"}
    expected = fields.get(parameter.kind, f"{kind} | Unset")
    assert SamplingParams.__annotations__[parameter.name] == expected
    assert getattr(SamplingParams(), parameter.name) is UNSET
    others = {"stop_regex": "Mapping[str, regex.Pattern[str]]", **dict.fromkeys(("seed", "repeats"), "int | None"),
              "sampling_order": "SamplingOrder | None", "thinking": "int | tuple[str, ...] | None"}  # fmt: skip
    resolved = others.get(parameter.name, kind)
    assert ResolvedParams.__annotations__[parameter.name] == resolved


def test_records_have_no_other_fields():
    assert set(SamplingParams.__annotations__) == set(ResolvedParams.__annotations__) == set(IDS)


def test_keywords_have_the_types_of_the_table():
    shared, of_gen = parameters_for("run"), parameters_for("gen")
    del shared["max_tokens"], of_gen["max_tokens"]
    for options, parameters in ((SamplingOptions, shared), (GenSamplingOptions, of_gen)):
        found = {name: each.__forward_arg__ for name, each in options.__annotations__.items()}
        assert found == {
            name: f"{OPTION_TYPES[each.kind]} | None" for name, each in parameters.items()
        }
    for parameter in parameters_of(sgl.gen):
        if parameter.name in of_gen:
            assert parameter.annotation == f"{OPTION_TYPES[of_gen[parameter.name].kind]} | None"


def test_docstrings_say_what_the_table_says():
    entries = re.findall(
        r"^    (\w+): ((?:.|\n {8})+)", inspect.getdoc(sgl.gen) or "", re.MULTILINE
    )
    told = {name: re.sub(r"\s+", " ", text) for name, text in entries}
    for name, parameter in parameters_for("gen").items():
        assert told[name].startswith(parameter.docstring_entry), name
    for parameter in PARAMETERS:
        assert f"    {parameter.name}: {parameter.docstring_entry}\n" in (
            SamplingParams.__doc__ or ""
        )


# ------------------------------------------------------------------------------ where values get to


@pytest.mark.parametrize("parameter", parameters_for("gen").values(), ids=parameters_for("gen"))
def test_gen_puts_a_value_under_its_name(parameter):
    written, read = said(parameter)
    assert given_values(sgl.gen("a", **{parameter.name: written}).node.params) == {
        parameter.name: read
    }
    assert given_values(sgl.gen("a", **{parameter.name: None}).node.params) == {}


@pytest.mark.parametrize("make", [sgl.gen, sgl.gen_int])
def test_values_can_be_given_in_sglangs_order(make):
    names = [
        p.name for p in parameters_of(make) if p.name in IDS and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    written = [said(parameters_for("gen")[name]) for name in names]
    params = make("a", *(value for value, _ in written)).node.params
    assert given_values(params) == dict(zip(names, (read for _, read in written)))


def test_the_last_values_in_sglangs_order_are_constraints():
    unset = [None] * len(parameters_for("hooks"))
    assert sgl.gen("a", *unset, None, ["x", "y"]).choices == ("x", "y")
    assert sgl.gen("a", *unset, None, None, None, "[0-9]").node.constraint == sgl.Regex("[0-9]")


def test_a_default_that_a_run_is_given_counts_as_set_unless_it_is_off_by_itself():
    script = sgl.ScriptedBackend(default="x")
    program = sgl.function(lambda s: s.__iadd__(sgl.gen("a")))
    program.run(backend=script, ignore_eos=False, max_new_tokens=128, top_k=None).sync()
    assert given_values(script.calls[0].params) == {"max_tokens": 128}


@pytest.mark.parametrize("parameter", parameters_for("run").values(), ids=parameters_for("run"))
def test_a_run_gives_a_value_to_its_generations(parameter):
    written, read = said(parameter)
    script = sgl.ScriptedBackend(default="x")
    program = sgl.function(lambda s: s.__iadd__(sgl.gen("a")))
    program.run(backend=script, **{parameter.sglang: written}).sync()
    program.run_batch([{}], backend=script, **{parameter.sglang: written})
    assert [given_values(call.params) for call in script.calls] == [{parameter.name: read}] * 2


@pytest.mark.parametrize(
    "parameter", parameters_for("sampling_params").values(), ids=parameters_for("sampling_params")
)
def test_sglangs_dictionary_has_it_under_sglangs_name(parameter):
    written, read = said(parameter)
    assert read_sampling({parameter.sglang: written}) == (
        SamplingParams(**{parameter.name: read}),
        None,
    )
    assert read_sampling({parameter.sglang: None}) == (SamplingParams(), None)
    with pytest.raises(
        sgl.ParameterError, match=rf"has no such field. Did you mean {parameter.sglang}\?"
    ):
        read_sampling({f"{parameter.sglang}s": written})


@pytest.mark.parametrize(
    "parameter", parameters_for("request").values(), ids=parameters_for("request")
)
def test_generate_has_it_as_a_field(parameter):
    written, read = said(parameter)
    (call,) = read_request("a", **{"return_logprob": True, parameter.sglang: written}).calls
    assert getattr(call.params, parameter.name) == read
    with pytest.raises(
        sgl.ParameterError, match=f"^{parameter.sglang}: sampling_params has no such field"
    ):
        read_sampling({parameter.sglang: written})


@pytest.mark.parametrize("parameter", parameters_for("hooks").values(), ids=parameters_for("hooks"))
def test_hooks_get_it_under_sglangs_name(parameter):
    written, read = said(parameter)
    seen = sgl.gen("a", **{parameter.name: written}).sampling_params
    assert getattr(seen, parameter.sglang) == (list(read) if isinstance(read, tuple) else read)


@pytest.mark.parametrize("parameter", PARAMETERS, ids=IDS)
def test_an_engine_fills_in_the_default(parameter):
    resolved = resolve_params(SamplingParams(), 10)
    default = getattr(resolved, parameter.name)
    assert default == ({} if parameter.name == "stop_regex" else parameter.default)
    assert type(default) is not type(UNSET)


def test_a_generation_among_choices_refuses_what_sglangs_gen_has_not():
    for name in (
        parameters_for("gen").keys() - parameters_for("hooks").keys() - {"lora_path"}
    ):  # which `select` has
        with pytest.raises(sgl.ParameterError, match=f"^{name}: .* has no effect with choices="):
            sgl.gen("a", choices=["x"], **{name: said(parameters_for("gen")[name])[0]})


def test_values_are_checked_also_among_choices():
    with pytest.raises(sgl.ParameterError, match=r"^top_p: 2.0 is outside its range"):
        sgl.gen("a", choices=["x"], top_p=2)


# ------------------------------------------------------------------------------------------- checks


@pytest.mark.parametrize("parameter", PARAMETERS, ids=IDS)
def test_what_no_backend_could_honour_is_refused_by_the_name_that_was_written(parameter):
    message, values = WRONG[parameter.kind]
    script = sgl.ScriptedBackend(default="x")
    program = sgl.function(lambda s: s.__iadd__(sgl.gen("a")))
    ways = {
        "gen": (parameter.name, lambda value: sgl.gen("a", **{parameter.name: value})),
        "run": (
            parameter.sglang,
            lambda value: program.run(backend=script, **{parameter.sglang: value}),
        ),
        "sampling_params": (
            parameter.sglang,
            lambda value: read_sampling({parameter.sglang: value}),
        ),
        "request": (
            parameter.sglang,
            lambda value: read_request("a", **{"return_logprob": True, parameter.sglang: value}),
        ),
    }
    for place in set(parameter.places) & ways.keys():
        name, call = ways[place]
        for value in values:
            if (
                place == "request"
                and parameter.kind != "token ids"
                and parameter.name != "confidence"
            ):
                value = [value]  # else a list is one for each prompt
            with pytest.raises(sgl.ParameterError, match=f"^{name}: .*({message})") as caught:
                call(value)
            assert caught.value.parameter == name
            assert len(caught.value.message) < 120


@pytest.mark.parametrize(
    "parameter", [p for p in PARAMETERS if p.kind in ("int", "float")], ids=lambda p: p.name
)
def test_ranges_are_those_of_the_table(parameter):
    def made(value):
        return SamplingParams(**{parameter.name: value})

    for bounds, check in (
        (parameter.range, made),
        (parameter.engine_range, lambda value: resolve_params(made(value), 10)),
    ):
        if bounds is None:
            continue
        below, above = "outside (its|an engine's) range: ", f"{parameter.name}: "
        if bounds.low is not None:
            with pytest.raises(sgl.ParameterError, match=f"^{above}.*{below}"):
                check(bounds.low - (not bounds.above))
            check(bounds.low + bounds.above)
        if bounds.high is not None:
            with pytest.raises(sgl.ParameterError, match=f"^{above}.*{below}"):
                check(bounds.high + 1)
            if parameter.name != "min_tokens":  # never more than max_tokens
                check(bounds.high)


@pytest.mark.parametrize(
    "parameter", [p for p in PARAMETERS if p.max_entries is not None], ids=lambda p: p.name
)
def test_lists_are_as_long_as_the_table_says(parameter):
    entry = {"strings": "a", "token ids": 1, "biases": (1, 1.0)}[parameter.kind]
    resolve_params(SamplingParams(**{parameter.name: (entry,) * parameter.max_entries}), 10)
    with pytest.raises(
        sgl.ParameterError,
        match=f"^{parameter.name}: .* entries, the limit is {parameter.max_entries:,}",
    ):
        resolve_params(
            SamplingParams(**{parameter.name: (entry,) * (parameter.max_entries + 1)}), 10
        )


@pytest.mark.parametrize(
    "wide", [{"temperature": 1000.0}, {"top_p": 0.0}, {"n": 300}, {"repetition_penalty": 5.0}, {"logit_bias": {1: 2e4}}],
    ids=str,
)  # fmt: skip
def test_what_another_backend_may_take_is_an_engines_to_refuse(wide):
    (name,) = wide
    asked = sgl.gen("a", **wide)
    with pytest.raises(sgl.ParameterError, match=f"^{name}: .* is outside an engine's range"):
        resolve_params(asked.node.params, 10)


def test_an_argument_that_is_not_known_yet_is_taken_in_a_trace_and_refused_by_an_engine():
    asked = sgl.gen("a", temperature=SglArgument("t"))  # type: ignore[call-overload]  # a symbol, in a trace
    with pytest.raises(
        sgl.ParameterError, match=r"^temperature: Argument.* is only known when the program runs"
    ):
        resolve_params(asked.node.params, 10)


# ----------------------------------------------------------------------------------------- the docs


def table():
    """The table of docs/sampling.md."""
    openai = sgl.OpenAI("gpt-4o", api_key="none").capabilities.params or frozenset()
    claude = sgl.Anthropic("claude-opus-4-1", api_key="none").capabilities.params or frozenset()
    assert openai | claude <= set(IDS)
    shown = {
        "int": "int", "float": "float", "bool": "bool", "strings": "str, or a list", "token ids": "list of ids",
        "biases": "ids to floats", "order": '`"joint"` or `"sequential"`',
        "budget": "int, or str", "exactness": 'bool, or `"bound"`, `"weighted"`',
    }  # fmt: skip
    lines = [
        "| Parameter | Type | Default | Range | An engine takes | What it does | SGLang's name | Given to | Taken by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for p in PARAMETERS:
        anywhere = "" if str(p.range) == "any" or p.kind not in ("int", "float") else str(p.range)
        engine = [f"at most {p.max_entries:,} entries"] if p.max_entries is not None else []
        engine += [str(p.engine_range)] if p.engine_range is not None else []
        places = [
            text for place, text in (
                ("gen", "`gen`"), ("run", "`run`"), ("sampling_params", "`sampling_params`"), ("request", "`generate`"),
                ("openai", "OpenAI's routes"), ("completions", "OpenAI's completions"),
            ) if place in p.places
        ]  # fmt: skip
        remote = [
            name for name, takes in (("OpenAI", openai), ("Claude", claude)) if p.name in takes
        ]
        default = "" if p.default in (None, ()) else f"`{p.default}`"
        cells = (
            f"`{p.name}`", shown[p.kind], default, anywhere, ", ".join(engine), p.text,
            f"`{p.alias}`" if p.alias else "", ", ".join(places), ", ".join(("engine", *remote)),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return re.sub(r"\|  (?=\|)", "| ", "\n".join(lines)) + "\n"


def written():
    return re.search(r"(?<=\n\n)\| Parameter \|.*?\n(?=\n)", DOCS.read_text(), re.DOTALL)


def test_the_docs_have_the_table():
    assert written()[0] == table(), "python -m tests.protocol.test_sampling_parameters writes it"


if __name__ == "__main__":
    text = DOCS.read_text()
    found = written()
    DOCS.write_text(text[: found.start()] + table() + text[found.end() :])
