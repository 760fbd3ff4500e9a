"""Compile every kernel of `dispatch="triton"` in bfloat16 for an H100, without one. Exits with 77 if it cannot."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from expert_threshold.kernels.gpu import experts as kernels

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {"rows": "i32", "ends": "*i32", "gates": "*fp32", "dgates": "*fp32", "dots": "*fp32"}
TYPES |= dict.fromkeys(("token", "pair", "by_token", "of_token"), "*i64")
TYPES |= dict.fromkeys(("left", "right", "weights", "kept", "out", "gated", "terms"), "*bf16")
UNUSED = ("gates", "kept", "gated", "dots")


def compiled(kernel: Any, constants: dict[str, Any], **options: int) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True, **options})


def local_memory(result: Any) -> str:
    """The bytes of stack that every thread needs, where spilled registers go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        usage = subprocess.run([BIN / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
    return next(word for word in usage.stdout.split() if word.startswith("STACK:"))


def main() -> None:
    if not all((BIN / tool).exists() for tool in ("ptxas", "cuobjdump")):
        print("triton brings no ptxas or cuobjdump here")
        sys.exit(77)
    d, h = 4096, 8192  # so many that ptxas does not unroll the loops, which takes it long
    unused = dict.fromkeys(UNUSED)
    product = {"experts": 16, "upcast": False, "part": kernels.PART}
    outer = {"upcast": False}
    products = {
        "up": (kernels.multiply, product | unused | {
            "d_in": d, "d_out": h, "gathered": True, "out_in": True, "epilogue": "relu2"}),
        "down": (kernels.multiply, product | unused | {
            "d_in": h, "d_out": d, "gathered": False, "out_in": True, "epilogue": ""}),
        "down's gradient": (kernels.multiply, product | {
            "d_in": d, "d_out": h, "gathered": True, "out_in": False, "epilogue": "backward"}),
        "up's gradient": (kernels.multiply, product | unused | {
            "d_in": h, "d_out": d, "gathered": False, "out_in": False, "epilogue": ""}),
        "dup": (kernels.multiply_segments, outer | {"d_left": h, "d_right": d, "gather_left": False}),
        "ddown": (kernels.multiply_segments, outer | {"d_left": d, "d_right": h, "gather_left": True}),
    }  # fmt: skip
    config = kernels.CONFIGS[0]
    for name, (kernel, constants) in products.items():
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        result = compiled(kernel, constants | {"tile_k": kernels.DEPTH} | config.kwargs, **options)
        instructions, stack = result.asm["ptx"].count("wgmma.mma_async"), local_memory(result)
        print(f"{name}: {instructions} wgmma, {stack}, {result.metadata.shared} bytes shared")
        assert instructions, name
        assert stack == "STACK:0", name
    compiled(kernels.sum_by_token, {"width": d, "gated": True, "tile": d})
    compiled(kernels.sum_by_token, {"width": d, "gated": False, "tile": d, "gates": None})
    compiled(kernels.spread_gates, {"experts": 16, "parts": h // kernels.PART, "tile": 128})


if __name__ == "__main__":
    main()
