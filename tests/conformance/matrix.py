"""The matrix of docs/backends.md: what each backend does with each feature. `python -m
tests.conformance.matrix` prints it.
"""

from typing import Any

import sglang_lite as sgl
from sglang_lite.lang.backend.remote.explain import Explanation

SCHEMA = '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false}'
ONE_BY_ONE = {
    "text": {},
    "`json_schema`, `type`": {"json_schema": SCHEMA},
    "a schema of free-form objects": {"json_schema": '{"type": "object"}'},
    "a number (`type=int`)": {"type": int},
    "`regex`": {"regex": "[ab]+"},
    "a GBNF grammar": {"constraint": sgl.grammar.Ebnf('root ::= "a" | "(" root ")"')},
    "a Lark grammar": {"constraint": sgl.grammar.Lark('start: "a" | "(" start ")"')},
    "`max_tokens`": {"max_tokens": 3},
    "`temperature`": {"temperature": 0},
    "`top_p`": {"top_p": 0.5},
    "`top_k`": {"top_k": 3},
    "`seed`": {"seed": 1},
    "`n`": {"n": 2},
    "`stop`": {"stop": "."},
    "`frequency_penalty`": {"frequency_penalty": 0.1},
    "`logit_bias`": {"logit_bias": {1: 1}},
    "`return_logprob`": {"return_logprob": True},
}
COLUMNS = {
    "gpt-4o": lambda **policy: sgl.OpenAI("gpt-4o", api_key="key", **policy),
    "gpt-4": lambda **policy: sgl.OpenAI("gpt-4", api_key="key", **policy),
    "gpt-5": lambda **policy: sgl.OpenAI("gpt-5", api_key="key", **policy),
    "gpt-6-luna": lambda **policy: sgl.OpenAI("gpt-6-luna", api_key="key", **policy),
    "davinci-002": lambda **policy: sgl.OpenAI("davinci-002", api_key="key", **policy),
    "claude-haiku-4-5": lambda **policy: sgl.Anthropic("claude-haiku-4-5", api_key="key", **policy),
    "claude-opus-5": lambda **policy: sgl.Anthropic("claude-opus-5", api_key="key", **policy),
    "vllm": lambda **policy: sgl.OpenAI("local", profile="vllm", api_key="key", **policy),
    "sglang": lambda **policy: sgl.OpenAI("local", profile="sglang", api_key="key", **policy),
    "llamacpp": lambda **policy: sgl.OpenAI("local", profile="llamacpp", api_key="key", **policy),
    "sglang_lite": lambda **policy: sgl.OpenAI(
        "local", profile="sglang_lite", api_key="key", **policy
    ),
    "compatible": lambda **policy: sgl.OpenAI(
        "local", profile="compatible", api_key="key", **policy
    ),
}


@sgl.function
def one(s, options):
    s += sgl.user("Hello.")
    s += sgl.assistant(sgl.gen("a", **options))


@sgl.function
def pick(s, temperature):
    s += sgl.user("Which?")
    s += sgl.assistant(sgl.select("a", ["dog", "cat"], temperature=temperature))


@sgl.function
def begun(s):
    s += sgl.user("Hello.")
    s += sgl.assistant("It is " + sgl.gen("a"))


@sgl.function
def picture(s):
    s += sgl.user(sgl.image("https://x.test/i.png") + "What is it?")
    s += sgl.assistant(sgl.gen("a"))


FEATURES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (one, {"options": options}) for name, options in ONE_BY_ONE.items()},
    "`select`": (pick, {"temperature": 0.0}),
    "`select` with probabilities": (pick, {"temperature": 1.0}),
    "a turn that has begun": (begun, {}),
    "images": (picture, {}),
}


def rows():
    """The lines of the table."""
    backends = {
        name: (make(policy="strict"), make(policy="emulate")) for name, make in COLUMNS.items()
    }
    yield f"| | {' | '.join(COLUMNS)} |"
    yield "|" + "---|" * (len(COLUMNS) + 1)
    for feature, (program, arguments) in FEATURES.items():
        cells = []
        for strict, emulating in backends.values():
            told = [each.explain(program, **arguments) for each in (strict, emulating)]
            cells.append(_cell(*told))
        yield f"| {feature} | {' | '.join(cells)} |"


def _cell(strict: Explanation, emulating: Explanation) -> str:
    if not strict.refused:
        return "native"
    return "refused" if emulating.refused else "emulated"


if __name__ == "__main__":
    print("\n".join(rows()))
