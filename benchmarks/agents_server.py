"""Agents of `sglang-lite bench --workload agents` as requests to a server: ours, SGLang's, or
vLLM's.

    python benchmarks/agents_server.py --url http://127.0.0.1:30000 [--agents 64] [--scale 1.0]
    [--vllm MODEL]

Ours and SGLang's are asked by `/generate`, vLLM's by `/v1/completions` for the model that it
serves; start it with `--enable-prompt-tokens-details`. Prints the seconds, programs a minute, and
prompt tokens computed over those needed. How much memory the agents need beside the server's is set
there (`--max-total-tokens`; printed is what they need).
"""

from __future__ import annotations

import argparse
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import httpx

from sglang_lite import Engine
from sglang_lite.bench.agents import draw_agents, run_agents, total_tokens_at_end
from sglang_lite.protocol import Generation, SamplingParams, Usage


class Server:
    """What `run_agents` asks of an engine, of a server. Each request has a thread.

    Args:
        url: its address.
        vllm: model of a vLLM server; None for a server with `/generate`.
    """

    def __init__(self, url: str, vllm: str | None) -> None:
        self._client = httpx.Client(
            base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)
        )
        self._vllm = vllm
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def flush_cache(self) -> None:
        self._client.post(
            "/flush_cache" if self._vllm is None else "/reset_prefix_cache"
        ).raise_for_status()

    def stats(self) -> Counter[str]:
        return self._counts.copy()

    def submit(
        self, ids: list[int], params: SamplingParams, *, sink: Callable[[object], None]
    ) -> None:
        threading.Thread(target=self._asked, args=(ids, params, sink), daemon=True).start()

    def _asked(
        self, ids: list[int], params: SamplingParams, sink: Callable[[object], None]
    ) -> None:
        try:
            written, cached = self._answer(ids, params)
        except Exception as error:  # told as the agent's
            sink(error)
            return
        with self._lock:
            self._counts += Counter(prompt_tokens=len(ids), prompt_tokens_cached=cached)
        sink(
            Generation(
                "",
                tuple(written),
                finish_reason="length",
                usage=Usage(len(ids), cached, len(written)),
            )
        )

    def _answer(self, ids: list[int], params: SamplingParams) -> tuple[list[int], int]:
        """Ids that were generated, and the number of cached ones of the prompt."""
        greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        if self._vllm is None:
            body = {
                "input_ids": ids,
                "sampling_params": {**greedy, "max_new_tokens": params.max_tokens},
            }
            found = self._client.post("/generate", json=body).raise_for_status().json()
            return found["output_ids"], found["meta_info"]["cached_tokens"]
        asked = {
            "model": self._vllm,
            "prompt": ids,
            "max_tokens": params.max_tokens,
            "return_token_ids": True,
        }
        found = (
            self._client.post("/v1/completions", json={**asked, **greedy}).raise_for_status().json()
        )
        details = found["usage"].get("prompt_tokens_details") or {}
        return found["choices"][0]["token_ids"], details.get("cached_tokens") or 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--vllm", metavar="MODEL")
    options = parser.parse_args()
    turns = draw_agents(options.agents, scale=options.scale)
    server = cast(Engine, Server(options.url, options.vllm))
    print(
        f"{options.agents} agents, {total_tokens_at_end(turns):,} tokens at their ends", flush=True
    )
    run_agents(server, turns[: -(-options.agents // 8)], as_program=False)  # warms up
    got = run_agents(server, turns, as_program=False)
    rate = 60 * got.programs / got.seconds
    print(f"{got.seconds:.2f} s, {rate:.0f} programs a minute, computed / needed {got.again:.2f}")


if __name__ == "__main__":
    main()
