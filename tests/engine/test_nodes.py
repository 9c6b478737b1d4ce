"""Ranks on several machines, each played by processes of this one: who is let in, what they answer,
how they end.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang_lite as sgl
from sglang_lite import worker
from sglang_lite.engine import nodes
from sglang_lite.engine.nodes import NodeListener, connect_to_node_0, run_worker_node
from sglang_lite.protocol import BackendError, EngineClosedError, ParameterError, SamplingParams
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.parallel.addresses import GLOO, rendezvous_url
from sglang_lite.runtime.parallel.addresses import parse_address as host_and_port
from sglang_lite.runtime.parallel.collectives import GlooCollectives, open_rank_store
from tests.children import send
from tests.engine import processes
from tests.engine.collector import Collector

SETTINGS: dict[str, Any] = dict(
    device="cpu", dtype="float32", tp_size=2, nnodes=2, max_total_tokens=4096
)


@pytest.fixture
def config(folders, address):
    return EngineConfig.make(model=str(folders[0]), dist_init_addr=address, **SETTINGS)


@pytest.fixture
def listener(config):
    """A listener of node 0, and the ranks that have come to it."""
    joined = []
    found = NodeListener(
        config, Path(config.model), lambda rank, child: joined.append((rank, child))
    )
    yield found, joined
    found.close()
    for _, child in joined:
        child.connection.release_socket()


def test_a_node_that_differs_is_refused_by_name(config, folders, listener, monkeypatch):
    path, other = Path(config.model), replace(config, node_rank=1)
    for settings, model, difference in (
        (
            replace(other, dtype="bfloat16"),
            path,
            "it has dtype='bfloat16', and node 0 has 'float32'",
        ),
        (other, Path(folders[1]), "it has another model than node 0"),
    ):
        with pytest.raises(BackendError, match=f"node 0 at 127.*refuses node 1: {difference}"):
            run_worker_node(settings, model)
    monkeypatch.setattr(nodes, "__version__", "0.0.0")
    with pytest.raises(BackendError, match=r"it has sglang_lite 0\.0\.0, and node 0 has"):
        run_worker_node(other, path)
    assert listener[1] == []


def test_replicas_that_would_answer_otherwise_are_refused_by_name(config):
    path, both = Path(config.model), replace(config, tp_size=1, dp_size=2)
    found = NodeListener(both, path, lambda *_: None)
    for settings, difference in (
        (dict(enable_lora=True), "enable_lora=True, and node 0 has False"),
        (
            dict(enable_return_hidden_states=True),
            "enable_return_hidden_states=True, and node 0 has False",
        ),
        (dict(seed=3), "seed=3, and node 0 has None"),
    ):
        with pytest.raises(BackendError, match=f"refuses node 1: it has {difference}"):
            run_worker_node(replace(both, node_rank=1, **settings), path)
    found.close()


def test_machines_meet_at_an_address_of_ipv6(config):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    _, port = host_and_port(config.dist_init_addr)
    settings, joined = replace(config, dist_init_addr=f"[::1]:{port}"), []
    found = NodeListener(
        settings, Path(config.model), lambda rank, child: joined.append((rank, child))
    )
    connection = connect_to_node_0(settings, Path(config.model), 1)
    found.wait_for_processes(10, lambda: False)
    found.close()

    def summed(rank):
        at = rendezvous_url(settings.dist_init_addr, GLOO)
        return GlooCollectives(config.parallel.as_seen_by(rank), at, 60).sum(torch.ones(2)).tolist()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(summed, range(2))) == [[2, 2]] * 2
    assert [rank for rank, _ in joined] == [1]
    for each in (connection, joined[0][1].connection):
        each.release_socket()


def test_strangers_do_not_keep_nodes_away(config, listener):
    found, joined = listener
    deep = b"\x81\xa1x" + b"\x91" * 50_000 + b"\x90"
    framed = [len(content).to_bytes(4, "big") + content for content in (b"abc", deep)]
    for content in (b"", b"GET / HTTP/1.1\r\n\r\n", *framed):
        with (
            socket.create_connection(host_and_port(config.dist_init_addr)) as stranger,
            contextlib.suppress(OSError),  # it may be sent away before it has said all
        ):
            stranger.sendall(content)
            stranger.shutdown(socket.SHUT_WR)
            stranger.recv(1)
    with pytest.raises(
        BackendError, match=r"node 1 of 2 has not come to 127.0.0.1:\d+ within 0.01 s.*node_rank=1"
    ):
        found.wait_for_processes(0.01, lambda: False)
    with socket.create_connection(host_and_port(config.dist_init_addr)):  # who says nothing
        connection = connect_to_node_0(replace(config, dist_timeout=10), Path(config.model), 1)
        found.wait_for_processes(0.01, lambda: False)
    assert [rank for rank, _ in joined] == [1]
    connection.release_socket()


def test_an_address_that_can_not_be_had_or_reached_is_named(config, monkeypatch):
    monkeypatch.setattr(nodes, "DIST_TIMEOUT_S", 0)
    with pytest.raises(
        BackendError, match=r"dist_init_addr: node 0 can't be reached at 127.0.0.1:\d+"
    ):
        run_worker_node(replace(config, node_rank=1), Path(config.model))
    with (
        socket.create_server(host_and_port(config.dist_init_addr)),
        pytest.raises(BackendError, match=r"dist_init_addr: node 0 can't listen at 127.0.0.1:\d+"),
    ):
        NodeListener(config, Path(config.model), lambda *_: None)
    with pytest.raises(
        BackendError, match=r"dist_init_addr: node 0 can't be reached at a\.\.b:5000"
    ):
        connect_to_node_0(replace(config, dist_init_addr="a..b:5000"), Path(config.model), 1)


def test_a_node_waits_for_node_0_as_long_as_it_is_told(config, monkeypatch):
    monkeypatch.setattr(nodes, "DIST_TIMEOUT_S", 0)
    tried, connect = threading.Event(), socket.create_connection

    def connect_and_tell(*where):
        try:
            return connect(*where)
        finally:
            tried.set()

    monkeypatch.setattr(nodes.socket, "create_connection", connect_and_tell)
    joined = []
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(
            connect_to_node_0, replace(config, dist_timeout=60), Path(config.model), 1
        )
        assert tried.wait(60)
        found = NodeListener(
            config, Path(config.model), lambda rank, child: joined.append((rank, child))
        )
        coming.result(60).release_socket()
        found.wait_for_processes(10, lambda: False)
        found.close()
    assert [rank for rank, _ in joined] == [1]
    joined[0][1].connection.release_socket()


def test_a_port_behind_the_first_that_is_taken_is_named(config):
    host, port = host_and_port(config.dist_init_addr, GLOO)
    with (
        socket.create_server((host, port)),
        pytest.raises(
            BackendError, match=rf"rank 0 can't listen at {host}:{port}: .*The two ports behind"
        ),
    ):
        open_rank_store(rendezvous_url(config.dist_init_addr, GLOO), config.parallel, 1)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "BrokenFrameError: a message of 1,213,486,160 bytes"),
        ((100).to_bytes(4, "big") + b"it begins", "TimeoutError"),
        (b"", "ConnectionResetError: the other end has ended"),
    ],
)
def test_a_server_that_is_no_node_0_is_named(answer, reason, config, monkeypatch):
    monkeypatch.setattr(nodes, "_HANDSHAKE_S", 0.2)
    done = threading.Event()

    def serve():
        with server.accept()[0] as line:
            line.recv(1 << 16)
            line.sendall(answer)
            done.wait(10 if answer else 0)

    with socket.create_server(host_and_port(config.dist_init_addr)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(
            BackendError, match=rf"node 0 at 127\.0\.0\.1:\d+ refuses node 1: {reason}"
        ):
            run_worker_node(replace(config, node_rank=1), Path(config.model))
        done.set()
        thread.join()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(nnodes=3), "nnodes: 3 does not divide 2 ranks"),
        (dict(dist_init_addr=None), "dist_init_addr: None is no host and port"),
        (dict(dist_init_addr="10.0.0.1"), "dist_init_addr: '10.0.0.1' is no host and port"),
        (dict(dist_init_addr="::1:5000"), "dist_init_addr: '::1:5000' is no host and port"),
        (
            dict(dist_init_addr="10.0.0.1:65535"),
            "dist_init_addr: '10.0.0.1:65535' is no host and port",
        ),
        (dict(node_rank=2), "node_rank: 2 is none of 2 machines"),
        (dict(nnodes=1), "dist_init_addr: is for several machines"),
        (dict(restart=True), "restart: is not here with nnodes=2"),
        (dict(dp_size=3), "nnodes: 2 does not divide 3 replicas"),
    ],
)
def test_settings_of_machines_that_do_not_fit_are_refused_by_name(settings, message):
    with pytest.raises(ParameterError, match=message):
        EngineConfig.make(**{**SETTINGS, "dist_init_addr": "10.0.0.1:5000", **settings})


def test_an_engine_is_on_machine_0():
    with pytest.raises(ParameterError, match="node_rank: an engine is on machine 0"):
        sgl.Engine(**SETTINGS, dist_init_addr="10.0.0.1:5000", node_rank=1)


def test_a_process_of_torchrun_knows_its_place():
    given = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5000",
    }
    flags = ["--nnodes", "4", "--node-rank", "3", "--dist-init-addr", "10.0.0.1:5001"]
    assert worker.torchrun_rank_flags(given) == flags
    assert worker.torchrun_rank_flags(given | {"WORLD_SIZE": "1", "RANK": "0"}) == []
    assert [
        worker.visible_gpu(given),
        worker.visible_gpu(given | {"CUDA_VISIBLE_DEVICES": "4,6"}),
    ] == [
        "1",
        "6",
    ]
    with pytest.raises(SystemExit, match="'RANK' is missing, which torchrun sets"):
        worker.torchrun_rank_flags({})


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("module", "ranks"), [("sglang_lite", 4), ("sglang_lite.worker", 2)])
def test_two_nodes_answer_like_one_process_and_a_dead_rank_is_named(
    module, ranks, folders, own, config, monkeypatch
):
    mark = uuid.uuid4().hex
    monkeypatch.setenv(processes.MARK, mark)
    host, port = host_and_port(config.dist_init_addr)
    flags = [
        "--model",
        str(folders[0]),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--tp-size",
        str(ranks),
    ]
    if module == "sglang_lite":
        flags = [
            "serve",
            *flags,
            "--nnodes",
            "2",
            "--node-rank",
            "1",
            "--dist-init-addr",
            f"{host}:{port}",
        ]
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port - 1)}
    agent = subprocess.Popen([sys.executable, "-m", module, *flags], env={**os.environ, **place})
    with sgl.Engine(
        folders[0], dist_init_addr=config.dist_init_addr, **SETTINGS | {"tp_size": ranks}
    ) as engine:
        greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        prompts = ["ab", "abc" * 20, "b"]
        assert [engine.complete(p, greedy).text for p in prompts] == [
            own.complete(p, greedy).text for p in prompts
        ]
        places = [(rank, rank * 2 // ranks) for rank in range(ranks)]
        assert [(each["rank"], each["node"]) for each in engine.stats()["ranks"]] == places
        sink = Collector()
        engine.submit(
            "ab",
            SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True),
            sink=sink,
            stream=True,
        )
        sink.begun()
        (victim, *_) = [pid for pid in processes.marked(mark) if _parent(pid) == agent.pid]
        send(victim, signal.SIGKILL)
        error = sink.end()
        assert isinstance(error, EngineClosedError)
        assert re.search(rf"rank \d of {ranks} was ended by SIGKILL", str(error))
    assert agent.wait(60) == 1
    processes.gone(mark)


@pytest.mark.slow
def test_replicas_of_two_nodes_answer_like_one_engine(folders, own, config, monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv(processes.MARK, mark)
    flags = [
        "--model",
        str(folders[0]),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--dp-size",
        "2",
        "--nnodes",
        "2",
    ]
    place = ["--node-rank", "1", "--dist-init-addr", config.dist_init_addr]
    agent = subprocess.Popen([sys.executable, "-m", "sglang_lite", "serve", *flags, *place])
    settings = SETTINGS | {"tp_size": 1, "dp_size": 2}
    with sgl.Engine(folders[0], dist_init_addr=config.dist_init_addr, **settings) as engine:
        greedy = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        expected = own.complete(
            "abc", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        ).text
        assert [said(engine, "abc", greedy, routed_dp_rank=replica) for replica in range(2)] == [
            expected
        ] * 2
        assert [each["dp_rank"] for each in engine.stats()["replicas"]] == [0, 1]
        stream = engine.generate(
            "ab", greedy | {"max_new_tokens": 1500}, stream=True, routed_dp_rank=1
        )
        next(stream)
        (victim, *_) = [pid for pid in processes.marked(mark) if _parent(pid) == agent.pid]
        send(victim, signal.SIGKILL)
        with pytest.raises(EngineClosedError, match="the process of replica 1 on node 1 is gone"):
            deque(stream, maxlen=0)
        assert said(engine, "abc", greedy) == expected
    assert agent.wait(60) == 1
    processes.gone(mark)


def said(engine: sgl.Engine, *args: Any, **fields: Any) -> str:
    """Text of an answer to one prompt."""
    answer: Any = engine.generate(*args, **fields)
    text: str = answer["text"]
    return text


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
