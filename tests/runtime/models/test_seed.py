"""Requests to the server of a running engine: its key goes to it alone, and what else answers is a named error."""

import pytest

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.weights.seed import Seed
from tests.web import sends, web

HOSTS = {"seed.example": "93.184.215.14", "other.example": "93.184.215.15"}
SEED = Seed("93.184.215.14", 30000)


def test_a_seed_is_asked_without_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://93.184.215.15:3128")
    with web(HOSTS, {"/info": sends(b"{}")}) as asked:
        assert SEED.ask("/info") == {}
    assert asked == ["/info"]


def test_no_redirect_of_a_seed_is_followed(monkeypatch):
    monkeypatch.setenv("SGLANG_LITE_SEED_KEY", "secret")
    pages = {"/info": sends(b"", 302, location="http://93.184.215.15/there"), "/there": sends(b"{}")}
    with web(HOSTS, pages) as asked, pytest.raises(ModelError, match="/info was refused with 302"):
        SEED.ask("/info")
    assert asked == ["/info"]
