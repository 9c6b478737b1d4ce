"""Fields that are served and have no effect: each is reported, or refused where its provider
refuses it. Where it has an effect, nothing is reported.
"""

import contextlib
import dataclasses

import anthropic
import httpx2
import openai
import pytest

from tests.server.conftest import serving
from tests.server.scripted import Scripted

USER: list = [{"role": "user", "content": "a"}]
NAMED: list = [
    {"role": "user", "content": "a", "name": "ann"}, {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c", "name": "bob"},
]  # fmt: skip
CALLED: list = [
    {**USER[0], "name": "ann"},
    {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
]
# A template that reads what the model of these tests has no use for.
SHOWS = (
    "{% set enable_thinking = enable_thinking if enable_thinking is defined else true %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.name }}{{ m.content }}{% endfor %}"
    "{% if enable_thinking %}effort={{ reasoning_effort }}{% endif %}"
)
# As many do: only the results of tools have a name, and they must have one.
OF_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if not m.name %}{{ raise_exception('no name') }}{% endif %}{{ m.name }}{% endif %}{{ m.content }}{% endfor %}"
)


class Clients:
    """The official clients of a server."""

    def __init__(self, url):
        self._openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._anthropic = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        self._http = httpx2.Client(base_url=url, timeout=60)

    def unused(self, door, **options):
        """What the answer to a request reports, or None."""
        return getattr(self, f"_{door}")(options).headers.get("x-unused-fields")

    def _chat(self, options):
        options = {"model": "", "messages": USER, "max_tokens": 1, **options}
        return self._openai.chat.completions.with_raw_response.create(**options)

    def _completions(self, options):
        options = {"model": "", "prompt": "a", "max_tokens": 1, **options}
        return self._openai.completions.with_raw_response.create(**options)

    def _responses(self, options):
        options = {"model": "", "input": "a", "max_output_tokens": 1, **options}
        return self._openai.responses.with_raw_response.create(**options)

    def _input_tokens(self, options):
        return self._openai.responses.input_tokens.with_raw_response.count(
            model="", input="a", **options
        )

    def _messages(self, options):
        options = {"model": "", "messages": USER, "max_tokens": 1, **options}
        return self._anthropic.messages.with_raw_response.create(**options)

    def _count_tokens(self, options):
        return self._anthropic.messages.with_raw_response.count_tokens(
            model="", messages=USER, **options
        )

    def _generate(self, options):
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1}, **options}
        return self._http.post("/generate", json=body).raise_for_status()

    def close(self):
        for each in (self._openai, self._anthropic, self._http):
            each.close()


@contextlib.contextmanager
def clients_of(engine):
    with serving(engine) as url, contextlib.closing(Clients(url)) as clients:
        yield clients


@pytest.fixture(scope="module")
def plain(url):
    """Of a server whose template reads no variables and no names, and whose policy ignores
    priorities.
    """
    with contextlib.closing(Clients(url)) as clients:
        yield clients


@pytest.fixture(scope="module")
def shows(engine):
    """Of a server whose template reads all, and whose policy heeds priorities."""
    fake = Scripted(engine, ["b"], template=SHOWS)
    fake.config = dataclasses.replace(engine.config, policy="priority")
    with clients_of(fake) as clients:
        yield clients


def extra(**fields):
    return {"extra_body": fields}


