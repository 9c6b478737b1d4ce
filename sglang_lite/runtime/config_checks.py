"""Checks of settings of an engine that belong together."""

from __future__ import annotations

import os
from collections.abc import Callable

from sglang_lite.errors import shown
from sglang_lite.protocol import ParameterError
from sglang_lite.protocol.anything import UserValue

_SEED = "remote_instance_weight_loader_"


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


def seed_ports(service: int | None, group: UserValue) -> tuple[int, ...] | None:
    """Ports of the group of an engine that sends weights, as a tuple; None for any that is free.

    Args:
        service: port of its server.
        group: ports of the group as they were given.

    Raises:
        ParameterError: a port is none, or there are several.
    """
    of_group, of_service = f"{_SEED}send_weights_group_ports", f"{_SEED}seed_instance_service_port"
    if group is not None and (not isinstance(group, list | tuple) or len(group) != 1):
        raise ParameterError(of_group, f"{shown(group)} is no list of one port.")
    ports = None if group is None else tuple(group)
    for name, port in ((of_service, service), *((of_group, port) for port in ports or ())):
        if port is not None:
            check_int(name, port, 1)
            if port >= 1 << 16:
                raise ParameterError(name, f"{port:,} is no port.")
    return ports


def check_offload(gigabytes: int, group_size: int, *, saver: bool) -> None:
    """Raises ParameterError if settings of layers in the host's memory are wrong, or don't go with `saver`."""
    check_int("cpu_offload_gb", gigabytes, 0)
    if group_size != -1:
        check_int("offload_group_size", group_size, 1)
        if not gigabytes:
            raise ParameterError("offload_group_size", "is for weights in the host's memory.", hint="cpu_offload_gb=4")
    if gigabytes and saver:
        raise ParameterError("cpu_offload_gb", "is not here with enable_memory_saver.", hint="Leave one out.")
