"""Runs that wind down, beside what else an engine does: adapters, images, ranks, drafts, replicas
behind one handle.

The oracle is the same generation without a limit: what winds down begins with its tokens, is
shorter, and is marked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import sglang_lite as sgl
from sglang_lite.constraints.schema import json_schema, parse_json
from sglang_lite.program.nodes import Gen, ImagePart, Node, Text
from sglang_lite.protocol import Generation, Played, ProgramResult, Prompt, SamplingParams, Span
from tests.engine.conftest import SETTINGS
from tests.runtime.requests.test_cut import OPEN

LIMIT = 120  # which the context of the smallest model holds
FREE: dict[str, Any] = {"max_tokens": LIMIT, "ignore_eos": True, "temperature": 1.0}
LISTS = json_schema(OPEN, separators=(",", ":"))  # not all of these models have a token of a blank
NO_TIME: dict[str, Any] = {"timeout": 1e-9, "wind_down": 600}


def generation(
    engine: sgl.Engine, prompt: Prompt | str, constraint=None, *, winds_down=False, **params: Any
) -> Generation:
    """A generation; it may wind down from its start."""
    done: Future[Any] = Future()
    ticket = engine.submit(
        prompt, SamplingParams(**{**FREE, **params}), constraint, sink=done.set_result
    )
    if winds_down:
        ticket.wind_down()
    found = done.result(timeout=120)
    assert isinstance(found, Generation), found
    return found


def check_text(engine: sgl.Engine, prompt: Prompt | str, **params: Any) -> None:
    """Checks free text: it is what the model would have given, cut."""
    whole = generation(engine, prompt, **params)
    found = generation(engine, prompt, winds_down=True, **params)
    assert len(whole.token_ids) == LIMIT
    assert 1 <= len(found.token_ids) < LIMIT
    assert found.token_ids == whole.token_ids[: len(found.token_ids)]
    assert found.finish_reason == "length"


def check_json(engine: sgl.Engine, prompt: Prompt | str, **params: Any) -> None:
    """Checks a JSON value: it is closed and marked, and the model wrote all that is in it."""
    for seed in range(4):
        given = {**params, "ignore_eos": False, "seed": seed}
        whole = generation(engine, prompt, LISTS, **given)
        found = generation(engine, prompt, LISTS, winds_down=True, **given)
        value = parse_json(LISTS, found.text)
        if found.text != whole.text:
            assert found.finish_reason == "length"
            assert found.shortened
            if whole.finish_reason == "stop":
                assert value["a"] == json.loads(whole.text)["a"][: len(value["a"])]


def check_program(engine: sgl.Engine, prompt: Prompt | str, **params: Any) -> None:
    """Checks a program that winds down from its start."""
    played: dict[str, Any] = {}
    ended: Future[Any] = Future()

    def sink(event: object) -> None:
        if isinstance(event, Played):
            played[event.name] = event.event
        else:
            ended.set_result(event)

    def gen(name: str, constraint=None) -> Gen:
        return Gen(
            name,
            SamplingParams(**{**FREE, "ignore_eos": constraint is None, "seed": 1, **params}),
            constraint,
        )

    program = engine.open_program(sink=sink)
    program.wind_down()
    program.extend((), [*nodes_of(prompt), gen("text"), Text("y"), gen("list", LISTS), gen("last")])
    program.close()
    end = ended.result(timeout=120)
    assert isinstance(end, ProgramResult), end
    for name in ("text", "last"):
        assert (played[name].finish_reason, played[name].usage.completion_tokens) == ("length", 1)
    parse_json(LISTS, played["list"].text)
    assert played["list"].usage.completion_tokens < LIMIT


def nodes_of(prompt: Prompt | str) -> list[Node]:
    """Nodes that add a prompt's texts and images."""
    if isinstance(prompt, str):
        return [Text(prompt)]
    images = iter(prompt.images)
    return [
        Text(each.text) if each.text != "<image>" else ImagePart(next(images), "<image>")
        for each in prompt.spans
    ]


CHECKS = [check_text, check_json, check_program]


# ----------------------------------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Iterator[sgl.Engine]:
    from tests.runtime.models.test_lora import adapted as saved

    base, reference = saved("llama-2", tmp_path_factory.mktemp("llama"), {"one": {"r": 4}})
    paths = (f"one={reference.folders['one']}",)
    with sgl.Engine(
        str(base), dtype="float32", in_process=True, lora_paths=paths, max_total_tokens=4096
    ) as engine:
        yield engine


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # that peft reads
@pytest.mark.parametrize("check", CHECKS)
def test_a_request_with_an_adapter_winds_down(adapted, check):
    assert generation(adapted, "ab", lora_path=("one",), temperature=0, max_tokens=8).token_ids != (
        generation(adapted, "ab", temperature=0, max_tokens=8).token_ids
    )
    check(adapted, "ab", lora_path=("one",), seed=2)


