"""The Triton-lang kernels: in the interpreter against the references, ahead of time to cubins.

Interpreter or compiler is decided when triton is imported, for the whole process. The compiler is
used in this one; all interpreted cases run in one other process, each test looks at its case.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.aot import ARCHS, OPS, compile_all, compile_variant, table, variants
from tests.gpu.kernel_cases import CASES

ROOT = Path(__file__).resolve().parents[2]
# Largest error over the largest value. 16-bit types: a few roundings of 2^-11 and 2^-8 in the
# output; the state is kept in fp32, but for a decay per key channel it is fed by rounded keys.
LIMITS = {
    "fp32": {"o": 5e-6, "state": 5e-6},
    "fp16": {"o": 2e-3, "state": 1e-3},
    "bf16": {"o": 2e-2, "state": 1e-2, "bound": 5e-3},
}

EXACT = {"lse": 2e-6, "pool": 0, "mass": 2e-6, "bound": 1e-5, "chosen": 0}


@pytest.fixture(scope="session")
def errors() -> dict[str, dict[str, float]]:
    env = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.gpu.kernel_cases"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_interpreted_kernel_computes_the_reference(case: Any, errors: dict[str, Any]) -> None:
    found, limits = errors[case.name], {**EXACT, **LIMITS[case.dtype]}
    assert {name: value for name, value in found.items() if not value <= limits[name]} == {}


ONE_OF_EACH = ("chunk_inverse", "gated_delta_head_96x192_bf16", "attention_128_page32_bf16")


def test_cubins_of_one_architecture(tmp_path: Path) -> None:
    """One shape of each kernel: no spills, and the order of arguments is the kernel's own."""
    cubins = compile_all(tmp_path, [90], wanted=lambda v: any(x in v.name for x in ONE_OF_EACH))
    kernels = {(v.op, v.name): v.kernel for v in variants()}
    assert len(cubins) == 6
    for cubin in cubins:
        names = [a.name for a in cubin.arguments]
        kernel = kernels[cubin.op, cubin.variant]
        assert names[-2:] == ["scratch", "profile"]
        assert names[:-2] + list(cubin.constants) == kernel.arg_names
        assert cubin.symbol.encode() in cubin.path.read_bytes()
        assert cubin.spill_bytes == 0
        assert 0 < cubin.registers <= 255
        assert cubin.threads == 32 * cubin.num_warps
    listed = json.loads((tmp_path / "cubins.json").read_text())
    assert [row["path"] for row in listed] == [c.path.name for c in cubins]
    assert len(table(cubins)) == 6


def test_parameters_of_the_compiled_entry(tmp_path: Path) -> None:
    """What a launcher passes is what the code reads: kinds and count from the PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant = next(v for v in variants() if v.name.startswith("recurrent_gated_delta_head_64"))
    cubin = compile_variant(variant, 80, tmp_path)
    source = ASTSource(
        fn=variant.kernel,
        signature=variant.types | dict.fromkeys(variant.constants, "constexpr"),
        constexprs=variant.constants,
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]
    entry = ptx[ptx.index(".entry") : ptx.index(".reqntid")]
    words = [line.split()[1] for line in entry.splitlines() if ".param" in line]
    kinds = {"i32": ".u32", "fp32": ".f32"}
    assert words == [kinds.get(a.type, ".u64") for a in cubin.arguments]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Launches compile for sm_90, specialised as a launch would, and run nothing."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32",
             "int8": "i8"}  # fmt: skip
    seen: dict[str, int] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {n: kwargs.pop(n) for n in ("num_warps", "num_stages") if n in kwargs}
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        types, constants = {}, {}
        for param in self.params:
            value = values[param.name]
            if param.is_constexpr or value is None or (type(value) is int and value == 1):
                types[param.name], constants[param.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                types[param.name] = "*" + kinds[str(value.dtype).removeprefix("torch.")]
            else:
                types[param.name] = "i32" if isinstance(value, int) else "fp32"
        source = ASTSource(fn=self, signature=types, constexprs=constants)
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        if not done.asm["cubin"] or not all(0 < n < 2**31 for n in grid):
            raise RuntimeError(f"{self.fn.__name__} {grid}")  # asserts of the case may fail
        seen[self.fn.__name__] = seen.get(self.fn.__name__, 0) + 1

    monkeypatch.setattr(triton.JITFunction, "run", run)
    return seen


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == "bf16"], ids=lambda c: c.name)
def test_launches_compile_as_a_gpu_would_specialise_them(
    case: Any, launches: dict[str, int]
) -> None:
    """Arguments that are None or 1 become constants, which the interpreter does not show."""
    with contextlib.suppress(AssertionError, ValueError):  # nothing was computed
        case.run()
    assert launches


@pytest.mark.full
def test_perf_gpu_runs_end_to_end(tmp_path: Path) -> None:
    env = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "perf.gpu", "--small", "--json", str(tmp_path / "gpu.json")]
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["skipped"] == []
    assert {row["method"] for row in found["ttft"]} >= {"cold", "5% replay", "split + K/V copy"}
    assert all(row["error_o"] < 2e-2 for row in found["numerics"])


def test_names_of_variants_are_unique() -> None:
    names = [v.name for v in variants(OPS)]
    assert len(names) == len(set(names))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_no_kernel_spills_on_any_architecture(tmp_path: Path) -> None:
    cubins = compile_all(tmp_path, ARCHS)
    assert {(c.variant, c.arch): c.spill_bytes for c in cubins if c.spill_bytes} == {}
    assert max(c.shared_bytes for c in cubins if c.arch == 120) <= 99 * 1024
