"""The engine's runtime. Importing it first bounds the spinning of torch's threads (openmp.py)."""

from sglang_lite.runtime import openmp as openmp
