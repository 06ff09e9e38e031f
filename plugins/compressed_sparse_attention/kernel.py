"""``hybrid::CompressedSparseAttention`` on a GPU, in Triton-lang: K/V rows in pages of a pool.

``ref.py`` says what it computes. `append_kv` writes the rows of a step to their pages, unless the
step is a replay; `paged_attention` only reads (FlashAttention, Dao, arXiv 2307.08691, over pages as
in PagedAttention, arXiv 2309.06180): prefill, replay and, where few tokens come with many rows, the
same split over the rows. The query heads that share a K/V head are rows of one tile.

Only machines with a GPU, builds and tests import this module: serving never does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from plugins.aot import Variant
from plugins.compressed_sparse_attention import sparse_kernel
from plugins.tiles import product, span

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _pool_rows(block_table, b, M, at, live, PAGE: tl.constexpr):
    """Where in the pool, in rows, the positions ``at`` of sequence b lie."""
    page = tl.load(block_table + b * M + at // PAGE, mask=live, other=0)
    return page.to(tl.int64) * PAGE + at % PAGE


@triton.jit
def append_kv(
    k, v, pool_k, pool_v, block_table, total_lens, append, starts, lengths, T, M, Hk,
    D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows k, v [B, T, Hk, D] into the pools [P, PAGE, Hk, D]; nothing where append[0] is 0.

    Grid (ceil(T / ROWS), B * Hk).
    """
    b, h = tl.program_id(1) // Hk, tl.program_id(1) % Hk
    first, count = span(starts, lengths, b, T)
    t, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BD)
    live = t < tl.where(tl.load(append) != 0, count, 0)
    at = tl.load(total_lens + b) - count + t
    inside = live[:, None] & (d < D)[None, :]
    source = ((first + t) * Hk + h)[:, None] * D + d[None, :]
    rows = _pool_rows(block_table, b, M, at, live, PAGE)
    target = (rows * Hk + h)[:, None] * D + d[None, :]
    tl.store(pool_k + target, tl.load(k + source, mask=inside, other=0.0), mask=inside)
    tl.store(pool_v + target, tl.load(v + source, mask=inside, other=0.0), mask=inside)


@triton.jit
def _softmax_step(scores, values, top, mass, acc):
    """One tile [BQ, BN] of base-2 scores, -inf where not seen, into the running softmax."""
    new = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(scores - shift[:, None])
    old = tl.exp2(top - shift)
    acc = acc * old[:, None] + product(p.to(values.dtype), values)
    return new, mass * old + tl.sum(p, 1), acc


