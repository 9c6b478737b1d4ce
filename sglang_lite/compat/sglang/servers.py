"""Functions that start servers and send them requests, for scripts and notebooks."""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

from sglang_lite.compat.sglang.launch_hooks import reject_launch_hooks
from sglang_lite.compat.sglang.server_process import flags_of
from sglang_lite.protocol import BackendError, ParameterError, RequestTimeoutError

if TYPE_CHECKING:
    import requests


def http_request(
    url: str,
    json: object = None,
    stream: bool = False,
    api_key: str | None = None,
    verify: str | None = None,
    method: str | None = None,
    *,
    timeout: float | None = 600,
) -> requests.Response:
    """Sends an HTTP request with a JSON body.

    Args:
        url: URL of the request.
        json: value of the body, or None for no body.
        stream: whether the response body is read in chunks.
        api_key: bearer token of the `Authorization` header, or None.
        verify: file with trusted certificates; None for the default ones.
        method: HTTP method; by default GET, or POST if `json` or `stream` is given.
        timeout: maximum number of seconds to wait for the connection, and then for each part of the
            response; None for no limit.

    Returns:
        The response, with any status code.

    Raises:
        ParameterError: `url` is not an http(s) URL.
        RequestTimeoutError: the server did not answer within `timeout` seconds.
        BackendError: the server can't be reached, the connection broke, or `requests` is not
            installed.
    """
    try:
        import requests
        from requests import exceptions
    except ModuleNotFoundError as error:
        raise BackendError(
            "http_request returns a response of requests.", hint="pip install requests."
        ) from error

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    verb = method or ("POST" if stream or json is not None else "GET")
    try:
        return requests.request(
            verb,
            url,
            json=json,
            stream=stream,
            headers=headers,
            verify=verify or True,
            timeout=timeout,
        )
    except (exceptions.MissingSchema, exceptions.InvalidSchema, exceptions.InvalidURL) as error:
        hint = "Give one such as http://localhost:30000/generate."
        raise ParameterError("url", f"{url!r} is not an http(s) URL.", hint=hint) from error
    except requests.Timeout as error:
        raise RequestTimeoutError(
            f"{url} did not answer in time: {error}", hint="Raise timeout."
        ) from error
    except requests.RequestException as error:
        raise BackendError(
            f"{url} does not answer: {error}", hint="Check the address and the server."
        ) from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ParameterError("server_args", f"{message.removeprefix('argument ')}.")


def launch_server(
    server_args: Any,  # a class whose fields no type checker can know
    init_tokenizer_manager_func: Callable[..., object] | None = None,
    run_scheduler_process_func: Callable[..., object] | None = None,
    run_detokenizer_process_func: Callable[..., object] | None = None,
    execute_warmup_func: Callable[..., object] | None = None,
    launch_callback: Callable[[], object] | None = None,
) -> int:
    """Runs a server in this process, like `sglang-lite serve`, until SIGTERM or SIGINT. Must be
    called on the main thread.

    Args:
        server_args: SGLang's `ServerArgs`.
        init_tokenizer_manager_func, run_scheduler_process_func, run_detokenizer_process_func,
            execute_warmup_func: must be None, because this package doesn't have SGLang's processes.
        launch_callback: called once, without arguments, when the server can be reached; requests
            are answered after it returns.

    Returns:
        The exit status.

    Raises:
        ParameterError: a setting is invalid or not supported.
        CapabilityError: a function is given that starts one of SGLang's processes.
    """
    reject_launch_hooks(
        {
            "init_tokenizer_manager_func": init_tokenizer_manager_func,
            "run_scheduler_process_func": run_scheduler_process_func,
            "run_detokenizer_process_func": run_detokenizer_process_func,
            "execute_warmup_func": execute_warmup_func,
        }
    )
    from sglang_lite.server import flags
    from sglang_lite.server.app import print_line, serve

    changed = {
        each.name: value
        for each in fields(server_args)
        if (value := getattr(server_args, each.name)) != each.default
    }
    parser = _Parser("launch_server")
    flags.add_serve_flags(parser)
    settings, engine, replicas = flags.read_serve_flags(parser.parse_args(flags_of(changed)))
    if replicas.replicas or replicas.workers:
        raise ParameterError(
            "server_args", "several servers are not one process.", hint="Use sglang-lite serve."
        )
    waiting = [launch_callback] if launch_callback is not None else []

    def announce(line: str) -> None:
        print_line(line)
        while waiting:
            waiting.pop()()

    return serve(settings, engine, announce)


def launch_server_cmd(
    command: str, host: str = "0.0.0.0", port: int | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a server with a shell-like command, to which `--host` and `--port` are added.

    Args:
        command: command line of the server.
        port: port of the server; None for a free one.

    Returns:
        The process and its port.
    """
    import shlex
    import socket

    if port is None:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
    process = subprocess.Popen([*shlex.split(command), "--host", host, "--port", str(port)])
    return process, port


def terminate_process(process: subprocess.Popen[bytes]) -> None:
    """Terminates a process that launch_server_cmd started, and kills it if it is still running
    after 10 seconds.
    """
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for_server(
    base_url: str, timeout: float | None = None, process: subprocess.Popen[bytes] | None = None
) -> None:
    """Waits until a server answers `/v1/models`.

    Args:
        timeout: maximum number of seconds, or None for no limit.
        process: process of the server, or None if it is not known.

    Raises:
        RequestTimeoutError: the server did not answer within `timeout` seconds.
        BackendError: the process has ended.
    """
    import httpx2

    started = time.monotonic()
    while True:
        if process is not None and process.poll() is not None:
            raise BackendError(f"the server ended with exit code {process.returncode}.")
        try:
            answer = httpx2.get(
                f"{base_url}/v1/models", headers={"Authorization": "Bearer None"}, timeout=5
            )
            if answer.is_success or answer.status_code in (401, 403):  # a server that wants a key
                return
        except httpx2.HTTPError:
            pass
        if timeout is not None and time.monotonic() - started > timeout:
            raise RequestTimeoutError(f"{base_url} did not answer within {timeout:g} s.")
        time.sleep(0.2)
