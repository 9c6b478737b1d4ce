"""Checks of settings of an engine that belong together."""

from __future__ import annotations

import os
from collections.abc import Callable

from sglang_lite.errors import shown
from sglang_lite.protocol import ParameterError


def check_int(name: str, value: object, least: int) -> None:
    """Raises ParameterError if a setting is not a whole number, or less than `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ParameterError(name, f"{value!r} is not a whole number of at least {least}.")


def check_number(name: str, value: object, valid: Callable[[float], bool], problem: str) -> None:
    """Raises ParameterError with a problem if a setting is no number, or not a valid one."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not valid(value):
        raise ParameterError(name, f"{value!r} is {problem}")


def check_template(template: str | None) -> None:
    """Raises ParameterError if a text is neither a template nor the path of one."""
    if template is not None and "{" not in template and not os.path.isfile(template):
        problem = f"there is no file {shown(template)}, and the text has no {{{{ or {{%, so it is no template."
        raise ParameterError("chat_template", problem)


def check_scales(path: str | None, kv_dtype: str) -> None:
    """Raises ParameterError if a file has scales for keys and values that are not in 8 bits."""
    if path is not None and kv_dtype != "fp8":
        raise ParameterError(
            "quantization_param_path", "scales are for keys and values in 8 bits.", hint='Add kv_dtype="fp8".'
        )
