"""Routes that SGLang or Ollama has and this server lacks, by the feature that they need."""

from __future__ import annotations

from sglang_lite.server.errors import NotServedError

_FEATURES: dict[tuple[str, ...], tuple[str, str]] = {  # paths: the feature, and what to use
    (
        "/update_weights_from_ipc",
        "/remote_instance_transfer_engine_info", "/get_remote_instance_transfer_engine_info",
    ): (
        "Weights that come by sockets or RDMA",
        "Use /update_weights_from_distributed, /update_weights_from_tensor or /update_weights_from_disk.",
    ),
    ("/v1/realtime",): ("Sound that arrives bit by bit", "Send files: /v1/audio/transcriptions."),
    ("/v1/systemone",): ("The form of that cloud", "Use /generate or /v1/…."),
    (
        "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs",
    ): ("Models that come and go", "It serves the model that it was started with: /api/tags."),
    (
        "/hicache/storage-backend", "/hicache/storage-backend/clear", "/get_hicache_l3_cache_layout",
    ): ("Changing the cache's tiers while the server runs", "Start it with --enable-hierarchical-cache."),
    (
        "/scale_elastic_ep", "/is_scaling_elastic_ep",
    ): ("Adding ranks while the server runs", "Start it with another --tp-size, or serve --replicas N."),
    ("/pd_role_switch",): ("Servers that only prefill or only decode", "Every server does both: serve --replicas N."),
    (
        "/add_external_corpus", "/remove_external_corpus", "/list_external_corpora",
    ): ("A corpus for drafts", "Drafts come from the prompt and earlier answers: --speculation auto."),
    (
        "/set_internal_state", "/set_trace_level", "/slow_down",
    ): ("Changing settings while the server runs", "Start it with other settings."),
    ("/dumper",): ("Files of a model's tensors between its layers", "The states of tokens: return_hidden_states."),
}  # fmt: skip
_FOLDERS = ("/api/blobs", "/dumper")  # their paths continue after these prefixes
ABSENT = {path: feature for paths, feature in _FEATURES.items() for path in paths}


def unsupported_path_error(path: str) -> NotServedError | None:
    """Returns the error for a path of SGLang's or Ollama's that this server lacks, or None for any
    other path.
    """
    known = next((each for each in _FOLDERS if path.startswith(f"{each}/")), path.rstrip("/"))
    if known not in ABSENT:
        return None
    feature, instead = ABSENT[known]
    whose = "Ollama" if path.startswith("/api/") else "SGLang"
    return NotServedError(
        f"{path} is {whose}'s. {feature}: this server doesn't have that.", hint=instead
    )
