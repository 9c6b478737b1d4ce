"""Launches by what a GPU has."""

import pytest
import torch

from sglang_lite.runtime.attention.base import AttentionRequirements
from sglang_lite.runtime.attention.registry import make_attention
from sglang_lite.runtime.kernels.device_properties import (
    INTERPRETER,
    DeviceProperties,
    assume_device,
    properties_of,
)
from sglang_lite.runtime.kernels.experts_tiled import down_launch, gate_up_launch
from sglang_lite.runtime.kernels.launch_config import (
    choose_attention_launch,
    choose_product_tile,
    tile_stages,
)
from tests.runtime.kernels.launches import GPUS, HEADS

A100, A10, RTX_4090, H200 = GPUS
SMALL = DeviceProperties("a GPU of before Ampere", 49_152, 1 << 16, 20, (7, 5))

# Queries of a program, tokens at a time, warps, stages: measured on an H200, so no change of
# anything else changes them.
CHOSEN = {
    # kernel, head, bytes of queries, of keys, queries, rows
    ("decode", 128, 2, 2, 8, 1): (8, 32, 1, 3),
    ("decode", 128, 2, 2, 8, 47): (8, 32, 1, 3),
    ("decode", 128, 2, 2, 8, 48): (8, 64, 4, 2),
    ("decode", 128, 2, 2, 8, 127): (8, 64, 4, 2),
    ("decode", 128, 2, 2, 16, 127): (16, 64, 2, 2),
    ("decode", 128, 2, 2, 8, 128): (8, 32, 1, 3),
    ("decode", 64, 2, 2, 8, 8): (8, 32, 1, 3),
    ("decode", 128, 2, 1, 8, 2): (8, 256, 8, 1),
    ("decode", 128, 2, 1, 16, 2): (16, 32, 1, 3),
    ("decode", 128, 2, 1, 8, 3): (8, 32, 1, 3),
    ("decode", 128, 2, 1, 16, 256): (16, 32, 1, 3),
    ("decode", 256, 2, 2, 8, 1): (8, 32, 4, 2),
    ("decode", 256, 2, 2, 16, 1): (16, 32, 2, 2),
    ("decode", 256, 2, 1, 32, 256): (32, 32, 2, 2),
    ("decode", 128, 4, 4, 16, 8): (16, 16, 4, 2),
    ("prefix", 128, 2, 2, 64, 0): (64, 64, 4, 3),
    ("prefix", 80, 2, 1, 64, 0): (64, 64, 4, 3),
    ("prefix", 256, 2, 2, 64, 0): (64, 32, 8, 2),
    ("prefix", 128, 4, 4, 16, 0): (16, 16, 4, 2),
    ("prefill", 128, 2, 2, 16, 0): (16, 64, 4, 3),
    ("prefill", 96, 2, 2, 64, 0): (64, 64, 4, 3),
    ("prefill", 64, 2, 2, 128, 0): (128, 128, 8, 2),
    ("prefill", 128, 2, 1, 128, 0): (128, 128, 8, 2),
    ("prefill", 256, 2, 2, 16, 0): (16, 32, 4, 2),
    ("prefill", 256, 2, 2, 64, 0): (64, 32, 8, 2),
    ("prefill", 256, 2, 1, 128, 0): (128, 32, 8, 2),
    ("prefill", 128, 4, 4, 16, 0): (16, 16, 4, 2),
    ("prefill", 256, 4, 4, 128, 0): (16, 16, 4, 2),
}


def chosen(properties, kernel, dim, item, cached, queries, rows):
    launch = choose_attention_launch(
        properties,
        kernel,
        dim=dim,
        item=item,
        cached=cached,
        queries=queries,
        rows=rows,
        heads=8 if rows else 1,
    )
    return launch and (launch.queries, launch.tokens, launch.warps, launch.stages)


@pytest.mark.parametrize("asked", CHOSEN, ids=lambda asked: " ".join(map(str, asked)))
def test_an_h200_has_what_was_measured_there(asked):
    assert chosen(H200, *asked) == CHOSEN[asked]


def test_rows_taken_from_their_product_have_programs_of_two_warps_where_they_are_one_or_some():
    asked = {"dim": 128, "item": 2, "cached": 2, "queries": 8, "heads": 8, "product": True}
    launches = [
        choose_attention_launch(H200, "decode", **asked, rows=rows) for rows in (1, 2, 64, 128)
    ]
    assert [(launch.tokens, launch.warps) for launch in launches] == [
        (64, 2),
        (32, 1),
        (64, 2),
        (32, 1),
    ]


def test_few_rows_of_8_bits_are_read_by_programs_that_have_a_multiprocessor_each():
    asked = {"dim": 128, "item": 2, "cached": 1, "queries": 8, "heads": 4}

    def exclusive(properties, **more):
        return choose_attention_launch(properties, "decode", **asked, **more).exclusive

    assert [exclusive(H200, rows=rows) for rows in (1, 4, 5, 64)] == [True, True, False, False]
    assert not exclusive(H200, rows=1, shared=True)
    # Two blocks of 256 tokens find no room on others, but programs have them to themselves as well.
    assert [exclusive(properties, rows=1) for properties in (RTX_4090, SMALL)] == [True, False]


