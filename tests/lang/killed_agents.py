"""An agent that is killed with SIGKILL at random moments, and begun again until it has answered.

`play_lives` runs in a process of its own, which forks one process for each life of the agent. What
its tools do is in files that know nothing of the journal.
"""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sglang_lite as sgl
from sglang_lite.lang.tools import tool_schemas
from tests.children import send
from tests.waiting import until

TURNS = 12


def question(turn, mode):
    """The calls of a turn, or a program that makes them in a loop: three tools, of which two may be
    repeated. In code mode, each fourth turn has calls between programs, and the next their answer.
    """
    kinds = ["pay", "keyed", "look"] if turn % 3 == 0 else ["pay", "look"]
    if mode == "code" and turn % 4 < 2:
        loop = f"for n in [{10 * turn}, {10 * turn + 1}, {10 * turn + 2}]:"
        return "\n".join([loop, *(f"    {kind}(n)" for kind in kinds), f"return {turn}"])
    if mode == "code" and turn % 4 == 3:
        return json.dumps({"answer": "paid"})
    calls = [{"tool": kind, "arguments": {"n": 10 * turn + i}} for i, kind in enumerate(kinds)]
    return json.dumps({"calls": calls})


def _append(path, text):
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{text}\n".encode())
    os.fsync(file)
    os.close(file)


def _append_nothing(n: int) -> None:
    """Does nothing."""


def _program(folder, mode):
    def pay(n: int) -> str:
        """Pays once."""
        _append(folder / "paid", n)
        return f"paid {n}"

    def keyed(n: int, idempotency_key: str) -> str:
        """Pays with a key."""
        _append(folder / "keyed", f"{n} {idempotency_key}")
        return f"keyed {n}"

    @sgl.idempotent
    def look(n: int) -> str:
        """Looks."""
        return f"seen {n}"

    tools: list[Callable[..., Any]] = [pay, keyed, look]

    @sgl.function
    def agent(s):
        s += sgl.user("Pay.")
        return sgl.use_tools(s, tools, max_steps=TURNS, parallel_tool_calls=True)

    @sgl.function
    def programmer(s):
        for turn in range(0, TURNS, 4):
            for program in (turn, turn + 1):
                s += sgl.user("Pay.")
                s += sgl.assistant(sgl.gen(f"turn_{program}", code=tools))
                assert s[f"turn_{program}"] == program
            s += sgl.user("Pay.")
            sgl.use_tools(s, tools, f"calls_{turn}", parallel_tool_calls=True)
        s += sgl.user("Done?") + sgl.assistant(sgl.gen("end"))

    return programmer if mode == "code" else agent


def _live(folder, mode):
    """One life: runs or resumes the agent, and says which calls were in doubt."""

    def answer(request):
        turn = request.prompt.text.count("<|im_start|>assistant") - 1
        _append(folder / "asked", turn)
        return question(turn, mode) if turn < TURNS else json.dumps({"answer": "all paid"})

    state = _program(folder, mode).run(
        backend=sgl.ScriptedBackend(answer), journal=folder / "journal"
    )
    while pending := state.pending():
        for call in pending:
            _append(folder / "doubted", f"{call.tool} {call.arguments['n']}")
        state = state.resume([call.give_result("paid before") for call in pending])
    (folder / "end").write_text(state.text())


def play_lives(folder, seed, kills, mode):
    """Kills an agent `kills` times, lets it end, and returns what was seen of it.

    Args:
        mode: "tools" if the agent calls tools, "code" if it writes programs that call them.

    Returns:
        One record for each life that was killed: what was paid, asked and doubted until then, and
        the lines of the journal.
    """
    drawn = random.Random(seed)
    folder = Path(folder)
    seen = []
    agents = 0
    tool_schemas([_append_nothing])  # imports what each life would import
    while len(seen) < kills:
        own = folder / str(agents)
        own.mkdir()
        agents += 1
        lives = [_seen(own, killed=False)]
        while not (own / "end").exists():
            growth: int | None = drawn.randint(0, 3000)
            if len(seen) + len(lives) - 1 >= kills:
                growth = None
            if _fork_life(own, growth, mode):
                lives.append(_seen(own, killed=True))
        lives.append(_seen(own, killed=False))
        seen += lives[1:-1]
        yield lives


def _fork_life(folder, growth, mode):
    """Runs a life in a process, killed when its journal is seen to have grown by so many bytes; None
    to let it end. Returns whether it was killed.
    """
    journal = folder / "journal"
    before = journal.stat().st_size if journal.exists() else 0
    process = os.fork()
    if not process:
        try:
            _live(folder, mode)
        finally:
            os._exit(0)
    if growth is not None:
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        until(
            lambda: (
                (journal.exists() and journal.stat().st_size > before + growth)
                or os.waitid(os.P_PID, process, ended)
            )
        )
        send(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return os.WIFSIGNALED(status)


def _seen(folder, killed):
    found = {"killed": killed}
    for name in ("paid", "keyed", "asked", "doubted", "journal", "end"):
        path = folder / name
        found[name] = path.read_text().splitlines() if path.exists() else []
    return found


def all_lives(folder, seed, kills, mode):
    """The same as a list, for a process of its own."""
    return list(play_lives(folder, seed, kills, mode))
