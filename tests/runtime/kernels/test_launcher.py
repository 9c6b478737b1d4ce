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

import sglang_lite as sgl
from sglang_lite.runtime.kernels.descriptors import tensor_descriptor
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.launcher import KernelLauncher, cached_launch, variant_key
from sglang_lite.runtime.kernels.norm import add_norm
from sglang_lite.runtime.kernels.reference.norm import norm as reference
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

EDGES = (
    0,
    1,
    2,
    15,
    16,
    17,
    32,
    -1,
    -16,
    2**31 - 1,
    2**31,
    -(2**31),
    -(2**31) - 1,
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
CPU = -1  # torch's number of the device on which tensors without a GPU are
ROOM = torch.empty(4096, dtype=torch.uint8)
FORMATS = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.int32,
    torch.int64,
    torch.bool,
)
numbers = st.one_of(
    st.sampled_from(EDGES), st.integers(-(2**63), 2**64 - 1), st.floats(), st.booleans(), st.none()
)


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
    if variant_key((one,), CPU)[0] == variant_key((other,), CPU)[0]:
        # constant memory, specialised, by alignment
        for options in itertools.product((False, True), repeat=3):
            assert native_specialize_impl(BaseBackend, one, *options) == native_specialize_impl(
                BaseBackend, other, *options
            )


@given(st.lists(arguments, max_size=4), st.lists(arguments, max_size=4))
def test_kinds_of_arguments_are_those_of_each(one, other):
    apart = [variant_key((x,), CPU)[0] for x in one], [variant_key((x,), CPU)[0] for x in other]
    assert (variant_key(tuple(one), CPU)[0] == variant_key(tuple(other), CPU)[0]) == (
        apart[0] == apart[1]
    )


def test_the_driver_takes_addresses_of_tensors_and_numbers_as_they_are():
    x = torch.empty(64)[3:]
    assert variant_key((x, None, 7, True, 0.5), CPU)[1] == [x.data_ptr(), None, 7, True, 0.5]


@pytest.mark.parametrize(
    "without", [torch.empty(8, device="meta"), torch.empty(0)], ids=["meta", "empty"]
)
def test_a_tensor_without_memory_has_no_kinds(without):
    assert variant_key((torch.empty(8), without, 3), CPU) == ((), [])


class Triton:
    """A kernel `f(x, n, SIZE: constexpr)` that notes what it is asked for."""

    __name__ = "f"

    def __init__(self):
        names = {"x": False, "n": False, "SIZE": True}
        self.params = [
            SimpleNamespace(name=name, is_constexpr=constant) for name, constant in names.items()
        ]
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
    active = SimpleNamespace(
        get_current_device=lambda: device, get_current_stream=lambda device: 77
    )
    monkeypatch.setattr(driver, "_active", active)


@pytest.fixture
def triton_(monkeypatch):
    set_device(monkeypatch, CPU)
    return Triton()


def test_the_first_launch_of_a_kind_is_triton_s_and_others_are_the_same_variant(triton_):
    kernel, x = KernelLauncher(triton_), torch.empty(64)
    kernel[(3,)](x, 5, SIZE=8, num_warps=2)
    kernel[(4, 2)](x[4:], 6, SIZE=8, num_warps=2)
    assert triton_.asked == [((5,), {"SIZE": 8, "num_warps": 2})]
    assert triton_.launches == [
        (4, 2, 1, 77, 1, (4, 1, 0), None, None, None, x.data_ptr() + 16, 6, None)
    ]


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


def test_nothing_is_kept_of_launches_on_tensors_without_memory(triton_, monkeypatch):
    kernel = KernelLauncher(triton_)
    set_device(monkeypatch, properties_of(torch.device("cpu")))  # as while variants are collected
    for _ in range(2):
        kernel[(1,)](torch.empty(8, device="meta"), 5, SIZE=8)
    assert len(triton_.asked) == 2


def test_each_device_has_variants_of_its_own(triton_, monkeypatch):
    kernel = KernelLauncher(triton_)
    for device in (0, 1):
        set_device(monkeypatch, device)
        kernel[(1,)](7, 5, SIZE=8)
    assert len(triton_.asked) == 2


@pytest.mark.parametrize(
    "argument", [torch.empty(64), torch.empty(8, device="meta")], ids=["host", "meta"]
)
def test_a_tensor_that_the_gpu_can_not_read_is_refused(triton_, monkeypatch, argument):
    set_device(monkeypatch, 1)
    kernel = KernelLauncher(triton_)
    for _ in range(2):
        with pytest.raises(
            sgl.SglError,
            match=r"^f: .* on device cuda:1, .* argument .x. is on (cpu|meta)\. .*device=.cuda:1",
        ):
            kernel[(1,)](argument, 5, SIZE=8)
    assert triton_.asked == []


def test_a_tensor_elsewhere_is_refused_after_launches_of_its_kind(triton_, monkeypatch):
    """The driver gets nothing but its address then, and reading there would end the work of the
    whole process.
    """
    kernel, x = KernelLauncher(triton_), torch.empty(64)
    kernel[(1,)](x, 5, SIZE=8)
    kernel[(1,)](x, 5, SIZE=8)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 1)
    with pytest.raises(sgl.SglError, match=r"f: .* device cpu"):
        kernel[(1,)](x, 5, SIZE=8)
    assert len(triton_.launches) == 1


def test_memory_of_the_host_that_is_pinned_is_taken(triton_, monkeypatch):
    set_device(monkeypatch, 0)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    kernel, x = KernelLauncher(triton_), torch.empty(64)
    for _ in range(2):
        kernel[(1,)](x, 5, SIZE=8)
    assert len(triton_.launches) == 1
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: False)
    with pytest.raises(sgl.SglError, match="pin the host's memory"):
        kernel[(1,)](x, 5, SIZE=8)


def test_an_empty_tensor_may_be_anywhere(triton_, monkeypatch):
    set_device(monkeypatch, 0)
    KernelLauncher(triton_)[(1,)](torch.empty(0), 5, SIZE=8)
    assert len(triton_.asked) == 1


def test_memory_behind_a_descriptor_is_checked(triton_, monkeypatch):
    kernel = KernelLauncher(triton_)
    described = TensorDescriptor.from_tensor(torch.empty(16, 64), [16, 32])
    kernel[(1,)](described, 5, SIZE=8)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    cached = tensor_descriptor(torch.empty(16, 64), 64, (16, 32))
    set_device(monkeypatch, 0)
    for argument in (described, cached):
        with pytest.raises(sgl.SglError, match=r"f: .* device cuda:0, .* .x. is on cpu"):
            kernel[(1,)](argument, 5, SIZE=8)


def test_kernels_of_the_interpreter_stay_as_they_are():
    assert (
        cached_launch(test_each_device_has_variants_of_its_own)
        is test_each_device_has_variants_of_its_own
    )


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
    power = round_up_to_power_of_2(size)
    assert power // 2 < size <= power
    assert power.bit_count() == 1
