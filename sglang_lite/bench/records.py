"""Records of measurements, and their JSON form."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from sglang_lite.bench.peers import PeerResults
from sglang_lite.protocol import ParameterError


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of one workload, either as requests or as a program.

    Attributes:
        first: seconds of the first run, which warms up the later ones.
        seconds: seconds of each later run, in order.
        steps: number of steps of one later run.
    """

    first: float
    seconds: tuple[float, ...]
    steps: int

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Difference between the slowest and the fastest run, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of a workload.

    Attributes:
        tokens: number of generated tokens.
        ideal: minimum seconds on this hardware; None on a CPU.
        requests: runs as requests.
        program: runs as a program, or None if the workload is not written as one.
    """

    workload: str
    tokens: int
    ideal: float | None
    requests: Runs
    program: Runs | None


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine and model of a measurement.

    Attributes:
        ranks: number of devices, or processes of a CPU, that share each layer.
        copy, matmul, link: measured rates, as in `limits.Rates`; None on a CPU. `link` is also None
            with one GPU.
        ready: seconds that the engine took to start in this process.
        first_token: seconds from the start of another process to its first token.
        compiled: number of kernels that this other process had to compile.
        tokens: capacity of the KV cache.
    """

    device: str
    ranks: int
    torch: str
    shape: str
    numbers: str
    copy: float | None
    matmul: float | None
    link: float | None
    ready: float
    first_token: float
    compiled: int
    tokens: int


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Everything that one benchmark measured: the machine, each workload, and the peers.

    Attributes:
        peers: measurements of peers, by name.
    """

    machine: Machine
    rows: tuple[Row, ...]
    peers: dict[str, PeerResults]

    def save(self, path: Path) -> None:
        """Writes the records as JSON, with the median, the spread and the number of each workload's
        runs.

        Raises:
            ParameterError: the file can't be written.
        """
        content = asdict(self)
        for row, written in zip(self.rows, content["rows"]):
            for form in ("requests", "program"):
                runs = getattr(row, form)
                if runs is not None:
                    written[form] |= {
                        "median": runs.median,
                        "spread": runs.spread,
                        "count": len(runs.seconds),
                    }
        try:
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ParameterError("--json", f"{path}: {error}") from error
