"""The TensorRT plugin library, with neither a GPU nor TensorRT's own library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_configs.errors import ConversionError
from plugins.tensorrt import build as plugin_build
from plugins.tensorrt.build import HEADERS, LIBRARY, OUTPUT, ROOT, build, include_flags

HARNESS = Path(__file__).with_name("harness.cpp")
FAKE_CUDA = Path(__file__).with_name("fake_cuda.cpp")
SHAPES = ("gated_delta_head_128x128_bf16", "chunk_inverse", "_128_page32_bf16")

REGISTRY = """
import json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import tensorrt_lean as trt

registry = trt.get_plugin_registry()
registry.load_library(sys.argv[2])

def make(name, **attributes):
    kinds = {np.int32: trt.PluginFieldType.INT32, np.float32: trt.PluginFieldType.FLOAT32,
             np.int8: trt.PluginFieldType.CHAR}
    arrays = {n: np.frombuffer(v.encode(), np.int8) if isinstance(v, str) else
              np.array([v], np.float32 if isinstance(v, float) else np.int32)
              for n, v in attributes.items()}
    fields = [trt.PluginField(n, a, kinds[a.dtype.type]) for n, a in arrays.items()]
    creator = registry.get_creator(name, "1", "hybrid")
    return creator.create_plugin(name, trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)

linear = dict(q_num_heads=2, kv_num_heads=4, scale=1.0, chunk_size=64)
attention = dict(num_heads=4, kv_num_heads=2, scale=1.0, local_window_size=-1, layer=3)
print(json.dumps({
    "version": trt.__version__,
    "creators": sorted(c.name for c in registry.all_creators if c.plugin_namespace == "hybrid"),
    "linear": make("LinearStateReplay", update_rule="gated_delta", **linear) is not None,
    "attention": make("CompressedSparseAttention", **attention) is not None,
    "wrong": make("LinearStateReplay", update_rule="nonsense", **linear) is not None,
}))
"""


@pytest.fixture(scope="session")
def library() -> Path:
    """What ``make plugins-tensorrt`` has built from the present sources; else one with the few
    kernels that these tests ask for."""
    made = OUTPUT / LIBRARY
    sources = [*(ROOT / "plugins").rglob("*.cpp"), *(ROOT / "plugins").rglob("*.h")]
    sources += [*(ROOT / "plugins").rglob("kernel.py")]
    if made.exists() and made.stat().st_mtime > max(f.stat().st_mtime for f in sources):
        return made
    return build(ROOT / "artifacts" / "tensorrt-few", (90,), SHAPES)


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("harness") / "harness"
    command = ["g++", "-std=c++17", "-Wno-deprecated-declarations", *include_flags()]
    subprocess.run([*command, str(HARNESS), "-o", str(program), "-ldl"], check=True)
    return program


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1 that only says what it was asked for."""
    folder = tmp_path_factory.mktemp("driver")
    command = ["g++", "-std=c++17", "-shared", "-fPIC", *include_flags(), str(FAKE_CUDA)]
    output = str(folder / "libcuda.so.1")
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1", "-o", output], check=True)
    return folder


def launches(harness: Path, library: Path, driver: Path, arch: int) -> tuple[dict[str, str], str]:
    """What each enqueue of the harness asked of the driver, and the library's messages."""
    settings = os.environ | {"LD_LIBRARY_PATH": str(driver), "FAKE_ARCH": str(arch)}
    done = subprocess.run(
        [harness, library, "launch"], capture_output=True, text=True, check=False, env=settings
    )
    parts = done.stdout.split("enqueue ")[1:]
    return dict(part.split("\n", 1) for part in parts), done.stderr


def symbols(library: Path, which: str) -> list[str]:
    done = subprocess.run(
        ["nm", "-D", which, str(library)], capture_output=True, text=True, check=True
    )
    return [line.split()[-1] for line in done.stdout.splitlines()]


def test_it_asks_for_no_symbol_of_tensorrt_or_cuda(library: Path) -> None:
    names = symbols(library, "--undefined-only")
    assert names
    assert not [n for n in names if n.startswith("cu") or "nvinfer" in n]
    needed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True)
    assert "not found" not in needed.stdout
    assert "cuda" not in needed.stdout
    assert "nvinfer" not in needed.stdout


