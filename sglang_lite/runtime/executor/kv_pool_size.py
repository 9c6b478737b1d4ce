"""Computes the size of a GPU's KV pool: the memory that remains beside the weights and the largest
step.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.capacity import Sizes
from sglang_lite.runtime.executor.prefix_groups import MAX_CHUNKS
from sglang_lite.runtime.executor.prompt_logprobs import FIRST_ROWS, MAX_LOGITS
from sglang_lite.runtime.kv_cache.window_pages import count_kept_pages
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.model import DeviceModel, Model
from sglang_lite.runtime.parallel.layout import ALONE, Parallel
from sglang_lite.runtime.scheduler.drafted_rows import max_draft_tokens

_SPARE = 512 << 20  # bytes for graphs, the allocator's rounding and the libraries
_CONTEXT = 640 << 20  # bytes that CUDA and the libraries' kernels take per process on a Hopper GPU
# Most token slots of a pool including its dummy page: kernels index token slots with 32-bit
# integers.
MAX_SLOTS = 2**31 - 1
# tokens of a typical request, in addition to twice its window, for sizing the window pages
_TYPICAL = 2048


def count_window_pages(window: int | None, pages: int, sizes: Sizes, longest: int) -> int:
    """Returns the number of pages in a separate pool for sliding-window layers. Returns 0 if these
    layers would need as many pages as the others.

    The pages suffice for as many typical requests, running or cached, as the other pool holds. They
    also suffice for a step's prompts.

    Args:
        window: longest window, in tokens; None if no layer has one.
        pages: number of pages in the pool for the other layers.
        sizes: maximum numbers of rows and tokens of a step, and the page size.
        longest: longest sequence, in tokens.
    """
    if window is None or longest <= window:
        return 0
    size = sizes.page_size
    kept = count_kept_pages(window, size)
    chunk = -(-sizes.step_tokens // size) + 1
    typical = -(-min(longest, _TYPICAL + 2 * window) // size)
    shared = -(-pages * kept // typical) + min(chunk, pages // 48)
    count = max(shared, kept + kept // 2 + 2)
    return count if count < pages else 0


def pool_bytes(model: Model, pages: int, own_pages: int, page_size: int) -> int:
    """Returns the size of a KV cache in bytes. Sliding-window layers have `own_pages` pages. If
    `own_pages` is 0, they have as many as the other layers.
    """
    tokens = pages * page_size
    own = (own_pages or pages) * page_size
    return tokens * (model.token_bytes - model.window_bytes) + own * model.window_bytes


def gpu_bytes_in_use(device: torch.device) -> int:
    """Returns the bytes of a GPU that are in use, by this process and others."""
    torch.cuda.empty_cache()  # returns memory of closed engines to the GPU
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def estimate_process_bytes(model: DeviceModel) -> int:
    """Returns approximately how many bytes of a GPU this process uses."""
    torch.cuda.empty_cache()
    moved = model.weight_memory if isinstance(model, Decoder) else None
    return (
        torch.cuda.memory_reserved(model.device) + (0 if moved is None else moved.nbytes) + _CONTEXT
    )


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Memory of a GPU that remains for the cache.

    Attributes:
        bytes: its size; may be negative.
        explanation: text for messages that says what takes the rest of the GPU's memory.
    """

    bytes: float
    explanation: str


