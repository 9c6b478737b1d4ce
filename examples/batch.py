"""One program over many items: prompts share their prefix, and the runtime computes it once.
Run: python examples/batch.py"""

import sglang_lite as sgl

WORDS = ["dog", "carrot", "eagle", "salmon", "oak", "potato", "horse", "apple"]


@sgl.function
def classify(s, word):
    s += "Word: cat. Kind: animal\nWord: tomato. Kind: plant\nWord: shark. Kind: animal\nWord: rose. Kind: plant\n"
    s += f"Word: {word}. Kind:" + sgl.select("kind", [" animal", " plant"])


def main() -> None:
    states = classify.run_batch([{"word": word} for word in WORDS], progress_bar=True)
    for word, state in zip(WORDS, states, strict=True):
        print(f"{word:8}{state['kind']}  ({state.selection('kind').probs[state['kind']]:.0%})")
    usages = [state.usage() for state in states]
    cached, prompt = sum(u.cached_tokens for u in usages), sum(u.prompt_tokens for u in usages)
    print(f"{cached} of {prompt} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
