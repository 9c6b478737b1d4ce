"""Five things a program can do, on a real 135M-parameter model on this machine's CPU. Run: make
demo
"""

import time

from pydantic import BaseModel, Field

import sglang_lite as sgl


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=120)
    city: str = Field(max_length=40)


@sgl.function
def capitals(s, country):
    """(a) Few-shot: two worked examples, and a stop at the end of the line."""
    s += "France: Paris\nItaly: Rome\n"
    s += f"{country}:" + sgl.gen("capital", stop="\n", max_tokens=8, temperature=0)


@sgl.function
def sentiment(s, review):
    """(b) A choice: both answers are scored, so there are probabilities."""
    s += "Review: I loved every minute of it.\nSentiment: positive\n\n"
    s += "Review: The worst evening of my life.\nSentiment: negative\n\n"
    s += f"Review: {review}\nSentiment:" + sgl.select("label", [" positive", " negative"])


@sgl.function
def extract(s, paragraph):
    """(c) Extraction: the answer is a Person, whatever the model would rather write."""
    s += sgl.user(f"Extract the person's name, age and city as JSON.\n\n{paragraph}")
    s += sgl.assistant(sgl.gen("person", type=Person, max_tokens=80, temperature=0))


@sgl.function
def compare(s, places):
    """(d) Fork: three branches share everything so far and run in parallel; join collects them."""
    s += sgl.system("You answer in one short sentence.")
    branches = s.fork(len(places))
    branches += lambda i: sgl.user(f"What is {places[i]} known for?")
    branches += sgl.assistant(sgl.gen("known_for", max_tokens=24, stop=".", temperature=0))
    branches.join()


def main() -> None:
    started = time.perf_counter()
    runs = []

    print("(a) Few-shot question answering")
    for country in ("Japan", "Greece"):
        state = capitals.run(country)
        runs.append(state)
        print(f"    {country}:{state['capital']}")

    print("(b) A choice, with its probabilities")
    for review in ("A wonderful film, I laughed a lot.", "Boring, and far too long."):
        state = sentiment.run(review)
        runs.append(state)
        shares = ", ".join(
            f"{choice.strip()} {p:.0%}" for choice, p in state.selection("label").probs.items()
        )
        print(f"    {review!r} ->{state['label']} ({shares})")

    print("(c) Extraction into a typed value")
    paragraph = "Maria Lopez, who is 34 years old, moved to Madrid last spring to open a bakery."
    state = extract.run(paragraph)
    runs.append(state)
    print(f"    {paragraph}\n    -> {state['person']!r}")

    print("(d) Three branches and a join")
    places = ["Venice", "Japan", "Switzerland"]
    state = compare.run(places)
    runs.append(state)
    for place, answer in zip(places, state["known_for"], strict=True):
        print(f"    {place}: {answer.strip()}.")

    print("(e) What it took")
    usages = [run.usage() for run in runs]
    prompt = sum(u.prompt_tokens for u in usages)
    cached = sum(u.cached_tokens for u in usages)
    generated = sum(u.completion_tokens for u in usages)
    print(
        f"    {len(runs)} programs: {prompt} prompt tokens, {cached} of them cached; {generated} generated"
    )
    print(
        f"    {sum(u.total_s for u in usages):.1f} s in programs, {time.perf_counter() - started:.1f} s with loading"
    )


if __name__ == "__main__":
    main()
