"""One decode step of error-bounded sparse attention on a GPU, in Triton-lang.

``ref.py``'s `sparse_decode_attention` says what it computes. A round is two kernels: `read_chosen`
reads the chosen blocks row by row and takes the other entries by their summaries, split over the
entries; `choose_more` adds the splits up, bounds the error and, where it is too large, chooses more
entries. Five rounds are always launched: what is done returns at once, so that the host never
waits. The fewest entries that keep the limit are found by bisection over the bits of a threshold,
so entries of exactly equal error are chosen together, where the reference takes the lower index;
it does not tell first choices from later ones.

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
from plugins.compressed_sparse_attention.ref import BLOCK as ROWS_OF_BLOCK
from plugins.tiles import product

BLOCK = tl.constexpr(ROWS_OF_BLOCK)
ROUNDS = 4  # in which entries are chosen; in the last of them all that are left


@triton.jit
def _group(b, h, Hq, Hk, BG: tl.constexpr):
    """Numbers [BG] of the query heads of K/V head h; which of them exist."""
    g = tl.arange(0, BG)
    return b * Hq + h * (Hq // Hk) + g, g < Hq // Hk


@triton.jit
def _unread(stats, chosen, entry, j, S, used, recent, blocks):
    """Of entries j: chosen, read (chosen and in the slot), and estimated."""
    inside = j < S
    taken = tl.load(chosen + entry, mask=inside, other=0) != 0
    in_slot = j < blocks
    never = in_slot & (j >= used - recent)
    live = tl.load(stats + entry * 2, mask=inside & (never == 0), other=0.0) > 0
    return taken, live & ((taken & in_slot) == 0)


@triton.jit
def _estimates(
    q, head, exists, summaries, stats, entry, there, scale, D: tl.constexpr, BD: tl.constexpr,
    SOUND: tl.constexpr,
):  # fmt: skip
    """Logarithms of the least and largest mass of entries [BG, BE], their var (calibrated) or half
    (sound), counts and value spreads. Queries and summaries are exact in the products' tf32."""
    STEP: tl.constexpr = 64 if BD > 64 else BD
    mean = tl.zeros([head.shape[0], entry.shape[0]], tl.float32)
    width = tl.zeros([head.shape[0], entry.shape[0]], tl.float32)
    for d0 in tl.range(0, BD, STEP):
        d = d0 + tl.arange(0, STEP)[None, :]
        rows = exists[:, None] & (d < D)
        qd = tl.load(q + head[:, None] * D + d, mask=rows, other=0.0).to(tl.float32)
        place = summaries + entry[:, None] * (3 * D) + d
        inside = there[:, None] & (d < D)
        centre = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        spread = tl.load(place + D, mask=inside, other=0.0).to(tl.float32)
        mean += tl.dot(qd, tl.trans(centre))
        if SOUND:
            width += tl.dot(tl.abs(qd), tl.trans(spread))
        else:
            width += tl.dot(qd * qd, tl.trans(spread * spread))
    count = tl.load(stats + entry * 2, mask=there, other=1.0)
    reach = tl.load(stats + entry * 2 + 1, mask=there, other=0.0)
    mean = mean * scale + tl.log(count)[None, :]
    if SOUND:
        width *= scale
        low, high = mean - width, mean + width
    else:
        width = tl.minimum(width * scale * scale, 30.0)
        low, high = mean + width / 2, mean + width / 2
    low = tl.where(there[None, :], low, float("-inf"))
    high = tl.where(there[None, :], high, float("-inf"))
    return low, high, width, count, reach


