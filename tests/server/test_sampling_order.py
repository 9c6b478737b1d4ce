"""`sampling_order` has the same effect through each door: the library, a run's settings, SGLang's
dictionary, and HTTP.
"""

from typing import Any

import httpx2
import pytest

import sglang_lite as sgl

SEED = 5
ENDLESS: dict[str, Any] = {"ignore_eos": True}
# Of the model's 20 likeliest tokens, which are nearly as likely as all others, top-p leaves all or
# about half.
FILTERS: dict[str, Any] = {"top_k": 20, "top_p": 0.5}


def gen(engine, url, options):
    @sgl.function
    def program(s):
        s += "ab" + sgl.gen("a", max_tokens=12, seed=SEED, **ENDLESS, **FILTERS, **options)

    return program.run(backend=engine)["a"]


def run_settings(engine, url, options):
    @sgl.function
    def program(s):
        s += "ab" + sgl.gen("a", max_tokens=12, seed=SEED, **ENDLESS)

    return program.run(backend=engine, **FILTERS, **options)["a"]


def gen_on_a_server(engine, url, options):
    return gen(sgl.RuntimeEndpoint(url), url, options)


def gen_by_requests(engine, url, options):
    @sgl.function
    def program(s):
        s += "ab" + sgl.gen("a", max_tokens=12, seed=SEED, **ENDLESS, **FILTERS, **options)

    return program.run(backend=sgl.RuntimeEndpoint(url), push_down=False)["a"]


def sampling_params(engine, url, options):
    return engine.generate("ab", _native(options))["text"]


def native(engine, url, options):
    return _post(url, "/generate", {"text": "ab", "sampling_params": _native(options)})["text"]


def completions(engine, url, options):
    body = {
        "model": "",
        "prompt": "ab",
        "max_tokens": 12,
        "seed": SEED,
        **ENDLESS,
        **FILTERS,
        **options,
    }
    return _post(url, "/v1/completions", body)["choices"][0]["text"]


def _native(options):
    return {"max_new_tokens": 12, "sampling_seed": SEED, **ENDLESS, **FILTERS, **options}


def _post(url, path, body):
    answer = httpx2.post(url + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


DOORS = [gen, run_settings, gen_on_a_server, gen_by_requests, sampling_params, native, completions]


@pytest.mark.parametrize("door", DOORS)
def test_an_order_has_its_effect(engine, url, door):
    """Joint without min-p and sequential with it, unless an order is named. A min-p this small
    leaves all tokens.
    """
    joint, sequential = (
        sampling_params(engine, url, {"sampling_order": each}) for each in ("joint", "sequential")
    )
    assert joint != sequential
    small = {"min_p": 1e-6}
    assert door(engine, url, {}) == joint
    assert door(engine, url, {"sampling_order": "joint"}) == joint
    assert door(engine, url, {"sampling_order": "sequential"}) == sequential
    assert door(engine, url, small) == sequential
    assert door(engine, url, small | {"sampling_order": "joint"}) == joint


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "ab", "sampling_params": {"sampling_order": "vllm"}}),
        ("/v1/completions", {"model": "", "prompt": "ab", "sampling_order": "vllm"}),
        (
            "/v1/chat/completions",
            {"model": "", "messages": [{"role": "user", "content": "a"}], "sampling_order": "x"},
        ),
    ],
)
def test_an_unknown_order_is_refused_by_name(url, path, body):
    answer = httpx2.post(url + path, json=body)
    assert answer.status_code == 400
    assert "sampling_order" in answer.text
    assert "joint" in answer.text
