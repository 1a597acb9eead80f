"""Compiles the kernels for a GPU that is not here, as far as machine code: what Triton's interpreter allows, its
compiler may refuse. A program of its own, since Triton interprets in the tests' own process.

    python -m tests.engine.gpu.compiled 90      (compute capability 9.0)
"""

from __future__ import annotations

import sys

from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from backend.engine.gpu import kernels

DIM, HEADS, GROUP = 128, 8, 4
HALF, FLOATS = "*bf16", "*fp32"
DECODE = {
    "query": HALF, "key_pool": HALF, "value_pool": HALF, "out": HALF, "partial": FLOATS, "lse": FLOATS, "rows": "*i64",
    "tables": "*i32", "lengths": "*i64", "sinks": HALF, "scale": "fp32", "softcap": "fp32",
}  # fmt: skip
SIZES = {
    "GROUP": GROUP, "GROUP_PAD": 16, "KEY_DIM": DIM, "VALUE_DIM": DIM, "KEY_PAD": DIM, "VALUE_PAD": DIM,
    "BLOCK_SIZE": 16, "TILE": 64, "PRECISION": "ieee",
}  # fmt: skip
KERNELS = [
    (kernels.decode, DECODE, SIZES | {"SOFTCAP": False, "WINDOW": False, "SINKS": False, "SPLIT": True}),
    (kernels.decode, DECODE, SIZES | {"SOFTCAP": True, "WINDOW": True, "SINKS": True, "SPLIT": False}),
    (kernels.reduce, {"partial": FLOATS, "lse": FLOATS, "out": HALF, "sinks": HALF},
     {"VALUE_DIM": DIM, "VALUE_PAD": DIM, "SPLITS_PAD": 64, "SINKS": True}),
    (kernels.write, {"key": HALF, "value": HALF, "key_pool": HALF, "value_pool": HALF, "slots": "*i64"},
     {"HEADS": HEADS, "KEY_DIM": DIM, "VALUE_DIM": DIM, "KEY_PAD": 1024, "VALUE_PAD": 1024}),
]  # fmt: skip


def main(capability: int) -> None:
    for kernel, types, constants in KERNELS:
        names = kernel.arg_names
        # What is neither a tensor nor fixed is a whole number: strides, and how many splits.
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
        made = triton_compile(source, target=GPUTarget("cuda", capability, 32))
        print(kernel.__name__, len(made.asm["cubin"]), "bytes,", made.metadata.shared, "bytes of shared memory")


if __name__ == "__main__":
    main(int(sys.argv[1]))
