"""Entry point for torchrun. `torchrun … -m sglang_lite.worker --model M --tp-size 8` runs
`sglang-lite serve` with these flags, with one rank in each of torchrun's processes. The process of
rank 0 has the server; each process sees one GPU.
"""

from __future__ import annotations

import os
import sys

from sglang_lite.cli import main


def torchrun_rank_flags(environment: dict[str, str]) -> list[str]:
    """Returns the flags for a process's rank, the number of ranks and the address of rank 0, from
    torchrun's variables. The port is the one after torchrun's.

    Raises:
        SystemExit: a variable is missing.
    """
    try:
        rank = environment["RANK"]
        count = environment["WORLD_SIZE"]
        address = f"{environment['MASTER_ADDR']}:{int(environment['MASTER_PORT']) + 1}"
    except KeyError as error:
        raise SystemExit(
            f"sglang_lite.worker: {error} is missing, which torchrun sets. Start it by torchrun."
        ) from error
    return (
        []
        if count == "1"
        else ["--nnodes", count, "--node-rank", rank, "--dist-init-addr", address]
    )


def visible_gpu(environment: dict[str, str]) -> str:
    """Returns the GPU for this process as a value of CUDA_VISIBLE_DEVICES: the variable's entry for
    LOCAL_RANK, or LOCAL_RANK itself if the variable isn't set.
    """
    local = int(environment.get("LOCAL_RANK", "0"))
    gpus = environment.get("CUDA_VISIBLE_DEVICES")
    return str(local) if gpus is None else (*gpus.split(","), *[""] * local)[local]


if __name__ == "__main__":
    own = dict(os.environ)
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpu(own)
    sys.exit(main(["serve", *sys.argv[1:], *torchrun_rank_flags(own)]))
