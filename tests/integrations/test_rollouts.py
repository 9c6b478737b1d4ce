"""Rollouts of slime and verl: by slime's own names of a sample's fields, and by verl's classes, or
their fields where it is not installed.
"""

import asyncio
import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pydantic
import pytest

import sglang_lite as sgl
from sglang_lite.integrations.slime import generate_function
from tests.server.conftest import serving

SAMPLING = {
    "temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 5, "stop": None, "stop_token_ids": None,
    "skip_special_tokens": True, "no_stop_trim": True, "spaces_between_special_tokens": False, "sampling_seed": 3,
}  # fmt: skip  # as slime makes them


@sgl.function
def two_turns(s, prompt, label):
    s += prompt + sgl.gen("one") + "\nAgain:" + sgl.gen("two", max_tokens=3)
    return float(s["one"] == label)


@sgl.function
def forked(s, prompt):
    s += prompt
    branches = s.fork(2)
    branches[0] += sgl.gen("one")
    branches[1] += sgl.gen("two")
    branches.join()


@sgl.function
def again(s, prompt):
    tries = []
    s += prompt + sgl.gen(
        "one", regex="[ab]", check=lambda text: (tries.append(text), len(tries) > 1)[1], retries=1
    )


class Sample:
    """Fields of slime.utils.types.Sample that a rollout reads and writes."""

    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    def __init__(self, prompt, label=None):
        self.prompt, self.label, self.metadata = prompt, label, {}
        self.tokens, self.response, self.response_length = [], "", 0
        self.loss_mask = self.rollout_log_probs = self.reward = None
        self.weight_versions: list[str] = []
        self.status = self.Status.PENDING


@pytest.fixture(scope="module")
def address(engine):
    with serving(engine) as url:
        yield url


def slime_args(address):
    host, _, port = address.removeprefix("http://").partition(":")
    return SimpleNamespace(sglang_router_ip=host, sglang_router_port=int(port))


def expected(program, engine, *arguments):
    asked = {
        "return_prompt_token_ids": True,
        "return_logprob": True,
        "temperature": 0,
        "max_new_tokens": 5,
    }
    (sequence,) = program.run(*arguments, backend=engine, **asked).trajectory().sequences
    return sequence


def generated(program, address, sample, **sampling):
    async def generate():
        return await generate_function(program)(
            slime_args(address), sample, {**SAMPLING, **sampling}
        )

    return asyncio.run(generate())


def test_a_sample_of_slimes_has_the_tokens_of_the_run(engine, address):
    right = expected(two_turns, engine, "A cat is", "?")
    found = generated(two_turns, address, Sample("A cat is", label="?"))
    assert tuple(found.tokens) == right.ids
    assert found.response_length == len(right.ids) - right.prompt_len == len(found.loss_mask)
    assert found.loss_mask == list(map(int, right.loss_mask[right.prompt_len :]))
    assert sum(found.loss_mask) == 8
    drawn = [value for value in right.logprobs if value is not None]
    assert [value for value in found.rollout_log_probs if value] == pytest.approx(drawn, abs=1e-3)
    assert (found.status, found.reward) == (Sample.Status.TRUNCATED, 0.0)
    assert found.weight_versions == ["default"] * 2
    texts = two_turns.run("A cat is", "?", backend=engine, temperature=0, max_new_tokens=5)
    assert found.response == texts["one"] + "\nAgain:" + texts["two"]


def test_each_branch_is_a_sample_and_a_rejected_answer_none(address):
    one, two = generated(forked, address, Sample("A cat is"))
    assert one.loss_mask == two.loss_mask[-5:] == [1] * 5
    assert one is not two
    assert one.response
    assert one.response == two.response
    single = generated(again, address, Sample("Say a or b:"), temperature=1.0)
    assert (single.response_length, single.status) == (1, Sample.Status.COMPLETED)


