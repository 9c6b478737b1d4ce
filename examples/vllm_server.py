"""A program on a vLLM server, which is asked what it is and gets constraints in its own field.
Without an address, a local imitation of a server answers.
Run: pip install 'sglang-lite[openai]' && python examples/vllm_server.py [http://localhost:8000/v1
MODEL]
"""

import sys
from contextlib import nullcontext

import sglang_lite as sgl

code = sgl.gen("code", regex="[A-Z]{2}", max_tokens=8)


@sgl.function
def country_code(s: sgl.ProgramState, country: str) -> None:
    s += sgl.user(f"The two-letter code of {country}?") + sgl.assistant(code)


def main() -> None:
    url, model = sys.argv[1:3] if sys.argv[2:] else ("", "Qwen/Qwen3-8B")
    with nullcontext() if url else sgl.testing.server_for_tests("FR", compatible=True) as imitation:
        client = {"base_url": url, "api_key": "-"} if url else imitation.openai
        backend = sgl.OpenAI(model, profile="vllm", **client)
        state = country_code("France").run(backend=backend)
        print(state[code], "by", state.get_meta_info("code")["strategy"])
        if imitation:
            print(
                "sent:",
                {key: imitation.last[key] for key in ("model", "structured_outputs", "max_tokens")},
            )


if __name__ == "__main__":
    main()
