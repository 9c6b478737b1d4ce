"""A model of the Hugging Face hub: fetched once, then used from its cache, also offline.
Run: python examples/hub_model.py [OWNER/NAME]"""

import sys

import sglang_lite as sgl


@sgl.function
def capital(s: sgl.ProgramState, country: str) -> None:
    s += sgl.user(f"What is the capital of {country}?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))


def main() -> None:
    model = sys.argv[1] if sys.argv[1:] else "HuggingFaceTB/SmolLM2-135M-Instruct"
    with sgl.Engine(model, dtype="float32") as engine:
        print(model, "->", capital("France").run(backend=engine)["answer"])


if __name__ == "__main__":
    main()
