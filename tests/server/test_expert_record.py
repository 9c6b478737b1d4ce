"""Which experts are chosen, over HTTP."""

import httpx2

from sglang_lite.protocol import SamplingParams
from tests.runtime.models.test_families import engine as engine_of
from tests.runtime.parallel.test_cuts import folder_of
from tests.server.conftest import serving


def test_a_record_of_experts_begins_ends_and_is_read(tmp_path):
    mode = {"expert_distribution_recorder_mode": "stat"}
    with (
        engine_of(folder_of("olmoe", tmp_path), max_total_tokens=200, **mode) as engine,
        serving(engine) as url,
        httpx2.Client(base_url=url, timeout=60) as client,
    ):
        assert client.post("/dump_expert_distribution_record").status_code == 400
        assert client.post("/start_expert_distribution_record").json() == {"success": True}
        engine.complete([5, 6, 7], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        assert client.get("/stop_expert_distribution_record").json() == {"success": True}
        engine.complete([5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        counts = client.post("/dump_expert_distribution_record").json()["logical_count"]
    assert [sum(layer) for layer in counts] == [3 * 4] * 3  # experts of each of four tokens