@triton.jit
def paged_attention(
    q, pool_k, pool_v, block_table, total_lens, starts, lengths, o, lse,
    T, M, Hq, Hk, window, scale,
    D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, BQ: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """o [B, T, Hq, D] and, unless null, lse [B, T, Hq] of queries at the last positions.

    total_lens [B]: rows that the last query of a sequence sees; window: rows that a query sees, its
    own included (0: all). Grid (ceil(T * Hq / Hk / BQ), B * Hk, splits): with more than one split
    each takes a share of the rows, o is [splits, B * T, Hq, D] and `merge_splits` adds them up.
    """
    b, h = tl.program_id(1) // Hk, tl.program_id(1) % Hk
    first, count = span(starts, lengths, b, T)
    G = Hq // Hk
    if tl.program_id(0) * BQ < count * G:
        total = tl.load(total_lens + b)
        r, d, n = tl.program_id(0) * BQ + tl.arange(0, BQ), tl.arange(0, BD), tl.arange(0, BN)
        t, live = r // G, r < count * G
        at = total - count + t
        row = (first + t) * Hq + h * G + r % G
        place = row[:, None] * D + d[None, :]
        inside = live[:, None] & (d < D)[None, :]
        qt = tl.load(q + place, mask=inside, other=0.0)
        top = tl.full([BQ], float("-inf"), tl.float32)
        mass = tl.zeros([BQ], tl.float32)
        acc = tl.zeros([BQ, BD], tl.float32)
        stop = tl.minimum(total, tl.max(tl.where(live, at, 0), 0) + 1)
        oldest = tl.where(window > 0, at - window, -1)
        start = 0
        if window > 0:
            start = tl.maximum(tl.min(at, 0) - window + 1, 0) // BN * BN
        share = tl.cdiv(tl.cdiv(stop - start, BN), tl.num_programs(2)) * BN
        start += tl.program_id(2) * share
        stop = tl.minimum(stop, start + share)
        for s in tl.range(start, stop, BN):
            key = s + n
            held = key < stop
            rows = _pool_rows(block_table, b, M, key, held, PAGE)
            target = (rows * Hk + h)[:, None] * D + d[None, :]
            read = held[:, None] & (d < D)[None, :]
            keys = tl.load(pool_k + target, mask=read, other=0.0)
            values = tl.load(pool_v + target, mask=read, other=0.0)
            seen = held[None, :] & (key[None, :] <= at[:, None])
            seen &= key[None, :] > oldest[:, None]
            scores = product(qt, tl.trans(keys)) * (scale * LOG2E)
            scores = tl.where(seen, scores, float("-inf"))
            top, mass, acc = _softmax_step(scores, values, top, mass, acc)
        split = tl.program_id(2).to(tl.int64) * T * (tl.num_programs(1) // Hk) * Hq
        acc /= tl.maximum(mass, 1e-30)[:, None]
        tl.store(o + split * D + place, acc.to(o.dtype.element_ty), mask=inside)
        if lse is not None:
            wanted = tl.where(lse.to(tl.int64) != 0, count * G, 0)
            tl.store(lse + split + row, (top + tl.log2(mass)) / LOG2E, mask=r < wanted)


@triton.jit
def merge_splits(
    parts, part_lse, o, lse, N, splits, D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr
):
    """parts [splits, N, D], part_lse [splits, N] -> o [N, D], lse [N]. Grid (N); splits <= BS."""
    row = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BS), tl.arange(0, BD)
    sums = tl.load(part_lse + s * N + row, mask=s < splits, other=float("-inf"))
    top = tl.max(sums, 0)
    weight = tl.exp(sums - top)
    inside = (s < splits)[:, None] & (d < D)[None, :]
    part = tl.load(parts + (s * N + row)[:, None] * D + d[None, :], mask=inside, other=0.0)
    mass = tl.sum(weight, 0)
    out = tl.sum(weight[:, None] * part, 0) / mass
    tl.store(o + row * D + d, out.to(o.dtype.element_ty), mask=d < D)
    tl.store(lse + row, top + tl.log(mass))


@dataclass(frozen=True)
class Tile:
    """Rows of queries (token and head) and of keys per program, and its schedule."""

    BQ: int
    BN: int
    num_warps: int
    num_stages: int


# By the power of two that holds the head size.
TILES = {
    16: Tile(64, 64, 4, 2), 32: Tile(64, 64, 4, 2), 64: Tile(128, 32, 8, 2),
    128: Tile(64, 32, 4, 2), 256: Tile(64, 32, 8, 2),
}  # fmt: skip
FEW = 16  # rows of queries up to which a tile of so many is taken, and the keys are split
MAX_SPLITS = 64
ROWS = 64


def append_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    block_table: torch.Tensor,
    total_lens: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    max_length: int = 0,
) -> None:
    """Write k, v [B, T, Hk, D] to the last positions of their sequences, in place of the pools.

    For the other arguments see `attend`. A replay does not call it.
    """
    _, T, Hk, D = k.shape
    if starts is not None:
        T = max_length
    append = torch.ones(1, dtype=torch.int32, device=k.device)
    append_kv[(triton.cdiv(T, ROWS), len(total_lens) * Hk)](
        k, v, pool_k, pool_v, block_table, total_lens, append, starts, lengths,
        T, block_table.shape[1], Hk,
        D=D, BD=triton.next_power_of_2(D), PAGE=pool_k.shape[1], ROWS=ROWS,
    )  # fmt: skip


