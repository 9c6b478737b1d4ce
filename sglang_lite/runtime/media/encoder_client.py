"""Client for media encoders on other servers (`serve --encoder-only`). An engine uses it in place
of its own encoder and preparation of inputs.

A server receives the file, which is smaller than the encoder's inputs, and responds with features
in the format of safetensors, named by a hash of the file and of its preparation settings. Nothing
is unpickled.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence

import httpx2
import torch

from sglang_lite.protocol import BackendError, ParameterError
from sglang_lite.runtime.media.prepare import Pixels, copy_to_pinned
from sglang_lite.runtime.tokens.image_span import MediaItem

logger = logging.getLogger("sglang_lite")
_KEY = "SGLANG_LITE_ENCODER_KEY"  # variable with the servers' API key
_TIMEOUT = httpx2.Timeout(60.0, connect=5.0)  # for each read and write
_ANSWER_S = 60.0  # for the whole body of a response, after its headers
_MORE_BYTES = 1 << 20  # allowance in a response for a header or an error message
_PAUSE_S = 10.0  # time after a failure during which a server is tried last
_FEATURES = "features"


class EncoderClient:
    """Client of one or more servers that encode a model's images, videos and sounds.

    Args:
        urls: addresses of the servers, such as "http://10.0.0.2:30000".
        size, planes: size of a vector, and number of vectors in a feature, like
            `VisionTower.planes`.
        dtype, device: data type and device of the features.
    """

    def __init__(
        self, urls: Sequence[str], size: int, planes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._urls = tuple(urls)
        self.width = size * planes
        key = os.environ.get(_KEY)
        headers = {
            "Accept-Encoding": "identity",
            **({"Authorization": f"Bearer {key}"} if key else {}),
        }
        self._client = httpx2.Client(timeout=_TIMEOUT, trust_env=False, headers=headers)
        self._paused = dict.fromkeys(self._urls, 0.0)  # end of each server's pause

    def prepare(self, item: MediaItem) -> Pixels:
        """Fetches the features of an image, a video or a sound. May be called on several threads.

        The same file goes to the same server first. If that server does not respond, the next one
        is tried.

        Raises:
            ParameterError: a server rejects the file.
            BackendError: no server responds with its features.
        """
        first = int.from_bytes(item.key[:4], "big") % len(self._urls)
        now = time.monotonic()
        failures = list[str]()
        for url in sorted(
            self._urls[first:] + self._urls[:first], key=lambda url: now < self._paused[url]
        ):
            try:
                return {_FEATURES: self._fetch_features(url, item)}
            except (httpx2.HTTPError, _UnusableError) as error:
                self._paused[url] = time.monotonic() + _PAUSE_S
                failures.append(f"{url}: {error or type(error).__name__}")
                logger.warning("the encoder at %s", failures[-1])
        raise BackendError(
            f"the {item.medium.kind} is encoded nowhere: {'; '.join(failures)}",
            hint="Start one of encoder_urls: sglang-lite serve --encoder-only, with the same model.",
        )

    def encode(self, media: Sequence[Pixels]) -> list[torch.Tensor]:
        """Copies the fetched features [count, planes * size] of each medium to the device."""
        return [each[_FEATURES].to(self.device, self.dtype, non_blocking=True) for each in media]

    def close(self) -> None:
        """Closes all connections. Requests in progress fail."""
        self._client.close()

    def _fetch_features(self, url: str, item: MediaItem) -> torch.Tensor:
        """Fetches the features from one server."""
        from safetensors.torch import load

        medium = item.medium
        source = f"data:{medium.media_type};base64,{base64.b64encode(medium.data).decode()}"
        asked = {"mm_items": [source], "modality": medium.kind, "num_frames": medium.frames}
        status, data = self._post_limited(url, asked, 4 * item.count * self.width + _MORE_BYTES)
        if status in (400, 413):
            raise ParameterError(medium.kind, f"{url} refuses it: {_error_message_in(data)}")
        if status != 200:
            hint = f" ({_KEY} has its key.)" if status in (401, 403) else ""
            raise _UnusableError(f"answers {status}: {_error_message_in(data)}{hint}")
        try:
            found = load(data)
        except Exception as error:  # of safetensors, of several kinds
            raise _UnusableError(f"answers no features: {error!r:.200}") from None
        if item.key.hex() not in found:
            raise _UnusableError(
                "prepares it in another way. Give it the same model and mm_process_config."
            )
        features = found[item.key.hex()]
        if features.shape != (item.count, self.width):
            shape = " x ".join(map(str, features.shape))
            raise _UnusableError(
                f"has {shape} numbers for it, not {item.count} x {self.width}: of another model."
            )
        if not features.is_floating_point():
            raise _UnusableError(f"has numbers of {features.dtype} for it, which are no features.")
        if not features.isfinite().all():
            raise _UnusableError("has numbers for it that are NaN or infinite.")
        return copy_to_pinned(features) if self.device.type == "cuda" else features

    def _post_limited(self, url: str, asked: Mapping[str, object], most: int) -> tuple[int, bytes]:
        """Sends a request and returns the status and body of the response, which may have at most
        `most` bytes.
        """
        parts = list[bytes]()
        size = 0
        with self._client.stream("POST", f"{url}/encode", json=asked) as response:
            end = time.monotonic() + _ANSWER_S
            for part in response.iter_raw():
                size += len(part)
                if size > most:
                    raise _UnusableError(
                        f"answers {response.status_code} with more than {most:,} bytes."
                    )
                if time.monotonic() > end:
                    raise _UnusableError(
                        f"has sent {size:,} bytes of its answer in {_ANSWER_S:g} seconds."
                    )
                parts.append(part)
        return response.status_code, b"".join(parts)


class _UnusableError(Exception):
    """Raised for a server's response without usable features."""


def _error_message_in(data: bytes) -> str:
    """Returns the error message in a response."""
    try:
        return str(json.loads(data)["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError, RecursionError):
        return data[:200].decode("utf-8", "replace")
