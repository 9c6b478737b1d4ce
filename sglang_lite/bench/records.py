"""Measurements as records and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from sglang_lite.bench.peers import Figures
from sglang_lite.protocol import ParameterError


@dataclass(frozen=True, slots=True)
class Runs:
    """One workload in one way.

    Attributes:
        first: seconds of the first run, before all others: it warms up what the others find warm.
        seconds: of each other run, in their order.
        steps: of one of them.
    """

    first: float
    seconds: tuple[float, ...]
    steps: int

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest less fastest, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


@dataclass(frozen=True, slots=True)
class Row:
    """A workload.

    Attributes:
        tokens: that are generated.
        ideal: seconds at the physical limit; None on a CPU.
        requests: as requests.
        program: as a program; None where it is none.
    """

    workload: str
    tokens: int
    ideal: float | None
    requests: Runs
    program: Runs | None


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the model.

    Attributes:
        copy, matmul: rates as `limits.Rates` has them; None on a CPU.
        ready: seconds that the engine took in this process.
        first_token: seconds from the start of another process to its first token.
        compiled: kernels that this other process had to compile.
        tokens: room in the KV cache.
    """

    device: str
    torch: str
    shape: str
    numbers: str
    copy: float | None
    matmul: float | None
    ready: float
    first_token: float
    compiled: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """A whole measurement.

    Attributes:
        peers: by name.
    """

    machine: Machine
    rows: tuple[Row, ...]
    peers: dict[str, Figures]

    def save(self, path: Path) -> None:
        """Writes JSON: the records' fields, and of each workload's runs the median and the spread.

        Raises:
            ParameterError: the file can't be written.
        """
        content = asdict(self)
        for row, written in zip(self.rows, content["rows"]):
            for way in ("requests", "program"):
                runs = getattr(row, way)
                if runs is not None:
                    written[way] |= {"median": runs.median, "spread": runs.spread, "count": len(runs.seconds)}
        try:
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ParameterError("--json", f"{path}: {error}") from error
