"""SGLang's `launch_server`: its arguments become the server's settings, and its callback is called once."""

import pytest

from sglang_lite.srt.entrypoints.http_server import launch_server
from sglang_lite.srt.server_args import ServerArgs


@pytest.fixture
def served(monkeypatch):
    """What a server would be given; it tells two lines when it can be reached."""
    given = []

    def serve(settings, engine, announce):
        given.append((settings, engine))
        announce("Serving")
        announce("Playground")
        return 0

    monkeypatch.setattr("sglang_lite.server.app.serve", serve)
    return given


def test_the_callback_is_called_once_the_server_can_be_reached(served):
    reached = []
    args = ServerArgs(model_path="folder", port=1234, api_key="secret", max_running_requests=7)
    assert launch_server(args, lambda: reached.append(len(served))) == 0
    assert reached == [1]
    [(settings, engine)] = served
    assert (settings.port, settings.api_key) == (1234, ("secret",))
    assert (engine["model"], engine["max_running"]) == ("folder", 7)
    assert launch_server(args) == 0