def test_it_exports_the_entry_points_alone(library: Path) -> None:
    names = set(symbols(library, "--defined-only"))
    entries = {"getCreators", "setLoggerFinder", "hybrid_layer_events", "hybrid_last_error"}
    assert entries <= names
    assert not [n for n in names - entries if "cubin" in n or ("hybrid" in n and "_Z" not in n)]


def test_harness(library: Path, harness: Path) -> None:
    """Types, formats, shapes, workspace, serialisation and refusals: see harness.cpp."""
    done = subprocess.run([harness, library], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("FAIL")] == []
    assert done.returncode == 0, done.stdout
    assert lines[-1] == "0 failed"
    assert sum(line.startswith("ok") for line in lines) > 300
    for rule in ("linear", "gated", "delta", "gated_delta", "attention"):
        assert f"ok   {rule}: serialised and read back" in lines


def test_launches(library: Path, harness: Path, driver: Path) -> None:
    """Kernels, grids and the first arguments; inputs lie at 0x1000, 0x2000, ..., the workspace at
    0x800000. B = 2, 4 heads of 128 x 128; attention: T = 64, 8 query and 2 K/V heads."""
    asked, _ = launches(harness, library, driver, 90)
    assert all("returned 0" in text for text in asked.values()), asked
    calls = {
        name: [line.split() for line in text.splitlines() if " grid " in line]
        for name, text in asked.items()
    }
    for name in ("T=1", "T=16"):
        (one,) = calls[name]
        assert one[1] == "recurrent"
        assert int(one[4]) == 2 * 4  # sequences x heads
        # q k v log_decay beta past present, the last two in one place
        assert one[8:] == ["1000", "2000", "3000", "5000", "6000", "4000", "4000"]
    assert calls["T=0"] == []
    chunked = calls["T=450"]
    kernels = ["chunk_products", "chunk_inverse", "chunk_states", "chunk_outputs"]
    assert [c[1] for c in chunked] == kernels
    assert [c[3:5] for c in chunked[:2]] == [["8", "8"]] * 2  # chunks of 64, sequences x heads
    assert chunked[3][4:6] == ["8", "8"]
    inverse = chunked[0][12]
    assert inverse == chunked[1][8]
    states = [int(a, 16) for a in chunked[3][8:] if int(a, 16) >= 0x800000]
    assert states[0] == 0x800000
    assert states[1] == 0x800000 + 2 * 4 * 8 * 128 * 128 * 2  # then u, after S of every chunk

    append, attend = calls["attention"]
    assert (append[1], attend[1]) == ("append_kv", "paged_attention")
    assert append[8:] == ["2000", "3000", "4000", "5000", "6000", "7000", "8000"]
    assert attend[8:13] == ["1000", "4000", "5000", "6000", "7000"]
    assert int(attend[4]) == 2 * 2
    text = asked["attention"]
    assert text.index("wait 0xa") < text.index("append_kv") < text.index("record 0xb")
    assert "wait" not in asked["attention without events"]

    append, attend, merge = calls["decode"]  # two tokens over 2048 rows
    assert (append[1], attend[1], merge[1]) == ("append_kv", "paged_attention", "merge_splits")
    assert attend[3:6] == ["1", "4", "8"]  # sequences x K/V heads, parts of 256 rows
    assert merge[3] == "16"  # sequences x query heads
    lse = 8 * 2 * 8 * 128 * 4
    assert merge[8:12] == ["800000", f"{0x800000 + lse:x}", "100000", f"{0x800000 + lse + 512:x}"]


def test_a_device_without_kernels_is_told_how_to_get_them(
    library: Path, harness: Path, driver: Path
) -> None:
    asked, messages = launches(harness, library, driver, 75)
    assert "returned -1" in asked["T=1"]
    assert "for compute capability 7.5: build the library with --archs 75" in messages


def test_it_loads_into_a_real_registry(library: Path) -> None:
    command = [sys.executable, "-c", REGISTRY, str(HEADERS), str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["version"].startswith("11.")
    assert found["creators"] == ["CompressedSparseAttention", "LinearStateReplay"]
    assert found["linear"]
    assert found["attention"]
    assert not found["wrong"]
    assert "update_rule is 'nonsense'" in done.stderr


def test_what_the_build_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin_build, "HEADERS", tmp_path)
    with pytest.raises(ConversionError, match=r"kernel_lens.*is missing.*setup\.sh"):
        build(tmp_path, (90,), SHAPES)
