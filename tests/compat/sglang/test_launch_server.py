"""SGLang's `launch_server`: its arguments become the server's settings, and its callback is called
once.
"""

import json

import pytest

import sglang_lite as sgl
from sglang_lite.protocol import ParameterError
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
    assert launch_server(args, launch_callback=lambda: reached.append(len(served))) == 0
    assert reached == [1]
    [(settings, engine)] = served
    assert (settings.port, settings.api_key) == (1234, ("secret",))
    assert (engine["model"], engine["max_running"]) == ("folder", 7)
    assert launch_server(args) == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"port": "x"}, "port: invalid int value: 'x'"), ({"dtype": "none"}, "dtype: invalid choice")],
)
def test_a_bad_argument_is_an_error(served, settings, why):
    with pytest.raises(ParameterError, match=why):
        launch_server(ServerArgs(model_path="folder", **settings))
    assert not served


def test_arguments_of_media_arrive(served):
    most, config = {"image": 3}, {"video": {"fps": 1}}
    launch_server(
        ServerArgs(
            "folder",
            limit_mm_data_per_request=most,
            mm_process_config=config,
            enable_multimodal=False,
        )
    )
    engine = served[0][1]
    # as the command line gives it to the engine
    assert json.loads(engine["limit_mm_data_per_request"]) == most
    assert json.loads(engine["mm_process_config"]) == config
    assert engine["enable_multimodal"] is False


@pytest.mark.parametrize(
    "name",
    [
        "init_tokenizer_manager_func",
        "run_scheduler_process_func",
        "run_detokenizer_process_func",
        "execute_warmup_func",
    ],
)
def test_functions_that_start_sglangs_processes_are_refused_by_name(name):
    with pytest.raises(sgl.CapabilityError, match=f"^{name}: the engine has no such process"):
        launch_server(ServerArgs(model_path="folder"), **{name: print})
    with pytest.raises(sgl.CapabilityError, match=f"^{name}: "):
        type("Own", (sgl.Engine,), {name: staticmethod(print)})
