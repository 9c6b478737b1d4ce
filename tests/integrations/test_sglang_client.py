"""SGLang's own language and RuntimeEndpoint on a server of ours."""

import json
import os
import subprocess
import sys

import pytest

import sglang_lite as sgl
from tests.integrations import sglang_client
from tests.server.conftest import serving

PACKAGE = os.environ.get("SGLANG_PACKAGE", "")


@pytest.mark.skipif(
    not PACKAGE,
    reason="SGLANG_PACKAGE is not the folder of SGLang's unzipped wheel: CONTRIBUTING.md",
)
def test_sglangs_own_language_is_told_what_ours_is(engine):
    pytest.importorskip(
        "aiohttp",
        reason="aiohttp, which SGLang needs, is not installed: `make test-clients` installs it",
    )
    with serving(engine) as url:
        command = [sys.executable, sglang_client.__file__, PACKAGE, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == sglang_client.said(sgl, engine)
