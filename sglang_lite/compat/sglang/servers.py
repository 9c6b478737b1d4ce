"""Servers as scripts and notebooks start and ask them."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

from sglang_lite.protocol import BackendError, RequestTimeoutError

if TYPE_CHECKING:
    import requests


def http_request(
    url: str,
    json: object = None,
    stream: bool = False,
    api_key: str | None = None,
    verify: str | None = None,
    method: str | None = None,
) -> requests.Response:
    """Asks a server, with a body of JSON.

    Args:
        json: the body; None for none.
        stream: the answer is read piece by piece.
        api_key: sent as the bearer's token.
        verify: file of the certificates that are trusted.
        method: by default GET where there is no body, else POST.

    Returns:
        The answer, whatever its status.

    Raises:
        BackendError: nobody answers.
    """
    import requests

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    verb = method or ("POST" if stream or json is not None else "GET")
    try:
        return requests.request(verb, url, json=json, stream=stream, headers=headers, verify=verify or True)
    except requests.ConnectionError as error:
        raise BackendError(f"{url} does not answer: {error}") from error


def launch_server_cmd(
    command: str, host: str = "0.0.0.0", port: int | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a server command with `--port` and `--host` added, on a free port if none is given.

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
    """Ends a process that launch_server_cmd started."""
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

    Raises:
        RequestTimeoutError: not within `timeout` seconds; BackendError: the process has ended.
    """
    import requests

    started = time.monotonic()
    while True:
        if process is not None and process.poll() is not None:
            raise BackendError(f"the server ended with exit code {process.returncode}.")
        try:
            answer = requests.get(f"{base_url}/v1/models", headers={"Authorization": "Bearer None"}, timeout=5)
            if answer.ok or answer.status_code in (401, 403):  # one with a key is there, too
                return
        except requests.RequestException:
            pass
        if timeout is not None and time.monotonic() - started > timeout:
            raise RequestTimeoutError(f"{base_url} did not answer within {timeout:g} s.")
        time.sleep(0.2)
