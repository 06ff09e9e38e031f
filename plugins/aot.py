"""``python -m plugins.aot``: the Triton-lang kernels to cubins, ahead of time and with no GPU.

Each op's ``kernel.py`` lists its `Variant`s: a kernel, the types of its arguments, its constants.
A `Cubin` says all that a launcher needs: ``cuModuleGetFunction(symbol)``, then ``cuLaunchKernel``
with ``32 * num_warps`` threads, ``shared_bytes`` of dynamic shared memory and ``arguments`` in
their order. The last two arguments belong to Triton-lang (scratch memory, profiler): pass null.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OPS = ("linear_state_replay", "compressed_sparse_attention")
ARCHS = (80, 90, 100, 120)
DEFAULT_OUTPUT = Path("artifacts/cubins")
_ABI = (("scratch", "*u64"), ("profile", "*u64"))


@dataclass(frozen=True)
class Variant:
    """One kernel at fixed types and constants. ``types``: argument name to Triton-lang type
    ("*bf16", "i32", "fp32", ...) in launch order; ``constants``: constexpr arguments."""

    op: str
    kernel: Any
    name: str
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Argument:
    """``type`` as Triton-lang writes it; a leading * is a device pointer (8 bytes)."""

    name: str
    type: str


@dataclass(frozen=True)
class Cubin:
    """A compiled variant; sizes in bytes, ``registers`` and ``spill_bytes`` per thread."""

    op: str
    kernel: str
    variant: str
    arch: int
    symbol: str
    arguments: tuple[Argument, ...]
    constants: dict[str, Any] = field(hash=False)
    num_warps: int = 4
    shared_bytes: int = 0
    registers: int = 0
    spill_bytes: int = 0
    path: Path = Path()

    @property
    def threads(self) -> int:
        return 32 * self.num_warps


def variants(ops: Iterable[str] = OPS) -> Iterator[Variant]:
    """What the ops' kernel.py want compiled."""
    for op in ops:
        yield from importlib.import_module(f"plugins.{op}.kernel").variants()


def compile_variant(variant: Variant, arch: int, out_dir: Path) -> Cubin:
    """Compile for compute capability ``arch`` (90: 9.0) into ``out_dir``.

    Pointers are promised to be 16-byte aligned. Raises triton's CompilationError.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in variant.types.items()
        if kind.startswith("*")
    }
    source = ASTSource(
        fn=variant.kernel,
        signature=variant.types | dict.fromkeys(variant.constants, "constexpr"),
        constexprs=variant.constants,
        attrs=aligned,
    )
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": True,
    }
    done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    if done.metadata.global_scratch_size or done.metadata.profile_scratch_size:
        raise RuntimeError(f"{variant.name}: the kernel wants scratch memory, launchers pass null")
    path = out_dir / f"{variant.name}.sm_{arch}.cubin"
    path.write_bytes(done.asm["cubin"])
    registers, spill_bytes = _resources(path, done.metadata.name)
    return Cubin(
        op=variant.op,
        kernel=variant.kernel.fn.__name__,
        variant=variant.name,
        arch=arch,
        symbol=done.metadata.name,
        arguments=tuple(Argument(*x) for x in (*variant.types.items(), *_ABI)),
        constants=variant.constants,
        num_warps=done.metadata.num_warps,
        shared_bytes=done.metadata.shared,
        registers=registers,
        spill_bytes=spill_bytes,
        path=path,
    )


def compile_all(
    out_dir: Path,
    archs: Iterable[int] = ARCHS,
    ops: Iterable[str] = OPS,
    wanted: Callable[[Variant], bool] = lambda _: True,
) -> list[Cubin]:
    """Compile every wanted variant for every arch; cubins and ``cubins.json`` go to ``out_dir``.

    Compiling again what has not changed takes it from Triton-lang's own cache.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    found = [v for v in variants(ops) if wanted(v)]
    cubins = [compile_variant(v, arch, out_dir) for v in found for arch in archs]
    rows = [asdict(c) | {"path": c.path.name} for c in cubins]
    (out_dir / "cubins.json").write_text(json.dumps(rows, indent=1))
    return cubins


def _resources(path: Path, symbol: str) -> tuple[int, int]:
    """Registers and bytes of stack and local memory per thread, as cuobjdump reads them."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"Function {symbol}:\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found, text
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def table(cubins: Iterable[Cubin]) -> list[str]:
    """A line per variant, without its architecture; per architecture registers/spills/shared."""
    rows: dict[str, dict[int, str]] = {}
    for c in cubins:
        cell = f"{c.registers}/{c.spill_bytes}/{c.shared_bytes / 1024:.0f}K"
        rows.setdefault(c.variant, {})[c.arch] = cell
    return [
        f"{name:48} " + "  ".join(f"sm_{a}: {cell:12}" for a, cell in cells.items())
        for name, cells in rows.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--archs", default=",".join(map(str, ARCHS)))
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--match", default="", help="only variants whose name holds this")
    parser.add_argument("--table", action="store_true", help="registers, spills, shared memory")
    args = parser.parse_args()
    archs = [int(arch) for arch in args.archs.split(",")]
    cubins = compile_all(args.out, archs, args.ops.split(","), lambda v: args.match in v.name)
    if args.table:
        print("registers/spill bytes per thread/shared memory per block")
        print("\n".join(table(cubins)))
    spilled = [f"{c.variant} on sm_{c.arch}" for c in cubins if c.spill_bytes]
    print(f"{len(cubins)} cubins in {args.out}; spilling: {', '.join(spilled) or 'none'}")


if __name__ == "__main__":
    main()
