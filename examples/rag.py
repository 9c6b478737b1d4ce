"""Answers with evidence: passages are found by embeddings, and each answer is a quote of the
passage, word for word. Run: python examples/rag.py (the first time it fetches an embedding model of
84 MB)
"""

from typing import Annotated

import sglang_lite as sgl

PASSAGES = [
    "The bridge was closed on Monday after inspectors found cracks in two of its beams.",
    "Repairs of the bridge will cost about 3.2 million dollars, said engineer Ada Flores.",
    "The museum opens at ten and is closed on Tuesdays.",
    "Tickets for the museum cost eight dollars; children pay nothing.",
    "The ferry to the island leaves every hour from the old harbour.",
]


@sgl.function
def answer(s: sgl.ProgramState, passage: str, question: str) -> None:
    s += sgl.user(f"{passage}\n{question} Quote the text.")
    s += sgl.assistant(
        sgl.gen("quote", type=Annotated[str, sgl.quote(passage, min_words=3)], temperature=0)
    )


def main() -> None:
    questions = [
        "Why was the bridge closed?",
        "How much are tickets for the museum?",
        "Where does the ferry leave?",
    ]
    with sgl.Engine("all-minilm-l6-v2") as embedder:
        passages, asked = (
            [each["embedding"] for each in embedder.encode(texts)]
            for texts in (PASSAGES, questions)
        )
    for question, vector in zip(questions, asked):
        # cosines: both have length 1
        scores = [sum(a * b for a, b in zip(vector, passage)) for passage in passages]
        best = max(range(len(PASSAGES)), key=scores.__getitem__)
        state = answer(PASSAGES[best], question).run()
        (where,) = state.get_meta_info("quote")["quotes"]
        print(
            f"{question}\n    {state['quote']}\n    passage {best} [{where['start']}:{where['end']}]"
        )


if __name__ == "__main__":
    main()