# ------------------------------------------------------------------------------------------- images


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Iterator[sgl.Engine]:
    from tests.runtime.media.seeing import engine_of, save_seeing

    save_seeing("qwen3_vl", folder := tmp_path_factory.mktemp("seeing"))
    with engine_of(folder) as engine:
        yield engine


@pytest.mark.parametrize("check", CHECKS)
def test_an_answer_about_an_image_winds_down(seeing, check):
    from tests.runtime.media.seeing import png, seen

    before = seeing.stats()["images_encoded"]
    check(seeing, seen("ab", png(40, 30), "cd"), seed=2)
    assert seeing.stats()["images_encoded"] >= before


# ----------------------------------------------------------------------------- processes and drafts

# What differs between engines; each has a model that is cut, copied, or guessed for.
KINDS: dict[str, dict[str, Any]] = {
    "ranks": {"tp_size": 2, "device": "cpu", "dtype": "float32", "threads": 2, "max_total_tokens": 8192},
    "replicas": {**SETTINGS, "dp_size": 2},
    "drafts": {**SETTINGS, "speculation": "prompt", "draft_tokens": 4, "in_process": True},
    "drafts at ranks": {
        "tp_size": 2, "device": "cpu", "dtype": "float32", "threads": 2, "max_total_tokens": 8192, "speculation": "prompt",
        "draft_tokens": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def several(folders, request) -> Iterator[sgl.Engine]:
    with sgl.Engine(folders[0], **KINDS[request.param]) as engine:
        yield engine


@pytest.mark.slow  # processes compute
@pytest.mark.parametrize("check", CHECKS)
def test_ranks_replicas_and_drafts_wind_down(several, check):
    check(several, "ab ab ab ab", seed=2)


@sgl.function
def held(s, text):
    """A program in a grammar, with a fork and a choice."""
    s += text
    with s.grammar(sgl.Regex(r"[a-f]{4,200}(yes|no)[0-9]{1,200}")):
        s += sgl.gen("letters", max_tokens=LIMIT, temperature=1.0, seed=1)
        s += sgl.gen("rest", max_tokens=LIMIT, temperature=1.0, seed=2)
    s += sgl.gen("list", constraint=LISTS, max_tokens=LIMIT, temperature=1.0, seed=3)
    first, second = s.fork(2)
    first += " a " + sgl.gen("more", **FREE, seed=4)
    second += " b " + sgl.select("choice", ["ab", "cd"])
    s += first["more"] + second["choice"]
    s += sgl.gen("last", **FREE, seed=5)
    return [first.get_meta_info("more"), second["choice"]]


def check_held(states: list[sgl.ProgramState], *, is_remote: bool = False) -> None:
    """Checks programs that wound down from their start. The first nodes of a remote one may come to
    their own limits before its server hears of it.
    """
    for state in states:
        assert state.error() is None
        more, choice = state.ret_value
        for meta in (more, state.get_meta_info("last")):
            assert meta["finish_reason"]["type"] == "length"
            assert 1 <= meta["completion_tokens"] < LIMIT + is_remote
        if state.get_meta_info("list")["completion_tokens"] < LIMIT:
            parse_json(LISTS, state["list"])
        else:
            assert is_remote
        assert choice in ("ab", "cd")


@pytest.fixture(scope="module")
def replicas(folders) -> Iterator[sgl.Engine]:
    with sgl.Engine(folders[0], **SETTINGS, dp_size=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(replicas) -> Iterator[sgl.RuntimeEndpoint]:
    from tests.server.conftest import serving

    with serving(replicas) as url:
        backend = sgl.RuntimeEndpoint(url)
        yield backend
        backend.shutdown()


@pytest.mark.slow
def test_programs_in_grammars_wind_down_at_both_replicas_of_an_engine(replicas):
    before = [each["programs_opened"] for each in replicas.stats()["replicas"]]
    states = held.run_batch([{"text": f"{i} "} for i in range(8)], backend=replicas, **NO_TIME)
    check_held(states)
    opened = [each["programs_opened"] for each in replicas.stats()["replicas"]]
    assert all(now > was for now, was in zip(opened, before))


@pytest.mark.slow
def test_programs_in_grammars_wind_down_at_both_replicas_of_a_server(served, replicas):
    before = [each["programs_opened"] for each in replicas.stats()["replicas"]]
    states = held.run_batch([{"text": f"{i} "} for i in range(8)], backend=served, **NO_TIME)
    check_held(states, is_remote=True)
    opened = [each["programs_opened"] for each in replicas.stats()["replicas"]]
    assert all(now > was for now, was in zip(opened, before))


@pytest.mark.slow
def test_a_replica_hears_of_it_that_was_not_chosen_yet(replicas):
    """A program winds down before its first question, so a replica is chosen for it."""
    check: Callable[..., None] = check_program
    for prompt in ("a", "b", "c", "d"):
        check(replicas, prompt)


def test_a_prompt_may_be_given_in_parts(adapted):
    check_text(adapted, Prompt((Span("ab"), Span("cd"))), seed=3)
