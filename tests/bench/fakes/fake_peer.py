"""Parts that the fake vllm and sglang share: a log of what they were asked for, a clock of their
own, and ways to fail.
"""

import itertools
import json
import os
import subprocess
import time
from pathlib import Path

MISHAP = os.environ.get("FAKE_PEER_MISHAP")
_clock = 0.0
_times = itertools.cycle([5.0, 1.0, 3.0, 2.0])
_flushes = itertools.cycle([False, True])
time.perf_counter = lambda: _clock


def log(*entry):
    with open(os.environ["FAKE_PEER_LOG"], "a") as file:
        file.write(json.dumps(entry) + "\n")


def load(model, **settings):
    config = json.loads(Path(model, "config.json").read_text())
    log("load", config["vocab_size"], config["num_hidden_layers"], settings)
    if MISHAP == "left":  # a process that outlives this one
        fifo = open(os.environ["FAKE_PEER_FIFO"], "w")  # noqa: SIM115 # kept open by that process
        print("x", end="", file=fifo, flush=True)
        subprocess.Popen(["tail", "-f", "/dev/null"], stdout=fifo)
    while MISHAP == "hang":
        pass
    if MISHAP == "die":
        os._exit(3)


def flush():
    flushed = next(_flushes) and MISHAP != "unflushed"
    if flushed:
        log("flush")
    return flushed


def generate(prompts, counts, temperature):
    """The outputs' lengths."""
    global _clock
    if MISHAP == "fail" and len(prompts) > 1:
        raise ValueError("out of\nmemory")
    assert all(type(token) is int for prompt in prompts for token in prompt)
    log("generate", len(prompts), len(prompts[0]), counts[0], temperature)
    _clock += 7.0 if counts[0] == 1 else next(_times)
    return [count - (MISHAP == "short") for count in counts]
