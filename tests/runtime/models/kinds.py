"""Table of transformers' kinds of causal language models: which code runs a tiny model of each, and
how far its logits are from transformers' own.

`python -m tests.runtime.models.kinds` prints each row of `kinds.tsv` that differs from what the
installed transformers gives, and fails if any does. With `--write`, it writes the table.
"""

import contextlib
import difflib
import re
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers

import sglang_lite as sgl
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading.load_model import load
from sglang_lite.runtime.models.decoder import Decoder
from tests.runtime.models.test_transformers_limits import ours, theirs
from tests.runtime.models.tiny import randomise, save
from tests.runtime.models.zoo import KINDS, tiny

TABLE = Path(__file__).with_suffix(".tsv")
HEAD = "# kind\tcode that runs it\tlargest difference of logits, relative to the largest logit\treason\n"
NEAR = 1e-4
LENGTHS = (24, 40)


def row_of(kind: str) -> str:
    """Returns a kind's row of the table."""
    try:
        model = randomise(tiny(kind))
    except Exception as error:  # of transformers: of any class
        return _row(kind, "not built", "", str(error))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        try:
            save(model, Path(folder))
        except Exception as error:
            return _row(kind, "not saved", "", str(error))
        try:
            config = EngineConfig.make(model=folder, device="cpu", dtype="float32")
            loaded = load(config, Path(folder)).model
        except sgl.ModelError as error:
            return _row(kind, "refused", "", re.sub(rf"{folder}(/|: )", "", str(error)))
        generator = torch.Generator().manual_seed(1)
        rows = [torch.randint(2, 95, (length,), generator=generator) for length in LENGTHS]
        pairs = zip(ours(loaded, rows), [theirs(model, row) for row in rows])
        distance = max(_distance(found, expected) for found, expected in pairs)
    code = "sglang_lite" if isinstance(loaded, Decoder) else "transformers"
    return _row(kind, code, f"under {NEAR:g}" if distance < NEAR else f"{distance:.1g}", "")


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def _row(kind: str, code: str, distance: str, reason: str) -> str:
    line = reason.strip().partition("\n")[0].partition("Use ")[0].strip()[:200]
    return f"{kind}\t{code}\t{distance}\t{line}\n"


def main() -> None:
    """Compares or writes the table."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = [HEAD, *map(row_of, sorted(KINDS))]
    before = TABLE.read_text().splitlines(keepends=True) if TABLE.exists() else []
    if "--write" in sys.argv:
        TABLE.write_text("".join(found))
    changes = list(difflib.unified_diff(before, found, TABLE.name, transformers.__version__, n=0))
    sys.stdout.writelines(changes)
    if changes and "--write" not in sys.argv:
        sys.exit("Correct the code, or write the table again: see its docstring.")


if __name__ == "__main__":
    main()
