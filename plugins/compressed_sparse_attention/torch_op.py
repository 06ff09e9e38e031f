"""``hybrid::paged_attention`` and ``hybrid::sparse_decode_attention`` for PyTorch: importing this
module registers the ops.

K/V rows live in pages of a pool. Both ops only read: a step that appends writes its rows with
`write_kv` first, a replay brings none. On a CPU they are the mathematics of ``ref.py`` in float64;
on a GPU the first is the kernel of ``kernel.py``, the second gathers its blocks, in fp32.
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


@paged_attention.register_kernel("cuda")
def _paged_on_gpu(
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
    from plugins.compressed_sparse_attention import kernel

    (pool_k, step), (pool_v, other) = contiguous_pages(pool_k), contiguous_pages(pool_v)
    if step != other:
        raise ValueError(f"K pages lie {step} pages apart, V pages {other}")
    o, lse = kernel.attend(
        q.contiguous()[None], pool_k, pool_v, block_table * step, total_lens, scale=scale,
        window=window, starts=starts, lengths=lengths, max_length=max_length,
    )  # fmt: skip
    return o[0], lse[0]


def contiguous_pages(pool: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A contiguous view [P', page, Hk, d] of a pool that is every m-th page of one, and m.

    Page p of the pool is page p * m of the view: engines keep K and V pages in turn. Raises
    ValueError where a page itself is not contiguous.
    """
    pages, *shape = pool.shape
    size = math.prod(shape)
    step, rest = divmod(pool.stride(0), size)
    if rest or not step or not pool[0].is_contiguous():
        raise ValueError(f"pages of {shape} with strides {pool.stride()} are not contiguous")
    strides = (size, *pool[0].stride())
    return pool.as_strided(((pages - 1) * step + 1, *shape), strides), step


@torch.library.custom_op("hybrid::sparse_decode_attention", mutates_args=(), device_types="cpu")
def sparse_decode_attention(
    q: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    block_table: torch.Tensor,
    total_lens: torch.Tensor,
    selected: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query of each of B sequences over selected blocks of its pages.

    q [B, Hq, dk]; pools and tables as above; selected [B, Hk, S] int32: numbers of the blocks that
    each K/V head reads, at least one with rows in it, no block twice, -1 = none. Returns
    o [B, Hq, dv] and the log-sum-exp over the rows read [B, Hq] fp32: with that of dense attention
    it gives the attention mass left out, ref.py's error_bound.
    """
    return _selected(q, pool_k, pool_v, block_table, total_lens, selected, scale, torch.float64)


@sparse_decode_attention.register_fake
def _sparse_shapes(
    q: torch.Tensor, pool_k: torch.Tensor, pool_v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    sums = q.new_empty(q.shape[:2], dtype=torch.float32)
    return q.new_empty(*q.shape[:2], pool_v.shape[-1]), sums


@sparse_decode_attention.register_kernel("cuda")
def _sparse_on_gpu(
    q: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    block_table: torch.Tensor,
    total_lens: torch.Tensor,
    selected: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _selected(q, pool_k, pool_v, block_table, total_lens, selected, scale, torch.float32)


def _selected(
    q: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    block_table: torch.Tensor,
    total_lens: torch.Tensor,
    selected: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    B, Hk, S = selected.shape
    place = torch.arange(pool_k.shape[1], device=q.device)
    head = torch.arange(Hk, device=q.device)[:, None, None]
    block = selected.clamp(min=0).long()
    pages = block_table.long().gather(1, block.flatten(1)).reshape(B, Hk, S, 1)
    row = block[..., None] * len(place) + place
    live = (selected[..., None] >= 0) & (row < total_lens[:, None, None, None])  # [B, Hk, S, page]
    k, v = (pool[pages, place, head].to(dtype) for pool in (pool_k, pool_v))
    grouped = q.to(dtype).reshape(B, Hk, -1, q.shape[-1])
    score = torch.einsum("bhgd,bhspd->bhgsp", grouped, k) * scale
    score = score.masked_fill(~live[:, :, None], -math.inf).flatten(-2)
    v = v.masked_fill(~live[..., None], 0).flatten(2, 3)  # rows that are not read may be NaN
    o = torch.einsum("bhgn,bhnd->bhgd", score.softmax(-1), v)
    lse = score.logsumexp(-1)
    return o.flatten(1, 2).to(q.dtype), lse.flatten(1).float()


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
