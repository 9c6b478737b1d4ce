"""A mixed load: streams, samples, selections, programs, constraints, some of which take long to
compile.
"""

import json
import random
import sys

from sglang_lite.errors import SglError
from sglang_lite.program.nodes import Fork, Gen, Join, Program, Select, Text
from sglang_lite.protocol import Ebnf, JsonSchema, Regex, SamplingParams
from tests.engine.collector import Collector

LONG = SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=1.0, max_tokens=8)


def slow(salt):
    """A constraint that compiles for about as long as it may, and is in no cache."""
    return Ebnf("root ::= " + " ".join(f'("a" | "b{salt}"){{1,{n}}}' for n in range(50, 90)))


def start(engine, seed, stop=lambda: False, told=lambda event: None):
    """Submits until `stop()`; sinks of all that was taken, each of which will have one end, or one
    a sample.
    """
    rng = random.Random(seed)
    sinks = []

    def sink(count=1):
        collector = Collector(count)
        sinks.append(collector)

        def tell(event):
            collector(event)
            told(event)

        return tell

    tree = Program(
        (
            Gen("x", SHORT),
            Fork(((Gen("l", LONG),), (Select("r", ("d", "ef")),))),
            Join(),
            Gen("y", SHORT),
        )
    )
    kinds = [
        lambda: engine.submit("ab", LONG, sink=sink(), stream=True),
        lambda: engine.submit("abc", SamplingParams(n=3, max_tokens=50), sink=sink(3), stream=True),
        lambda: engine.submit("ab", LONG, Regex("[a-f]{3000}"), sink=sink(), stream=True),
        lambda: engine.submit(
            "ab", SHORT, JsonSchema(json.dumps({"enum": [f"{seed}", "b"]})), sink=sink()
        ),
        lambda: engine.submit("ab", SHORT, slow(chr(97 + rng.randrange(26))), sink=sink()),
        lambda: engine.submit_select("ab", ["c", "de"], sink=sink()),
        lambda: engine.run_program("ab", tree, sink=sink(), stream=True),
        lambda: grown(engine.open_program(sink=sink(), stream=True)),
    ]

    def grown(program):
        program.extend((), (Text("ab"), Gen("x", SHORT), Gen("z", SHORT, Regex("[ab]{3}"))))
        program.extend((), (Gen("y", LONG),))
        program.close()

    order = [kind for kind in kinds for _ in range(3)]
    rng.shuffle(order)
    for kind in order:
        if stop():
            break
        try:
            kind()
        except SglError:  # its process has ended: nothing was taken
            sinks.pop()
            break
    return sinks


if __name__ == "__main__":  # the parent that is killed: it says a line at each event
    import sglang_lite as sgl

    engine = sgl.Engine(sys.argv[1], **json.loads(sys.argv[2]))
    print("started", flush=True)
    start(engine, int(sys.argv[3]), told=lambda event: print("event", flush=True))
    print("all", flush=True)
    sys.stdin.read()
