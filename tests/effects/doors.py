"""Doors through which a generation is asked for. Each gives an answer in the form of
`Engine.generate`.

A question has sampling parameters by this package's names and, beside them, `prompt`, `regex` and
`json_schema`.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2

import sglang_lite as sgl
from sglang_lite.protocol.sampling import PARAMETERS, parameters_for

PROMPT = "The river runs to the sea. The river runs to the sea. The river runs"
_SGLANG = {each.name: each.sglang for each in PARAMETERS}
_OF_REQUESTS = parameters_for("request")

_RECORDS = {"return_prompt_token_ids", "return_routed_experts", "return_hidden_states"}


def ask_engine(engine: sgl.Engine, *, prompt: str = PROMPT, **given: Any) -> Any:
    """Answer of `Engine.generate`."""
    params, fields = _split(given)
    return engine.generate(prompt, params, **fields)


def ask_server(url: str, *, prompt: str = PROMPT, **given: Any) -> Any:
    """Answer of a server's `/generate`."""
    params, fields = _split(given)
    return _answer(f"{url}/generate", {"text": prompt, "sampling_params": params, **fields})


def ask_completions(url: str, *, prompt: str = PROMPT, **given: Any) -> Any:
    """Answer of a server's `/v1/completions`; a list for several samples."""
    schema = given.pop("json_schema", None)
    form = {"name": "value", "schema": json.loads(schema)} if schema else None
    scored = (
        {"logprobs": given.pop("top_logprobs_num", 0)} if given.pop("return_logprob", False) else {}
    )
    body = {
        **{"no_stop_trim" if name == "include_stop" else name: value for name, value in given.items()}, **scored,
        "prompt": prompt, "return_token_ids": True, "return_meta_info": True,
        **({"response_format": {"type": "json_schema", "json_schema": form}} if form else {}),
    }  # fmt: skip
    answers = [
        {
            "text": choice["text"],
            "output_ids": choice["token_ids"],
            "meta_info": choice["meta_info"],
        }
        for choice in _answer(f"{url}/v1/completions", body)["choices"]
    ]
    return answers if len(answers) > 1 else answers[0]


@sgl.function
def _program(s: sgl.ProgramState, prompt: str, options: dict[str, Any]) -> None:
    s += prompt
    s += sgl.gen("a", **options)


def ask_program(engine: sgl.Engine, *, prompt: str = PROMPT, **given: Any) -> Any:
    """Answer of a `gen` in a program; a list for several samples. Ids are those of the
    log-probabilities, records of tokens those of the run's trajectory.
    """
    # the trajectory that has records needs the ids of the prompt
    recorded = not _RECORDS.isdisjoint(given)
    ids_too = {"return_prompt_token_ids": True} if recorded else {}
    state = _program.run(prompt, {"return_logprob": True, **ids_too, **given}, backend=engine)
    text, meta = state["a"], state.get_meta_info("a") or {}
    if isinstance(text, list):
        return [{"text": each, "output_ids": [], "meta_info": {}} for each in text]
    ids = [each[1] for each in meta.get("output_token_logprobs", ())]
    answer = {"text": text, "output_ids": ids, "meta_info": meta}
    if recorded:
        (sequence,) = state.trajectory().sequences
        prompt_ids = [token for token, drawn in zip(sequence.ids, sequence.loss_mask) if not drawn]
        records = {
            "routed_experts": sequence.routed_experts,
            "hidden_states": sequence.hidden_states,
        }
        return {**answer, "prompt_token_ids": prompt_ids, "meta_info": {**meta, **records}}
    return answer


def _split(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys of SGLang's dictionary, and fields beside it."""
    params = {
        _SGLANG.get(name, name): value for name, value in given.items() if name not in _OF_REQUESTS
    }
    return params, {_SGLANG[name]: value for name, value in given.items() if name in _OF_REQUESTS}


def _answer(url: str, body: dict[str, Any]) -> Any:
    found = httpx2.post(url, json=body, timeout=60)
    if found.status_code == 400:
        raise sgl.ParameterError("body", found.text)
    assert found.status_code == 200, found.text
    return found.json()
