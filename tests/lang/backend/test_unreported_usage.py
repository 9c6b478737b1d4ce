"""Budgets on servers that report no usage, or a wrong one: what a call may have used counts, and a
warning says so.
"""

import re
from itertools import count

import pytest
from api_server import Drop, Events, Reply

import sglang_lite as sgl
from sglang_lite.lang.backend.anthropic import Anthropic
from sglang_lite.lang.backend.openai import OpenAI
from sglang_lite.lang.chat_template import get_chat_template
from sglang_lite.program.choosing import ChoicesDecision
from sglang_lite.protocol import Generation, Selection
from sglang_lite.testing import Html
from sglang_lite.testing.server import ServerForTests

pytestmark = pytest.mark.usefixtures("either_client")

ANSWER = "Paris is the capital of France, and has been so for more than a thousand years."
ROWS, MAX_TOKENS = 40, 32


class Pieces:
    """Tokenizer of the server's model: words in pieces of four letters, and single signs."""

    def encode(self, text):
        return [0] * len(re.findall(r"\w{1,4}|[^\w\s]", text))

    def decode(self, tokens):
        raise NotImplementedError


def tokens(text):
    return len(Pieces().encode(text))


@sgl.function
def ask(s, i):
    s += sgl.system("You know all countries. Answer in one sentence.")
    s += sgl.user(f"Question {i}: what is the capital of France, and since when?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=MAX_TOKENS))


def chat(usage=None, text=ANSWER, finish="stop", **more):
    """A chat completion as it is sent: a mapping, as no type of the SDK is without usage."""
    choice = {
        "index": 0,
        "finish_reason": finish,
        "message": {"role": "assistant", "content": text},
    }
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        **more,
    } | ({} if usage is None else {"usage": usage})


def used(prompt, completion):
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 0}


def chunks(usage=None, text=ANSWER, finish="stop", each=None):
    """The chunks of a streamed chat completion."""

    def chunk(delta, reason=None, **more):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        named = {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [choice],
        }
        return named | ({} if each is None else {"usage": each}) | more

    pieces = [chunk({"content": piece}) for piece in re.findall(r"\s*\S+", text)]
    last = [] if usage is None else [chunk({}, usage=usage) | {"choices": []}]
    return [*pieces, chunk({}, finish), *last, "[DONE]"]