@triton.jit
def read_chosen(
    q, pool_k, pool_v, block_table, rows, summaries, stats, chosen, done, sums, acc_sums,
    M, S, blocks, recent, Hq, Hk, scale,
    D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, BG: tl.constexpr, BE: tl.constexpr,
    SHARE: tl.constexpr, SOUND: tl.constexpr,
):  # fmt: skip
    """Per split of SHARE entries: sums [B*Hk, splits, 4, BG] = largest exponent, mass read, mass
    estimated, least mass estimated; acc_sums [B*Hk, splits, BG, BD]. Grid (splits, B * Hk)."""
    split, bh = tl.program_id(0), tl.program_id(1)
    if tl.load(done + bh) == 0:
        b, h = bh // Hk, bh % Hk
        head, exists = _group(b, h, Hq, Hk, BG)
        d, e, r, g = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BLOCK), tl.arange(0, BG)
        own = exists[:, None] & (d < D)[None, :]
        qt = tl.load(q + head[:, None] * D + d[None, :], mask=own, other=0.0)
        n = tl.load(rows + bh)
        used = tl.cdiv(n, BLOCK)
        top = tl.full([BG], -1e30, tl.float32)
        read, mass, least = (tl.zeros([BG], tl.float32), tl.zeros([BG], tl.float32),
                             tl.zeros([BG], tl.float32))  # fmt: skip
        acc = tl.zeros([BG, BD], tl.float32)
        first = bh.to(tl.int64) * S
        start = split * SHARE
        for block in tl.range(start, tl.minimum(start + SHARE, used)):
            if tl.load(chosen + first + block) != 0:
                at = block * BLOCK + r
                held = at < n
                page = tl.load(block_table + b * M + at // PAGE, mask=held, other=0).to(tl.int64)
                place = ((page * PAGE + at % PAGE) * Hk + h)[:, None] * D + d[None, :]
                inside = held[:, None] & (d < D)[None, :]
                keys = tl.load(pool_k + place, mask=inside, other=0.0)
                values = tl.load(pool_v + place, mask=inside, other=0.0)
                score = product(qt, tl.trans(keys)) * scale
                score = tl.where(held[None, :], score, float("-inf"))
                new = tl.maximum(top, tl.max(score, 1))
                p, old = tl.exp(score - new[:, None]), tl.exp(top - new)
                read = read * old + tl.sum(p, 1)
                acc = acc * old[:, None] + product(p.to(values.dtype), values)
                top = new
        for j0 in tl.range(start, tl.minimum(start + SHARE, S), BE):
            j = j0 + e
            entry = first + j
            _taken, there = _unread(stats, chosen, entry, j, S, used, recent, blocks)
            low, high, _width, _count, _reach = _estimates(
                q, head, exists, summaries, stats, entry, there, scale, D, BD, SOUND
            )
            new = tl.maximum(top, tl.max(high, 1))
            old = tl.exp(top - new)
            low, high = tl.exp(low - new[:, None]), tl.exp(high - new[:, None])
            middle = (low + high) / 2
            place = entry[:, None] * (3 * D) + 2 * D + d[None, :]
            inside = there[:, None] & (d < D)[None, :]
            mean_v = tl.load(summaries + place, mask=inside, other=0.0).to(tl.float32)
            acc = acc * old[:, None] + tl.dot(middle, mean_v)
            read, top = read * old, new
            mass, least = mass * old + tl.sum(middle, 1), least * old + tl.sum(low, 1)
        out = bh * tl.num_programs(0) + split
        for i in tl.static_range(4):
            value = top if i == 0 else read if i == 1 else mass if i == 2 else least
            tl.store(sums + (out * 4 + i) * BG + g, value)
        tl.store(acc_sums + (out * BG + g)[:, None] * BD + d[None, :], acc)


@triton.jit
def choose_more(
    q, rows, summaries, stats, chosen, done, sums, acc_sums, errors, o, lse, mass_read,
    error_bound, S, splits, blocks, recent, Hq, Hk, scale, epsilon, factor, stage,
    D: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr, BE: tl.constexpr, SOUND: tl.constexpr,
):  # fmt: skip
    """o [B, Hq, D], lse, mass_read, error_bound [B, Hq] and, unless within the limit, more of
    ``chosen`` [B, Hk, S]: stage 0 to 2 the fewest that should do, 3 all, 4 none. Grid (B * Hk).
    errors [B*Hk, BG, S] is scratch."""
    bh = tl.program_id(0)
    if tl.load(done + bh) == 0:
        b, h = bh // Hk, bh % Hk
        head, exists = _group(b, h, Hq, Hk, BG)
        d, e, g = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BG)
        used = tl.cdiv(tl.load(rows + bh), BLOCK)
        top = tl.full([BG], -1e30, tl.float32)
        read, mass, least = (tl.zeros([BG], tl.float32), tl.zeros([BG], tl.float32),
                             tl.zeros([BG], tl.float32))  # fmt: skip
        acc = tl.zeros([BG, BD], tl.float32)
        for s in tl.range(0, splits):
            part = sums + (bh * splits + s) * 4 * BG + g
            its = tl.load(part)
            new = tl.maximum(top, its)
            old, add = tl.exp(top - new), tl.exp(its - new)
            read = read * old + tl.load(part + BG) * add
            mass = mass * old + tl.load(part + 2 * BG) * add
            least = least * old + tl.load(part + 3 * BG) * add
            its_acc = acc_sums + ((bh * splits + s) * BG + g)[:, None] * BD + d[None, :]
            acc = acc * old[:, None] + tl.load(its_acc) * add[:, None]
            top = new
        whole = read + mass
        out = acc / whole[:, None]
        written = exists[:, None] & (d < D)[None, :]
        tl.store(o + head[:, None] * D + d[None, :], out.to(o.dtype.element_ty), mask=written)
        tl.store(lse + head, top + tl.log(whole), mask=exists)
        tl.store(mass_read + head, read / whole, mask=exists)
        norm2 = tl.sum(out * out, 1)
        size = tl.maximum(tl.sqrt(norm2), 1e-30)
        first = bh.to(tl.int64) * S
        left, open_left = tl.zeros([BG], tl.float32), tl.zeros([BG], tl.float32)
        for j0 in tl.range(0, S, BE):
            j = j0 + e
            entry = first + j
            taken, there = _unread(stats, chosen, entry, j, S, used, recent, blocks)
            low, high, width, count, reach = _estimates(
                q, head, exists, summaries, stats, entry, there, scale, D, BD, SOUND
            )
            low, high = tl.exp(low - top[:, None]), tl.exp(high - top[:, None])
            place = entry[:, None] * (3 * D) + 2 * D + d[None, :]
            inside = there[:, None] & (d < D)[None, :]
            mean_v = tl.load(summaries + place, mask=inside, other=0.0).to(tl.float32)
            away = tl.sum(mean_v * mean_v, 1)[None, :] + norm2[:, None]
            away -= 2 * tl.dot(out, tl.trans(mean_v))
            away = tl.maximum(away, 0.0)
            if SOUND:
                wrong = (high - low) / 2 * tl.sqrt(away) + high * reach[None, :]
                wrong /= ((read + least) * size)[:, None]
            else:
                share = high / (whole * size)[:, None]
                wrong = share * share * (tl.exp(width) - 1) / count[None, :]
                wrong *= reach[None, :] * reach[None, :] + away
            wrong = tl.where(there[None, :] & exists[:, None], wrong, 0.0)
            left += tl.sum(wrong, 1)
            wrong = tl.where(taken[None, :], 0.0, wrong)
            open_left += tl.sum(wrong, 1)
            kept = (bh.to(tl.int64) * BG + g)[:, None] * S + j[None, :]
            wanted = (j < S)[None, :] & (g >= 0)[:, None]
            tl.store(errors + kept, tl.where((taken | (there == 0))[None, :], -1.0, wrong),
                     mask=wanted)  # fmt: skip
        if SOUND:
            bound = tl.where(left < 1, left / (1 - left), float("inf"))
            limit = epsilon / (1 + epsilon)
        else:
            bound = factor * tl.sqrt(left)
            limit = (epsilon / factor) * (epsilon / factor)
        tl.store(error_bound + head, bound, mask=exists)
        broken = (open_left > limit) & exists
        if (stage == 4) | (tl.max(broken.to(tl.int32), 0) == 0):
            tl.store(done + bh, 1)
        else:
            tl.debug_barrier()  # what other threads wrote to `errors`
            # The largest threshold whose entries at or below sum to the limit or less.
            under = tl.full([BG], -1, tl.int32)
            over = tl.full([BG], 0x7F800000, tl.int32)
            if stage < 3:
                for _step in tl.range(0, 31):
                    bits = under + (over - under) // 2
                    total = tl.zeros([BG], tl.float32)
                    for j0 in tl.range(0, S, BE):
                        j = j0 + e
                        place = (bh.to(tl.int64) * BG + g)[:, None] * S + j[None, :]
                        wrong = tl.load(errors + place, mask=(j < S)[None, :], other=-1.0)
                        small = (wrong >= 0) & (wrong.to(tl.int32, bitcast=True) <= bits[:, None])
                        total += tl.sum(tl.where(small, wrong, 0.0), 1)
                    fits = total <= limit
                    under, over = tl.where(fits, bits, under), tl.where(fits, over, bits)
            for j0 in tl.range(0, S, BE):
                j = j0 + e
                place = (bh.to(tl.int64) * BG + g)[:, None] * S + j[None, :]
                wrong = tl.load(errors + place, mask=(j < S)[None, :], other=-1.0)
                more = (wrong >= 0) & (wrong.to(tl.int32, bitcast=True) > under[:, None])
                more = tl.max((more & broken[:, None]).to(tl.int32), 0)
                tl.store(chosen + first + j, more.to(tl.int8), mask=(j < S) & (more > 0))


