"""Helpers that SGLang's users import from `sglang.utils`."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_lite.protocol import BackendError, DownloadError, ParameterError, RequestTimeoutError

if TYPE_CHECKING:
    import requests


def read_jsonl(filename: str | os.PathLike[str]) -> Iterator[Any]:
    """The values of a JSON-lines file; lines that start with # are skipped."""
    with open(filename, encoding="utf-8") as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                yield json.loads(line)


def dump_state_text(filename: str | os.PathLike[str], states: Sequence[Any], mode: str = "w") -> None:
    """Writes the texts of states (of anything else: what `str` makes of it) to a file, each under its number."""
    with open(filename, mode, encoding="utf-8") as file:
        for i, state in enumerate(states):
            text = state.text() if hasattr(state, "text") else state
            file.write(f"{'=' * 40} {i} {'=' * 40}\n{text}\n{'=' * 80}\n\n")


def convert_json_schema_to_str(json_schema: object) -> str:
    """A schema as JSON text: from a dict, a pydantic model, or text as it is.

    Raises:
        ParameterError: it is none of these.
    """
    if isinstance(json_schema, str):
        return json_schema
    if isinstance(json_schema, dict):
        return json.dumps(json_schema)
    if hasattr(json_schema, "model_json_schema"):
        return json.dumps(json_schema.model_json_schema())
    raise ParameterError("json_schema", f"a {type(json_schema).__name__} is no schema.")


def download_and_cache_file(url: str, filename: str | None = None) -> str:
    """Fetches a file once; later calls give the same path.

    Args:
        filename: where to; by default the address's last part in the system's folder for temporary files.

    Raises:
        DownloadError: it could not be fetched whole.
    """
    import tempfile

    import requests
    from tqdm.auto import tqdm

    target = Path(filename) if filename else Path(tempfile.gettempdir()) / url.split("/")[-1]
    if target.exists():
        return str(target)
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    try:
        # Not compressed: the length that the server tells is then that of the file.
        with requests.get(url, stream=True, timeout=60, headers={"Accept-Encoding": "identity"}) as response:
            response.raise_for_status()
            whole = "content-encoding" not in response.headers
            size = int(response.headers.get("content-length", 0)) if whole else 0
            with open(part, "wb") as file, tqdm(total=size or None, unit="B", unit_scale=True, desc=target.name) as bar:
                for chunk in response.iter_content(1 << 16):
                    file.write(chunk)
                    bar.update(len(chunk))
        if size and part.stat().st_size != size:
            raise DownloadError(f"{url}: {part.stat().st_size:,} of {size:,} bytes came.", hint="Try again.")
        part.replace(target)
    except (requests.RequestException, OSError) as error:
        raise DownloadError(f"{url}: {error}", hint="Check the address and the network.") from error
    finally:
        part.unlink(missing_ok=True)
    return str(target)


def http_request(
    url: str,
    json: object = None,
    stream: bool = False,
    api_key: str | None = None,
    verify: str | None = None,
    method: str | None = None,
) -> requests.Response:
    """A request of a server, with a body of JSON.

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
        raise BackendError(f"{url} gives no answer: {error}") from error


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
            if requests.get(f"{base_url}/v1/models", headers={"Authorization": "Bearer None"}, timeout=5).ok:
                return
        except requests.RequestException:
            pass
        if timeout is not None and time.monotonic() - started > timeout:
            raise RequestTimeoutError(f"{base_url} did not answer within {timeout:g} s.")
        time.sleep(0.2)


def print_highlight(html_content: str) -> None:
    """Shows text highlighted in a notebook, or prints it."""
    try:
        from IPython.display import HTML, display  # type: ignore[import-not-found] # only in notebooks
    except ImportError:
        print(html_content)
        return
    display(HTML(f"<strong style='color: #00008B;'>{html_content}</strong>"))
