"""Runs the ranks of an engine on a Ray cluster. Each rank counts as a node of its own (nodes.py),
and its agent is an actor with a reserved device. Rank 0 runs in the engine's process; an actor only
reserves its device on this machine.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from sglang_lite.protocol import BackendError, CapabilityError
from sglang_lite.runtime.config import DIST_TIMEOUT_S, EngineConfig
from sglang_lite.runtime.parallel.addresses import NCCL

# requested share of the resource that Ray has for each machine, to place a bundle on the machine
_OF_THIS_MACHINE = 0.001


def start_rank_actors(config: EngineConfig) -> EngineConfig:
    """Creates Ray actors that run an engine's ranks. When the engine or one of the actors ends, all
    actors end.

    Args:
        config: settings with `use_ray`.

    Returns:
        Settings of the engine that uses these ranks.

    Raises:
        CapabilityError: Ray is not installed.
        BackendError: the cluster has no room for all ranks.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise CapabilityError(
            "use_ray needs Ray.", hint="pip install 'sglang-lite[ray]'"
        ) from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    ranks = config.parallel.ranks
    host = ray.util.get_node_ip_address()
    patience = config.dist_timeout or DIST_TIMEOUT_S
    on_gpus = config.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= 1
    room = {"CPU": 1.0, **({"GPU": 1.0} if on_gpus else {})}
    bundles = [room | {f"node:{host}": _OF_THIS_MACHINE}, *[room] * (ranks - 1)]
    group = ray.util.placement_group(bundles, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=patience)
        actors = [_create_actor(ray, group, rank, on_gpus=on_gpus) for rank in range(ranks)]
        own = ray.get(actors[0].gpu.remote(), timeout=patience) if on_gpus else 0
        address = f"{f'[{host}]' if ':' in host else host}:{_find_free_ports(host)}"
        placed = replace(config, use_ray=False, nnodes=ranks, dist_init_addr=address)
        runs = [
            actors[rank].run.remote(asdict(replace(placed, node_rank=rank)))
            for rank in range(1, ranks)
        ]
    # of any kind, so that the group's room is not blocked for others
    except BaseException as error:
        ray.util.remove_placement_group(group)
        if not isinstance(error, ray.exceptions.GetTimeoutError):
            raise
        raise BackendError(
            f"use_ray: the cluster has had no room for {ranks} ranks within {patience:g} s.",
            hint=f"Each needs a {' and a '.join(room)}, one of them on this machine.",
        ) from error
    watch = partial(_release_when_one_ends, ray, group, actors, runs)
    threading.Thread(target=watch, name="sglang_lite-ray", daemon=True).start()
    return replace(placed, base_gpu_id=own)


class _Agent:
    """Ray actor that reserves a device for a rank. It also runs the rank's agent, except for rank
    0.
    """

    def gpu(self) -> int:
        """Returns the index of the actor's GPU on its machine."""
        import ray

        return int(ray.get_gpu_ids()[0])

    def run(self, settings: dict[str, Any]) -> int:
        """Runs a rank as a node of its own, like `sglang-lite serve` with a `node_rank`."""
        from sglang_lite.engine.nodes import run_worker_node
        from sglang_lite.runtime.models.resolve import resolve_for_engine

        config = EngineConfig(**settings)
        return run_worker_node(config, resolve_for_engine(config.model, config.revision))


def _create_actor(ray: Any, group: Any, rank: int, *, on_gpus: bool) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return ray.remote(num_cpus=1, num_gpus=int(on_gpus), scheduling_strategy=where)(_Agent).remote()


def _release_when_one_ends(ray: Any, group: Any, actors: list[Any], runs: list[Any]) -> None:
    """Waits until one of the runs has ended. Then ends all actors and releases the reserved
    devices.
    """
    ray.wait(runs, num_returns=1)
    actors.clear()
    ray.util.remove_placement_group(group)


def _find_free_ports(host: str) -> int:
    """Finds consecutive free ports, as many as the ranks need. Returns the first one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(100):
        # none that the system gives to connections
        port = 20_000 + int.from_bytes(os.urandom(2), "big") % 10_000
        try:
            for each in range(port, port + NCCL + 1):
                socket.create_server((host, each), family=family).close()
        except OSError:
            continue
        return port
    raise BackendError(
        f"use_ray: no three ports in a row are free at {host}.", hint="End other engines."
    )
