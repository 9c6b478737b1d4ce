"""The same questions about every document of a folder, on a Ray cluster: an engine an actor, and each document at one
of them, which reads it once. A batch that was stopped continues from its file.
Run: pip install 'sglang-lite[ray]' && python examples/documents_ray.py"""

import tempfile
from pathlib import Path

import sglang_lite as sgl
from sglang_lite.ray import RayOptions

FOLDER = Path(__file__).parent.parent / "docs"
QUESTIONS = ["What is this text about?", "Is it for users or for developers?"]


@sgl.function
def ask(s, name, text, question):
    s += f"{text}\n\nQuestion: {question}\nAnswer:"
    s += sgl.gen("answer", max_tokens=12, temperature=0, stop="\n")


def main() -> None:
    try:
        import ray
    except ModuleNotFoundError:
        print("This example needs Ray: pip install 'sglang-lite[ray]'")
        return
    documents = {path.name: path.read_text()[:600] for path in sorted(FOLDER.glob("*.md"))[:4]}
    rows = [{"name": n, "text": text, "question": q} for q in QUESTIONS for n, text in documents.items()]
    with tempfile.TemporaryDirectory() as folder:
        options = RayOptions(engine={"model": sgl.EngineConfig().model})
        states = ask.run_batch(rows, cluster=options, checkpoint=Path(folder, "answers.jsonl"))
    for row, state in zip(rows, states, strict=True):
        print(f"{row['name']}: {row['question']}{state['answer']}")
    cached = sum(state.usage().cached_tokens for state in states)
    print(f"Ray: {len(states)} answers; {cached} prompt tokens came from a cache")
    ray.shutdown()


if __name__ == "__main__":
    main()
