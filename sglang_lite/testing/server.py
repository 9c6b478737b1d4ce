"""Local server with the APIs of providers, for tests."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import NoneType
from typing import Any, Final

from sglang_lite.errors import short_repr
from sglang_lite.lang.argument_names import explains_wrong_arguments
from sglang_lite.lang.backend.scripted import Rules
from sglang_lite.protocol import ParameterError, SglError
from sglang_lite.protocol.anything import Foreign, UserValue
from sglang_lite.testing.answers import (
    Answer,
    Buffered,
    Cut,
    Fail,
    Html,
    RenderedAnswer,
    Say,
    Slow,
    convert_to_say,
    render_answer,
)
from sglang_lite.testing.anthropic import Messages, token_count_answer
from sglang_lite.testing.api import ScriptedApi
from sglang_lite.testing.http import Drop, Events, Hold, HttpAnswer, LocalServer, Reply, Request
from sglang_lite.testing.openai_chat import Chat, Completions, OpenAiApi
from sglang_lite.testing.openai_responses import Responses

_APIS: Final[dict[str, ScriptedApi]] = {  # by path suffix; the first match wins
    "/chat/completions": Chat(),
    "/completions": Completions(),
    "/responses": Responses(),
    "/messages": Messages(),
}
_GARBAGE: Final = '{"id": "cut'
_RAW: Final = (Reply, Events, Hold, Drop)
_SCRIPTS: Final = (NoneType, str, Sequence, Mapping, Say, Fail, Cut, Slow, Buffered, Html, *_RAW)


class ServerForTests(LocalServer):
    """Local server with OpenAI's and Anthropic's APIs. Created by `sgl.server_for_tests`.

    Attributes:
        answers: scripted answers, as for `server_for_tests`; may be replaced between requests.
        requests: all requests, in order: `path`, `headers`, `body`.
        last: body of the last request.
        url: base address of the server.
        openai, anthropic: `base_url` and `api_key` as keyword arguments of the SDKs' clients,
            `sgl.OpenAI` and `sgl.Anthropic`.
        hung_up: event, set when a client has disconnected from an answer that never ends.
    """

    def __init__(
        self,
        answers: UserValue,
        models: Sequence[str] | None,
        api_key: str | None,
        seed: int,
        *,
        compatible: bool,
    ) -> None:
        self.answers = answers  # checked before a socket is opened
        super().__init__()
        self._models = models
        self._api_key = api_key
        self._compatible = compatible
        self._random = Random(seed)
        self._numbers = itertools.count(1)

    @property
    def answers(self) -> UserValue:
        return self._answers

    @answers.setter
    def answers(self, answers: UserValue) -> None:
        if isinstance(answers, bytes) or not (isinstance(answers, _SCRIPTS) or callable(answers)):
            raise ParameterError(
                "answers", f"{short_repr(answers)} is not a string, list, mapping or function."
            )
        self._answers = answers
        self._rules = Rules(answers)

    @property
    def openai(self) -> dict[str, Foreign]:
        return {"base_url": f"{self.url}/v1", "api_key": self._api_key or "key-for-tests"}

    @property
    def anthropic(self) -> dict[str, Foreign]:
        return {"base_url": self.url, "api_key": self._api_key or "key-for-tests"}

    def __enter__(self) -> ServerForTests:
        super().__enter__()
        return self

    def answer_request(self, request: Request) -> HttpAnswer:
        """Returns the answer to a request."""
        path = request.path.partition("?")[0].rstrip("/")
        number = next(self._numbers)
        api = next((api for end, api in _APIS.items() if path.endswith(end)), None)
        if request.method == "GET" and "/models" in path:
            return self._answer_models_request(request, path, number)
        if path.endswith("/messages/count_tokens"):
            wrong = self._check_key(request)
            return (
                Reply(token_count_answer(request.body))
                if wrong is None
                else _error_reply(Messages(), wrong, number)
            )
        if api is None or not isinstance(request.body, Mapping):
            what = (
                f"Unknown request URL: {request.method} {path}."
                if api is None
                else "The body is no JSON object."
            )
            return _error_reply(
                api or _guess_provider_api(request), Fail(404 if api is None else 400, what), number
            )
        scripted = self._rules.find_answer(_prompt_for_rules(api, request.body), request)
        if isinstance(scripted, _RAW):
            return scripted
        fault = self._find_refusal(request, api)
        if fault is not None:
            return _error_reply(api, fault, number)
        try:
            return self._render_script(scripted, api, request, number)
        except (SglError, TypeError, StopIteration) as error:
            words = f"server_for_tests can't answer this: {error}"
            return _error_reply(api, Fail(500, words, headers={"x-should-retry": "false"}), number)

    def _find_refusal(self, request: Request, api: ScriptedApi) -> Fail | None:
        """Returns the error for a key, a model or a body that the provider would reject, or None if
        it would accept the request.
        """
        if (wrong := self._check_key(request)) is not None:
            return wrong
        model = request.body.get("model")
        if self._models is not None and model not in self._models:
            return Fail(404, f"The model `{model}` does not exist.", code="model_not_found")
        return api.refusal(request.body, compatible=self._compatible)

    def _check_key(self, request: Request) -> Fail | None:
        headers = {name.lower(): value for name, value in request.headers.items()}
        keys = (
            headers.get("authorization", "").removeprefix("Bearer "),
            headers.get("x-api-key"),
            headers.get("api-key"),
        )
        if self._api_key is None or self._api_key in keys:
            return None
        return Fail(401, "Incorrect API key provided.", code="invalid_api_key")

    def _render_script(
        self, scripted: Answer, api: ScriptedApi, request: Request, number: int
    ) -> HttpAnswer:
        """Converts a scripted answer to the HTTP answer to send."""
        match scripted:
            case Html(status, text):
                return Reply(text, status, {"Content-Type": "text/html"})
            case Fail(after=None):
                return _error_reply(api, scripted, number)
            case Fail(after=after, answer=answer):
                sent = self._render_script(answer, api, request, number)
                if not isinstance(sent, Events):
                    return _error_reply(api, scripted, number)
                return Events(
                    [*itertools.islice(sent.events, after), api.error_event(scripted, number)],
                    "done",
                )
            case Cut(after, how, answer):
                return _cut_reply_short(
                    self._render_script(answer, api, request, number), after, how
                )
            case Slow(seconds, answer):
                return _replace_fields(
                    self._render_script(answer, api, request, number), pause=seconds
                )
            case Buffered(answer):
                sent = self._render_script(answer, api, request, number)
                return _replace_fields(sent, buffered=True) if isinstance(sent, Events) else sent
        return self._render_samples(scripted, api, request, number)

    def _render_samples(
        self, given: Answer, api: ScriptedApi, request: Request, number: int
    ) -> HttpAnswer:
        summary = api.summarize_request(request.body)
        scripted = [given]
        while len(scripted) < summary.n:  # each sample takes the next answer of a list
            scripted.append(self._rules.find_answer(summary.prompt, request))
        answers: list[RenderedAnswer] = [
            render_answer(convert_to_say(each), summary, self._random) for each in scripted
        ]
        headers = {
            "x-request-id": f"req_{number}",
            "request-id": f"req_{number}",
            **answers[0].say.headers,
        }
        if summary.stream:
            return Events(api.events(answers, summary, request.body, number), headers=headers)
        return Reply(api.response(answers, summary, number), headers=headers)

    def _answer_models_request(self, request: Request, path: str, number: int) -> HttpAnswer:
        api = _guess_provider_api(request)
        wrong = self._check_key(request)
        if wrong is not None:
            return _error_reply(api, wrong, number)
        names = list(self._models or ())
        name = path.rpartition("/models")[2].removeprefix("/")
        if name and self._models is not None and name not in names:
            return _error_reply(
                api,
                Fail(404, f"The model `{name}` does not exist.", code="model_not_found"),
                number,
            )
        make = _openai_model if isinstance(api, OpenAiApi) else _anthropic_model
        if name:
            return Reply(make(name))
        data = [make(each).to_dict(mode="json") for each in names]
        pages = {
            "has_more": False,
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }
        return Reply(
            {"object": "list", "data": data}
            if isinstance(api, OpenAiApi)
            else {"data": data, **pages}
        )


def _replace_fields(sent: HttpAnswer, **how: Any) -> HttpAnswer:
    assert isinstance(sent, Events | Reply)
    return replace(sent, **how)


def _prompt_for_rules(api: ScriptedApi, body: Mapping[str, Any]) -> str:
    """Returns the text of a request, which decides its scripted answer. Returns "" if the API can't
    read the body.
    """
    try:
        return api.summarize_request(body).prompt
    except (KeyError, TypeError, AttributeError, StopIteration, SglError):
        return ""


def _cut_reply_short(sent: HttpAnswer, after: int, how: str) -> HttpAnswer:
    if isinstance(sent, Events):
        first_events = list(itertools.islice(sent.events, after))
        return Events([*first_events, _GARBAGE]) if how == "garbage" else Events(first_events, how)
    assert isinstance(sent, Reply)
    if how == "hold":
        return Hold()
    return replace(sent, body=_GARBAGE) if how == "garbage" else replace(sent, cut=True)


def _error_reply(api: ScriptedApi, fail: Fail, number: int) -> Reply:
    names = {"x-request-id": f"req_{number}", "request-id": f"req_{number}"}
    return Reply(api.error_body(fail, number), fail.status, {**names, **fail.headers})


def _guess_provider_api(request: Request) -> ScriptedApi:
    """Guesses a provider's API from the headers of a request. Used if the path doesn't identify the
    API.
    """
    anthropic = any(name.lower() == "anthropic-version" for name in request.headers)
    return _APIS["/messages" if anthropic else "/chat/completions"]


def _openai_model(name: str) -> Any:
    from openai.types import Model

    return Model(id=name, created=0, object="model", owned_by="tests")


def _anthropic_model(name: str) -> Any:
    from anthropic.types import ModelInfo

    created = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return ModelInfo(
        id=name, created_at=created, display_name=name, type="model", lifecycle="active"
    )


@explains_wrong_arguments
def server_for_tests(
    answers: Answer
    | Sequence[Answer]
    | Mapping[UserValue, UserValue]
    | Callable[[Request], Answer] = None,
    *,
    models: Sequence[str] | None = None,
    api_key: str | None = None,
    compatible: bool = False,
    seed: int = 0,
) -> ServerForTests:
    """Creates a local server that answers like OpenAI (chat, responses, completions, models) and
    Anthropic (messages, count_tokens, models), for tests of programs and their error handling
    (docs/testing.md). Use it with `with`.

    Args:
        answers: scripted answers: a text, `Say`, `Fail` or another class of `sglang_lite.testing`;
            a list, whose items answer one request each (the last item repeats); a mapping from
            texts or compiled patterns to answers, in which the key found last in the prompt
            decides; or a function of the request. None answers "ok", or a random text that the
            request's schema or grammar allows.
        models: names of the available models; requests for other models are answered with 404. None
            accepts any model.
        api_key: key that requests must have; other requests are answered with 401. None accepts any
            key.
        compatible: whether to act as a server that is merely compatible: unknown fields are
            accepted, and no model refuses anything. Otherwise a request that doesn't match the
            SDK's types, or that the model's generation doesn't support, is refused with status 400
            and the provider's message.
        seed: seed of random texts.
    """
    return ServerForTests(answers, models, api_key, seed, compatible=compatible)
