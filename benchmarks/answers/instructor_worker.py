"""Runs in instructor's own environment: reads requests from stdin, writes answers to stdout, a JSON object a line.

python benchmarks/answers/instructor_worker.py URL MODEL MODE CLIENTS ATTEMPTS MAX_TOKENS START

START is the time when it was started, to tell how long its imports took.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import instructor
import openai
from schemas import SCHEMAS  # beside this file

URL, MODEL, MODE = sys.argv[1:4]
CLIENTS, ATTEMPTS, MAX_TOKENS = map(int, sys.argv[4:7])
SETUP_SECONDS = time.time() - float(sys.argv[7])


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """Asks for one value, with retries, and counts the tokens of every attempt."""
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=1200, max_retries=0), mode=instructor.Mode[MODE]
    )
    told = {"prompt_tokens": 0, "completion_tokens": 0, "text": "", "error": "", "value": None}

    def count(response: Any) -> None:
        told["prompt_tokens"] += response.usage.prompt_tokens
        told["completion_tokens"] += response.usage.completion_tokens
        told["text"] = response.choices[0].message.content or ""

    client.on("completion:response", count)
    try:
        value = client.chat.completions.create(
            model=MODEL, messages=request["messages"], response_model=SCHEMAS[request["schema"]],
            max_retries=ATTEMPTS - 1, max_tokens=MAX_TOKENS, temperature=0,
        )  # fmt: skip
        told["value"] = value.model_dump(mode="json")
    except Exception as error:  # what instructor gives up with is an outcome
        told["error"] = f"{type(error).__name__}: {error}"[:500]
    return told


with ThreadPoolExecutor(CLIENTS) as pool:
    for index, answer in enumerate(pool.map(ask, map(json.loads, sys.stdin))):
        print(json.dumps(answer | {"setup_seconds": 0.0 if index else SETUP_SECONDS}), flush=True)
