"""Reading a program's text while it is written. Run: python examples/streaming.py"""

import asyncio

import sglang_lite as sgl


@sgl.function
def story(s, topic):
    s += sgl.user(f"Write two sentences about {topic}.")
    s += sgl.assistant(sgl.gen("story", max_tokens=48, temperature=0.7, seed=1))


def main() -> None:
    state = story.run("a lighthouse", stream=True)
    for piece in state.text_iter("story"):
        print(piece, end="", flush=True)
    print("\n--- and for coroutines:")
    asyncio.run(follow())


async def follow() -> None:
    state = await story.arun("a small boat", stream=True)
    async for piece in state.text_async_iter("story"):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
