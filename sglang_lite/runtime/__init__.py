"""The engine's runtime. Importing it first bounds the spinning of torch's threads (host/openmp.py)."""

from sglang_lite.runtime.host import openmp as openmp
