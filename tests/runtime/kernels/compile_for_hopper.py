"""Compiles prefill attention for a Hopper GPU where there is none: `python -m tests.runtime.kernels.compile_for_hopper`.

In a process of its own, as Triton's interpreter, which other tests run, stays in what the compiler calls.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from sglang_lite.runtime.kernels.prefill_attention_hopper import SHARED, prefill_kernel

PAGE = 16


def main() -> None:
    copies = f"tensordesc<bf16[{PAGE}, 64],{SHARED.value!r}>"
    types = {
        "q": "*bf16", "q_stride": "i32", "keys": copies, "values": copies, "token_slots": "i32", "out": "*bf16",
        "plan_blocks": "*i32", "page_table": "*i32", "pages_per_slot": "i32", "scale": "fp32",
    }  # fmt: skip
    constants = {"G": 4, "DIM": 128, "PAGE": PAGE, "HEADS": 32}
    names = prefill_kernel.arg_names
    aligned = [i for i, name in enumerate(names) if types.get(name, "").startswith("*") or name == "q_stride"]
    source = GluonASTSource(
        prefill_kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.metadata.shared <= 227 * 1024
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


if __name__ == "__main__":
    main()
