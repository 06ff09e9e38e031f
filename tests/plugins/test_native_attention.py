"""The decode kernels against the reference: odd shapes, NaN wherever nothing may be read."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from plugins.compressed_sparse_attention.node import Compression
from plugins.compressed_sparse_attention.node import compressed_sparse_attention as emit
from plugins.compressed_sparse_attention.ref import (
    BLOCK,
    Host,
    SparseStep,
    compressed_sparse_attention,
    sparse_decode_attention,
    summarise,
)
from plugins.onnx_graph import DOMAIN, OPSET, ORT_DOMAIN, Nodes
from serving.engine.native import summarise_slot
from tests.plugins.running import NATIVE, session_of

Array = NDArray[Any]
ROOT = Path(__file__).resolve().parents[2]
RECENT = 2
# Rows of an evicted group.
EVICTED = 9
_DENSE = ["q", "k_new", "v_new", "past_k", "past_v", "seqlens", "total_len", "positions"]
_SPARSE = ["kv_rows", "summaries", "stats", "epsilon", "factor"]
_HOST = ["host_k", "host_v", "host_rows", "host_first"]
_INT = dict.fromkeys(
    ["seqlens", "total_len", "kv_rows", "host_rows", "host_first"], TensorProto.INT32
)
_KIND = _INT | {"positions": TensorProto.INT64, "summaries": TensorProto.FLOAT16}
_ANSWERS = ["o", "present_k", "present_v", "present_summaries", "present_stats"]
_ANSWERS += ["error_bound", "mass_read", "rows_read", "chosen"]


@dataclass(frozen=True)
class Case:
    """``rows``: of every kv head of every sequence; ``evicted``: groups that are in no slot;
    ``host``: they can be read all the same."""

    Hq: int
    rows: tuple[tuple[int, ...], ...]
    dk: int
    dv: int = 0
    capacity: int = 0
    evicted: int = 0
    sound: bool = False
    epsilon: float = 0.05
    peak: float = 3.0
    host: bool = False
    own: float = 0.3  # of a row, beside what its block shares

    @property
    def value_dim(self) -> int:
        return self.dv or self.dk


CASES = [
    Case(1, ((1,),), 32),
    Case(3, ((31,),), 64),
    Case(2, ((33, 65),), 80, capacity=70),
    Case(5, ((97,),), 96),
    Case(16, ((1000, 700), (40, 999)), 128, evicted=5),
    Case(8, ((1000,),), 256, epsilon=0.2),
    Case(7, ((513,),), 64, dv=40, evicted=3),
    Case(6, ((1000, 1000),), 64, sound=True, epsilon=0.5, peak=0.3),
    Case(4, ((300,),), 32, sound=True, evicted=2, epsilon=0.5, peak=0.3),
    Case(8, ((2000, 1500),), 64, epsilon=0.01, peak=6.0),
    Case(4, ((1025, 3),), 24, epsilon=0.001),
    Case(4, ((700, 300), (65, 500)), 64, evicted=20, host=True, epsilon=0.02),
    Case(6, ((1000,),), 24, evicted=7, host=True, epsilon=0.001),
    Case(2, ((200, 200),), 80, evicted=3, host=True, epsilon=1e-6, peak=1.0),
    Case(4, ((300,),), 32, sound=True, evicted=9, host=True, epsilon=0.5, peak=0.3),
    # So unlike inside their blocks that a first choice is not enough.
    Case(2, ((1000, 900),), 64, evicted=30, host=True, epsilon=0.1, own=3.0),
    Case(2, ((1000, 900),), 64, evicted=30, host=True, epsilon=0.1, own=2.0),
]


@functools.cache
def session(form: str, Hq: int, Hk: int, dk: int, scale: float) -> ort.InferenceSession:
    g = Nodes("ort")
    names = {n: n for n in [*_SPARSE, *_HOST, *_ANSWERS[3:]]}
    emit(
        g, "o", _DENSE, ("present_k", "present_v"),
        num_heads=Hq, num_kv_heads=Hk, head_dim=dk, scale=scale, compression=Compression(**names),
    )  # fmt: skip
    info = helper.make_tensor_value_info
    outs = {"present_summaries": TensorProto.FLOAT16, "rows_read": TensorProto.INT32}
    outs["chosen"] = TensorProto.UINT8
    graph = helper.make_graph(
        g.nodes,
        "op",
        [info(n, _KIND.get(n, TensorProto.FLOAT), None) for n in [*_DENSE, *_SPARSE, *_HOST]],
        [info(n, outs.get(n, TensorProto.FLOAT), None) for n in _ANSWERS],
        initializer=list(g.constants.values()),
    )
    domains = [helper.make_opsetid("", OPSET)]
    domains += [helper.make_opsetid(d, 1) for d in (ORT_DOMAIN, DOMAIN)]
    functions = list(g.functions.values())
    model = helper.make_model(graph, opset_imports=domains, functions=functions, ir_version=11)
    return session_of(model, form, threads=2)


def inputs(case: Case, seed: int = 0) -> dict[str, Array]:
    """Before the step: the new row is in k_new, v_new; blocks past ``rows`` and their entries,
    and those of the recent blocks, are NaN."""
    rng = np.random.default_rng(seed)
    rows = np.array(case.rows, np.int32)
    (B, Hk), dk, dv = rows.shape, case.dk, case.value_dim
    C = case.capacity or int(rows.max()) + 50
    M = -(-C // BLOCK)
    x = {
        "q": rng.standard_normal((B, 1, case.Hq * dk)),
        "k_new": rng.standard_normal((B, 1, Hk * dk)),
        "v_new": rng.standard_normal((B, 1, Hk * dv)),
        "past_k": np.full((B, Hk, C, dk), np.nan),
        "past_v": np.full((B, Hk, C, dv), np.nan),
        "summaries": np.full((B, Hk, M + case.evicted, 2 * dk + dv), np.nan, np.float16),
        "stats": np.full((B, Hk, M + case.evicted, 2), np.nan),
    }
    gone: list[tuple[Any, ...]] = []
    for b, h in np.ndindex(B, Hk):
        n = rows[b, h]
        for name, d in (("past_k", dk), ("past_v", dv)):
            # Blocks that differ, with rows alike inside: what makes a selection worth while.
            centre = rng.standard_normal((M, 1, d)) * (case.peak if name == "past_k" else 1)
            alike = centre + case.own * rng.standard_normal((M, BLOCK, d))
            x[name][b, h, : n - 1] = alike.reshape(-1, d)[: n - 1]
        recent = max(-(-n // BLOCK) - RECENT, 0)
        fill = [(j, slice(j * BLOCK, (j + 1) * BLOCK)) for j in range(recent)]
        groups = [(j, x["past_k"][b, h, at], x["past_v"][b, h, at]) for j, at in fill]
        for j in range(M, M + case.evicted):
            k = rng.standard_normal((EVICTED, dk)) * 0.2
            groups.append((j, k, rng.standard_normal((EVICTED, dv))))
            gone.append((b, h, j, *groups[-1][1:]))
        for j, k, v in groups:
            entry, stats = summarise(k.astype(np.float32), v.astype(np.float32), sound=case.sound)
            x["summaries"][b, h, j], x["stats"][b, h, j] = entry, stats
        if recent > 2:
            x["stats"][b, h, 1, 1] = np.inf  # a block that is always read
        if case.evicted:
            x["stats"][b, h, M, 0] = 0  # no such group
    feeds = {n: a if a.dtype == np.float16 else a.astype(np.float32) for n, a in x.items()}
    feeds["kv_rows"] = rows
    feeds["epsilon"] = np.full(B, case.epsilon, np.float32)
    feeds["factor"] = np.full(B, 0.0 if case.sound else 1.5, np.float32)
    host = host_of(gone, feeds["stats"].shape[:3], dk) if case.host else no_host(Hk)
    return feeds | dense_lengths(rows) | host


def no_host(Hk: int) -> dict[str, Array]:
    nothing = np.zeros(0, np.float32)
    rows, first = (np.zeros((0, Hk, 0), np.int32) for _ in range(2))
    return {"host_k": nothing, "host_v": nothing, "host_rows": rows, "host_first": first}


def host_of(gone: list[tuple[Any, ...]], entries: tuple[int, ...], dim: int) -> dict[str, Array]:
    """Evicted rows strewn over a memory of NaN, every third group not to be had."""
    rng = np.random.default_rng(1)
    count = sum(len(k) for _, _, _, k, _ in gone)
    k, v = np.full((2, 3 * count, dim), np.nan, np.float32)
    places = iter(rng.permutation(3 * count))
    B, Hk, S = entries
    first = np.full((B, Hk, S), -1, np.int32)
    listed: dict[tuple[int, int], list[int]] = {at: [] for at in np.ndindex(B, Hk)}
    for i, (b, h, j, keys, values) in enumerate(gone):
        at = [int(next(places)) for _ in keys]
        k[at], v[at] = keys, values
        if i % 3 != 1:
            first[b, h, j] = len(listed[b, h])
        listed[b, h] += [p * dim // 8 for p in at]
    rows = np.array([listed[at] for at in np.ndindex(B, Hk)], np.int32).reshape(B, Hk, -1)
    return {"host_k": k.ravel(), "host_v": v.ravel(), "host_rows": rows, "host_first": first}


def dense_lengths(rows: Array) -> dict[str, Array]:
    """What a compressed step does not look at: no sensible values."""
    B = len(rows)
    return {
        "seqlens": np.full(B, 123456, np.int32),
        "total_len": np.array(123456, np.int32),
        "positions": np.zeros((B, 1), np.int64),
    }


def run(form: str, case: Case, feeds: dict[str, Array]) -> dict[str, Array]:
    """In place, as the engine does: presents are written over a copy of the pasts."""
    Hk = feeds["kv_rows"].shape[1] if feeds["kv_rows"].size else feeds["past_k"].shape[1]
    s = session(form, case.Hq, Hk, case.dk, case.dk**-0.5)
    binding, owned = s.io_binding(), {n: a.copy() for n, a in feeds.items()}
    for name, a in owned.items():
        kind = a.dtype.type
        binding.bind_input(name, "cpu", 0, kind, a.shape, a.ctypes.data)
        if (present := "present_" + name.removeprefix("past_")) in _ANSWERS:
            binding.bind_output(present, "cpu", 0, kind, a.shape, a.ctypes.data)
    free = [n for n in _ANSWERS if not n.startswith("present_")]
    for name in free:
        binding.bind_output(name, "cpu")
    s.run_with_iobinding(binding)
    got = dict(zip(free, binding.copy_outputs_to_cpu()[-len(free) :], strict=True))
    for name in ("past_k", "past_v", "summaries", "stats"):
        got["present_" + name.removeprefix("past_")] = owned[name]
    return got


def reference(case: Case, feeds: dict[str, Array]) -> SparseStep:
    """Of the slots after the new row was written, with the summaries as they then are."""
    rows, k, v = feeds["kv_rows"], feeds["past_k"].copy(), feeds["past_v"].copy()
    B, Hk = rows.shape
    for b, h in np.ndindex(B, Hk):
        k[b, h, rows[b, h] - 1] = feeds["k_new"].reshape(B, Hk, -1)[b, h]
        v[b, h, rows[b, h] - 1] = feeds["v_new"].reshape(B, Hk, -1)[b, h]
    return sparse_decode_attention(
        feeds["q"].reshape(B, case.Hq, -1), k, v, rows, feeds["summaries"], feeds["stats"],
        scale=case.dk**-0.5, epsilon=case.epsilon, factor=float(feeds["factor"][0]) or 1.0,
        recent=RECENT, sound=case.sound,
        host=Host(*(feeds[n] for n in _HOST)) if case.host else None,
    )  # fmt: skip


@pytest.mark.parametrize("form", NATIVE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sparse_step_is_the_reference(case: Case, form: str) -> None:
    feeds = inputs(case)
    got, want = run(form, case, feeds), reference(case, feeds)
    np.testing.assert_array_equal(got["chosen"], want.chosen)
    np.testing.assert_array_equal(got["rows_read"], want.rows_read)
    B = len(case.rows)
    np.testing.assert_allclose(got["o"].reshape(B, case.Hq, -1), want.o, rtol=1e-3, atol=2e-5)
    np.testing.assert_allclose(got["mass_read"], want.mass_read, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(got["error_bound"], want.error_bound, rtol=1e-2, atol=1e-6)


def test_the_cases_read_some_and_leave_some() -> None:
    """Else the test above would prove little."""
    read = [reference(c, inputs(c)).rows_read.sum() / np.sum(c.rows) for c in CASES]
    assert sum(0.05 < r < 0.95 for r in read) >= 5, read
    fetched = []
    for case in (c for c in CASES if c.host):
        feeds = inputs(case)
        some = reference(case, feeds).chosen.astype(bool) & (feeds["host_first"] >= 0)
        fetched.append(some.sum() / (feeds["host_first"] >= 0).sum())
    assert sum(0 < share < 1 for share in fetched) >= 2, fetched
    chosen = [reference(c, inputs(c)).chosen[..., -c.evicted :].any() for c in CASES if c.evicted]
    assert any(chosen)
    assert not all(chosen)
    late = [(reference(c, inputs(c)).chosen == 2).any() for c in CASES]
    assert any(late)
    assert not all(late)


def dense_case(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """The same step with epsilon 0, and without any compression where all rows are alike."""
    feeds = inputs(case)
    exact = {**feeds, "epsilon": np.zeros_like(feeds["epsilon"])}
    rows = feeds["kv_rows"]
    plain = dict(feeds)
    for name in _SPARSE:
        plain[name] = feeds[name][:0]
    plain |= no_host(rows.shape[1])
    plain["seqlens"] = rows[:, 0] - 1
    plain["total_len"] = np.array(rows.max(), np.int32)
    return exact, plain


DENSE = [
    Case(1, ((1,),), 32),
    Case(5, ((31,), (1000,)), 96),
    Case(4, ((33, 33), (2, 2)), 80),
    Case(16, ((1025, 1025),), 128),
    Case(8, ((2048,),), 256),
    Case(70, ((65,),), 64, dv=40),
    Case(3, ((1000,),), 24),
]


@pytest.mark.parametrize("form", NATIVE)
@pytest.mark.parametrize("case", DENSE, ids=str)
def test_a_dense_step_is_the_reference(case: Case, form: str) -> None:
    exact, plain = dense_case(case)
    got = run(form, case, plain)
    rows, B = np.array(case.rows), len(case.rows)
    new = {n: plain[n].reshape(B, 1, rows.shape[1], -1) for n in ("k_new", "v_new")}
    o, k, v, _, _ = compressed_sparse_attention(
        plain["q"].reshape(B, 1, case.Hq, -1), **new, past_k=plain["past_k"],
        past_v=plain["past_v"], total_lens=rows[:, 0], scale=case.dk**-0.5,
    )  # fmt: skip
    np.testing.assert_allclose(got["o"], o.reshape(B, 1, -1), rtol=1e-4, atol=2e-6)
    np.testing.assert_array_equal(got["present_k"], k.astype(np.float32))
    np.testing.assert_array_equal(got["present_v"], v.astype(np.float32))
    assert not got["error_bound"].any()
    assert (got["rows_read"] == rows).all()
    if case.Hq <= 64:  # one group: the most that a compressed step takes
        np.testing.assert_array_equal(run(form, case, exact)["o"], got["o"])


@pytest.mark.parametrize("form", NATIVE)
def test_company_and_threads_change_no_bit(form: str) -> None:
    """A sequence's answer in a ragged batch, some of it dense, is that of the sequence alone."""
    case = Case(8, ((1300, 800), (40, 2000), (700, 700)), 64, evicted=6, host=True, epsilon=0.02)
    feeds = inputs(case)
    feeds["epsilon"][2] = 0
    together = run(form, case, feeds)
    for b, rows in enumerate(case.rows):
        whole = {"total_len", "host_k", "host_v"}
        alone = {n: a if n in whole else a[b : b + 1] for n, a in feeds.items()}
        got = run(form, replace(case, rows=(rows,)), alone)
        for name in _ANSWERS:
            np.testing.assert_array_equal(got[name], together[name][b : b + 1], err_msg=name)


