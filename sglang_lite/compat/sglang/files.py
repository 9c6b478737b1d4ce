"""Reading, writing and downloading of data files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from sglang_lite.kernel import progress_bar
from sglang_lite.protocol import DownloadError
from sglang_lite.protocol.anything import Json, UserValue
from sglang_lite.random_ids import random_id


def read_jsonl(filename: str | os.PathLike[str]) -> Iterator[Json]:
    """Yields the values of a JSON-lines file, except empty lines and lines that start with #."""
    with open(filename, encoding="utf-8") as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                yield json.loads(line)


def dump_state_text(filename: str | os.PathLike[str], states: Sequence[UserValue], mode: str = "w") -> None:
    """Writes the texts of states to a file, each under its number. Objects without a `text` method are written as
    strings."""
    with open(filename, mode, encoding="utf-8") as file:
        for i, state in enumerate(states):
            text = state.text() if hasattr(state, "text") else state
            file.write(f"{'=' * 40} {i} {'=' * 40}\n{text}\n{'=' * 80}\n\n")


def download_and_cache_file(url: str, filename: str | None = None) -> str:
    """Downloads a file, unless it exists already, and returns its path.

    Args:
        url: http(s) URL of the file.
        filename: path of the file; None for a path in the system's folder for temporary files, which depends on the
            URL.

    Raises:
        DownloadError: the file could not be downloaded completely.
    """
    import tempfile

    import httpx2

    target = Path(filename) if filename else Path(tempfile.gettempdir()) / _name_of(url)
    if target.exists():
        return str(target)
    part = target.with_name(f"{target.name}.part-{random_id()}")
    try:
        # Not compressed, so that the content-length header is the size of the file.
        plain = {"Accept-Encoding": "identity"}
        with httpx2.stream("GET", url, timeout=60, headers=plain, follow_redirects=True) as response:
            response.raise_for_status()
            whole = "content-encoding" not in response.headers
            size = int(response.headers.get("content-length", 0)) if whole else 0
            bar = progress_bar(total=size or None, unit="B", unit_scale=True, desc=target.name)
            with open(part, "wb") as file, bar:
                for chunk in response.iter_bytes(1 << 16):
                    file.write(chunk)
                    bar.update(len(chunk))
        if size and part.stat().st_size != size:
            raise DownloadError(f"{url}: {part.stat().st_size:,} of {size:,} bytes arrived.", hint="Try again.")
        part.replace(target)
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise DownloadError(f"{url}: {error}", hint="Check the address and the network.") from error
    finally:
        part.unlink(missing_ok=True)
    return str(target)


def _name_of(url: str) -> str:
    """File name for a URL: a digest of the URL, and the last part of its path."""
    return f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{urlsplit(url).path.rpartition('/')[2][-100:]}"