def attend(
    q: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    block_table: torch.Tensor,
    total_lens: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    starts: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    max_length: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention to the rows in the pools; writes none. Every tensor is contiguous.

    q [B, T, Hq, D] in fp16, bf16 or fp32; pool_k, pool_v [P, page, Hk, D] of the same type, a page
    being a power of two of rows; block_table [B, M], total_lens [B] int32. Sequence b is row b of
    q, cut at lengths[b] (int32) where given. Packed sequences: B = 1, and sequence b is the rows
    starts[b] .. starts[b] + lengths[b], at most ``max_length`` of them. Its queries stand at the
    last of its total_lens[b] positions; window: rows a query sees, its own included (0: all).
    Returns o like q and the log-sum-exp of the scores [B, T, Hq] fp32.
    """
    _, T, Hq, D = q.shape
    B, M = block_table.shape
    if starts is not None:
        T = max_length
    _, page, Hk, _ = pool_k.shape
    BD = max(16, triton.next_power_of_2(D))
    tile, splits, rows = TILES[BD], 1, T * (Hq // Hk)
    if rows <= FEW:
        if starts is not None:  # the parts of splits are padded
            row = starts.long()[:, None] + torch.arange(T, device=q.device)
            padded = q[0, row.clamp(max=q.shape[1] - 1)]
            found = attend(
                padded, pool_k, pool_v, block_table, total_lens, scale=scale, window=window,
                lengths=lengths,
            )  # fmt: skip
            return _unpad(found, row, lengths, q.shape[1])
        tile = Tile(FEW, 64 if BD < 256 else 32, 4, 2)
        splits = max(1, min(MAX_SPLITS, M * page // 256, 512 // (B * Hk)))
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    new: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    parts = o if splits == 1 else torch.empty(splits, B * T, Hq, D, **new)
    part_lse = lse if splits == 1 else torch.empty(splits, B * T, Hq, **new)
    paged_attention[(triton.cdiv(rows, tile.BQ), B * Hk, splits)](
        q, pool_k, pool_v, block_table, total_lens, starts, lengths, parts, part_lse,
        T, M, Hq, Hk, window, scale, D=D, BD=BD, PAGE=page, BQ=tile.BQ, BN=tile.BN,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if splits > 1:
        N = B * T * Hq
        merge_splits[(N,)](
            parts, part_lse, o, lse, N, splits, D=D, BD=BD, BS=triton.next_power_of_2(splits)
        )
    return o, lse


def _unpad(
    found: tuple[torch.Tensor, torch.Tensor], row: torch.Tensor, lengths: Any, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded o [B, T, ...] and lse to packed rows; what is padding goes to a row too many."""
    past = torch.arange(row.shape[1], device=row.device) >= lengths[:, None]
    row = row.masked_fill(past, count)
    packed = []
    for x in found:
        out = x.new_empty(count + 1, *x.shape[2:])
        out[row] = x
        packed.append(out[None, :count])
    return packed[0], packed[1]


HEAD_SIZES = (32, 64, 80, 96, 128, 256)
PAGES = (32, 64)


def variants() -> Iterator[Variant]:
    """What plugins.aot compiles: the dense kernels for each head size and page, the sparse ones."""
    yield from sparse_kernel.variants()
    for dtype in ("bf16", "fp16"):
        kinds = dict.fromkeys(("q", "k", "v", "pool_k", "pool_v", "o"), f"*{dtype}")
        kinds |= dict.fromkeys(("block_table", "total_lens", "append"), "*i32")
        kinds |= dict.fromkeys(("starts", "lengths"), "*i32") | {"lse": "*fp32", "scale": "fp32"}
        for D in HEAD_SIZES:
            BD = triton.next_power_of_2(D)
            tile = TILES[BD]
            for page in PAGES:
                values = {"D": D, "BD": BD, "PAGE": page, "ROWS": ROWS, "BQ": tile.BQ}
                values["BN"] = tile.BN
                for kernel, warps, stages in (
                    (append_kv, 4, 1),
                    (paged_attention, tile.num_warps, tile.num_stages),
                ):
                    yield Variant(
                        op="compressed_sparse_attention",
                        kernel=kernel,
                        name=f"{kernel.fn.__name__}_{D}_page{page}_{dtype}",
                        types={n: kinds.get(n, "i32") for n in kernel.arg_names if n not in values},
                        constants={n: values[n] for n in kernel.arg_names if n in values},
                        num_warps=warps,
                        num_stages=stages,
                    )
                yield from _split_variants(dtype, kinds, D, BD, page)


def _split_variants(
    dtype: str, kinds: dict[str, str], D: int, BD: int, page: int
) -> Iterator[Variant]:
    """`attend` for few queries: parts of the rows in fp32, and adding them up."""
    values = {"D": D, "BD": BD, "PAGE": page, "BQ": FEW, "BN": 64 if BD < 256 else 32}
    parts = {"o": "*fp32", "parts": "*fp32", "part_lse": "*fp32"}
    for kernel, types, constants, stages in (
        (paged_attention, kinds | parts, values, 2),
        (merge_splits, kinds | parts | {"o": f"*{dtype}"}, values | {"BS": MAX_SPLITS}, 3),
    ):
        yield Variant(
            op="compressed_sparse_attention",
            kernel=kernel,
            name=f"{kernel.fn.__name__}_few_{D}_page{page}_{dtype}",
            types={n: types.get(n, "i32") for n in kernel.arg_names if n not in constants},
            constants={n: constants[n] for n in kernel.arg_names if n in constants},
            num_warps=4,
            num_stages=stages,
        )
