"""An engine that takes its weights from a running one, over its routes and gloo: the same logits,
and the version.
"""

from __future__ import annotations

import shutil
import socket
from typing import Any

import httpx2
import pytest
import torch

import sglang_lite as sgl
from sglang_lite.runtime.models.weights import instance
from tests.runtime.models.test_families import FAMILIES, SHAPE
from tests.runtime.models.test_new_weights import engine, pair, tensors_of, told
from tests.runtime.models.tiny import randomise, save
from tests.server.conftest import Running

SEED = "remote_instance_weight_loader_"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module", params=["llama-biases", "qwen3-moe"])
def folders(request, tmp_path_factory):
    return pair(request.param, tmp_path_factory.mktemp("seeds"))


@pytest.fixture
def seed(folders):
    """A server with the weights of the second folder, of which it says that they are the first's."""
    with engine(folders[0]) as running:
        running.update_weights_from_tensor(tensors_of(folders[1]), weight_version="step 7")
        served = Running(running)
        try:
            yield served
        finally:
            served.terminate()


@pytest.fixture
def bare(folders, tmp_path):
    """The first folder without weights."""
    shutil.copytree(folders[0], tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    return tmp_path / "bare"


def address_of(seed):
    return seed.url.removeprefix("http://")


def of_seed(seed, **settings):
    host, _, port = address_of(seed).partition(":")
    return {
        "load_format": "remote_instance", f"{SEED}seed_instance_ip": host, "dist_timeout": 60,
        f"{SEED}seed_instance_service_port": int(port), f"{SEED}backend": "gloo", **settings,
    }  # fmt: skip


@pytest.mark.sampled(2)
def test_an_engine_in_another_process_gets_the_weights_of_a_running_one(seed, bare, folders):
    with engine(folders[1]) as other:
        expected = told(other)
    with sgl.Engine(
        str(bare), dtype="float32", max_running=4, device="cpu", **of_seed(seed)
    ) as running:
        assert told(running) == expected
        assert running.get_model_info()["weight_version"] == "step 7"
        assert (
            running.generate("a", {"max_new_tokens": 1})["meta_info"]["weight_version"] == "step 7"
        )
        running.update_weights(str(folders[0]))  # other weights come from files again
        assert told(running) != expected
    address = f"instance://{address_of(seed)}"
    with sgl.Engine(
        address, dtype="float32", max_running=4, device="cpu", in_process=True
    ) as running:  # which names the seed's own folder
        assert told(running) == expected
        assert running.get_model_info()["model_path"] == str(folders[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each engine")
def test_weights_come_over_nccl(seed, bare, folders):
    with engine(folders[1]) as other:
        expected = told(other)
    settings = of_seed(seed) | {f"{SEED}backend": "nccl", "base_gpu_id": 1}
    with sgl.Engine(
        str(bare), dtype="float32", max_running=4, max_total_tokens=8192, **settings
    ) as running:
        assert told(running) == expected


def test_weights_that_a_seed_has_in_fewer_bits_are_named(tmp_path):
    kind, changes = FAMILIES["qwen2"]
    model = randomise(kind(kind.config_class(**SHAPE | changes | {"intermediate_size": 64})))
    folder = save(model, tmp_path)
    with engine(folder, dtype="bfloat16", quantization="int8") as running:
        served = Running(running)
        try:
            with pytest.raises(sgl.ModelError, match="in fewer bits in this engine"):
                engine(folder, device="cpu", **of_seed(served))
        finally:
            served.terminate()


def test_a_seed_with_an_administrator_wants_its_key(folders, bare, monkeypatch):
    with engine(folders[0]) as running:
        served = Running(running, admin_api_key="secret")
        try:
            with pytest.raises(sgl.ModelError, match="Set SGLANG_LITE_SEED_KEY"):
                engine(bare, device="cpu", **of_seed(served))
            monkeypatch.setenv("SGLANG_LITE_SEED_KEY", "secret")
            with engine(bare, device="cpu", **of_seed(served)) as other:
                assert told(other) == told(running)
        finally:
            served.terminate()


def test_a_seed_whose_weights_change_meanwhile_is_named(seed, bare, folders):
    take = instance.InstanceSource.take_tensor_or_stack

    def taken(self, name, shape):
        if name == "model.norm.weight":
            seed.service.engine.update_weights_from_tensor(
                {EMBEDDING: tensors_of(folders[0])[EMBEDDING]}
            )
        return take(self, name, shape)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(sgl.ModelError, match="have changed since they were off"),
    ):
        patch.setattr(instance.InstanceSource, "take_tensor_or_stack", taken)
        engine(bare, device="cpu", **of_seed(seed))
    with engine(bare, device="cpu", **of_seed(seed)):  # another one gets them
        pass


def test_weights_are_sent_at_the_port_that_is_given(seed, bare):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {f"{SEED}send_weights_group_ports": [taken.getsockname()[1]], "dist_timeout": 5}
        with pytest.raises(sgl.SglError):
            engine(bare, device="cpu", **of_seed(seed) | ports)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no port": ({f"{SEED}seed_instance_service_port": None}, "service_port: is missing"),
    "no server": (
        {f"{SEED}seed_instance_service_port": 1},
        "instance://127.0.0.1:1: /get_model_info: ",
    ),
    "a version": ({"weight_version": "mine"}, "weight_version: is that of the engine"),
    "transfer engine": (
        {f"{SEED}backend": "transfer_engine"},
        "'transfer_engine' is SGLang's, and not here",
    ),
    "two ports": ({f"{SEED}send_weights_group_ports": [1, 2]}, "is no list of one port"),
    "nccl": ({f"{SEED}backend": "nccl"}, "nccl is for an engine on a GPU"),
    "an address": ({"model": "instance://here"}, "no address of the form instance://host:port"),
    "a format": (
        {"model": "instance://here:1", "load_format": "pt"},
        "'pt' is not for instance://here:1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named_before_weights_are_sent(case, seed, bare):
    changes, why = BAD[case]
    settings = {"model": str(bare), "device": "cpu", "in_process": True} | of_seed(seed) | changes
    with pytest.raises(sgl.SglError, match=why):
        sgl.Engine(**settings)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/init_weights_send_group_for_remote_instance", {"ports": "1,2"}),
        ("/init_weights_send_group_for_remote_instance", {"ports": "0", "world_size": 3}),
        ("/send_weights_to_remote_instance", {"ports": "", "names": ["a"]}),
    ],
)
def test_a_request_for_another_group_is_refused(path, body, seed):
    answer = httpx2.post(
        f"{seed.url}{path}", json={"master_address": "127.0.0.1", "group_name": "g", **body}
    )
    assert (answer.status_code, "group" in answer.text) == (400, True)
