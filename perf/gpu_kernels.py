"""perf.gpu's kernels: numerics against float64 at real shapes, times over their floors."""

from __future__ import annotations

import math
from typing import Any

import torch

from perf import gpu_sparse
from perf.gpu_bench import Bench
from plugins.compressed_sparse_attention.kernel import attend
from plugins.linear_state_replay.kernel import SHAPES, linear_state_replay


def linear_inputs(
    bench: Bench, rule: str, decay: int, dk: int, dv: int, T: int, heads: int, dtype: torch.dtype
) -> dict[str, Any]:
    k = torch.nn.functional.normalize(torch.randn(1, T, heads, dk, device=bench.device), dim=-1)
    size = (1, T, heads, dk) if decay == 2 else (1, T, heads)
    log_decay = -torch.exp(torch.empty(size, device=bench.device).uniform_(-8, 0.5))
    beta = 2 * torch.rand(1, T, heads, device=bench.device) if "delta" in rule else None
    return {
        "q": bench.random(1, T, heads, dk, dtype=dtype), "k": k.to(dtype),
        "v": bench.random(1, T, heads, dv, dtype=dtype), "beta": beta, "log_decay": log_decay,
        "past_state": torch.randn(1, heads, dk, dv, device=bench.device),
    }  # fmt: skip


