"""The same questions about every document of a folder, on a Ray cluster: an engine an actor, and
each document at one of them, which reads it once. A batch that was stopped continues from its file.
Run: pip install 'sglang-lite[local,ray]' && python examples/documents_ray.py
"""

import tempfile
from pathlib import Path

import sglang_lite as sgl
from sglang_lite.ray import RayOptions

FOLDER = Path(__file__).with_name("data") / "documents"
QUESTIONS = {
    "topic": [" weather", " sport", " food", " books"],
    "news": [" good news", " bad news"],
}


@sgl.function
def ask(s: sgl.ProgramState, text: str, question: str) -> None:
    s += f"{text}\nThe {question} of this text is" + sgl.select("answer", QUESTIONS[question])


def main() -> None:
    try:
        import ray
    except ModuleNotFoundError:
        print("This example needs Ray: pip install 'sglang-lite[ray]'")
        return
    documents = {path.stem: path.read_text().strip() for path in sorted(FOLDER.glob("*.txt"))}
    rows = [
        {"text": text, "question": question}
        for question in QUESTIONS
        for text in documents.values()
    ]
    with tempfile.TemporaryDirectory() as folder:
        options = RayOptions(engine={"model": sgl.EngineConfig().model, "dtype": "float32"})
        states = ask.run_batch(rows, cluster=options, checkpoint=Path(folder, "answers.jsonl"))
    for i, name in enumerate(documents):
        print(
            f"{name}:"
            + ",".join(states[i + k * len(documents)]["answer"] for k in range(len(QUESTIONS)))
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
