"""What a number format costs in quality: perplexity and agreement with float32 on a fixed text.

python benchmarks/quality.py [--dtypes bfloat16 int8] [--tokens 2048]
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics

import torch

from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.kernels.reference import AttentionPlan, ExtendRow
from sglang_lite.runtime.load import LoadedModel, load_model
from sglang_lite.runtime.models.resolve import resolve


@torch.inference_mode()
def logprobs(loaded: LoadedModel, ids: list[int], chunk: int = 256) -> torch.Tensor:
    """log P of every token after every prefix [tokens, vocabulary], computed in chunks as the engine does."""
    cache = loaded.model.allocate_cache(len(ids))
    rows = []
    for start in range(0, len(ids), chunk):
        end = min(start + chunk, len(ids))
        at = torch.arange(start, end)
        plan = AttentionPlan(at, None, (ExtendRow(0, end - start, slice(0, end)),))
        hidden = loaded.model.forward(torch.tensor(ids[start:end]), at, plan, cache)
        rows.append(loaded.model.logits(hidden).log_softmax(-1))
    return torch.cat(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    path = resolve("smollm2-135m")
    text = "".join(pydoc_data.topics.topics[name] for name in ("exceptions", "import", "specialnames"))
    reference: torch.Tensor | None = None
    print(f"{'dtype':10}{'perplexity':>12}{'KL to float32':>15}{'greedy agreement':>18}")
    for dtype in ["float32", *options.dtypes]:
        loaded = load_model(EngineConfig(device="cpu", dtype=dtype), path)
        ids = loaded.tokenizer.encode(text)[: options.tokens]
        rows = logprobs(loaded, ids)
        reference = rows if reference is None else reference
        loss = -rows[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).mean().item()
        divergence = (reference.exp() * (reference - rows)).sum(-1).mean().item()
        agreement = (reference.argmax(-1) == rows.argmax(-1)).float().mean().item()
        print(f"{dtype:10}{math.exp(loss):12.3f}{divergence:15.4f}{agreement:18.1%}", flush=True)


if __name__ == "__main__":
    main()