@pytest.mark.parametrize("form", NATIVE)
@pytest.mark.parametrize("sound", [False, True])
def test_a_block_gets_its_entry_when_it_may_be_left_unread(form: str, sound: bool) -> None:
    """At the first row of the third block from its own; the engine brings no entry for it."""
    case = Case(2, ((129,), (130,)), 48, sound=sound)
    feeds = inputs(case)
    want = feeds["summaries"][:, 0, 2].copy(), feeds["stats"][:, 0, 2].copy()
    for name in ("summaries", "stats"):
        feeds[name][0, 0, 2] = np.nan
    got = run(form, case, feeds)
    assert_entries_close(got["present_summaries"][0, 0, 2], want[0][0])
    np.testing.assert_allclose(got["present_stats"][0, 0, 2], want[1][0], rtol=2e-3)
    np.testing.assert_array_equal(got["present_summaries"][1, 0, 2], want[0][1])


def assert_entries_close(got: Array, want: Array) -> None:
    """float16 in the last place: the mean was summed in another order."""
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("rows", [1, 31, 33, 1000])
def test_summaries_of_a_slot(rows: int, sound: bool) -> None:
    rng = np.random.default_rng(rows)
    k, v = (rng.standard_normal((rows, d)).astype(np.float32) for d in (80, 24))
    entries, stats = summarise_slot(k, v, sound=sound)
    for j, entry in enumerate(entries):
        at = slice(j * BLOCK, (j + 1) * BLOCK)
        want, want_stats = summarise(k[at], v[at], sound=sound)
        assert_entries_close(entry, want)
        np.testing.assert_allclose(stats[j], want_stats, rtol=2e-3, atol=1e-6)
        if sound:  # never inside the box
            centre, spread = (entry[i : i + 80].astype(np.float64) for i in (0, 80))
            assert (np.abs(k[at] - centre) <= spread).all()


