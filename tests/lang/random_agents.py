"""Random agents: what their model writes, what their tools do, who decides, and when they are
killed. `expected` says what becomes of one, without a log, a replay or a line of the language.
"""

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator

import sglang_lite as sgl

KINDS = ["note", "later", "flaky", "asked", "judged", "keyed", "safe", "strict", "team"]


class Killed(BaseException):
    """Stands for the end of the process."""


@dataclass
class Script:
    """What a model writes: turns of calls, each a kind and a number, and an answer."""

    turns: list
    answer: str

    def text(self, turn):
        if turn >= len(self.turns):
            return json.dumps({"answer": self.answer})
        return json.dumps({"calls": [_written(*each) for each in self.turns[turn]]})


def _written(kind, number):
    return {"tool": kind, "arguments": {"n": number}}


@dataclass
class Agent:
    """A random agent.

    Attributes:
        scripts: of the agent, with the name "main", and of the teams that it calls, by number.
        limits: parameters of `use_tools`.
        is_async: whether the bodies are coroutines.
        kills: numbers of the events at which it is killed.
        forks: number of branches, each an agent; 0 for one without a fork.
    """

    scripts: dict
    limits: dict
    is_async: bool
    kills: set
    forks: int


def draw_agent(seed):
    drawn = random.Random(seed)
    numbers = itertools.count(1)
    scripts = {}

    def draw_script(kinds, turns):
        found = [
            [(drawn.choice(kinds), next(numbers)) for _ in range(drawn.choice([1, 1, 2, 3]))]
            for _ in range(turns)
        ]
        for kind, number in itertools.chain(*found):
            if kind == "team":
                own = [each for each in KINDS if each != "team"]
                scripts[str(number)] = draw_script(own, drawn.randint(0, 2))
        return Script(found, f"answer {next(numbers)}")

    scripts["main"] = draw_script(KINDS, drawn.randint(0, 5))
    forks = drawn.choice([0, 0, 0, 2])
    for i in range(forks):
        scripts[f"fork{i}"] = draw_script(KINDS, drawn.randint(0, 2))
    limits: dict[str, int | None] = {"max_steps": drawn.choice([1, 3, 9])}
    if drawn.random() < 0.3:
        limits["max_calls_per_turn"] = drawn.randint(1, 2)
    limits["max_failures"] = drawn.choice([None, 2, 3])
    kills = {drawn.randint(1, 40) for _ in range(drawn.choice([0, 1, 3, 6]))}
    return Agent(scripts, limits, drawn.random() < 0.4, kills, forks)


def decide(call):
    """What somebody decides about a call that waits."""
    number = call.arguments["n"]
    if call.in_doubt:
        return [call.give_result("known"), call.deny("it may be done")][number % 2]
    return [call.approve(), call.deny("no"), call.give_result("done"), call.approve(n=-number)][
        number % 4
    ]


def judge(call):
    """What an approver decides at once about a call, or that it has to wait."""
    number = call.arguments["n"]
    return [True, False, "ask", call.approve(n=-number)][number // 4 % 4]


@dataclass
class World:
    """What the calls of an agent have done, over all its lives.

    Attributes:
        effects: how often each call was made, by its number.
        begun, ended: numbers of the calls that were made in this life.
        keys: keys of each call.
        asked: questions that were put to the model: the script and the turn.
    """

    agent: Agent
    effects: Counter = field(default_factory=Counter)
    begun: set = field(default_factory=set)
    ended: set = field(default_factory=set)
    keys: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)
    events: int = 0
    dead: bool = False
    on_kill: Callable[[], None] | None = None

    def event(self):
        """Counts an event. A process that was killed does nothing any more."""
        if not self.dead:
            self.events += 1
            if self.on_kill is not None and self.events in self.agent.kills:
                self.on_kill()
                self.dead = True
        if self.dead:
            raise Killed

    def act(self, number):
        if not self.dead:
            self.begun.add(abs(number))
        self.event()
        self.effects[abs(number)] += 1
        self.event()

    def answer(self, request):
        text = request.prompt.text
        name = text.rpartition("script:")[2].partition(";")[0]
        turn = text.rpartition("script:")[2].count("assistant") - 1
        self.event()
        self.asked.append((name, turn))
        return self.agent.scripts[name].text(turn)


def tools_of(world, team):
    """The tools of an agent. A call leaves its number behind."""

    def note(n: int) -> int:
        """Notes."""
        world.act(n)
        world.ended.add(abs(n))
        return n

    async def later(n: int) -> int:
        """Notes later."""
        await asyncio.sleep(0)
        world.act(n)
        world.ended.add(abs(n))
        return n

    def flaky(n: int) -> int:
        """Fails."""
        world.act(n)
        world.ended.add(abs(n))
        raise LookupError(f"no {n}")

    def asked(n: int) -> int:
        """Has to be approved."""
        return note(n)

    def judged(n: int) -> int:
        """Is approved at once."""
        return note(n)

    def keyed(n: int, idempotency_key: str) -> int:
        """Takes a key."""
        world.keys.setdefault(n, set()).add(idempotency_key)
        return note(n)

    @sgl.idempotent
    def safe(n: int) -> int:
        """May be repeated."""
        return note(n)

    def strict(n: Annotated[int, AfterValidator(_refuse)]) -> int:
        """Takes no number."""
        return note(n)

    return [note, later, flaky, asked, judged, keyed, safe, strict, team]


