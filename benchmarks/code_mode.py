"""Code mode beside plain tool calls: ten tasks of at least five calls each, with one real model.

python benchmarks/code_mode.py [--model FILE_OR_NAME] [--tasks 10] [--device cpu]

Reports for each way the tokens of all prompts and answers, the generations, the calls that were made,
and how many tasks ended as they should: the world as it has to be, and the number that was asked for.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import sglang_lite as sgl


@dataclass
class World:
    """What the tools read and change."""

    populations: dict[str, int] = field(
        default_factory=lambda: {
            "Oslo": 720, "Rome": 2800, "Lima": 10000, "Bern": 134, "Cairo": 9500, "Quito": 1900,
        }
    )  # fmt: skip
    balances: dict[str, int] = field(
        default_factory=lambda: {"ann": 20, "bob": 130, "cyd": 45, "dan": 300, "eve": 70, "fay": 10}
    )
    stock: dict[str, int] = field(
        default_factory=lambda: {"pen": 3, "cup": 12, "hat": 0, "bag": 7, "fan": 25, "mat": 1}
    )
    messages: list[tuple[str, str]] = field(default_factory=list)
    calls: int = 0

    def tools(self) -> list[Callable[..., object]]:
        def list_cities() -> list[str]:
            """Names of all cities."""
            self.calls += 1
            return list(self.populations)

        def get_population(city: str) -> int:
            """Population of a city, in thousands."""
            self.calls += 1
            return self.populations[city]

        def list_users() -> list[str]:
            """Names of all users."""
            self.calls += 1
            return list(self.balances)

        def get_balance(user: str) -> int:
            """Balance of a user."""
            self.calls += 1
            return self.balances[user]

        def add_to_balance(user: str, amount: int) -> int:
            """Adds an amount to a user's balance and returns the new balance."""
            self.calls += 1
            self.balances[user] += amount
            return self.balances[user]

        def send_message(user: str, text: str) -> str:
            """Sends a text to a user."""
            self.calls += 1
            self.messages.append((user, text))
            return "sent"

        def list_items() -> list[str]:
            """Names of all items in stock."""
            self.calls += 1
            return list(self.stock)

        def get_stock(item: str) -> int:
            """Number of pieces of an item."""
            self.calls += 1
            return self.stock[item]

        def set_stock(item: str, count: int) -> str:
            """Sets the number of pieces of an item."""
            self.calls += 1
            self.stock[item] = count
            return "set"

        return [
            list_cities, get_population, list_users, get_balance, add_to_balance, send_message, list_items,
            get_stock, set_stock,
        ]  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A task, the number that has to be the answer (None for any), and what has to be in the world."""

    text: str
    answer: int | str | None = None
    balances: dict[str, int] = field(default_factory=dict)
    stock: dict[str, int] = field(default_factory=dict)
    messages: tuple[tuple[str, str], ...] = ()


_START = World()
TASKS = (
    Task("What is the sum of the populations of all cities?", sum(_START.populations.values())),
    Task("Which city has the largest population?", "Lima"),
    Task("How many cities have a population above 1000?", 4),
    Task("What is the sum of the balances of all users?", sum(_START.balances.values())),
    Task(
        "Send each user the message hello.",
        messages=tuple((user, "hello") for user in _START.balances),
    ),
    Task(
        "Send each user whose balance is below 50 the message low.",
        messages=tuple((user, "low") for user, each in _START.balances.items() if each < 50),
    ),
    Task(
        "Add 10 to the balance of each user.",
        balances={user: each + 10 for user, each in _START.balances.items()},
    ),
    Task("How many pieces are in stock, of all items together?", sum(_START.stock.values())),
    Task(
        "Set the stock of each item that has less than 5 pieces to 20.",
        stock={item: 20 if each < 5 else each for item, each in _START.stock.items()},
    ),
    Task(
        "Double the stock of each item.",
        stock={item: 2 * each for item, each in _START.stock.items()},
    ),
)


def is_right(task: Task, world: World, answer: object) -> bool:
    """Returns whether a task ended as it should."""
    if world.balances != (task.balances or _START.balances):
        return False
    if world.stock != (task.stock or _START.stock):
        return False
    if sorted(world.messages) != sorted(task.messages):
        return False
    text = str(answer).replace(",", "")
    return task.answer is None or re.search(rf"\b{task.answer}\b", text) is not None


@sgl.function
def with_code(s, task, tools):  # type: ignore[no-untyped-def] # a program's body
    code = sgl.CodeTools(tools)
    s += sgl.system(code.describe())
    s += sgl.user(task)
    s += sgl.assistant(sgl.gen("answer", 250, code=code, temperature=0))
    try:
        return s["answer"]
    except sgl.CodeError as error:
        return error  # so that there is a state, with the usage of all attempts


@sgl.function
def with_calls(s, task, tools, parallel):  # type: ignore[no-untyped-def] # a program's body
    s += sgl.system("Use the tools. When all is done, answer shortly.")
    s += sgl.user(task)
    try:
        return sgl.use_tools(
            s, tools, max_steps=20, max_tokens=250, temperature=0, parallel_tool_calls=parallel
        )
    except sgl.SglError as error:
        return error


WAYS = {
    "code": lambda task, tools, backend: with_code.run(task, tools, backend=backend),
    "tool calls": lambda task, tools, backend: with_calls.run(task, tools, False, backend=backend),
    "several calls a turn": lambda task, tools, backend: with_calls.run(
        task, tools, True, backend=backend
    ),
}


def run_way(name: str, backend: object, count: int) -> None:
    right = turns = calls = prompt = completion = failed = 0
    began = time.perf_counter()
    for task in TASKS[:count]:
        world = World()
        state = WAYS[name](task.text, world.tools(), backend)
        answer, usages = state.ret_value, state.usage()
        generations = [node for node in state.trace().nodes if node.kind == "gen"]
        turns += sum(
            len(node.attempts) + (not node.attempts or node.error is None) for node in generations
        )
        done = not isinstance(answer, sgl.SglError) and is_right(task, world, answer)
        failed += isinstance(answer, sgl.SglError)
        right += done
        calls += world.calls
        prompt += usages.prompt_tokens
        completion += usages.completion_tokens
        print(f"  {name}: {task.text} {answer!s:.60} {'right' if done else 'wrong'}", flush=True)
    seconds = time.perf_counter() - began
    print(
        f"| {name} | {right} of {count} | {turns} | {calls} | {prompt:,} | {completion:,} | {prompt + completion:,} "
        f"| {failed} | {seconds:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="")
    parser.add_argument("--tasks", type=int, default=len(TASKS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    asked = parser.parse_args()
    model = (asked.model,) if asked.model else ()
    with sgl.Engine(*model, device=asked.device) as engine:
        print("| way | right | turns | calls | prompt | written | tokens | failed | s |")
        for name in asked.ways:
            run_way(name, engine, asked.tasks)


if __name__ == "__main__":
    main()