def test_several_queries_run_in_the_runtime_s_own_kernel() -> None:
    case = Case(4, ((64, 64),), 32)
    _, plain = dense_case(case)
    rng = np.random.default_rng(0)
    for name, width in (("q", 4), ("k_new", 2), ("v_new", 2)):
        plain[name] = rng.standard_normal((1, 5, width * 32)).astype(np.float32)
    plain["positions"] = np.arange(59, 64)[None]
    for got, want in zip(*(run(f, case, plain).items() for f in ("avx2", "ort")), strict=True):
        np.testing.assert_array_equal(got[1], want[1], err_msg=got[0])


def test_steps_that_do_not_fit_are_refused() -> None:
    case = CASES[4]
    feeds = inputs(case)
    for change in (
        {"kv_rows": feeds["kv_rows"] + 10_000},
        {"kv_rows": feeds["kv_rows"] * 0},
        {"kv_rows": feeds["kv_rows"][:1]},
        {"stats": feeds["stats"][:, :, :-1].copy()},
        {"factor": feeds["factor"][:1]},
        {"host_k": np.zeros(8, np.float32)},
    ):
        with pytest.raises(Exception, match=r"do not fit|outside the slot"):
            run("avx2", case, feeds | change)


@pytest.mark.parametrize("form", NATIVE)
def test_rows_outside_the_host_are_not_read(form: str) -> None:
    """As if it did not have them: asked for, and still estimated."""
    case = next(c for c in CASES if c.host and not c.sound)
    feeds = inputs(case)
    want = run(form, case, feeds | {"host_first": np.full_like(feeds["host_first"], -1)})
    size = len(feeds["host_k"]) // 8
    for change in (
        {"host_rows": feeds["host_rows"] + size},
        {"host_rows": feeds["host_rows"] - size},
        {"host_first": feeds["host_first"] + feeds["host_rows"].shape[2]},
    ):
        got = run(form, case, feeds | change)
        for name in _ANSWERS:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.full
def test_the_address_sanitizer_finds_nothing() -> None:
    """All of this again, and the convolution, with every access checked. The AVX-512 form runs too,
    its sixteen lanes as pairs of eight."""
    built = subprocess.run([ROOT / "plugins/native/build.sh", "asan"], check=False)
    library = ROOT / "artifacts/native/libhybrid_ops_asan.so"
    if built.returncode or not library.is_file():
        pytest.fail("no library with AddressSanitizer")
    # libstdc++ too: the sanitizer looks for its throw before anything else brings it.
    names = ["-print-file-name=libasan.so", "-print-file-name=libstdc++.so"]
    runtime = [subprocess.check_output(["g++", n], text=True).strip() for n in names]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "HYBRID_OPS_LIBRARY": str(library),
    }
    files = ["tests/plugins/test_native_attention.py", "tests/plugins/test_causal_conv.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "not full", "-rs", *files]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
