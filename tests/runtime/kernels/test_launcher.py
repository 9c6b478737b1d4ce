"""A launch that is kept is the one that Triton would make."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang_lite.runtime.kernels.launcher import KernelLauncher, cached_launch, variant_key
from sglang_lite.runtime.kernels.norm import add_norm
from sglang_lite.runtime.kernels.reference.norm import norm as reference
from sglang_lite.runtime.kernels.sizes import cdiv, power_of_2

EDGES = (0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
ROOM = torch.empty(4096, dtype=torch.uint8)
FORMATS = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.int64, torch.bool)
numbers = st.one_of(st.sampled_from(EDGES), st.integers(-(2**63), 2**64 - 1), st.floats(), st.booleans(), st.none())


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(FORMATS))
    return ROOM[: 4096 - 64].view(dtype)[draw(st.integers(0, 20)) :: draw(st.integers(1, 3))]


@st.composite
def descriptors(draw):
    x = ROOM.view(draw(st.sampled_from(FORMATS[:4]))).view(16, -1)
    rows, columns = (draw(st.sampled_from((16, 32, 64))) for _ in range(2))
    return TensorDescriptor.from_tensor(x, [rows, columns])


arguments = st.one_of(numbers, tensors(), descriptors())


@given(arguments, arguments)
def test_whatever_triton_tells_apart_has_kinds_of_its_own(one, other):
    if variant_key((one,))[0] == variant_key((other,))[0]:
        for options in itertools.product((False, True), repeat=3):  # constant memory, specialised, by alignment
            assert native_specialize_impl(BaseBackend, one, *options) == native_specialize_impl(
                BaseBackend, other, *options
            )


@given(st.lists(arguments, max_size=4), st.lists(arguments, max_size=4))
def test_kinds_of_arguments_are_those_of_each(one, other):
    apart = [variant_key((x,))[0] for x in one], [variant_key((x,))[0] for x in other]
    assert (variant_key(tuple(one))[0] == variant_key(tuple(other))[0]) == (apart[0] == apart[1])


def test_the_driver_takes_addresses_of_tensors_and_numbers_as_they_are():
    x = torch.empty(64)[3:]
    assert variant_key((x, None, 7, True, 0.5))[1] == [x.data_ptr(), None, 7, True, 0.5]


@pytest.mark.parametrize("without", [torch.empty(8, device="meta"), torch.empty(0)], ids=["meta", "empty"])
def test_a_tensor_without_memory_has_no_kinds(without):
    assert variant_key((torch.empty(8), without, 3)) == ((), [])


class Triton:
    """A kernel `f(x, n, SIZE: constexpr)` that notes what it is asked for."""

    def __init__(self):
        self.params = [SimpleNamespace(is_constexpr=constant) for constant in (False, False, True)]
        self.asked, self.launches = [], []

    def run(self, *arguments, grid, warmup, **options):
        self.asked.append((arguments[1:], options))
        kernel = object.__new__(CompiledKernel)
        vars(kernel).update(
            module=None, function=len(self.asked), packed_metadata=(4, 1, 0),
            _run=lambda *launch: self.launches.append(launch),
        )  # fmt: skip
        return kernel


def set_device(monkeypatch, device):
    active = SimpleNamespace(get_current_device=lambda: device, get_current_stream=lambda device: 77)
    monkeypatch.setattr(driver, "_active", active)


@pytest.fixture
def triton_(monkeypatch):
    set_device(monkeypatch, 0)
    return Triton()


def test_the_first_launch_of_a_kind_is_triton_s_and_others_are_the_same_variant(triton_):
    kernel, x = KernelLauncher(triton_), torch.empty(64)
    kernel[(3,)](x, 5, SIZE=8, num_warps=2)
    kernel[(4, 2)](x[4:], 6, SIZE=8, num_warps=2)
    assert triton_.asked == [((5,), {"SIZE": 8, "num_warps": 2})]
    assert triton_.launches == [(4, 2, 1, 77, 1, (4, 1, 0), None, None, None, x.data_ptr() + 16, 6, None)]


def test_every_other_kind_and_option_is_a_variant_of_its_own(triton_):
    kernel, x = KernelLauncher(triton_), torch.empty(64)
    calls = [
        ((x, 5), {"SIZE": 8}), ((x[1:], 5), {"SIZE": 8}), ((x, 16), {"SIZE": 8}), ((x, 1), {"SIZE": 8}),
        ((x, 5), {"SIZE": 16}), ((x, 5), {"SIZE": 8, "num_warps": 2}), ((x.half(), 5), {"SIZE": 8}),
        ((x, None), {"SIZE": 8}), ((x, True), {"SIZE": 8}), ((x, 2**40), {"SIZE": 8}),
    ]  # fmt: skip
    for _ in range(2):
        for given_, options in calls:
            kernel[(1,)](*given_, **options)
    assert len(triton_.asked) == len(calls)
    assert [launch[4] for launch in triton_.launches] == [*range(1, len(calls) + 1)]


def test_nothing_is_kept_of_launches_on_tensors_without_memory(triton_):
    kernel = KernelLauncher(triton_)
    for _ in range(2):
        kernel[(1,)](torch.empty(8, device="meta"), 5, SIZE=8)
    assert len(triton_.asked) == 2


def test_each_device_has_variants_of_its_own(triton_, monkeypatch):
    kernel, x = KernelLauncher(triton_), torch.empty(64)
    kernel[(1,)](x, 5, SIZE=8)
    set_device(monkeypatch, 1)
    kernel[(1,)](x, 5, SIZE=8)
    assert len(triton_.asked) == 2


def test_kernels_of_the_interpreter_stay_as_they_are():
    assert cached_launch(test_each_device_has_variants_of_its_own) is test_each_device_has_variants_of_its_own


def test_unaligned_rows_after_aligned_ones_are_right():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    room, weight = torch.randn(4 * 64 + 1, device=device), torch.rand(64, device=device)
    for _ in range(2):
        for x in (room[:-1], room[1:]):
            rows = x.view(4, 64)
            out = add_norm(rows, torch.zeros_like(rows), weight, 1e-6)
            torch.testing.assert_close(out, reference(rows, weight, 1e-6))


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_sizes(size, part):
    assert (cdiv(size, part) - 1) * part < size <= cdiv(size, part) * part
    power = power_of_2(size)
    assert power // 2 < size <= power
    assert power.bit_count() == 1
