"""Requests to the server of a running engine: its key goes to it alone, and what else answers is a
named error.
"""

from typing import Any

import pytest
import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.weights.instance import InstanceSource
from sglang_lite.runtime.models.weights.seed import Seed
from tests.web import sends, web

HOSTS = {"seed.example": "93.184.215.14", "other.example": "93.184.215.15"}
SEED = Seed("93.184.215.14", 30000)


def test_a_seed_is_asked_without_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://93.184.215.15:3128")
    with web(HOSTS, {"/info": sends(b"{}")}) as asked:
        assert SEED.request_json("/info") == {}
    assert asked == ["/info"]


def test_no_redirect_of_a_seed_is_followed(monkeypatch):
    monkeypatch.setenv("SGLANG_LITE_SEED_KEY", "secret")
    pages = {
        "/info": sends(b"", 302, location="http://93.184.215.15/there"),
        "/there": sends(b"{}"),
    }
    with web(HOSTS, pages) as asked, pytest.raises(ModelError, match="/info was refused with 302"):
        SEED.request_json("/info")
    assert asked == ["/info"]


@pytest.mark.parametrize("host", ["2606:2800:21f::1", "[2606:2800:21f::1]"])
def test_a_seed_may_have_an_address_of_ipv6(host):
    with web({"six.example": "2606:2800:21f::1"}, {"/info": sends(b"{}")}):
        assert Seed(host, 30000).request_json("/info") == {}
    assert str(Seed(host, 30000)) == "instance://[2606:2800:21f::1]:30000"


def _no_http(handler):
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")


@pytest.mark.parametrize(
    "page", [_no_http, sends(b"abc", content_length="9"), sends(b"[]"), sends(b"{")]
)
def test_what_is_no_seed_is_named(page):
    with (
        web(HOSTS, {"/info": page}),
        pytest.raises(ModelError, match=r"instance://93\.184\.215\.14:30000: /info"),
    ):
        SEED.request_json("/info")


class Offering(Seed):
    """A seed that offers something.

    Attributes:
        bodies: what it was asked.
    """

    def __init__(self, offer: dict[str, Any]) -> None:
        super().__init__("[::1]", 30000)
        self._offer, self.bodies = offer, list[Any]()

    def request_json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        self.bodies.append(body)
        return {"weight_version": "one", **self._offer}


OFFER = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]], "port": 30001}


@pytest.mark.parametrize(
    "change",
    [
        {"names": None},
        {"names": [1]},
        {"dtypes": [1]},
        {"shapes": [2]},
        {"shapes": [["2"]]},
        {"port": "a"},
        {"port": 0},
    ],
)
def test_an_odd_offer_is_named(change):
    seed = Offering(OFFER | change)
    with pytest.raises(ModelError, match=r"instance://\[::1\]:30000: is no engine of this package"):
        InstanceSource(seed, "one", torch.device("cpu"), backend="gloo", port=0, timeout_s=1.0)
    assert [each["master_address"] for each in seed.bodies] == ["::1"]
