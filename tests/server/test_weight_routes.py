"""SGLang's routes for weights: what they change, and what they refuse."""

import base64
import pickle
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import torch
from safetensors.torch import save

import sglang_lite as sgl
from sglang_lite.server.settings import ServerSettings
from tests.runtime.models.test_new_weights import GREEDY, Q, pair, tensors_of
from tests.server.conftest import serving
from tests.waiting import until


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return pair("llama-biases", tmp_path_factory.mktemp("llamas"))


@pytest.fixture(scope="module")
def client(folders):
    with (
        sgl.Engine(str(folders[0]), dtype="float32", max_running=4, in_process=True) as engine,
        serving(engine) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def ids(client):
    answer = client.post("/generate", json={"text": "abc", "sampling_params": GREEDY}).json()
    return answer["output_ids"], answer["meta_info"]["weight_version"]


def test_weights_come_as_the_bytes_of_safetensors(client, folders):
    old, _ = ids(client)
    tensors = {
        name: base64.b64encode(save({name: tensor})).decode()
        for name, tensor in tensors_of(folders[1]).items()
    }
    assert (
        client.post("/pause_generation", json={"mode": "retract"}).json()["num_paused_requests"]
        == 0
    )
    for name, data in tensors.items():
        body = {"serialized_named_tensors": [data], "weight_version": "2"}
        assert client.post("/update_weights_from_tensor", json=body).json()["success"], name
    assert client.post("/continue_generation").status_code == 200
    new, version = ids(client)
    assert (new != old, version) == (True, "2")
    rows = client.post("/get_weights_by_name", json={"name": Q, "truncate_size": 2}).json()
    assert torch.equal(torch.tensor(rows), tensors_of(folders[1])[Q][:2])
    assert client.post("/weights_checker", json={"action": "snapshot"}).json()["success"]
    body = {"model_path": str(folders[0]), "load_format": "safetensors", "weight_version": "1"}
    assert client.post("/update_weights_from_disk", json=body).json()["success"]
    assert ids(client) == (old, "1")
    compared = client.post("/weights_checker", json={"action": "compare"})
    assert (compared.json()["success"], len(compared.json()["changed"])) == (False, len(tensors))


def test_an_update_of_several_calls_begins_and_ends(client):
    refused = client.post("/begin_weight_update", json={"selector": "draft"})
    assert (refused.status_code, "selector" in refused.text) == (400, True)
    assert client.post("/end_weight_update").status_code == 400
    assert client.post("/begin_weight_update", json={"selector": "all"}).json()["success"]
    assert client.post("/end_weight_update").json()["success"]
    assert ids(client)


def test_weights_get_another_name_alone(client):
    before, _ = ids(client)
    named = client.post(
        "/update_weight_version", json={"new_version": "step 7", "abort_all_requests": False}
    )
    assert (named.status_code, named.json()["success"], named.json()["new_version"]) == (
        200,
        True,
        "step 7",
    )
    assert ids(client) == (before, "step 7")
    assert client.get("/model_info").json()["weight_version"] == "step 7"
    for body in ({}, {"new_version": 7}):
        assert client.post("/update_weight_version", json=body).status_code == 400
    assert ids(client) == (before, "step 7")


def test_requests_end_before_the_weights_get_another_name(client):
    body = {
        "text": "abc",
        "stream": True,
        "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
    }
    with client.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert (
            client.post("/update_weight_version", json={"new_version": "aborted"}).status_code
            == 200
        )
        assert '"abort"' in "".join(lines)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            {"serialized_named_tensors": [base64.b64encode(pickle.dumps([1])).decode()]},
            "Pickled tensors are refused",
        ),
        ({"serialized_named_tensors": ["%"]}, "is no base64"),
        ({"serialized_named_tensors": []}, "has 0 entries"),
        (
            {"serialized_named_tensors": [""], "load_format": "flattened_bucket"},
            "is no flattened bucket of a GPU",
        ),
        ({"serialized_named_tensors": [""], "load_format": "pt"}, "'pt' is not for tensors"),
        (
            {"serialized_named_tensors": [base64.b64encode(b"\x10" + b"\0" * 7 + b"{}").decode()]},
            "damaged",
        ),
        (
            {"serialized_named_tensors": [base64.b64encode(save({"x": torch.ones(2)})).decode()]},
            "no place for x",
        ),
    ],
)
def test_other_tensors_change_nothing(client, body, why):
    before = ids(client)
    response = client.post("/update_weights_from_tensor", json=body)
    assert response.status_code == 400
    assert why in response.text
    assert ids(client) == before


def test_health_says_that_the_engine_is_asleep(client):
    assert client.post("/sleep").status_code == 200
    second = client.post("/sleep")
    assert (second.status_code, second.json()["error"]["message"][:20]) == (
        400,
        "the engine is asleep",
    )
    for path in ("/health", "/health_generate"):
        answer = client.get(path)
        assert (answer.status_code, answer.text) == (200, "asleep")
    assert client.post("/wake_up").status_code == 200
    for path in ("/health", "/health_generate"):
        answer = client.get(path)
        assert (answer.status_code, answer.text) == (200, "")


