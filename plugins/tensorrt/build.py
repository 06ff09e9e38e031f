"""``make plugins-tensorrt``: the kernels to cubins, then one shared library around them.

No GPU, CUDA toolkit or nvcc is needed: the kernels are compiled by Triton-lang (plugins/aot.py),
the rest is host code, which g++ compiles against the CUDA and TensorRT headers that
``requirements/setup.sh tensorrt`` unpacks. What has not changed is not built again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from engine_configs.errors import ConversionError
from plugins.aot import ARCHS, Cubin, Variant, compile_all

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HEADERS = ROOT / ".venv" / "tensorrt"
OUTPUT = ROOT / "artifacts" / "tensorrt"
LIBRARY = "libhybrid_tensorrt.so"
PAGE = 32  # rows of a block of the engine's pool
LAUNCHED = (
    "recurrent", "key_decay", "chunk_products", "chunk_inverse", "chunk_states", "chunk_outputs",
    "append_kv", "paged_attention", "merge_splits",
)  # fmt: skip
INCLUDES = ("nvidia/cu13/include", "kernel_lens/include/tensorrt")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden")
_QUIET = ("-Wno-deprecated-declarations",)  # of TensorRT's own headers


def build(
    output: Path = OUTPUT, archs: Sequence[int] = ARCHS, shapes: Sequence[str] = ("",)
) -> Path:
    """The library's path. shapes: only kernels whose name holds one of these.

    Raises ConversionError when headers or compiler are missing or fail.
    """
    require_headers()
    output.mkdir(parents=True, exist_ok=True)
    work_of = partial(compile_arch, output / "cubins", tuple(shapes))
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        cubins = [cubin for found in pool.map(work_of, archs) for cubin in found]
    work = output / "objects"
    work.mkdir(exist_ok=True)
    _write(work / "kernels.inc", kernel_table(cubins))
    _write(work / "cubins.S", embedded(cubins))
    sources = [*sorted(HERE.glob("*.cpp")), work / "cubins.S"]
    stamp = _digest([*sources, *HERE.glob("*.h"), work / "kernels.inc", *(c.path for c in cubins)])
    library, mark = output / LIBRARY, output / "built-from"
    if library.exists() and mark.exists() and mark.read_text() == stamp:
        return library
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: compile_one(source, work), sources))
    run(["g++", "-shared", "-o", library, *objects, "-ldl", "-Wl,--no-undefined"])
    mark.write_text(stamp)
    return library


def launched(variant: Variant) -> bool:
    """A plugin launches it: others are of the ops' other homes."""
    fits = variant.constants.get("PAGE", PAGE) == PAGE
    return fits and variant.kernel.fn.__name__ in LAUNCHED


def compile_arch(output: Path, shapes: tuple[str, ...], arch: int) -> list[Cubin]:
    def wanted(variant: Variant) -> bool:
        return launched(variant) and any(shape in variant.name for shape in shapes)

    return compile_all(output / str(arch), (arch,), wanted=wanted)


def compile_one(source: Path, work: Path) -> Path:
    target = work / f"{source.stem}.o"
    run(["g++", *_FLAGS, *_QUIET, *include_flags(), f"-I{work}", "-c", source, "-o", target])
    return target


def include_flags() -> list[str]:
    """-isystem: their warnings are not ours."""
    return [part for i in INCLUDES for part in ("-isystem", str(HEADERS / i))]


def require_headers() -> None:
    missing = [str(HEADERS / i) for i in INCLUDES if not (HEADERS / i).is_dir()]
    if missing or not shutil.which("g++"):
        raise ConversionError(
            f"{', '.join(missing) or 'g++'} is missing",
            where="plugins/tensorrt",
            fix="Run requirements/setup.sh (headers), apt-get install g++ (compiler)",
        )


def run(command: list[Any]) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConversionError(f"{command[0]} failed:\n{done.stderr}", where="plugins/tensorrt")


def kernel_table(cubins: list[Cubin]) -> str:
    """kernels.inc: what kernels.h declares, a row per cubin."""
    text: list[str] = []
    rows: list[str] = []
    for i, cubin in enumerate(cubins):
        arguments = ", ".join(f'{{"{a.name}", "{a.type}"}}' for a in cubin.arguments)
        numbers = {n: int(v) for n, v in cubin.constants.items() if isinstance(v, int)}
        constants = ", ".join(f'{{"{name}", {value}}}' for name, value in numbers.items())
        text += [
            f'extern "C" unsigned char const hybrid_cubin_{i}[];',
            f"constexpr Argument kArguments{i}[] = {{{arguments}}};",
            f"constexpr Constant kConstants{i}[] = {{{constants}}};",
        ]
        fields = [
            f'"{cubin.kernel}"', str(cubin.arch), f'"{cubin.symbol}"', str(cubin.num_warps),
            str(cubin.shared_bytes), f"kArguments{i}", str(len(cubin.arguments)),
            f"kConstants{i}", str(len(numbers)), f"hybrid_cubin_{i}",
        ]  # fmt: skip
        rows.append(f"    {{{', '.join(fields)}}},")
    return "\n".join([*text, "constexpr Kernel kKernels[] = {", *rows, "};", ""])


def embedded(cubins: list[Cubin]) -> str:
    """cubins.S: the bytes of every cubin behind a symbol."""
    lines = ["    .section .rodata"]
    for i, cubin in enumerate(cubins):
        symbol = f"hybrid_cubin_{i}"
        lines += ["    .balign 16", f"    .hidden {symbol}", f"    .globl {symbol}", f"{symbol}:"]
        lines.append(f'    .incbin "{cubin.path.resolve()}"')
    return "\n".join([*lines, '    .section .note.GNU-stack,"",@progbits', ""])


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for file in sorted(files):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the TensorRT plugin library.")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--archs", type=int, nargs="+", default=ARCHS, help="90: H100, H200")
    parser.add_argument(
        "--shapes", nargs="+", default=[""], help="only kernels whose name holds one of these"
    )
    options = parser.parse_args()
    library = build(options.output, options.archs, options.shapes)
    print(f"{library}: {library.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
