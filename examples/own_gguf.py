"""A GGUF file of your own. Without an argument, that of the default model is taken.
Run: python examples/own_gguf.py [FILE.gguf]"""

import subprocess
import sys

import sglang_lite as sgl


@sgl.function
def capital(s: sgl.ProgramState, country: str) -> None:
    s += sgl.user(f"What is the capital of {country}?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0))


def main() -> None:
    pull = [sys.executable, "-m", "sglang_lite", "models", "pull", "smollm2-135m"]
    file = sys.argv[1] if sys.argv[1:] else subprocess.check_output(pull, text=True).strip()
    with sgl.Engine(file, dtype="float32") as engine:
        print(file.rpartition("/")[2], "->", capital("France").run(backend=engine)["answer"])


if __name__ == "__main__":
    main()
