"""Causal depthwise convolution in front of a recurrent state, fused with its activation and with
the update of its tail, the row's last inputs.

    out[t] = silu(bias + sum over k of kernel[k] * inputs[t - W + 1 + k])
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2
from sglang_lite.runtime.kernels.state_chunks import count_slots, find_chunk
from sglang_lite.runtime.kernels.state_rows import StateRows

_CHANNELS = 256  # of a program
_TOKENS = 16  # of a program, unless rows have one


@triton.jit
def _load_inputs(
    inputs,
    tails,
    input_stride,
    tail_stride,
    begin,
    at,
    read,
    channel,
    inside,
    CHANNELS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Returns inputs of a row at tokens `at`, from its tail where they are before its first."""
    place = tl.maximum(read, 0).to(tl.int64)
    of_tail = (at < begin) & (read >= 0)
    source = tails + place * tail_stride + (at - begin + WINDOW - 1)[:, None] * CHANNELS
    old = tl.load(source + channel[None, :], mask=of_tail[:, None] & inside, other=0.0)
    source = inputs + at.to(tl.int64)[:, None] * input_stride
    own = tl.load(source + channel[None, :], mask=(at >= begin)[:, None] & inside, other=0.0)
    return tl.where((at < begin)[:, None], old.to(tl.float32), own.to(tl.float32))


@triton.jit
def _convolve(
    inputs,
    kernel,
    tails,
    input_stride,
    tail_stride,
    begin,
    token,
    read,
    channel,
    inside,
    TAILED: tl.constexpr,
    CHANNELS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Returns the sums of tokens of a row. TAILED: their windows may begin in the row's tail."""
    has_channel = channel < CHANNELS
    bias = tl.load(kernel + WINDOW * CHANNELS + channel, mask=has_channel, other=0.0)
    total = tl.zeros(inside.shape, tl.float32) + bias[None, :]
    for k in tl.static_range(WINDOW):
        weight = tl.load(kernel + k * CHANNELS + channel, mask=has_channel, other=0.0)
        at = token - (WINDOW - 1 - k)
        if TAILED:
            found = _load_inputs(
                inputs,
                tails,
                input_stride,
                tail_stride,
                begin,
                at,
                read,
                channel,
                inside,
                CHANNELS,
                WINDOW,
            )
        else:
            place = inputs + at.to(tl.int64)[:, None] * input_stride + channel[None, :]
            found = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        total += weight[None, :] * found
    return total


@cached_launch
@triton.jit(do_not_specialize=["count"])
def _state_conv(
    inputs,
    kernel,
    tails,
    offsets,
    read,
    write,
    out,
    count,
    input_stride,
    tail_stride,
    CHANNELS: tl.constexpr,
    WINDOW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    row, begin, first, end = find_chunk(offsets, count, tl.program_id(0), TOKENS)
    if first >= end:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has_channel = channel < CHANNELS
    source = tl.load(read + row)
    target = tl.load(write + row)
    token = first + tl.arange(0, TOKENS)
    inside = (token < end)[:, None] & has_channel[None, :]
    if first - begin >= WINDOW - 1:
        total = _convolve(
            inputs,
            kernel,
            tails,
            input_stride,
            tail_stride,
            begin,
            token,
            source,
            channel,
            inside,
            False,
            CHANNELS,
            WINDOW,
        )
    else:
        total = _convolve(
            inputs,
            kernel,
            tails,
            input_stride,
            tail_stride,
            begin,
            token,
            source,
            channel,
            inside,
            True,
            CHANNELS,
            WINDOW,
        )
    if ACTIVATION:
        total *= tl.sigmoid(total)
    place = out + token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)
    # Only a row's first chunk reads the tail, as the others have enough tokens before them. So it
    # is the one that can overwrite the tail.
    if (WINDOW > 1) & (first == begin) & (target >= 0):
        entry = tl.arange(0, TAIL)
        is_entry = (entry < WINDOW - 1)[:, None] & has_channel[None, :]
        new = _load_inputs(
            inputs,
            tails,
            input_stride,
            tail_stride,
            begin,
            end - (WINDOW - 1) + entry,
            source,
            channel,
            is_entry,
            CHANNELS,
            WINDOW,
        )
        tl.debug_barrier()  # all threads have read the tail before one overwrites it
        own = tails + target.to(tl.int64) * tail_stride + entry[:, None] * CHANNELS
        tl.store(own + channel[None, :], new.to(tails.dtype.element_ty), mask=is_entry)


def state_conv(
    inputs: torch.Tensor,
    kernel: torch.Tensor,
    tails: torch.Tensor,
    rows: StateRows,
    *,
    activation: bool = True,
) -> torch.Tensor:
    """Convolves each row's inputs with those before them, and stores its last inputs.

    Args:
        inputs: [T, C], whose channels are contiguous.
        kernel: float32 [W + 1, C], weights from the oldest input to the newest, and then the bias;
            W is at most 17.
        tails: pool [S, W - 1, C] of the inputs before a row's first token, oldest first (written).
        rows: rows of the step.
        activation: applies SiLU to the sum.

    Returns:
        Outputs [T, C], in the data type of `inputs`; sums are in float32. Moves 2 T C elements, and
        2 (W - 1) C for each row; inputs are read W times, but from caches.
    """
    tokens, channels = inputs.shape
    window = len(kernel) - 1
    block = min(_CHANNELS, round_up_to_power_of_2(channels))
    chunk = 1 if rows.longest == 1 else _TOKENS
    out = inputs.new_empty((tokens, channels))
    _state_conv[(count_slots(tokens, len(rows.read), chunk), cdiv(channels, block))](
        inputs,
        kernel,
        tails,
        rows.offsets,
        rows.read,
        rows.write,
        out,
        len(rows.read),
        inputs.stride(0),
        tails.stride(0),
        CHANNELS=channels,
        WINDOW=window,
        ACTIVATION=activation,
        TOKENS=chunk,
        TAIL=round_up_to_power_of_2(max(window - 1, 1)),
        BLOCK=block,
        num_warps=4,
        **pdl_options(inputs.device),
    )
    return out