def test_products_of_experts_on_an_h200_are_what_was_measured_there():
    assert [gate_up_launch(H200, 64, item) for item in (1, 2, 4)] == [
        (64, 128, 4, 3),
        (64, 128, 4, 2),
        (32, 32, 4, 2),
    ]
    assert [gate_up_launch(H200, 128, item) for item in (1, 2)] == [
        (128, 128, 8, 3),
        (128, 64, 8, 4),
    ]
    assert [down_launch(H200, 64, item) for item in (1, 2, 4)] == [
        (128, 128, 4, 3),
        (128, 64, 4, 4),
        (32, 32, 4, 2),
    ]
    assert [down_launch(H200, 128, item) for item in (1, 2)] == [(128, 128, 4, 3), (128, 64, 4, 3)]


PRODUCT_TILES = {
    # rows, shape of the matrix or of a gated pair, gated: outputs, inputs, stages
    (64, (1536, 8960), False): (64, 128, 6),
    (64, (6144, 4096), False): (64, 128, 6),
    (64, (151_936, 1536), False): (64, 128, 3),  # many times the multiprocessors
    (64, (6144, 1024), True): (32, 128, 4),
    (64, (12_288, 2048), True): (64, 128, 4),  # no more programs than multiprocessors
    (64, (17_920, 1536), True): (64, 64, 4),  # up to twice as many
    (64, (28_672, 4096), True): (64, 64, 4),
    (32, (34_816, 5120), True): (64, 64, 3),  # up to three times
    (64, (57_344, 8192), True): (64, 128, 4),
}


@pytest.mark.parametrize("asked", PRODUCT_TILES, ids=str)
def test_products_of_few_rows_on_an_h200_are_what_was_measured_there(asked):
    rows, shape, gated = asked
    tile = choose_product_tile(H200, rows, shape, gated=gated)
    assert (tile.outputs, tile.inputs, tile.stages) == PRODUCT_TILES[asked]


def test_programs_share_a_multiprocessor_only_if_each_loads_three_tiles():
    blackwell = DeviceProperties("RTX 5090", 101_376, 1 << 16, 170, (12, 0))
    tile = choose_product_tile(blackwell, 64, (28_672, 4096), gated=True)
    assert (tile.inputs, tile.stages) == (128, 2)
    # adapters need the room
    assert choose_product_tile(H200, 64, (28_672, 4096), gated=True, beside=True).inputs == 128


def test_smaller_cards_take_fewer_tokens_at_a_time():
    asked = ("prefill", 256, 2, 2, 128, 0)  # bf16 heads of 256
    assert [chosen(properties, *asked) for properties in (A100, A10, RTX_4090)] == [
        (128, 32, 8, 2),
        (128, 16, 8, 2),
        (128, 16, 8, 2),
    ]
    assert chosen(A100, "prefill", 128, 4, 4, 128, 0) == (16, 16, 4, 2)  # float32 heads of 128
    assert [gate_up_launch(A100, rows, 2) for rows in (16, 128)] == [
        (64, 128, 4, 2),
        (64, 64, 8, 3),
    ]
    assert [gate_up_launch(A10, rows, 2) for rows in (16, 64)] == [(64, 128, 4, 2), (64, 32, 4, 3)]
    assert [gate_up_launch(RTX_4090, rows, 1) for rows in (64, 128)] == [
        (64, 64, 4, 3),
        (64, 128, 8, 3),
    ]
    assert [down_launch(RTX_4090, rows, 1) for rows in (64, 128)] == [
        (128, 128, 4, 3),
        (64, 128, 4, 3),
    ]


def test_where_not_even_few_tokens_find_room_a_program_has_fewer_queries():
    assert chosen(SMALL, "prefill", 256, 2, 2, 128, 0) == (64, 16, 8, 1)


def test_decoding_is_many_by_the_multiprocessors_of_the_card():
    half = DeviceProperties("half of an H200", H200.shared_memory, H200.registers, 66, (9, 0))
    assert chosen(half, "decode", 128, 2, 2, 16, 64) == chosen(H200, "decode", 128, 2, 2, 16, 128)
    assert chosen(half, "decode", 128, 2, 2, 16, 63) == chosen(H200, "decode", 128, 2, 2, 16, 127)
    assert (half.programs_to_fill, H200.programs_to_fill) == (132, 264)


@pytest.mark.parametrize("properties", [*GPUS, INTERPRETER], ids=lambda properties: properties.name)
def test_every_head_finds_room(properties):
    for dim in HEADS:
        for kernel, item, queries in [
            ("decode", 2, 64),
            ("prefill", 2, 128),
            ("prefix", 2, 64),
            ("decode", 4, 16),
        ]:
            assert chosen(properties, kernel, dim, item, item, queries, 8)


def test_a_card_without_room_gets_torchs_attention_and_it_is_said(caplog):
    requirements = AttentionRequirements(
        8, 1, 256, torch.float32, torch.float32, torch.device("meta"), max_rows=4, max_chunks=0
    )
    with assume_device(DeviceProperties("tiny", 32_768, 1 << 16, 4, (8, 0))):
        backend = make_attention("auto", requirements)
    assert type(backend).__name__ == "TorchAttention"
    assert (
        "don't fit in the 32,768 bytes of shared memory that a program has on a tiny" in caplog.text
    )


def test_tiles_under_way_are_as_many_as_find_room():
    blackwell = DeviceProperties("RTX 5090", 101_376, 1 << 16, 170, (12, 0))
    assert tile_stages(H200, 64, 128, 128, 2, 4) == 4
    assert tile_stages(blackwell, 64, 128, 128, 2, 4) == 2
    assert blackwell.has_pdl
    assert blackwell.has_tma


def test_without_a_gpu_kernels_run_on_the_interpreter():
    assert properties_of(torch.device("cpu")) == INTERPRETER
    assert not INTERPRETER.has_pdl
    assert INTERPRETER.has_tma
