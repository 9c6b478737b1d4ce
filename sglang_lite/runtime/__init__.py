"""The engine. Nothing of it is imported before torch's threads are told how to wait."""

from sglang_lite.runtime import openmp as openmp