def exact_linear(x: dict[str, Any], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """ref.py in torch, float64."""
    y = {n: None if t is None else t.double() for n, t in x.items()}
    S, out = y["past_state"], []
    for t in range(y["q"].shape[1]):
        q, k, v = (y[n][:, t] for n in "qkv")
        decay = y["log_decay"][:, t].exp()
        S = S * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        if y["beta"] is not None:
            v = y["beta"][:, t, :, None] * (v - torch.einsum("bhkv,bhk->bhv", S, k))
        S = S + k[..., None] * v[..., None, :]
        out.append(scale * torch.einsum("bhkv,bhk->bhv", S, q))
    return torch.stack(out, 1), S


def numerics(bench: Bench) -> None:
    """Largest error over the largest value."""
    T, heads = (70, 2) if bench.small else (1000, 16)
    dtypes = (torch.bfloat16,) if bench.small else (torch.bfloat16, torch.float16)
    shapes = (("gated_delta", 1, 24, 48), ("gated", 1, 16, 16)) if bench.small else SHAPES
    for dtype in dtypes:
        for rule, decay, dk, dv in shapes:
            if bench.left() < 0.6 * bench.seconds:
                bench.skip(f"numerics of {rule} {dk}x{dv} {dtype}")
                continue
            x = linear_inputs(bench, rule, decay, dk, dv, T, heads, dtype)
            scale = dk**-0.5
            o, state = linear_state_replay(**x, update_rule=rule, scale=scale)
            want_o, want_state = exact_linear(x, scale)
            bench.add("numerics", {
                "kernel": f"{rule} {('', 'head', 'key')[decay]} {dk}x{dv}", "tokens": T,
                "dtype": str(dtype).removeprefix("torch."),
                "error_o": _error(o, want_o), "error_state": _error(state, want_state),
            })  # fmt: skip
        for D, T_q, total in ((16, 5, 100),) if bench.small else ((128, 300, 4000), (256, 1, 4000)):
            q, k, v, table, lens = attention_inputs(bench, 4, 2, D, T_q, total, dtype)
            o, _ = attend(q, k, v, table, lens, scale=D**-0.5)
            want = exact_attention(q, k, v, table, total)
            bench.add("numerics", {
                "kernel": f"attention {D}", "tokens": T_q,
                "dtype": str(dtype).removeprefix("torch."), "error_o": _error(o, want),
            })  # fmt: skip


def sparse(bench: Bench, bandwidth: float) -> None:
    """Sparse decode: errors, then its time over what it reads and beside dense decode."""
    Hq, Hk, D, rows = (2, 1, 16, 192) if bench.small else (16, 4, 128, 4096)
    found = gpu_sparse.make(bench.device, Hq, Hk, D, rows).errors()
    bench.add("numerics", {"kernel": f"sparse decode {D}", "tokens": 1, "dtype": "bfloat16",
                           **found})  # fmt: skip
    rows = 192 if bench.small else 32768
    case = gpu_sparse.make(bench.device, Hq, Hk, D, rows)
    read = float(case.sparse().chosen.float().mean())
    moved = 2 * 2 * rows * Hk * D * read + case.summaries.numel() * 2
    for name, run, size in (
        (f"sparse decode of {rows}, {read:.0%} read", case.sparse, moved),
        (f"dense decode of {rows}", case.dense, 2 * 2 * rows * Hk * D),
    ):
        add_time(bench, name, 1, bench.time(run), 0.0, size / bandwidth)


def attention_inputs(
    bench: Bench, Hq: int, Hk: int, D: int, T: int, total: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    pages = -(-total // 32)
    k, v = (bench.random(pages, 32, Hk, D, dtype=dtype) for _ in range(2))
    table = torch.randperm(pages, device=bench.device, dtype=torch.int32)[None]
    lens = torch.tensor([total], device=bench.device, dtype=torch.int32)
    return bench.random(1, T, Hq, D, dtype=dtype), k, v, table, lens


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, total: int
) -> torch.Tensor:
    T, Hq, D = q.shape[1:]
    rows = [t[table[0].long()].flatten(0, 1)[:total].double() for t in (k, v)]
    keys, values = (t.repeat_interleave(Hq // t.shape[1], 1) for t in rows)
    score = torch.einsum("thd,nhd->htn", q[0].double(), keys) * D**-0.5
    at = torch.arange(total - T, total, device=q.device)[:, None]
    score = score.masked_fill(torch.arange(total, device=q.device) > at, -math.inf)
    return torch.einsum("htn,nhd->thd", score.softmax(-1), values)[None]


def kernels(bench: Bench, flops: float, bandwidth: float) -> None:
    """Times over floors, whichever of operations and bytes takes longer."""
    half = torch.bfloat16
    for rule, decay, dk, dv, heads in (
        ("gated_delta", 1, 128, 128, 32), ("gated_delta", 1, 96, 192, 30),
        ("gated_delta", 2, 128, 128, 32), ("gated", 1, 128, 64, 128),
    ):  # fmt: skip
        if bench.small:
            dk, dv, heads = 16, 16, 1
        for T in (1, 70) if bench.small else (1, 512, 4096):
            if bench.left() < 0.5 * bench.seconds:
                bench.skip(f"time of {rule} {dk}x{dv} T={T}")
                continue
            x = linear_inputs(bench, rule, decay, dk, dv, T, heads, half)
            state = x.pop("past_state")

            def run(x: Any = x, state: Any = state, rule: str = rule, dk: int = dk) -> Any:
                return linear_state_replay(
                    **x, past_state=state, present_state=state, update_rule=rule, scale=dk**-0.5
                )

            moved = sum(t.numel() * t.element_size() for t in x.values() if t is not None)
            moved += 2 * x["v"].numel() + 2 * 4 * state.numel()
            # Per token and chunk of 64: q k^T, k k^T, k S, q S, k^T u and two products with u.
            work = 2 * T * heads * (2 * 64 * dk + 3 * dk * dv + 2 * 64 * dv) if T > 1 else 0
            add_time(bench, f"{rule} {('', 'head', 'key')[decay]} {dk}x{dv} heads={heads}", T,
                     bench.time(run), work / flops, moved / bandwidth)  # fmt: skip
    for name, Hq, Hk, D in (("qwen3.5-9b", 16, 4, 256), ("hybrid-7b", 30, 30, 128)):
        if bench.small:
            Hq, Hk, D = 2, 1, 16
        for T, total in ((1, 100), (5, 100)) if bench.small else ((1, 32768), (1638, 32768)):
            if bench.left() < 0.45 * bench.seconds:
                bench.skip(f"time of attention {name} T={T}")
                continue
            inputs = attention_inputs(bench, Hq, Hk, D, T, total)
            moved = 2 * 2 * total * Hk * D + 2 * 2 * T * Hq * D
            work = 4 * T * (total - T / 2) * Hq * D

            def read(inputs: Any = inputs, D: int = D) -> Any:
                return attend(*inputs, scale=D**-0.5)

            add_time(bench, f"attention {name} of {total}", T, bench.time(read), work / flops,
                     moved / bandwidth)  # fmt: skip


def add_time(
    bench: Bench, name: str, tokens: int, seconds: float, work: float, moved: float
) -> None:
    floor = max(work, moved)
    bench.add("kernels", {
        "kernel": name, "tokens": tokens, "ms": seconds * 1e3, "floor_ms": floor * 1e3,
        "over_floor": seconds / floor, "floor": "matmul" if work > moved else "copy",
    })  # fmt: skip


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())
