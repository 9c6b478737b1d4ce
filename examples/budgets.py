"""Budgets: a run stops before a call that could cost too much, and keeps what it has paid for.
Run: pip install 'sglang-lite[openai]' && python examples/budgets.py"""

import os

import sglang_lite as sgl


@sgl.function
def essay(s: sgl.ProgramState, topic: str) -> None:
    s += sgl.user(f"Write about {topic}, a paragraph at a time.")
    for i in range(8):
        s += sgl.assistant(sgl.gen(f"paragraph{i}", max_tokens=60)) + sgl.user("Continue.")


def main() -> None:
    with sgl.testing.server_for_tests(
        "The sea is large and old. It moves with the moon."
    ) as imitation:
        backend = sgl.OpenAI(
            "gpt-4o-mini", **({} if "OPENAI_API_KEY" in os.environ else imitation.openai)
        )
        for limit in (400, 4000):
            state = essay("the sea").run(backend=backend, max_total_tokens=limit)
            error = state.error()
            if isinstance(error, sgl.BudgetError):
                state = error.state  # what is paid for is kept
            used = state.trace().usage
            print(
                f"{limit}: {type(error).__name__ if error else 'finished'}, begins: {state['paragraph0']}"
            )
            print(
                f"    {used.prompt_tokens} + {used.completion_tokens} tokens, {backend.cost(used):.6f} dollars"
            )


if __name__ == "__main__":
    main()
