"""What shows the effect of each route of a server: its answer, or what it has changed."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from sglang_lite.engine import weights
from sglang_lite.protocol import SglError
from tests.effects.fields.case import Answer

TOKEN = "page"  # of the playground
GREEDY = {"temperature": 0, "max_new_tokens": 4}
QUESTION = {"type": "predicate", "instructions": "Is it short?"}
USER = [{"role": "user", "content": "x"}]
WEIGHT = "model.norm.weight"


@dataclass(frozen=True)
class Client:
    """Client of a server.

    Attributes:
        url: its address.
        engine: its engine.
    """

    url: str
    engine: Any

    def __call__(
        self, path: str, body: object = None, method: str = "POST", **options: Any
    ) -> Answer:
        """Answer to a request; 404 and 405 are failures of the test."""
        found = httpx2.request(method, self.url + path, json=body, timeout=60, **options)
        assert found.status_code not in (404, 405), found.text
        return Answer(found.status_code, found.headers, found.text)

    def get(self, path: str, **options: Any) -> Answer:
        return self(path, None, "GET", **options)


Shows = Callable[[Client], bool]
ROUTES: dict[str, tuple[str, Shows]] = {}


def route(names: str, server: str = "bytes") -> Callable[[Shows], Shows]:
    """Adds a case, which the function that follows is.

    Args:
        names: method and path of a route, or of several with the same effect.
        server: engine that answers (conftest.py).
    """

    def add(shows: Shows) -> Shows:
        for name in names.split(", "):
            ROUTES[name] = (server, shows)
        return shows

    return add


def answers(
    names: str, body: Mapping[str, Any] | None, path: str, server: str = "bytes", **query: Any
) -> None:
    """Adds cases of routes whose answer has something at a place.

    Args:
        body: what is sent.
        path: the place, as of `Answer.get`.
    """
    for name in names.split(", "):
        method, address = name.split(" ")

        def shows(client: Client, method: str = method, address: str = address) -> bool:
            found = client(address, body, method, **query)
            return found.status == 200 and found.get(path) not in (None, "", [], {}, 0)

        ROUTES[name] = (server, shows)


def empty(names: str, **query: Any) -> None:
    """Adds cases of routes whose answer is status 200 without a body, as polls expect it."""
    for name in names.split(", "):
        method, address = name.split(" ")

        def shows(client: Client, method: str = method, address: str = address) -> bool:
            found = client(address, None, method, **query)
            return (found.status, found.text) == (200, "")

        ROUTES[name] = ("bytes", shows)


answers("POST /generate, PUT /generate", {"text": "ab", "sampling_params": GREEDY}, "output_ids.3")
empty("GET /health, GET /ready, GET /ping, HEAD /, GET /health_generate")
answers("GET /version", None, "version")
answers("GET /model_info, GET /get_model_info", None, "max_model_len")
answers("GET /server_info, GET /get_server_info", None, "sglang_lite.program")
answers("GET /internal_state", None, "internal_states.0.total_tokens")
answers("GET /v1/loads", None, "loads.0.max_running_requests")
answers("POST /tokenize, POST /v1/tokenize", {"prompt": "abc"}, "tokens.2")
answers("POST /detokenize, POST /v1/detokenize", {"tokens": [66, 67]}, "text")
answers(
    "POST /separate_reasoning",
    {"text": "<think>a</think>b", "reasoning_parser": "qwen3"},
    "reasoning_text",
)
answers("POST /parse_function_call", {
    "text": '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', "tool_call_parser": "qwen25",
    "tools": [{"type": "function", "function": {"name": "add"}}],
}, "calls.0.name")  # fmt: skip
answers(
    "POST /v1/chat/completions, POST /invocations",
    {"messages": USER, "max_tokens": 4},
    "usage.completion_tokens",
)
answers("POST /v1/completions", {"prompt": "x", "max_tokens": 4}, "usage.completion_tokens")
answers("POST /v1/messages", {"messages": USER, "max_tokens": 4}, "usage.output_tokens")
answers("POST /v1/messages/count_tokens", {"messages": USER}, "input_tokens")
answers("POST /v1/responses", {"input": "x", "max_output_tokens": 4}, "usage.output_tokens")
answers("POST /v1/responses/input_tokens", {"input": "x"}, "input_tokens")
answers(
    "POST /v1/decisions",
    {"model": "", "input": "x", "questions": [QUESTION]},
    "answers.0.probability",
)
answers("POST /v1/score", {"prompt": "ab", "continuations": ["c"]}, "scores.0.logprob")
answers("POST /v1/embeddings", {"input": "the sea"}, "data.0.embedding.0", "embedder")
answers("POST /encode", {"text": "the sea"}, "embedding.0", "embedder")
answers(
    "POST /v1/rerank, POST /rerank",
    {"query": "a", "documents": ["b"]},
    "results.0.relevance_score",
    "reranker",
)
answers("POST /classify, POST /v1/classify", {"input": "the sea"}, "data.0.label", "classifier")
answers("POST /pooling", {"input": "the sea"}, "data.0.data.0", "pooler")
answers(
    "POST /vertex_generate",
    {"instances": [{"text": "ab"}], "parameters": {"sampling_params": GREEDY}},
    "predictions.0.text",
)
answers(
    "POST /api/chat",
    {"model": "", "messages": USER, "stream": False, "options": {"num_predict": 4}},
    "eval_count",
)
answers(
    "POST /api/generate",
    {"model": "", "prompt": "x", "stream": False, "options": {"num_predict": 4}},
    "eval_count",
)
answers("GET /api/tags, GET /api/ps", None, "models.0.digest")
answers("POST /api/show", {"model": "served"}, "template")
answers("GET /api/version", None, "version")
answers("POST /api/embed", {"model": "", "input": "the sea"}, "embeddings.0.0", "embedder")
answers("POST /api/embeddings", {"model": "", "prompt": "the sea"}, "embedding.0", "embedder")
answers("GET /v1/models", None, "data.0.id")
answers("GET /openapi.json", None, "paths")
answers(
    "POST /playground/run", {"turns": [{"role": "user", "kind": "gen", "max_tokens": 2}]}, "data",
    headers={"x-token": TOKEN},
)  # fmt: skip
answers(
    "POST /playground/check", {"kind": "regex", "text": "a+"}, "rules", headers={"x-token": TOKEN}
)


@route("GET /")
def is_a_page(client: Client) -> bool:
    return "<html" in client.get(f"/?token={TOKEN}").text


@route("GET /v1/models/{model:path}")
def describes_a_model(client: Client) -> bool:
    return bool(client.get("/v1/models/served").get("id") == "served")


@route("GET /get_load")
def counts_in_short(client: Client) -> bool:
    return client.get("/get_load").body[0]["num_reqs"] == 0


@route("GET /metrics")
def has_counts(client: Client) -> bool:
    return "num_running_reqs" in client.get("/metrics").text


def _forgets(client: Client, method: str) -> bool:
    """Whether a prompt that was cached is computed again."""
    body = {"text": "abcdefgh", "sampling_params": GREEDY}
    client("/generate", body)
    client("/flush_cache", None, method)
    return bool(client("/generate", body).get("meta_info.cached_tokens") == 0)


ROUTES["GET /flush_cache"] = ("bytes", lambda client: _forgets(client, "GET"))
ROUTES["POST /flush_cache"] = ("bytes", lambda client: _forgets(client, "POST"))


def _freezes(client: Client, method: str) -> bool:
    """Whether objects of the server, which is in this process, are frozen."""
    before = gc.get_freeze_count()
    kept: list[list[object]] = [[] for _ in range(1000)]  # objects, of any kind
    client("/freeze_gc", None, method)
    frozen = gc.get_freeze_count() - before
    gc.unfreeze()  # for the tests that follow
    return frozen >= len(kept)


ROUTES["GET /freeze_gc"] = ("bytes", lambda client: _freezes(client, "GET"))
ROUTES["POST /freeze_gc"] = ("bytes", lambda client: _freezes(client, "POST"))


@route("POST /abort_request")
def ends_a_request(client: Client) -> bool:
    body = {
        "text": "a",
        "rid": "r",
        "stream": True,
        "sampling_params": {"max_new_tokens": 300, "ignore_eos": True},
    }
    with httpx2.stream("POST", f"{client.url}/generate", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        client("/abort_request", {"rid": "r"})
        text = "".join(lines)
    return "abort" in text


@route("POST /configure_logging")
def changes_the_log(client: Client) -> bool:
    log = logging.getLogger()
    before = log.level
    try:
        client("/configure_logging", {"log_level": "error"})
        return log.level == logging.ERROR
    finally:
        log.setLevel(before)


@route("POST /open_session, POST /close_session")
def opens_and_closes(client: Client) -> bool:
    name = client("/open_session", {"capacity_of_str_len": 100}).body
    found = client(
        "/generate", {"text": "ab", "sampling_params": GREEDY, "session_params": {"id": name}}
    )
    client("/close_session", {"session_id": name})
    again = httpx2.post(f"{client.url}/close_session", json={"session_id": name})
    return (found.status, again.status_code) == (200, 404)


def _profiles(client: Client, start: str, stop: str) -> bool:
    assert client("/start_profile", None, start).get("success")
    try:
        return bool(client("/stop_profile", None, stop).get("path"))
    finally:
        with contextlib.suppress(SglError):  # where the route is taken out, the profile still runs
            client.engine.stop_profile()


for start, stop in (("GET", "POST"), ("POST", "GET")):
    for name in (f"{start} /start_profile", f"{stop} /stop_profile"):
        ROUTES[name] = (
            "bytes",
            lambda client, start=start, stop=stop: _profiles(client, start, stop),
        )


def _records(client: Client, method: str) -> bool:
    for action in ("start", "stop"):
        assert client(f"/{action}_expert_distribution_record", None, method).get("success")
    return "logical_count" in client("/dump_expert_distribution_record", None, method).body


for action in ("start", "stop", "dump"):
    for each in ("GET", "POST"):
        ROUTES[f"{each} /{action}_expert_distribution_record"] = (
            "mixture", lambda client, each=each: _records(client, each)
        )  # fmt: skip


# ------------------------------------------------------------------------------------------ weights


@route(
    "POST /release_memory_occupation, POST /resume_memory_occupation, GET /is_sleeping", "keeper"
)
def gives_memory_back(client: Client) -> bool:
    return _sleeps(client, "/release_memory_occupation", "/resume_memory_occupation")


@route("POST /sleep, POST /wake_up", "keeper")
def sleeps_and_wakes(client: Client) -> bool:
    return _sleeps(client, "/sleep", "/wake_up")


def _sleeps(client: Client, sleep: str, wake: str) -> bool:
    try:
        client(sleep)
        asleep = client.get("/is_sleeping").body["is_sleeping"]
        client(wake)
        return [asleep, client.get("/is_sleeping").body["is_sleeping"]] == [True, False]
    finally:
        with contextlib.suppress(SglError):  # where a route is taken out, the engine still sleeps
            weights.resume_memory_occupation(client.engine)


@route("POST /update_weights_from_disk", "keeper")
def reads_weights(client: Client) -> bool:
    body = {"model_path": client.engine.config.model, "weight_version": "disk"}
    client("/update_weights_from_disk", body)
    return _version(client) == "disk"


@route("POST /update_weights_from_tensor", "keeper")
def takes_a_tensor(client: Client) -> bool:
    import torch
    from safetensors.torch import save

    old = torch.tensor(_tensor(client))
    data = base64.b64encode(save({WEIGHT: old + 1})).decode()
    client("/update_weights_from_tensor", {"serialized_named_tensors": [data]})
    new = torch.tensor(_tensor(client))
    data = base64.b64encode(save({WEIGHT: old})).decode()
    client("/update_weights_from_tensor", {"serialized_named_tensors": [data]})
    return torch.equal(new, old + 1)


@route("POST /update_weight_version", "keeper")
def names_weights(client: Client) -> bool:
    client("/update_weight_version", {"new_version": "named", "abort_all_requests": False})
    return _version(client) == "named"


def _version(client: Client) -> str:
    return str(client.get("/model_info").get("weight_version"))


def _tensor(client: Client, method: str = "POST") -> list[float]:
    found: list[float] = client(
        "/get_weights_by_name", {"name": WEIGHT, "truncate_size": 64}, method
    ).body
    return found


ROUTES["GET /get_weights_by_name"] = ("keeper", lambda client: len(_tensor(client, "GET")) == 64)
ROUTES["POST /get_weights_by_name"] = ("keeper", lambda client: len(_tensor(client)) == 64)


@route("POST /weights_checker", "keeper")
def compares_weights(client: Client) -> bool:
    client("/weights_checker", {"action": "snapshot"})
    return bool(client("/weights_checker", {"action": "compare"}).get("success"))


@route("POST /pause_generation, POST /continue_generation", "keeper")
def waits(client: Client) -> bool:
    try:
        paused = client("/pause_generation", {"mode": "retract"}).body
        return "num_paused_requests" in paused and client("/continue_generation").status == 200
    finally:
        # where the route is taken out, the engine still waits
        weights.continue_generation(client.engine)


@route("POST /begin_weight_update, POST /end_weight_update", "keeper")
def ends_what_has_begun(client: Client) -> bool:
    try:
        begun = bool(client("/begin_weight_update", {}).get("success"))
        ended = bool(client("/end_weight_update", {}).get("success"))
        return begun and ended and client("/end_weight_update", {}).status == 400
    finally:
        with contextlib.suppress(SglError):  # where a route is taken out, the update is still open
            weights.end_update(client.engine)


def refuses(names: str, body: Mapping[str, Any], word: str) -> None:
    """Adds cases of routes that need another process: they say what is wrong with what they get."""
    for name in names.split(", "):
        method, address = name.split(" ")

        def shows(client: Client, method: str = method, address: str = address) -> bool:
            found = client(address, body, method)
            return found.status in (200, 400, 501) and word in found.text

        ROUTES[name] = ("keeper", shows)


GROUP = {"master_address": "127.0.0.1", "group_name": "g"}
refuses(
    "POST /init_weights_update_group",
    {**GROUP, "master_port": 1, "rank_offset": 5, "world_size": 2},
    "backend",
)
refuses(
    "POST /update_weights_from_distributed",
    {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g"},
    "g",
)
refuses("POST /destroy_weights_update_group", {"group_name": "absent"}, "absent")
refuses(
    "POST /init_weights_send_group_for_remote_instance",
    {**GROUP, "ports": "1", "group_rank": 9, "world_size": 2},
    "rank",
)
refuses(
    "POST /send_weights_to_remote_instance",
    {"master_address": "127.0.0.1", "ports": "1", "group_name": "g"},
    "g",
)


# ---------------------------------------------------------------------------------------- responses


def _made(client: Client) -> str:
    return str(client("/v1/responses", {"input": "before", "max_output_tokens": 2}).get("id"))


@route("GET /v1/responses/{id}")
def finds_a_response(client: Client) -> bool:
    return bool(client.get(f"/v1/responses/{_made(client)}").get("usage"))


@route("DELETE /v1/responses/{id}")
def forgets_a_response(client: Client) -> bool:
    name = _made(client)
    client(f"/v1/responses/{name}", None, "DELETE")
    return httpx2.get(f"{client.url}/v1/responses/{name}").status_code == 404


@route("POST /v1/responses/{id}/cancel")
def refuses_to_cancel_what_has_ended(client: Client) -> bool:
    return client(f"/v1/responses/{_made(client)}/cancel").status in (200, 400)


@route("GET /v1/responses/{id}/input_items")
def lists_items(client: Client) -> bool:
    return "before" in client.get(f"/v1/responses/{_made(client)}/input_items").text


@route("POST /v1/responses/compact")
def says_what_else_to_do(client: Client) -> bool:
    return "summary" in client("/v1/responses/compact", {}).text


# ------------------------------------------------------------------------------ programs and others


@route("POST /load_lora_adapter, POST /unload_lora_adapter", "mixture")
def loads_and_unloads(client: Client) -> bool:
    folder = client.engine.config.lora_paths[0].split("=", 1)[1]
    client("/load_lora_adapter", {"lora_name": "two", "lora_path": folder})
    there = "two" in client.get("/v1/models").text
    client("/unload_lora_adapter", {"lora_name": "two"})
    return there and "two" not in client.get("/v1/models").text


@route("POST /load_lora_adapter_from_tensors", "mixture")
def loads_what_it_is_sent(client: Client) -> bool:
    folder = Path(client.engine.config.lora_paths[0].split("=", 1)[1])
    data = base64.b64encode((folder / "adapter_model.safetensors").read_bytes()).decode()
    config = json.loads((folder / "adapter_config.json").read_text())
    body = {"lora_name": "three", "config_dict": config, "serialized_named_tensors": [data]}
    client("/load_lora_adapter_from_tensors", body)
    there = "three" in client.get("/v1/models").text
    client("/unload_lora_adapter", {"lora_name": "three"})
    return there


@route("POST /v1/audio/transcriptions, POST /v1/audio/translations", "whisper")
def writes_down(client: Client) -> bool:
    from tests.media_files import wav

    found = [
        httpx2.post(
            f"{client.url}/v1/audio/{kind}", files={"file": ("a.wav", wav(1.3).data)}, timeout=60
        )
        for kind in ("transcriptions", "translations")
    ]
    return all(each.status_code == 200 and each.json()["text"] for each in found)


def _program(**fields: Any) -> dict[str, Any]:
    """Body with a program that generates two tokens."""
    written = {"max_tokens": 2, "temperature": 0.0}
    nodes = [{"kind": "Text", "text": "ab"}, {"kind": "Gen", "name": "a", "params": written}]
    return {"version": 1, "prompt": "", "program": {"nodes": nodes}, **fields}


@route("POST /program")
def plays_a_program(client: Client) -> bool:
    return bool(client("/program", _program()).get("usage.completion_tokens") == 2)


@route("POST /program/{id}/answer")
def extends_a_program(client: Client) -> bool:
    body = _program(open=True, stream=True)
    with httpx2.stream("POST", f"{client.url}/program", json=body, timeout=60) as stream:
        name = stream.headers["x-program-id"]
        more = {"path": [], "nodes": [{"kind": "Gen", "name": "b", "params": {"max_tokens": 3}}]}
        client(f"/program/{name}/answer", {"version": 1, "answers": [more], "close": True})
        return '"b"' in "".join(stream.iter_lines())


@route("POST /program/rows")
def says_what_sends_rows(client: Client) -> bool:
    return "run_batch" in client("/program/rows", {}).text
