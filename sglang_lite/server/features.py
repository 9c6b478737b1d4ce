"""Features of images, videos and sounds, which a server with `--encoder-only` returns in
safetensors format.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace
from starlette.responses import Response

from sglang_lite.protocol import Media, MediaKind, ParameterError, Prompt
from sglang_lite.runtime.calls import EncodeMedia
from sglang_lite.runtime.media.data_url import parse_medium
from sglang_lite.server.endpoint import HttpRequest
from sglang_lite.server.fields import Fields
from sglang_lite.server.service import Service

_MAX_MEDIA = 64  # media of a request
_KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")


class FeaturesBody(msgspec.Struct, kw_only=True):
    """SGLang's request for features of media: data URLs, base64 or addresses. `num_frames` is an
    extension: how many frames of a video the model is shown, or 0 for as many as it can take.
    """

    mm_items: list[str]
    modality: str | None = None
    num_frames: int = 0


FEATURES: Fields[FeaturesBody] = Fields(
    FeaturesBody,
    dict.fromkeys(
        ("req_id", "num_parts", "part_idx"), "The answer has all features of the request."
    ),
    {"prefill_host": ("",), "embedding_port": ([], 0)},
)


async def encode(service: Service, call: HttpRequest) -> Response:
    """Returns the features of media: a tensor [count, size] for each medium. The tensor's name is a
    hash of the file and its preprocessing.
    """
    body = await asyncio.to_thread(call.read_fields, FEATURES)
    kind = next((each for each in _KINDS if each == (body.modality or "").lower()), None)
    if body.modality is not None and kind is None:
        raise ParameterError(
            "modality", f"{body.modality!r:.40} is not one of {', '.join(_KINDS)}."
        )
    data = await media_features(service, body.mm_items, kind, body.num_frames)
    return Response(data, media_type="application/octet-stream")


async def media_features(
    service: Service, sources: Sequence[str], kind: MediaKind | None = None, frames: int = 0
) -> bytes:
    """Returns features of media in the form of `EncodeMedia`'s answer.

    Args:
        sources: data URL, base64 or address of each medium.
        kind: kind of the media; None for the kind that a data URL names, or "image" for other
            sources.
        frames: number of frames of a video.

    Raises:
        ParameterError, CapabilityError: a medium can't be read, or the model takes none of its
            kind.
        OverloadedError: too many requests are waiting, or there is too little memory.
    """
    if not 1 <= len(sources) <= _MAX_MEDIA:
        raise ParameterError("mm_items", f"has {len(sources):,} media. Give 1 to {_MAX_MEDIA}.")
    media = tuple(
        _parse_medium_source(source, f"mm_items[{i}]", kind, frames)
        for i, source in enumerate(sources)
    )
    prompt = await service.images.fetch_prompt_images(Prompt((), images=media))
    return await asyncio.wrap_future(service.engine.core.submit_call(EncodeMedia(prompt.images)))


def _parse_medium_source(source: str, where: str, kind: MediaKind | None, frames: int) -> Media:
    told = next((each for each in _KINDS if source.startswith(f"data:{each}/")), _KINDS[0])
    medium: Media = replace(parse_medium(source, where, kind or told), frames=frames)
    return medium
