"""``hybrid::paged_attention`` and ``hybrid::sparse_decode_attention`` for PyTorch: importing this
module registers the ops.

K/V rows live in pages of a pool. Both ops only read: a step that appends writes its rows with
`write_kv` first, a replay brings none. On a CPU the ops are the mathematics of ``ref.py`` in
float64, on a GPU the kernels of ``kernel.py``.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def write_kv(
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Put K [W, Hk, dk] and V [W, Hk, dv] at ``rows`` [W] (page * page size + place in the page) of
    the pools [P, page, Hk, d], in place."""
    page, place = rows // pool_k.shape[1], rows % pool_k.shape[1]
    pool_k[page, place] = k.to(pool_k.dtype)
    pool_v[page, place] = v.to(pool_v.dtype)


@torch.library.custom_op("hybrid::paged_attention", mutates_args=(), device_types="cpu")
def paged_attention(
    q: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    total_lens: torch.Tensor,
    max_length: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of B packed sequences over their pages: prefill, replay and decode.

    q [N, Hq, dk]; pool_k, pool_v [P, page, Hk, dk or dv]; block_table [B, M], starts, lengths,
    total_lens [B] int32. Sequence b's queries are the rows starts[b] .. starts[b] + lengths[b] (at
    most ``max_length`` of them) and stand at the last of its total_lens[b] positions; window: rows
    a query sees, its own included (0: all). Returns o [N, Hq, dv] and the log-sum-exp of the
    scores [N, Hq] fp32.
    """
    o = q.new_zeros(*q.shape[:2], pool_v.shape[-1])
    lse = torch.full(q.shape[:2], -math.inf)
    bounds = zip(starts.tolist(), lengths.tolist(), total_lens.tolist(), strict=True)
    for b, (first, count, total) in enumerate(bounds):
        rows = slice(first, first + count)
        place = torch.arange(total)
        query = torch.arange(total - count, total)[:, None]
        seen = place <= query
        if window:
            seen &= place > query - window
        k, v = (_gather(pool, block_table[b], total) for pool in (pool_k, pool_v))
        out, sums = _attend(q[rows], k, v, seen[None], scale)
        o[rows], lse[rows] = out.to(o.dtype), sums
    return o, lse


@paged_attention.register_fake
def _paged_shapes(
    q: torch.Tensor, pool_k: torch.Tensor, pool_v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(*q.shape[:2], pool_v.shape[-1]), q.new_empty(
        q.shape[:2], dtype=torch.float32
    )


@torch.library.custom_op("hybrid::sparse_decode_attention", mutates_args=(), device_types="cpu")
def sparse_decode_attention(
    q: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    block_table: torch.Tensor,
    total_lens: torch.Tensor,
    selected: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One query of each of B sequences over selected blocks of its pages.

    q [B, Hq, dk]; pools and tables as above; selected [B, Hk, S] int32: numbers of the blocks that
    each K/V head reads, no block twice, -1 = none. Returns o [B, Hq, dv], the log-sum-exp over the
    rows read [B, Hq] fp32, and the attention mass of the rows left out [B, Hq] fp32 (ref.py's
    error_bound).
    """
    page = pool_k.shape[1]
    o = q.new_zeros(*q.shape[:2], pool_v.shape[-1])
    lse, dropped = torch.empty(q.shape[:2]), torch.empty(q.shape[:2])
    for b, total in enumerate(total_lens.tolist()):
        k, v = (_gather(pool, block_table[b], total) for pool in (pool_k, pool_v))
        block = torch.arange(total) // page
        read = (selected[b][:, :, None] == block).any(1)[:, None]
        every = torch.ones_like(read)
        out, kept = _attend(q[b : b + 1], k, v, read, scale)
        _, whole = _attend(q[b : b + 1], k, v, every, scale)
        o[b], lse[b], dropped[b] = out[0].to(o.dtype), kept[0], -torch.expm1(kept - whole)[0]
    return o, lse, dropped


@sparse_decode_attention.register_fake
def _sparse_shapes(
    q: torch.Tensor, pool_k: torch.Tensor, pool_v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sums = q.new_empty(q.shape[:2], dtype=torch.float32)
    return q.new_empty(*q.shape[:2], pool_v.shape[-1]), sums, torch.empty_like(sums)


def _gather(pool: torch.Tensor, table: torch.Tensor, total: int) -> torch.Tensor:
    """The first ``total`` rows [total, Hk, d] of one sequence, in float64."""
    pages = table[: -(-total // pool.shape[1])].long()
    return pool[pages].flatten(0, 1)[:total].double()


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, dk], k and v [n, Hk, d], seen [1 or Hk, T, n] → o [T, Hq, dv], lse [T, Hq]."""
    grouped = q.double().reshape(len(q), k.shape[1], -1, q.shape[-1])
    score = torch.einsum("thgd,nhd->hgtn", grouped, k) * scale
    score = score.masked_fill(~seen[:, None], -math.inf)
    o = torch.einsum("hgtn,nhd->thgd", score.softmax(-1), v)
    return o.flatten(1, 2), score.logsumexp(-1).permute(2, 0, 1).flatten(1, 2)
