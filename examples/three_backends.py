"""One program on three backends: the local engine, OpenAI and Anthropic. Without a key, a local
imitation of the provider answers, so the program can be tried offline.
Run: pip install 'sglang-lite[local,openai,anthropic]' && python examples/three_backends.py
"""

import os

from pydantic import BaseModel, Field

import sglang_lite as sgl


class City(BaseModel):
    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


city = sgl.gen("city", type=City, max_tokens=60, temperature=0)


@sgl.function
def where(s: sgl.ProgramState, text: str) -> None:
    s += sgl.user("City and country as JSON: The Colosseum in Rome.")
    s += sgl.assistant('{"name": "Rome", "country": "Italy"}')
    s += sgl.user(f"City and country as JSON: {text}") + sgl.assistant(city)


def main() -> None:
    with sgl.testing.server_for_tests('{"name": "Paris", "country": "France"}') as imitation:
        openai = {} if "OPENAI_API_KEY" in os.environ else imitation.openai
        anthropic = {} if "ANTHROPIC_API_KEY" in os.environ else imitation.anthropic
        backends = {
            "engine": None,  # the default backend
            "OpenAI": sgl.OpenAI("gpt-4o-mini", **openai),
            "Anthropic": sgl.Anthropic("claude-haiku-4-5", **anthropic),
        }
        for name, backend in backends.items():
            state = where("The Eiffel Tower in Paris.").run(backend=backend)
            how = state.get_meta_info("city").get("strategy", "masks of the grammar")
            print(f"{name:10} {state[city]!r}  by {how}")


if __name__ == "__main__":
    main()
