"""Quality that a number format costs: perplexity and agreement with float32 on a fixed text.

python benchmarks/quality.py [--dtypes bfloat16 int8] [--folders DIR ...] [--quantization int4 ...]
[--tokens 2048]

With `--folders` the first is read in float32, then the others, in whatever format, and the first
again in bfloat16, rounded as `Engine(quantization=)` does, instead of the default model in other
types.

On a GPU: its formats, through the engine, with the mean difference of the text's log-probabilities
instead of the KL divergence.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch

from sglang_lite import Engine
from sglang_lite.protocol import SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.loading.load_model import LoadedModel, load_model
from sglang_lite.runtime.models.resolve import resolve


@torch.inference_mode()
def logprobs(loaded: LoadedModel, ids: list[int], chunk: int = 256) -> torch.Tensor:
    """log P of every token after every prefix [tokens, vocabulary], computed in chunks as the
    engine does.
    """
    cache = loaded.model.allocate_cache(len(ids))
    rows = []
    for start in range(0, len(ids), chunk):
        end = min(start + chunk, len(ids))
        at = torch.arange(start, end)
        plan = AttentionPlan(at, (), (ExtendRow(0, end - start, slice(0, end)),))
        hidden = loaded.model.forward(torch.tensor(ids[start:end]), at, plan, cache)
        rows.append(loaded.model.logits(hidden).log_softmax(-1))
    return torch.cat(rows)


GPU_FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "fp8 keys and values": {"kv_dtype": "fp8"},
    "fp8 weights": {"quantization": "fp8"},
    "fp8 both": {"quantization": "fp8", "kv_dtype": "fp8"},
}


def on_gpu(text: str, tokens: int) -> None:
    print(f"{'':22}{'perplexity':>12}{'difference':>12}{'greedy agreement':>18}")
    reference: tuple[list[float], list[int]] | None = None
    params = SamplingParams(
        max_tokens=1, return_logprob=True, logprob_start_len=1, top_logprobs_num=1
    )
    for name, settings in GPU_FORMATS.items():
        with Engine(
            device="cuda", max_total_tokens=8192, step_tokens=256, max_running=16, **settings
        ) as engine:
            scored = (
                engine.complete(engine.tokenizer.encode(text)[:tokens], params).prompt_logprobs
                or ()
            )
        values, greedy = [float(t.logprob or 0) for t in scored], [t.top[0][1] for t in scored]
        reference = reference or (values, greedy)
        difference = sum(abs(a - b) for a, b in zip(values, reference[0])) / len(values)
        agreement = sum(a == b for a, b in zip(greedy, reference[1])) / len(values)
        print(
            f"{name:22}{math.exp(-sum(values) / len(values)):12.3f}{difference:12.4f}{agreement:18.1%}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--folders", nargs="+", type=Path)
    parser.add_argument("--quantization", nargs="+", default=[])
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    text = "".join(
        pydoc_data.topics.topics[name] for name in ("exceptions", "import", "specialnames")
    )
    if torch.cuda.is_available():
        on_gpu(text, options.tokens)
        return
    rows: list[tuple[str, Path, dict[str, Any]]]
    if options.folders:
        first = options.folders[0]
        rows = [(folder.name, folder, {"dtype": "float32"}) for folder in options.folders]
        rows += [
            (name, first, {"dtype": "bfloat16", "quantization": name})
            for name in options.quantization
        ]
    else:
        path = resolve("smollm2-135m")
        rows = [(dtype, path, {"dtype": dtype}) for dtype in ["float32", *options.dtypes]]
    reference: torch.Tensor | None = None
    print(
        f"{'':20}{'perplexity':>12}{'over the first':>16}{'KL to it':>12}{'greedy agreement':>18}"
    )
    for name, path, settings in rows:
        loaded = load_model(EngineConfig(device="cpu", **settings), path)
        ids = loaded.tokenizer.encode(text)[: options.tokens]
        found = logprobs(loaded, ids)
        loss = -found[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).mean().item()
        if reference is None:
            reference, least = found, loss
        divergence = (reference.exp() * (reference - found)).sum(-1).mean().item()
        agreement = (reference.argmax(-1) == found.argmax(-1)).float().mean().item()
        more = math.exp(loss - least) - 1
        print(
            f"{name:20}{math.exp(loss):12.3f}{more:16.1%}{divergence:12.4f}{agreement:18.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