def cache_room(
    model: DeviceModel,
    fraction: float,
    sizes: Sizes,
    context_length: int,
    *,
    drafts: bool = False,
    images: int = 0,
    taken: int = 0,
    processes: int = 1,
    layout: Parallel = ALONE,
) -> CacheRoom:
    """Returns the memory that remains beside the weights and the largest step.

    Args:
        model: loaded model, on a GPU.
        fraction: fraction of the GPU's memory that all allocations together may use.
        sizes: maximum numbers of rows and tokens of a step.
        context_length: longest sequence in tokens.
        drafts: whether steps check drafts, so that a row may have several logits.
        images: bytes for the features of images and for encoding them.
        taken: bytes in use on the fullest of the other ranks' GPUs. All ranks get pools of the same
            size.
        processes: number of the engine's processes on this GPU. Each gets its share of the
            fraction, whatever the others have used of theirs so far.
        layout: layout of the processes that hold parts of the model. Replicas compute feed-forwards
            of one another's rows, and a stage keeps the rows of a step for each of the other
            stages.
    """
    from sglang_lite.runtime.executor.prefill_graphs import max_captured_tokens  # needs Triton
    from sglang_lite.runtime.kernels.invariant_attention import piece_borders

    device = model.device
    item = model.precision.compute.itemsize
    taken = (
        max(gpu_bytes_in_use(device), taken) if processes == 1 else estimate_process_bytes(model)
    )
    total = torch.cuda.mem_get_info(device)[1] // processes
    # captured prefill graphs keep separate memory
    captured = max_captured_tokens(model, sizes.step_tokens)
    step = (layout.dp * sizes.step_tokens + captured) * model.activation_elements * item
    if model.spec is not None:
        step += (layout.pp - 1) * sizes.step_tokens * model.spec.hidden_size * item
    drafted = max_draft_tokens(sizes.max_running) if drafts else 0
    rows = max(sizes.max_running + drafted, FIRST_ROWS)  # rows whose logits are in memory at once
    # Logits of graphs and of other steps, and the float32 copies that some draws and
    # log-probabilities need.
    logits = max(rows * model.vocab_size, MAX_LOGITS) * (2 * item + 3 * 4)
    chunks = MAX_CHUNKS if model.shares_prefixes else 0
    if model.precision.batch_invariant:
        chunks = len(piece_borders(context_length))
    kinds = {(a.heads, a.key_size) for a in model.attentions}
    partials = sum(
        2 * sizes.max_running * (chunks + 3) * heads * (size + 2) * 4 for heads, size in kinds
    )
    largest = step + logits + partials + images
    others = "libraries" if processes > 1 else "other programs"
    return CacheRoom(
        fraction * total - taken - largest - _SPARE,
        f"of {total / 2**30:.1f} GiB, {taken / 2**30:.1f} are taken (the weights and {others}) "
        f"and a step takes up to {largest / 2**30:.1f}; with mem_fraction={fraction} that leaves room for ",
    )


def pool_tokens(
    model: DeviceModel,
    room: CacheRoom,
    sizes: Sizes,
    context_length: int,
    window: int | None = None,
    *,
    states: int | None = None,
    state_share: float = 0.0,
) -> int:
    """Returns the size of the KV pool in tokens. The pool consists of the whole pages that fit.

    Args:
        model: loaded model, on a GPU, whose tokens have keys and values.
        room: memory for the cache.
        sizes: maximum numbers of rows and tokens of a step, and the page size.
        context_length: longest sequence in tokens. The pool must hold one page more than the
            smaller of this and 1,024 tokens.
        window: longest window of layers with separate pages, in tokens; None if there are none.
        states: number of places for states of sequences; None for `state_share`.
        state_share: memory of states, in multiples of that of the pool.

    Raises:
        ModelError: the pool would be smaller than this minimum; the message contains the numbers.
    """
    available = room.bytes
    if states is None and model.state_bytes:
        available /= 1 + state_share
    else:
        available -= (states or 0) * model.state_bytes
    token = model.token_bytes
    tokens = (
        min(int(available // token), MAX_SLOTS - sizes.page_size)
        // sizes.page_size
        * sizes.page_size
    )
    if window is not None and tokens > 0:
        tokens = tokens_with_window_pages(model, available, tokens, sizes, context_length, window)
    if tokens < sizes.page_size + min(context_length, 1024):
        raise ModelError(
            f"out of GPU memory: {room.explanation}{max(tokens, 0):,} tokens of keys and values "
            f"({token:,} bytes each).",
            hint="Raise mem_fraction, lower step_tokens or max_running, or take a smaller model; engines that share "
            "a GPU need a mem_fraction or max_total_tokens each.",
        )
    return tokens


def tokens_with_window_pages(
    model: DeviceModel,
    available: float,
    tokens: int,
    sizes: Sizes,
    context_length: int,
    window: int,
) -> int:
    """Returns the size of the pool in tokens if sliding-window layers have separate pages. It is at
    least `tokens`, the size without separate pages, and at most four times as much.
    """

    def fits_in_memory(pages: int) -> bool:
        own = count_window_pages(window, pages, sizes, min(context_length, pages * sizes.page_size))
        return pool_bytes(model, pages, own, sizes.page_size) <= available

    least = tokens // sizes.page_size
    most = min(4 * least, MAX_SLOTS // sizes.page_size - 1)
    more = bisect_left(range(least, most + 1), True, key=lambda pages: not fits_in_memory(pages))
    return max(least, least + more - 1) * sizes.page_size