def test_questions_that_have_no_answer_are_refused(client):
    assert (
        client.post("/get_weights_by_name", json={"name": Q, "truncate_size": 0}).status_code == 400
    )
    assert client.post("/pause_generation", json={"mode": "x"}).status_code == 400
    assert (
        "none of checksum" in client.post("/weights_checker", json={"action": "reset_tensors"}).text
    )


# ---------------------------------------------------------------------------------- what paths tell


UPDATE, LOAD = "/update_weights_from_disk", "/load_lora_adapter"


def named(path, place):
    return (
        {"model_path": str(place)}
        if path == UPDATE
        else {"lora_name": "one", "lora_path": str(place)}
    )


@pytest.mark.parametrize("path", [UPDATE, LOAD])
def test_an_error_names_no_entry_of_a_folder(client, path, tmp_path):
    names = ("secret.pem", "notes.txt", "weights.gguf")
    for name in names:
        (tmp_path / name).write_text("what is in it")
    places = [
        tmp_path,
        *(tmp_path / name for name in names),
        tmp_path / "not there",
        "~nobody-here/a",
        "a\0b",
        "/" + "a" * 5000,
    ]
    for place in places:
        refused = client.post(path, json=named(path, place))
        assert refused.status_code == 400
        assert not any(name in refused.text for name in names if not str(place).endswith(name)), (
            refused.text
        )
        assert "what is in it" not in refused.text
    listed = client.post(path, json=named(path, "/etc")).text
    assert "passwd" not in listed
    assert "hosts" not in listed


@pytest.mark.parametrize("path", [UPDATE, LOAD])
def test_weights_lie_in_the_root_if_there_is_one(folders, tmp_path, path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(folders[1])
    outside = (
        folders[1],
        root / ".." / "other",
        root / "link",
        "/etc",
        "owner/model",
        "qwen3-0.6b",
    )
    with (
        sgl.Engine(str(folders[0]), dtype="float32", max_running=4, in_process=True) as engine,
        serving(engine, weights_root=str(root)) as url,
    ):
        for place in outside:
            refused = httpx2.post(f"{url}{path}", json=named(path, place), timeout=60)
            assert (refused.status_code, "outside of the folder" in refused.text) == (400, True), (
                place
            )
        if path == UPDATE:
            shutil.copytree(folders[1], root / "new")
            assert httpx2.post(f"{url}{path}", json=named(path, root / "new"), timeout=60).json()[
                "success"
            ]
    with pytest.raises(sgl.ParameterError, match=r"weights_root: .* is no folder"):
        ServerSettings(weights_root=str(tmp_path / "missing"))


@pytest.mark.parametrize("path", [UPDATE, LOAD])
def test_an_address_is_read_only_if_its_scheme_is_allowed(folders, path):
    """Memory is a scheme of fsspec's without a network."""
    with (
        sgl.Engine(str(folders[0]), dtype="float32", max_running=4, in_process=True) as engine,
        serving(engine, weights_scheme=("memory",)) as url,
    ):

        def told(place):
            answer = httpx2.post(f"{url}{path}", json=named(path, place), timeout=60)
            assert answer.status_code == 400
            return answer.text

        for place in (
            "http://127.0.0.1:1/a",
            "s3://bucket/a",
            "file:///etc",
            "memory://a::http://127.0.0.1:1/b",
        ):
            assert "scheme is not allowed" in told(place)
        assert "scheme is not allowed" not in told("memory://none")
    for scheme in ("file", "S3", "s3://"):
        with pytest.raises(sgl.ParameterError, match="weights_scheme"):
            ServerSettings(weights_scheme=(scheme,))


def test_a_group_whose_host_says_nothing_is_given_up_and_can_be_left(folders):
    def join(url, port):
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2,
                "group_name": "silent", "backend": "gloo"}  # fmt: skip
        return httpx2.post(f"{url}/init_weights_update_group", json=body, timeout=60)

    def leave(url):
        return httpx2.post(
            f"{url}/destroy_weights_update_group", json={"group_name": "silent"}, timeout=60
        )

    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and says nothing
        port = silent.getsockname()[1]
        with (
            sgl.Engine(
                str(folders[0]), dtype="float32", max_running=4, in_process=True, dist_timeout=1
            ) as engine,
            serving(engine) as url,
        ):
            for _ in range(2):  # its name is free again
                late = join(url, port)
                assert (late.status_code, late.json()["success"]) == (400, False)
                assert "nothing has come for 1 s" in late.json()["message"]
            assert leave(url).status_code == 400
        with (
            sgl.Engine(
                str(folders[0]), dtype="float32", max_running=4, in_process=True, dist_timeout=600
            ) as engine,
            serving(engine) as url,
            ThreadPoolExecutor(1) as pool,
        ):
            waiting = pool.submit(join, url, port)
            until(lambda: leave(url).status_code == 200)
            assert "it was left" in waiting.result().json()["message"]
            assert leave(url).status_code == 400