def test_a_run_whose_answers_were_all_rejected_is_aborted(address):
    @sgl.function
    def taken_back(s, prompt):
        with s.checkpoint() as before:
            s += prompt + sgl.gen("one")
            if s["one"] is not None:
                before.rollback()

    found = generated(taken_back, address, Sample("A cat is"))
    assert (found.status, found.response_length) == (Sample.Status.ABORTED, 0)


def test_what_a_run_lacks_or_does_not_know_is_told(address):
    with pytest.raises(sgl.CapabilityError, match=r"custom_params.*--rollout-top-p 1"):
        generated(
            two_turns, address, Sample("A cat"), custom_params={"return_top_p_token_ids": True}
        )
    sample = Sample("A cat")

    @sgl.function
    def other(s, prompt, picture):
        s += sgl.gen()

    with pytest.raises(sgl.ParameterError, match="picture"):
        generated(other, address, sample)


def stubs():
    """verl.experimental.agent_loop.agent_loop, with what a loop uses of it."""

    class AgentLoopMetrics(pydantic.BaseModel):
        generate_sequences: float = 0.0

    class AgentLoopOutput(pydantic.BaseModel, extra="forbid"):
        prompt_ids: list[int]
        response_ids: list[int]
        response_mask: list[int]
        response_logprobs: list[float] | None = None
        reward_score: float | None = None
        num_turns: int = 0
        metrics: AgentLoopMetrics

    class AgentLoopBase:
        def __init__(
            self,
            trainer_config,
            server_manager,
            tokenizer,
            processor,
            dataset_cls,
            data_config,
            **_,
        ):
            self.rollout_config = trainer_config.config.actor_rollout_ref.rollout

    module: Any = ModuleType("verl.experimental.agent_loop.agent_loop")
    module.AgentLoopMetrics, module.AgentLoopOutput = AgentLoopMetrics, AgentLoopOutput
    module.AgentLoopBase = AgentLoopBase
    parents = [
        ModuleType(name) for name in ("verl", "verl.experimental", "verl.experimental.agent_loop")
    ]
    return {each.__name__: each for each in (*parents, module)}


@pytest.fixture
def make_loop(monkeypatch, address):
    """Function that makes a loop of a program, as verl does."""
    for name, module in stubs().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "sglang_lite.integrations.verl", raising=False)
    from sglang_lite.integrations.verl import ProgramAgentLoop

    yield lambda program, longest=64: ProgramAgentLoop(
        program=program, url=address, server_manager=None, tokenizer=None, processor=None, dataset_cls=None,
        data_config=SimpleNamespace(config={}),
        trainer_config=SimpleNamespace(config=SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(response_length=longest)))),
    )  # fmt: skip
    monkeypatch.delitem(sys.modules, "sglang_lite.integrations.verl")


VERL = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "logprobs": True,
    "max_new_tokens": 5,
}


def test_an_output_of_verls_has_the_tokens_of_the_run(engine, make_loop):
    row = {"prompt": "A cat is", "label": "?", "raw_prompt": [], "index": 0}
    right = expected(two_turns, engine, "A cat is", "?")
    found = asyncio.run(make_loop(f"{__name__}.two_turns").run(dict(VERL), **row))
    assert (*found.prompt_ids, *found.response_ids) == right.ids
    assert found.response_mask == list(map(int, right.loss_mask[right.prompt_len :]))
    assert len(found.response_logprobs) == len(found.response_ids)
    assert (found.reward_score, found.num_turns) == (0.0, 4)
    short = asyncio.run(make_loop(f"{__name__}.two_turns", longest=6).run(dict(VERL), **row))
    assert (short.response_ids, len(short.response_mask)) == (found.response_ids[:6], 6)


def test_verl_takes_one_sequence_and_a_program(make_loop):
    with pytest.raises(sgl.CapabilityError, match="2 sequences"):
        asyncio.run(make_loop(f"{__name__}.forked").run(dict(VERL), prompt="A cat is"))
    for path in (f"{__name__}.expected", f"{__name__}.nothing", "forked"):
        with pytest.raises(sgl.ParameterError, match="is not the path of a program"):
            make_loop(path)
