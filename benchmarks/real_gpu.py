"""Real models on a GPU, by format of their weights: speed beside the physical limit, and distance
from float32.

    python benchmarks/real_gpu.py FILE.gguf [--folder FOLDER] [--repeat 3]

Formats, each in an engine of its own:

float32     the file's weights, decoded; what the others are compared with, and not timed
file        the file as `Engine(FILE)` serves it: matrices of 4 bits stay packed, others are decoded to bfloat16
bfloat16    a folder of the same weights in bfloat16
fp8, int4   the folder with `quantization="fp8"` and `"int4"`

Speed is tokens a second of one row (128 tokens read, 256 generated) and of 64 rows, medians of some
runs. The limit reads all weights, and each row's keys and values, once a step, at the rate of a
large copy, and makes all products at that of a large bfloat16 product; both rates are measured
first. Distance: 30 prompts, 32 greedy tokens in float32; how many of the tokens are the likeliest
in the other format, too, given the same text; how many whole answers are the same; and the mean
difference of log-probabilities, in nats.

The folder is written with transformers' code where there is none yet.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import sglang_lite as sgl
from sglang_lite.bench.limits import Rates, measure_rates
from sglang_lite.bench.workloads import WORKLOADS, Workload, run_workload
from sglang_lite.commands.verify.engines import GreedyAnswer, answer_greedily
from sglang_lite.commands.verify.greedy import measure_distance_to_answers
from sglang_lite.commands.verify.texts import PROMPTS
from sglang_lite.runtime.loading.description import describe
from sglang_lite.runtime.loading.model_files import open_model_files
from sglang_lite.runtime.models.spec import ModelSpec

TOKENS = 32  # of each greedy answer
SPEEDS = {"1 row": "decode1", "64 rows": "plain64"}


@dataclass(frozen=True)
class Format:
    """A format of the weights.

    Attributes:
        model, settings: model and settings of its engine.
        matrix_bytes: bytes of a number of the layers' matrices; None for those that the file says.
            The head, which is the embedding, too, has those of the computation.
    """

    name: str
    model: Path
    settings: dict[str, str]
    matrix_bytes: float | None


def write_folder(file: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as a folder of safetensors in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    del read.config.quantization_config  # with it transformers refuses to write the decoded weights
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def limit_seconds(spec: ModelSpec, work: Workload, weight_bytes: int, rates: Rates) -> float:
    """Least seconds of a workload without shared prompts, whose rows end together."""
    rows, new, read = len(work.suffix_lengths), work.output_lengths[0], sum(work.suffix_lengths)
    active = sum(layer.active_weight_elements(spec.hidden_size) for layer in spec.layers)
    head = spec.vocab_size * spec.hidden_size
    pair_bytes = 2 * spec.kv_layout.numbers
    seconds = max(weight_bytes / rates.bytes_per_s, 2 * active * read / rates.flops_per_s)
    for step in range(1, new):
        moved = weight_bytes + (read + rows * step) * pair_bytes
        seconds += max(moved / rates.bytes_per_s, 2 * (active + head) * rows / rates.flops_per_s)
    return seconds


def count_weight_bytes(spec: ModelSpec, weights: Format) -> int:
    """Bytes of the weights that a step reads."""
    if weights.matrix_bytes is None:
        return describe(str(weights.model)).loaded_bytes or 0
    matrices = sum(layer.active_weight_elements(spec.hidden_size) for layer in spec.layers)
    head = spec.vocab_size * spec.hidden_size
    return int(weights.matrix_bytes * matrices + max(2, weights.matrix_bytes) * head)


def measure_speeds(engine: sgl.Engine, repeat: int) -> dict[str, float]:
    """Median seconds of each workload; the first run of each warms up."""
    found = {}
    for name, workload in SPEEDS.items():
        seconds = [run_workload(engine, WORKLOADS[workload]()).seconds for _ in range(repeat + 1)]
        found[name] = median(seconds[1:])
    return found


def tell_distance(engine: sgl.Engine, exact: Sequence[GreedyAnswer]) -> str:
    """Distance of an engine from greedy answers in float32, as cells of the table."""
    found = measure_distance_to_answers(engine, exact)
    return f"{found.equal_share:8.1%} {found.equal_answers:4} of {len(exact)} {found.mean:8.4f}"


def tell(text: str) -> None:
    """Writes what is done now, with the time, to stderr."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def chats(engine: sgl.Engine) -> list[list[int]]:
    """Ids of the 30 prompts, each as a turn of a user if the model has a template."""
    template = engine.chat_template()
    texts = list(PROMPTS)
    if template is not None:
        texts = [
            template.render([{"role": "user", "content": text}], add_generation_prompt=True)
            for text in PROMPTS
        ]
    return [engine.tokenizer.encode(text) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    folder = options.folder or options.file.with_suffix("")
    if not folder.exists():
        tell(f"writing {folder}")
        write_folder(options.file, folder)
    formats = [
        Format("float32", options.file, {"dtype": "float32"}, 4),
        Format("bfloat16", folder, {}, 2),
        Format("fp8", folder, {"quantization": "fp8"}, 1),
        Format("int4", folder, {"quantization": "int4"}, 0.5 + 2 / 128),
        Format("file", options.file, {}, None),
    ]
    rates = measure_rates()
    spec = open_model_files(folder).spec
    assert isinstance(spec, ModelSpec)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.file.name}")
    print(
        f"a copy moves {rates.bytes_per_s / 1e12:.2f} TB/s, bfloat16 gives {rates.flops_per_s / 1e12:.0f} TFLOP/s"
    )
    speeds = "".join(f"{name + ', tokens/s':>18} {'of limit':>9}" for name in SPEEDS)
    print(f"{'format':10}{'GB':>6}{speeds}   {'tokens':>8} {'answers':>10} {'nats':>8}", flush=True)
    exact: list[GreedyAnswer] = []
    for each in formats:
        settings: dict[str, Any] = each.settings
        weight_bytes = count_weight_bytes(spec, each)
        tell(f"starting an engine of {each.name}")
        with sgl.Engine(str(each.model), log_level="error", mem_fraction=0.5, **settings) as engine:
            tell("started")
            if not exact:
                exact = answer_greedily(engine, chats(engine), TOKENS)
                continue
            cells = ""
            for name, seconds in measure_speeds(engine, options.repeat).items():
                work = WORKLOADS[SPEEDS[name]]()
                limit = limit_seconds(spec, work, weight_bytes, rates)
                cells += f"{sum(work.output_lengths) / seconds:18,.0f} {limit / seconds:9.1%}"
            print(
                f"{each.name:10}{weight_bytes / 1e9:6.2f}{cells}   {tell_distance(engine, exact)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