BY_MODEL = [  # where a field depends on the template or the policy
    ("chat", extra(priority=1), "priority"),
    ("completions", extra(priority=-1), "priority"),
    ("responses", extra(priority=1), "priority"),
    ("chat", {"reasoning_effort": "low"}, "reasoning_effort"),
    ("chat", {"reasoning_effort": "low", "stream": True}, "reasoning_effort"),
    ("chat", {"reasoning_effort": "none"}, "reasoning_effort"),
    (
        "chat",
        extra(chat_template_kwargs={"enable_thinking": True}),
        "chat_template_kwargs.enable_thinking",
    ),
    ("chat", {"messages": NAMED}, "messages[0].name, messages[2].name"),
    ("responses", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ("input_tokens", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ("messages", {"thinking": {"type": "disabled"}}, "thinking.type"),
    ("messages", {"thinking": {"type": "adaptive"}}, "thinking.type"),
    ("messages", {"output_config": {"effort": "low"}}, "output_config.effort"),
    ("messages", {"output_config": {"effort": "low"}, "stream": True}, "output_config.effort"),
    ("count_tokens", {"output_config": {"effort": "low"}}, "output_config.effort"),
]


@pytest.mark.parametrize(("door", "options", "unused"), BY_MODEL)
def test_a_field_is_reported_where_the_model_or_the_policy_has_no_use_for_it(
    plain, door, options, unused
):
    assert plain.unused(door, **options) == unused


@pytest.mark.parametrize(("door", "options", "unused"), BY_MODEL)
def test_and_nowhere_else(shows, door, options, unused):
    assert shows.unused(door, **options) is None


@pytest.mark.parametrize(("door", "options", "unused"), [
    ("generate", {"priority": 1}, "priority"),
    ("generate", {"text": ["a", "b"], "priority": [0, 1]}, "priority"),
    ("generate", {"top_logprobs_num": 2}, "top_logprobs_num"),
    ("generate", {"logprob_start_len": 0}, "logprob_start_len"),
    ("generate", {"token_ids_logprob": [0]}, "token_ids_logprob"),
    ("generate", {"return_text_in_logprobs": True}, "return_text_in_logprobs"),
    ("generate", {"text": ["a", "b"], "return_logprob": [True, False], "top_logprobs_num": [2, 3]},
     "top_logprobs_num[1]"),
    ("generate", {"text": ["a", "b"], "return_logprob": [True, False], "token_ids_logprob": [[5], [6]]},
     "token_ids_logprob[1]"),
    ("generate", {"text": ["a", "b"], "return_logprob": False, "top_logprobs_num": [2, 0]}, "top_logprobs_num"),
    ("chat", {"verbosity": "low"}, "verbosity"),
    ("chat", {"verbosity": "high", "stream": True}, "verbosity"),
    ("responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
    ("input_tokens", {"text": {"verbosity": "low"}}, "text.verbosity"),
])  # fmt: skip
def test_a_field_without_effect_is_reported(plain, door, options, unused):
    assert plain.unused(door, **options) == unused


@pytest.mark.parametrize(("door", "options"), [
    ("chat", extra(priority=0)),
    ("chat", {"verbosity": "medium"}),
    ("chat", extra(chat_template_kwargs={})),
    ("chat", {"logprobs": True, "top_logprobs": 2}),
    ("chat", {"stream": True, "stream_options": {"include_usage": True}}),
    ("responses", {"text": {"verbosity": "medium"}}),
    ("generate", {"priority": 0}),
    ("generate", {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "token_ids_logprob": [],
                  "return_text_in_logprobs": False}),
    ("generate", {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [0],
                  "return_text_in_logprobs": True}),
    ("generate", {"text": ["a", "b"], "return_logprob": [True, False], "top_logprobs_num": 2}),
])  # fmt: skip
def test_what_requests_nothing_or_has_its_effect_is_not(plain, door, options):
    assert plain.unused(door, **options) is None


@pytest.mark.parametrize(("door", "options", "parameter"), [
    ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("responses", {"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ("chat", {"top_logprobs": 2}, "top_logprobs"),
    ("responses", {"top_logprobs": 2}, "top_logprobs"),
    ("chat", {"verbosity": "loud"}, "verbosity"),
])  # fmt: skip
def test_what_the_provider_refuses_is_refused(plain, door, options, parameter):
    with pytest.raises(openai.BadRequestError) as raised:
        plain.unused(door, **options)
    assert raised.value.body["param"] == parameter


def test_a_field_that_another_one_overrides_is_reported(shows):
    kwargs = {"reasoning_effort": "high"}
    assert (
        shows.unused("chat", reasoning_effort="low", **extra(chat_template_kwargs=kwargs))
        == "reasoning_effort"
    )


def test_names_are_reported_by_role(engine):
    with clients_of(Scripted(engine, ["b"], template=OF_TOOLS)) as clients:
        assert clients.unused("chat", messages=CALLED) == "messages[0].name"