def _refuse(number):
    raise ValueError(f"{number} is no number")


APPROVE: Any = {"asked": "ask", "judged": judge}


def programs(world):
    """The programs of an agent: the plain one and the coroutine."""
    limits = dict(world.agent.limits, parallel_tool_calls=True)

    @sgl.function
    def inner(s, script):
        s += sgl.user(f"script:{script};")
        return sgl.use_tools(s, tools, approve=APPROVE, **limits)

    @sgl.idempotent
    def team(n: int) -> str:
        """Asks another agent."""
        try:
            return inner.run(str(n)).ret_value
        except sgl.ToolError as error:
            return f"limit {error.limit}"

    tools = tools_of(world, team)

    @sgl.function
    def plain(s):
        s += sgl.user("script:main;")
        answers = [_guard(s, tools, limits)]
        for i in range(world.agent.forks):
            (branch,) = s.fork(1)
            branch += sgl.user(f"script:fork{i};")
            answers.append(_guard(branch, tools, limits))
        return answers

    @sgl.function
    async def coroutine(s):
        s += sgl.user("script:main;")
        answers = [await _aguard(s, tools, limits)]
        for i in range(world.agent.forks):
            (branch,) = s.fork(1)
            branch += sgl.user(f"script:fork{i};")
            answers.append(await _aguard(branch, tools, limits))
        return answers

    return coroutine if world.agent.is_async else plain


def _contents(state):
    return [message["content"] for message in state.messages()]


def _guard(s, tools, limits):
    try:
        answer = sgl.use_tools(s, tools, approve=APPROVE, **limits)
    except sgl.ToolError as error:
        answer = f"limit {error.limit}"
    return [answer, _contents(s)]


async def _aguard(s, tools, limits):
    try:
        answer = await sgl.use_tools(s, tools, approve=APPROVE, **limits)
    except sgl.ToolError as error:
        answer = f"limit {error.limit}"
    await s.async_sync()
    return [answer, _contents(s)]


# ------------------------------------------------------------------------- the plain interpreter


@dataclass
class Expected:
    """What a plain interpreter finds.

    Attributes:
        answers: answer and messages of the agent and of its branches.
        made: numbers of the calls that are made.
    """

    agent: Agent
    doubts: dict  # what was decided about calls in doubt, by number
    made: set = field(default_factory=set)

    def answers(self):
        found = [self.run("main", [])]
        for i in range(self.agent.forks):
            found.append(self.run(f"fork{i}", list(found[0][1])))
        return [[answer, list(messages)] for answer, messages in found]

    def run(self, name, messages):
        script = self.agent.scripts[name]
        limits = self.agent.limits
        failures = Counter()
        messages.append(f"script:{name};")
        turn = -1
        while True:
            turn += 1
            text = script.text(turn)
            messages.append(text)
            if turn >= len(script.turns):
                return script.answer, messages
            if turn == limits["max_steps"]:
                return "limit max_steps", messages
            shown = []
            limit = limits.get("max_calls_per_turn", 99)
            results = [
                self.call(kind, number) if i < limit else (self.refusal(limit), False)
                for i, (kind, number) in enumerate(script.turns[turn])
            ]
            ended = ""
            for (kind, _), (result, failed) in zip(script.turns[turn], results):
                shown.append(f"Result of {kind}: {result}")
                failures[kind] = failures[kind] + 1 if failed else 0
                if failed and failures[kind] == limits["max_failures"]:
                    ended = ended or "limit max_failures"
            messages.append("\n".join(shown))
            if ended:
                return ended, messages

    @staticmethod
    def refusal(limit):
        verb = "call is" if limit == 1 else "calls are"
        return f"Error: not called, as only {limit} {verb} made in a turn."

    def call(self, kind, number):
        """The text of a call's result, and whether it failed."""
        if kind == "strict":
            why = f"n: Value error, {number} is no number"
            return f"Error: the arguments of strict are not valid: {why}", True
        if number in self.doubts:
            return ["known", "Denied: it may be done"][number % 2], False
        if kind == "team":
            answer, _ = self.run(str(number), [])
            return json.dumps(answer), False
        change = ""
        value = number
        if kind in ("asked", "judged"):
            verdict = number % 4 if kind == "asked" else [0, 4, None, 3][number // 4 % 4]
            if verdict is None:
                verdict = number % 4
            if verdict == 4:
                return "Denied: it was not approved.", False
            if verdict == 1:
                return "Denied: no", False
            if verdict == 2:
                return "done", False
            if verdict == 3:
                value = -number
                change = f'The arguments were changed to {{"n":{value}}}.\n'
        self.made.add(number)
        if kind == "flaky":
            return f"Error: LookupError: no {number}", True
        return f"{change}{value}", False
