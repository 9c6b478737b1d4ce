"""LiteLLM by its own package, against a local server. `make test-clients` installs it, as it brings
many packages; elsewhere these tests skip.
"""

import pytest
from api_server import Events
from openai_answers import calling, failure, said, streamed
from pydantic import BaseModel

import sglang_lite as sgl

pytest.importorskip("litellm", reason="litellm is not installed: make test-clients")
pytestmark = pytest.mark.filterwarnings("ignore")  # LiteLLM's own


class City(BaseModel):
    name: str
    people: int


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.fixture
def lite(api):
    return lambda model="openai/gpt-4o", **options: sgl.LiteLLM(
        model, api_key="sk-secret-0123456789", base_url=api.url + "/v1",
        **{"max_retries": 0, "profile": "openai/gpt-4o", **options},
    )  # fmt: skip


def run(backend, stream=False, **options):
    @sgl.function
    def program(s):
        s += sgl.system("Be brief.")
        s += sgl.user("Hi")
        s += sgl.assistant(sgl.gen("a", **options))

    return program.run(backend=backend, stream=stream)


def test_a_request_carries_the_turns_and_only_what_was_set(api, lite):
    api.answers = [said("Hello")]
    state = run(lite(), max_tokens=7, temperature=0)
    assert state["a"] == "Hello"
    assert [turn["role"] for turn in api.last["messages"]] == ["system", "user"]
    assert api.last["temperature"] == 0
    assert 7 in (api.last.get("max_tokens"), api.last.get("max_completion_tokens"))
    assert state.get_meta_info("a")["prompt_tokens"] == 10


def test_schemas_and_tools(api, lite):
    api.answers = [said('{"name": "Paris", "people": 2}')]
    assert run(lite(), type=City)["a"] == City(name="Paris", people=2)
    assert api.last["response_format"]["json_schema"]["strict"] is True
    api.answers = [calling(("c-1", "add", '{"a": 1, "b": 2}'))]
    assert run(lite(), tools=[add])["a"].run() == 3


def test_pieces_are_shown_as_they_come(api, lite):
    api.answers = [streamed("Hel", "lo")]
    state = run(lite(), stream=True)
    assert "".join(state.text_iter("a")) == "Hello"


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (failure(400, "Bad thing"), sgl.BackendError),
        (failure(401, "No key sk-secret-0123456789"), sgl.BackendError),
        (failure(429, "Slow down"), sgl.OverloadedError),
        (failure(500, "Oops"), sgl.BackendError),
        (Events([], end="drop"), sgl.BackendError),
    ],
)
def test_failures_are_ours_and_show_no_key(api, lite, reply, error):
    api.answers = [reply]
    with pytest.raises(error) as caught:
        run(lite())["a"]
    assert "sk-secret-0123456789" not in str(caught.value)
    assert caught.value.origin.provider == "litellm"
