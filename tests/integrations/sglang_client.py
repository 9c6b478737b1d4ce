"""A program for SGLang's own language and for ours, without roles, whose templates differ.

As a script, with the folder of SGLang's package and the address of a server: runs it by SGLang's
language and its RuntimeEndpoint, and prints what it says as JSON.
"""

import base64
import json
import sys
import types


def said(sgl, backend):
    """What a program says by an implementation of the language: at once, streamed, and in a batch."""

    @sgl.function
    def program(s, question):
        s += f"{question} " + sgl.gen("answer", max_tokens=6, temperature=0)
        s += ". It is " + sgl.select("choice", ["true", "false"])
        forks = s.fork(2)
        for fork in forks:
            fork += ", since " + sgl.gen("year", max_tokens=4, temperature=0, regex="[0-9]{3}")
        s += ", since " + forks[1]["year"] + sgl.gen("last", max_tokens=3, temperature=0)

    state = program.run(question="Who?", backend=backend)
    streamed = "".join(
        program.run(question="Who?", backend=backend, stream=True).text_iter("answer")
    )
    batch = program.run_batch([{"question": "Who?"}, {"question": "When?"}], backend=backend)
    return {
        "at once": [state["answer"], state["choice"], state["last"]],
        "streamed": streamed,
        "batch": [each["answer"] for each in batch],
    }


if __name__ == "__main__":
    # without the code of its __init__, which imports what a server needs
    package = types.ModuleType("sglang")
    package.__path__ = [f"{sys.argv[1]}/sglang"]
    sys.modules["sglang"] = package
    sys.modules["pybase64"] = base64  # a faster one
    from sglang.lang import api
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

    print(json.dumps(said(api, RuntimeEndpoint(sys.argv[2]))))
