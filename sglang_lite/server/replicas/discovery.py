"""Lookup of servers that come and go: by a DNS name, or in a file that lists addresses."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_lite.protocol import ParameterError
from sglang_lite.server.settings import check_worker

_DNS = "dns+"
_FILE = "file:"


def build_address_lookup(source: str) -> Callable[[], set[str]] | None:
    """Returns a function that looks up the servers' addresses for an entry of `workers`. Returns
    None if the entry is itself an address. The function raises OSError if the lookup fails, and
    ParameterError if a file is invalid or has no addresses.
    """
    if source.startswith(_DNS):
        return partial(_resolve_host, source.removeprefix(_DNS))
    return (
        partial(_read_addresses, Path(source.removeprefix(_FILE)))
        if source.startswith(_FILE)
        else None
    )


def _resolve_host(url: str) -> set[str]:
    parts = urlsplit(url)
    assert parts.hostname is not None  # checked by the settings
    try:
        known: Any = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # of a label that is empty or too long
        raise OSError(str(error)) from error
    return {
        f"http://[{address[0]}]:{address[1]}"
        if family == socket.AF_INET6
        else f"http://{address[0]}:{address[1]}"
        for family, _, _, _, address in known
    }


def _read_addresses(file: Path) -> set[str]:
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines()]
    urls = {line for line in lines if line and not line.startswith("#")}
    for url in urls:
        try:
            check_worker(url)
        except ParameterError as error:
            raise ParameterError(
                "workers", f"{file}: {error.message.removeprefix('workers: ')}"
            ) from None
    if not urls:  # perhaps it is being written
        raise ParameterError("workers", f"{file} names no server.")
    return urls
