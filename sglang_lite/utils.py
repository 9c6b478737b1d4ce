"""Helpers, for SGLang's users to import."""

from sglang_lite.compat.sglang.files import download_and_cache_file, dump_state_text, read_jsonl
from sglang_lite.compat.sglang.lazy_import import LazyImport
from sglang_lite.compat.sglang.notebook import print_highlight
from sglang_lite.compat.sglang.servers import http_request, launch_server_cmd, terminate_process, wait_for_server
from sglang_lite.compat.sglang.texts import (
    async_stream_and_merge,
    convert_json_schema_to_str,
    encode_image_base64,
    find_printable_text,
    stream_and_merge,
    trim_overlap,
)

__all__ = [
    "LazyImport",
    "async_stream_and_merge",
    "convert_json_schema_to_str",
    "download_and_cache_file",
    "dump_state_text",
    "encode_image_base64",
    "find_printable_text",
    "http_request",
    "launch_server_cmd",
    "print_highlight",
    "read_jsonl",
    "stream_and_merge",
    "terminate_process",
    "trim_overlap",
    "wait_for_server",
]