# Of each kind of server: whether it streams, its answer to a prompt of so many tokens, and the
# tokens that it generates.
SERVERS = {
    "no usage": (False, lambda n: Reply(chat()), tokens(ANSWER)),
    "null": (False, lambda n: Reply(chat() | {"usage": None}), tokens(ANSWER)),
    "empty": (False, lambda n: Reply(chat({})), tokens(ANSWER)),
    "zeros": (False, lambda n: Reply(chat(used(0, 0))), tokens(ANSWER)),
    "negative": (False, lambda n: Reply(chat(used(-5, -9))), tokens(ANSWER)),
    "words": (
        False,
        lambda n: Reply(chat({"prompt_tokens": "many", "completion_tokens": "few"})),
        tokens(ANSWER),
    ),
    "prompt only": (False, lambda n: Reply(chat(used(n, 0))), tokens(ANSWER)),
    "completion only": (False, lambda n: Reply(chat(used(0, tokens(ANSWER)))), tokens(ANSWER)),
    "ones": (False, lambda n: Reply(chat(used(1, 1))), tokens(ANSWER)),
    "half": (False, lambda n: Reply(chat(used(n // 2, tokens(ANSWER) // 2))), tokens(ANSWER)),
    "hidden reasoning": (False, lambda n: Reply(chat(text="Paris.", finish="stop")), MAX_TOKENS),
    "no limit kept": (False, lambda n: Reply(chat(text=3 * ANSWER)), tokens(3 * ANSWER)),
    "cut body": (False, lambda n: Reply(chat(used(n, tokens(ANSWER))), cut=True), tokens(ANSWER)),
    "no response": (False, lambda n: Drop(), MAX_TOKENS),
    "page": (False, lambda n: Html(), MAX_TOKENS),
    "stream": (True, lambda n: Events(chunks()), tokens(ANSWER)),
    "stream of nulls": (True, lambda n: Events(chunks(each=None)), tokens(ANSWER)),
    "stream of zeros": (
        True,
        lambda n: Events(chunks(used(0, 0), each=used(0, 0))),
        tokens(ANSWER),
    ),
    "stream that drops": (True, lambda n: Events(chunks()[:9], end="drop"), MAX_TOKENS),
    "stream that counts, and drops": (
        True,
        lambda n: Events(chunks(each=used(n, 9))[:9], end="drop"),
        MAX_TOKENS,
    ),
    "stream that ends early": (True, lambda n: Events(chunks(each=used(n, 9))[:9]), MAX_TOKENS),
    "stream that drops at once": (True, lambda n: Events([], end="drop"), MAX_TOKENS),
    "stream of garbage": (True, lambda n: Events([*chunks()[:5], '{"id": "cut']), MAX_TOKENS),
    "stream with an error": (
        True,
        lambda n: Events([*chunks()[:5], {"error": {"message": "Oh."}}]),
        MAX_TOKENS,
    ),
}
BROKEN = {
    "cut body", "no response", "page", "stream that drops", "stream that counts, and drops", "stream that ends early",
    "stream that drops at once", "stream of garbage", "stream with an error",
}  # fmt: skip


class Meter:
    """Answers of a server, and the tokens that it really uses."""

    def __init__(self, answer, generated):
        self.answer, self.generated, self.used, self.requests = answer, generated, 0, 0

    def __call__(self, request):
        prompt = sum(4 + tokens(message["content"]) for message in request.body["messages"])
        self.requests += 1
        self.used += prompt + self.generated
        return self.answer(prompt)


def played(backend, limit, *, stream, rows=ROWS, program=ask):
    """Plays a batch within a limit. Returns the states and errors of its rows."""
    arguments = [{"i": i} for i in range(rows)]
    if not stream:
        try:
            return program.run_batch(
                arguments, backend=backend, num_threads=1, max_total_tokens=limit
            )
        except sgl.BatchError as error:
            return error.results

    @sgl.function
    def all_in_turn(s):
        for each in arguments:
            inner = program.run(**each, stream=True)
            try:
                list(inner.text_iter())
            except sgl.SglError as error:
                results.append(error)
            else:
                results.append(inner)

    results: list[object] = []
    all_in_turn.run(backend=backend, max_total_tokens=limit).sync()
    return results


@pytest.mark.sampled(6)
@pytest.mark.parametrize("limit", [150, 400, 1200])
@pytest.mark.parametrize("tokenizer", [None, Pieces()], ids=["estimated", "counted"])
@pytest.mark.parametrize("kind", SERVERS)
def test_no_server_takes_more_than_the_limit_and_one_call(api, openai, kind, tokenizer, limit):
    stream, answer, generated = SERVERS[kind]
    meter = api.answers = Meter(answer, generated)
    backend = openai(profile="compatible", tokenizer=tokenizer)
    results = played(backend, limit, stream=stream)
    a_call = 70 if generated == MAX_TOKENS else 100
    assert meter.used <= limit + a_call
    assert 1 <= meter.requests < ROWS
    assert isinstance(results[-1], sgl.BudgetError)
    answered = [each for each in results if isinstance(each, sgl.ProgramState)]
    assert bool(answered) == (kind not in BROKEN)
    for each in answered:
        assert any("usage" in warning for warning in each.get_meta_info("answer")["warnings"])


def test_a_server_that_reports_its_usage_is_believed(api, openai):
    meter = api.answers = Meter(lambda n: Reply(chat(used(n, tokens(ANSWER)))), tokens(ANSWER))
    results = played(openai(profile="compatible"), 1200, stream=False)
    assert 1200 - 100 <= meter.used <= 1200
    assert "warnings" not in results[0].get_meta_info("answer")


def test_a_refused_request_uses_nothing(api, openai):
    numbers = count()

    def busy(n):
        if next(numbers) % 2:
            return Reply({"error": {"message": "busy"}}, 429)
        return Reply(chat(used(n, tokens(ANSWER))))

    api.answers = Meter(busy, tokens(ANSWER))
    results = played(openai(profile="compatible"), 400, stream=False)
    # as many as without the refused ones
    assert sum(isinstance(each, sgl.ProgramState) for each in results) == 5


def test_the_sdks_own_retries_count(api, openai):
    meter = api.answers = Meter(lambda n: Drop(), MAX_TOKENS)
    results = played(openai(profile="compatible", max_retries=1), 320, stream=False, rows=4)
    assert meter.requests == 4  # two of each call
    assert [type(each) for each in results[2:]] == [sgl.BudgetError] * 2


def test_a_server_that_is_not_there_uses_nothing(api, openai):
    backend = openai(profile="compatible", base_url="http://127.0.0.1:9/v1")
    results = played(backend, 150, stream=False)
    assert not any(isinstance(each, sgl.BudgetError) for each in results)


class Silent(ServerForTests):
    """The test server, without the usage in its answers."""

    def answer_request(self, request):
        answer = super().answer_request(request)
        if isinstance(answer, Events):
            return Events(
                [each if isinstance(each, str) else without_usage(each) for each in answer.events]
            )
        return Reply(without_usage(answer.body))


def without_usage(body):
    if hasattr(body, "to_dict"):
        body = body.to_dict(mode="json")
    if not isinstance(body, dict):
        return body
    return {key: without_usage(value) for key, value in body.items() if key != "usage"}


@sgl.function
def text(s, i):
    s += f"The capital of France, number {i}, is" + sgl.gen("answer", max_tokens=MAX_TOKENS)


BACKENDS = {
    "responses": (
        ask,
        lambda url: OpenAI("gpt-5", base_url=f"{url}/v1", api_key="key", api="responses"),
    ),
    "completions": (text, lambda url: OpenAI("davinci-002", base_url=f"{url}/v1", api_key="key")),
    "messages": (ask, lambda url: Anthropic("claude-opus-5", base_url=url, api_key="key")),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_api(name, stream):
    program, connect = BACKENDS[name]
    with Silent(ANSWER, None, None, 0, compatible=False) as api:
        backend = connect(api.url)
        results = played(backend, 400, stream=stream, program=program)
        backend.shutdown()
    assert isinstance(results[-1], sgl.BudgetError)
    assert 3 <= len(api.requests) <= 400 // MAX_TOKENS
    assert any("usage" in warning for warning in results[0].get_meta_info("answer")["warnings"])


# ---------------------------------------------------------------------------- other backends, nodes


class Hooks(sgl.BaseBackend):
    """A backend with SGLang's hooks, which report no usage."""

    def generate(self, s, sampling_params):
        return ANSWER, {}

    def select(self, s, choices, temperature, choices_method):
        return ChoicesDecision(choices[0])


class Native(sgl.BaseBackend):
    """A backend of a user's own, which reports no usage."""

    def __init__(self):
        super().__init__()
        self.chat_template = get_chat_template("default")

    async def agenerate(self, prompt, params, constraint, *, stream):
        yield Generation(ANSWER)

    async def aselect(self, prompt, choices, *, unconditional):
        return Selection((), picked=choices[0])


@sgl.function
def choose(s, i):
    s += sgl.user(f"Question {i}: what is the capital of France, and since when?")
    s += sgl.assistant(sgl.select("answer", ["Paris", "Rome"]))


@pytest.mark.parametrize("program", [ask, choose], ids=["gen", "select"])
@pytest.mark.parametrize("backend", [Hooks(), Native()], ids=["hooks", "native"])
def test_backends_of_users(backend, program):
    results = played(backend, 400, stream=False, program=program)
    done = [each for each in results if isinstance(each, sgl.ProgramState)]
    assert 3 <= len(done) <= 15
    assert all(isinstance(each, sgl.BudgetError) for each in results[len(done) :])
    assert any("usage" in warning for warning in done[0].get_meta_info("answer")["warnings"])


class Failing(Native):
    async def agenerate(self, prompt, params, constraint, *, stream):
        raise sgl.BackendError("the connection was lost.")
        yield


def test_an_error_without_a_usage_keeps_its_reservation():
    results = played(Failing(), 400, stream=False)
    assert [type(each) for each in results] == [sgl.BackendError] * 4 + [sgl.BudgetError] * (
        ROWS - 4
    )


def test_every_call_of_a_node_counts(api, openai):
    """Emulated constraints ask up to three times."""
    meter = api.answers = Meter(lambda n: Reply(chat(text="No number at all.")), MAX_TOKENS)

    @sgl.function
    def number(s, i):
        s += sgl.user(f"Question {i}: how many people live in France?")
        s += sgl.assistant(sgl.gen("answer", regex="[0-9]+", max_tokens=MAX_TOKENS))

    results = played(
        openai(profile="compatible", policy="emulate"), 600, stream=False, program=number
    )
    assert isinstance(results[-1], sgl.BudgetError)
    assert meter.requests % 3 == 0
    assert meter.used <= 600 + 3 * 110  # one node's calls


def test_the_calls_of_a_fallback_count(api, openai):
    meter = api.answers = Meter(lambda n: Drop(), MAX_TOKENS)
    backend = sgl.Fallback([openai(profile="compatible"), sgl.ScriptedBackend(default="Paris")])
    results = played(backend, 600, stream=False)
    assert isinstance(results[-1], sgl.BudgetError)
    assert meter.used <= 600 + 100