@dataclass(frozen=True)
class SparseStep:
    """As in ``ref.py``, and the log-sum-exp [B, Hq] of all that was read or estimated."""

    o: torch.Tensor
    lse: torch.Tensor
    error_bound: torch.Tensor
    mass_read: torch.Tensor
    chosen: torch.Tensor


SPLIT = 32  # entries a split
WARPS = 8


def sparse_decode(
    q: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    summaries: torch.Tensor,
    stats: torch.Tensor,
    *,
    scale: float,
    epsilon: float,
    factor: float = 1.0,
    recent: int = 2,
    sound: bool = False,
) -> SparseStep:
    """`sparse_decode_attention` of ``ref.py`` where the slot of a sequence is its pages.

    q [B, Hq, D] in fp16, bf16 or fp32; pool_k, pool_v [P, page, Hk, D] of the same type;
    block_table [B, M], rows [B, Hk] int32; summaries [B, Hk, S, 3*D] fp16, stats [B, Hk, S, 2]
    fp32: the first M * page / 32 entries describe the slot, further ones evicted rows. Contiguous.
    """
    B, Hq, D = q.shape
    _, page, Hk, _ = pool_k.shape
    S, M = summaries.shape[2], block_table.shape[1]
    blocks = M * page // ROWS_OF_BLOCK
    BG, BD = max(16, triton.next_power_of_2(Hq // Hk)), max(16, triton.next_power_of_2(D))
    splits = triton.cdiv(S, SPLIT)
    new: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
    chosen = _always_read(rows, stats, blocks, recent)
    done = torch.zeros(B * Hk, dtype=torch.int32, device=q.device)
    sums, acc = (
        torch.empty(B * Hk, splits, 4, BG, **new),
        torch.empty(B * Hk, splits, BG, BD, **new),
    )
    errors = torch.empty(B * Hk, BG, S, **new)
    o, (lse, mass_read, bound) = torch.empty_like(q), torch.empty(3, B, Hq, **new)
    sizes: dict[str, Any] = {"D": D, "BD": BD, "BG": BG, "BE": _tile(BD), "SOUND": sound}
    for stage in range(ROUNDS + 1):
        read_chosen[(splits, B * Hk)](
            q, pool_k, pool_v, block_table, rows, summaries, stats, chosen, done, sums, acc,
            M, S, blocks, recent, Hq, Hk, scale, PAGE=page, SHARE=SPLIT, **sizes,
            num_warps=WARPS,
        )  # fmt: skip
        choose_more[(B * Hk,)](
            q, rows, summaries, stats, chosen, done, sums, acc, errors, o, lse, mass_read, bound,
            S, splits, blocks, recent, Hq, Hk, scale, epsilon, factor, stage, **sizes,
            num_warps=WARPS,
        )  # fmt: skip
    return SparseStep(o, lse, bound, mass_read, chosen)


def _tile(dim: int) -> int:
    """Entries of a tile: what fits the registers."""
    return 32 if dim <= 64 else 16


def _always_read(rows: torch.Tensor, stats: torch.Tensor, blocks: int, recent: int) -> torch.Tensor:
    """chosen [B, Hk, S] int8 before anything is weighed: the recent blocks, and those marked."""
    j = torch.arange(stats.shape[2], device=rows.device)
    used = (rows[..., None] + ROWS_OF_BLOCK - 1) // ROWS_OF_BLOCK
    newest = (j >= used - recent) & (j < blocks)
    marked = (stats[..., 0] > 0) & stats[..., 1].isinf() & ~newest
    return (marked | (newest & (j < used))).to(torch.int8)


def variants() -> Iterator[Variant]:
    """What plugins.aot compiles: calibrated selection, groups of up to 16 heads."""
    for dtype in ("bf16", "fp16"):
        kinds = dict.fromkeys(("q", "pool_k", "pool_v", "o"), f"*{dtype}") | {"chosen": "*i8"}
        kinds |= dict.fromkeys(("block_table", "rows", "done"), "*i32") | {"summaries": "*fp16"}
        kinds |= dict.fromkeys(("M", "S", "splits", "blocks", "recent"), "i32")
        kinds |= dict.fromkeys(("Hq", "Hk", "stage"), "i32")
        kinds |= dict.fromkeys(("scale", "epsilon", "factor"), "fp32")
        for D in (64, 128, 256):
            values = {
                "D": D, "BD": D, "PAGE": 32, "BG": 16, "BE": _tile(D), "SHARE": SPLIT,
                "SOUND": False,
            }  # fmt: skip
            for kernel in (read_chosen, choose_more):
                yield Variant(
                    op="compressed_sparse_attention",
                    kernel=kernel,
                    name=f"{kernel.fn.__name__}_{D}_{dtype}",
                    types={n: kinds.get(n, "*fp32") for n in kernel.arg_names if n not in values},
                    constants={n: values[n] for n in kernel.arg_names if n in values},
                    num_warps=WARPS,
                    num_stages=1,
                )
