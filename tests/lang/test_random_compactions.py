"""Random conversations with compactions, forks, journals, saved states and reruns have the messages
that a plain interpreter of lists says.
"""

import hashlib
import random
from dataclasses import dataclass, field

import pytest

import sglang_lite as sgl
from tests.counts import some

HEADING = "Summary of the conversation so far:"
PROMPT = "Say it in short."
CALL = '{"tool": "look", "arguments": {}}'


def written(prompt):
    """What the model writes behind a prompt."""
    if prompt.endswith("CALL<|im_end|>\n<|im_start|>assistant\n"):
        return CALL
    return hashlib.sha256(prompt.encode()).hexdigest()[:8]


def rendered(messages):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)


@dataclass
class Expected:
    """A conversation as lists: its messages, its values, and the messages behind each node."""

    messages: list = field(default_factory=list)
    values: dict = field(default_factory=dict)
    behind: dict = field(default_factory=dict)

    def copy(self):
        return Expected(list(self.messages), dict(self.values), dict(self.behind))

    def ask(self, name, question):
        self.messages.append(("user", question))
        answer = written(rendered(self.messages) + "<|im_start|>assistant\n")
        self.values[name] = answer
        self.behind[name] = list(self.messages)
        self.messages.append(("assistant", answer))

    def play(self, steps):
        for kind, *step in steps:
            if kind == "ask":
                self.ask(*step)
            elif kind == "call":
                self.ask(step[0], "CALL")
                self.messages.append(("user", "the result"))
            elif kind == "compact":
                self.compact(*step)
            elif kind == "fork":
                self.fork(step)

    def compact(self, keep):
        head = 1 if self.messages[:1] and self.messages[0][0] == "system" else 0
        first = max(len(self.messages) - keep, head)
        while first > head and self.messages[first - 1] == ("assistant", CALL):
            first -= 1
        dropped = self.messages[head:first]
        if not dropped or (len(dropped) == 1 and dropped[0][1].startswith(f"{HEADING}\n")):
            return
        short = Expected(self.messages[:first])
        short.ask("summary", PROMPT)
        answer = self.values["summary"] = short.values["summary"]
        text = f"{HEADING}\n{answer}"
        self.messages = [*self.messages[:head], ("user", text), *self.messages[first:]]
        self.behind["summary"] = list(self.messages)

    def fork(self, branches):
        played = [self.copy() for _ in branches]
        for each, steps in zip(played, branches):
            before = dict(each.values)
            each.play(steps)
            each.values = {k: v for k, v in each.values.items() if before.get(k, 0) is not v}
        for name in {name for each in played for name in each.values}:
            self.values[name] = [each.values.get(name) for each in played]
            self.behind.pop(name, None)


def draw_steps(drawn, names, *, forks=True):
    found: list[tuple] = []
    for _ in range(drawn.randint(1, 8)):
        kind = drawn.choice(["ask", "ask", "call", "compact", "compact", "fork"])
        if kind == "ask":
            found.append(("ask", next(names), drawn.choice(["Why?", "What else?"])))
        elif kind == "call":
            found.append(("call", next(names)))
        elif kind == "compact":
            found.append(("compact", drawn.choice([0, 0, 1, 2, 3, 5, 9])))
        elif forks:
            found.append(("fork", *(draw_steps(drawn, names, forks=False) for _ in range(2))))
    return found


def play(s, steps):
    for kind, *step in steps:
        if kind == "ask":
            s += sgl.user(step[1])
            s += sgl.assistant(sgl.gen(step[0]))
        elif kind == "call":
            s += sgl.user("CALL")
            s += sgl.assistant(sgl.gen(step[0]))
            s += sgl.user("the result")
        elif kind == "compact":
            s.compact(keep=step[0], prompt=PROMPT)
        elif kind == "fork":
            forks = s.fork(2)
            for branch, inside in zip(forks, step):
                play(branch, inside)
            forks.join()


@sgl.function
def conversation(s, system, steps):
    if system:
        s += sgl.system("Be kind.")
    s += sgl.user("Hello.")
    play(s, steps)


def pairs(state):
    return [(each["role"], each["content"]) for each in state.messages()]


def check(state, expected):
    assert pairs(state) == expected.messages
    assert state.text() == rendered(expected.messages)
    assert {name: state[name] for name in expected.values} == expected.values


def conversations(seed, folder):
    drawn = random.Random(seed)
    names = iter(f"n{i}" for i in range(1000))
    system = drawn.random() < 0.7
    steps = draw_steps(drawn, names)
    expected = Expected([("system", "Be kind.")] * system + [("user", "Hello.")])
    expected.play(steps)
    asked = []

    def write(request):
        asked.append(request.prompt.text)
        return written(request.prompt.text)

    backend = sgl.ScriptedBackend(write)
    settings = drawn.choice([{}, {"stream": True}, {"journal": folder / "j"}, {"timeout": 60}])
    state = conversation.run(system, steps, backend=backend, **settings)
    state.sync()
    check(state, expected)
    if "journal" in settings:
        count = len(asked)
        lines = settings["journal"].read_bytes().splitlines(keepends=True)
        cut = drawn.randint(1, len(lines))
        (folder / "cut").write_bytes(b"".join(lines[:cut]))
        check(conversation.run(system, steps, backend=backend, journal=folder / "cut"), expected)
        assert len(asked) - count <= len(lines) - cut
    if drawn.random() < 0.5:
        state.save(folder / "s")
        state = sgl.load(folder / "s", conversation, backend=backend)
        check(state, expected)
    if expected.behind:
        name = drawn.choice(sorted(expected.behind))
        check(state.rerun(name), expected)
        fork = state.fork_at(name)[0]
        assert pairs(fork) == expected.behind[name]
        if name != "summary":
            fork += sgl.assistant_end()
        more = Expected(list(expected.behind[name]))
        if name != "summary":
            more.messages.append(("assistant", expected.values[name]))
        further = draw_steps(drawn, names)
        more.play(further)
        play(fork, further)
        check(fork, more)
    further = draw_steps(drawn, names)
    expected.play(further)
    play(state, further)
    check(state, expected)


@pytest.mark.parametrize("block", range(some(2, 20)))
def test_conversations_have_the_messages_of_a_plain_interpreter(block, tmp_path):
    for seed in range(block * 50, block * 50 + 50):
        folder = tmp_path / str(seed)
        folder.mkdir()
        conversations(seed, folder)
