"""A machine with a GPU: a larger model, most of the card's memory, many runs at once. Without a GPU
the default model answers the same program on the processor.
Run: python examples/gpu_box.py
"""

import torch

import sglang_lite as sgl

WORDS = ["dog", "carrot", "eagle", "salmon", "oak", "potato", "horse", "apple"]
kind = sgl.select("kind", [" animal", " plant"])


@sgl.function
def classify(s: sgl.ProgramState, word: str) -> None:
    s += "Word: cat. Kind: animal\nWord: tomato. Kind: plant\nWord: shark. Kind: animal\nWord: rose. Kind: plant\n"
    s += f"Word: {word}. Kind:" + kind


def main() -> None:
    if torch.cuda.is_available():
        sgl.set_default_backend(sgl.Engine("Qwen/Qwen3-8B", device="cuda", mem_fraction=0.88))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: the processor"
    states = classify.run_batch([{"word": word} for word in WORDS])
    print(device, *(f"{word}:{state[kind]}" for word, state in zip(WORDS, states)), sep="\n")


if __name__ == "__main__":
    main()
