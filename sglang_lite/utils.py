"""Helper functions, at SGLang's module path."""

from sglang_lite.compat.sglang.servers import http_request as http_request
from sglang_lite.compat.sglang.servers import launch_server_cmd as launch_server_cmd
from sglang_lite.compat.sglang.servers import terminate_process as terminate_process
from sglang_lite.compat.sglang.servers import wait_for_server as wait_for_server
from sglang_lite.compat.sglang.utils import LazyImport as LazyImport
from sglang_lite.compat.sglang.utils import async_stream_and_merge as async_stream_and_merge
from sglang_lite.compat.sglang.utils import convert_json_schema_to_str as convert_json_schema_to_str
from sglang_lite.compat.sglang.utils import download_and_cache_file as download_and_cache_file
from sglang_lite.compat.sglang.utils import dump_state_text as dump_state_text
from sglang_lite.compat.sglang.utils import encode_image_base64 as encode_image_base64
from sglang_lite.compat.sglang.utils import find_printable_text as find_printable_text
from sglang_lite.compat.sglang.utils import print_highlight as print_highlight
from sglang_lite.compat.sglang.utils import read_jsonl as read_jsonl
from sglang_lite.compat.sglang.utils import stream_and_merge as stream_and_merge
from sglang_lite.compat.sglang.utils import trim_overlap as trim_overlap
