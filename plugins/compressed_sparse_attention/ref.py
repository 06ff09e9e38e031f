"""What ``hybrid::CompressedSparseAttention`` means, in numpy float64.

Queries at the last T of ``total_len`` positions attend causally to the rows of a KV slot. A step
either appends its own K/V rows to the slot first, or (replay) brings none and reads the cached
ones. Dense attention is the case in which every row is retained and selected; a decode step may
instead read a bounded selection of the slot and estimate the rest (``sparse_decode_attention``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Ints = NDArray[Any]


def compressed_sparse_attention(
    q: Array,
    k_new: Array,
    v_new: Array,
    past_k: Array,
    past_v: Array,
    total_lens: Ints,
    selected: NDArray[np.bool_] | None = None,
    *,
    scale: float,
    window: int | None = None,
) -> tuple[Array, Array, Array, Array, Ints]:
    """Attend over the selected rows; report what the rest would have weighed.

    q [B, T, Hq, dk], k_new [B, T or 0, Hk, dk], v_new [B, T or 0, Hk, dv],
    past_k [B, Hk, C, dk], past_v [B, Hk, C, dv], total_lens [B]: rows visible to the last query,
    selected [B, Hk, C]: rows read exactly (None: all); window: rows a query sees, its own included.
    Returns o [B, T, Hq, dv], present_k, present_v (slots with the new rows written),
    error_bound [B, T, Hq] (attention mass dropped, 0 when dense), kept [B, Hk] (rows read).
    """
    q = np.asarray(q, np.float64)
    B, T, Hq, _ = q.shape
    Hk, C = past_k.shape[1], past_k.shape[2]
    present_k, present_v = np.array(past_k, np.float64), np.array(past_v, np.float64)
    o = np.zeros((B, T, Hq, past_v.shape[-1]))
    dropped = np.zeros((B, T, Hq))
    kept = np.zeros((B, Hk), np.int64)
    for b, total in enumerate(total_lens):
        start = int(total) - T
        if k_new.shape[1]:
            present_k[b, :, start:total] = np.moveaxis(k_new[b], 0, 1)
            present_v[b, :, start:total] = np.moveaxis(v_new[b], 0, 1)
        for h in range(Hk):
            rows = np.arange(C) < total if selected is None else selected[b, h][:C].copy()
            rows &= np.arange(C) < total
            kept[b, h] = rows.sum()
            for t in range(T):
                n = start + t + 1
                seen = slice(0 if window is None else max(0, n - window), n)
                keys, values, use = present_k[b, h, seen], present_v[b, h, seen], rows[seen]
                for g in range(h * Hq // Hk, (h + 1) * Hq // Hk):
                    score = keys @ q[b, t, g] * scale
                    p = np.exp(score - score.max())
                    mass = p[use].sum()
                    o[b, t, g] = p[use] @ values[use] / mass
                    dropped[b, t, g] = 1.0 - mass / p.sum()
    return o, present_k, present_v, dropped, kept


BLOCK = 32
MAX_VARIANCE = 30.0


@dataclass(frozen=True)
class SparseStep:
    """What one decode step answered, and what it knows about its own error.

    o [B, Hq, dv]; error_bound [B, Hq]: relative L2 error of o (``sound``: never more; else times
    calibrated ``factor``: rarely more; inf: nothing is known), 0 when every row was read;
    mass_read [B, Hq]: share of the (estimated) softmax mass that was read exactly;
    rows_read [B, Hk]: rows read, of the slot and of the host; chosen [B, Hk, S] uint8: not 0 = this
    entry was read, or, where the host does not have its rows, would have to be; 2 = only after what
    was chosen first had not been enough.
    ``error_bound <= epsilon`` wherever no such entry is chosen.
    """

    o: Array
    error_bound: Array
    mass_read: Array
    rows_read: Ints
    chosen: NDArray[np.uint8]


@dataclass(frozen=True)
class Host:
    """Memory beside the slots that still has the evicted rows; dk = dv.

    k, v [N]: flat; rows [B, Hk, R] int32: where each row starts in both, in units of 8 values;
    first [B, Hk, S] int32: the rows of entry j are ``rows[first_j : first_j + count_j]``; below 0
    they cannot be had.
    """

    k: Array
    v: Array
    rows: Ints
    first: Ints

    def read(self, b: int, h: int, entry: int, count: int, dim: int) -> tuple[Array, Array]:
        """k [count, dim], v [count, dim] of an entry."""
        first = int(self.first[b, h, entry])
        at = self.rows[b, h, first : first + count, None] * 8 + np.arange(dim)
        return self.k[at], self.v[at]


def summarise(k: Array, v: Array, *, sound: bool = False) -> tuple[Array, Array]:
    """The summary entry of one group of rows: k [n, dk], v [n, dv], n >= 1.

    Returns entry [2*dk + dv] float16 = centre_k, spread_k, mean_v, and stats [2] float32 =
    n, value_spread. All are taken about the *rounded* centre_k and mean_v.

    calibrated  centre_k = mean of k; spread_k = its standard deviation, per channel (about the
                rounded mean, divisor n); value_spread = sqrt(mean_i |v_i - mean_v|^2), or more
                where the caller knows that the entry's estimate is worse than that says
    sound       centre_k = middle of the box (min + max) / 2; spread_k = max_i |k_i - centre_k| per
                channel, rounded *up*; value_spread = max_i |v_i - mean_v|
    """
    k, v = np.asarray(k, np.float64), np.asarray(v, np.float64)
    centre = np.float16((k.min(0) + k.max(0)) / 2 if sound else k.mean(0))
    away = k - centre.astype(np.float64)
    mean_v = np.float16(v.mean(0))
    far = ((v - mean_v.astype(np.float64)) ** 2).sum(1)
    if sound:
        exact = np.abs(away).max(0)
        spread = exact.astype(np.float16)
        low = spread.astype(np.float64) < exact
        spread[low] = np.nextafter(spread[low], np.float16(np.inf))
        value_spread = np.nextafter(np.float32(np.sqrt(far.max())), np.float32(np.inf))
    else:
        spread = np.sqrt((away**2).mean(0)).astype(np.float16)
        value_spread = np.float32(np.sqrt(far.mean()))
    entry = np.concatenate([centre, spread, mean_v])
    return entry, np.array([len(k), value_spread], np.float32)


def sparse_decode_attention(
    q: Array,
    k: Array,
    v: Array,
    rows: Ints,
    summaries: Array,
    stats: Array,
    *,
    scale: float,
    epsilon: float,
    factor: float = 1.0,
    recent: int = 2,
    sound: bool = False,
    host: Host | None = None,
) -> SparseStep:
    """One decode step (T = 1): the blocks that matter exactly, the rest by their summaries.

    q [B, Hq, dk]; k [B, Hk, C, dk], v [B, Hk, C, dv]: slots whose first ``rows`` [B, Hk] rows count
    (the step's own row is among them; RoPE is in k, so their order means nothing; what lies behind
    may be NaN). The slot is cut into M = ceil(C / 32) blocks of 32 rows.
    summaries [B, Hk, S, 2*dk + dv] float16, stats [B, Hk, S, 2] float32 (see ``summarise``) with
    S >= M: entry j < M describes slot block j; entries from M on describe groups of evicted rows
    that are in no slot; a count of 0 means no such group. Of the slot blocks, those with
    value_spread = inf (sinks, heavy hitters, rows unlike all others) and the last ``recent`` that
    hold rows are always read; entries of the last ``recent`` and of blocks past ``rows`` are never
    looked at (they may be NaN).

    Per query head, with q' = scale * q and n, spread of the entry's stats, entry j weighs

        mean_j  = q' . centre_k,    n = count
        calibrated   var_j = sum_c (q'_c spread_k_c)^2, at most 30
                     m_j   = n exp(mean_j + var_j / 2)                    estimated mass
        sound        half_j = sum_c |q'_c| spread_k_c
                     lo_j, hi_j = n exp(mean_j -+ half_j),  m_j = (lo_j + hi_j) / 2

    With Z = sum of exp(q' . k_i) over rows read + sum of m_j over entries not read, and o = (sum of
    exp(q' . k_i) v_i + sum of m_j mean_v_j) / Z, the error expected of an entry left unread is

        calibrated   e_j = (m_j / Z)^2 expm1(var_j) / n (spread^2 + |mean_v_j - o|^2) / |o|^2
                     error_bound = factor sqrt(sum e_j),  limit: sum e_j <= (epsilon/factor)^2
        sound        e_j = ((hi_j - lo_j) / 2 |mean_v_j - o| + hi_j spread) / (Zlo |o|),
                     Zlo = mass read + sum of lo_j unread
                     error_bound = s / (1 - s), s = sum e_j (inf for s >= 1),
                     limit: sum e_j <= epsilon / (1 + epsilon)

    1. The always-read blocks are read. Every other entry is estimated.
    2. Each head's e_j are sorted, largest first (ties: the lower index); it chooses the fewest
       entries from the front such that the sum of the rest is within its limit.
    3. The blocks chosen by any head of a kv head's group are read for all of them, evicted groups
       from the ``host``. Those it does not have stay estimates (and in error_bound), and no longer
       count against the limit.
    4. With the masses now known, e_j of what is unread and not chosen is taken again; while a head
       of the group breaks its limit, 2 and 3 are repeated for it. After the third time every
       entry is chosen for a head that still breaks it.

    A fast form may use fp32 throughout and shift all exponents by a maximum.
    """
    B, Hq, _ = q.shape
    Hk, C = k.shape[1], k.shape[2]
    S, blocks = summaries.shape[2], -(-C // BLOCK)
    step = SparseStep(
        np.zeros((B, Hq, v.shape[-1])),
        np.zeros((B, Hq)),
        np.ones((B, Hq)),
        np.zeros((B, Hk), np.int64),
        np.zeros((B, Hk, S), np.uint8),
    )
    for b, h in np.ndindex(B, Hk):
        n = int(rows[b, h])
        used = -(-n // BLOCK)
        live = stats[b, h, :, 0] > 0
        live[max(used - recent, 0) : blocks] = False
        always = np.zeros(S, bool)
        always[max(used - recent, 0) : used] = True
        always |= live & np.isinf(stats[b, h, :, 1])
        group = slice(h * Hq // Hk, (h + 1) * Hq // Hk)
        # Rows that can be read, and the entry of each.
        parts = [(k[b, h, :n], v[b, h, :n])]
        owner, readable = [np.arange(n) // BLOCK], np.arange(S) < blocks
        for j in range(blocks, S):
            if host is not None and live[j] and host.first[b, h, j] >= 0:
                parts.append(host.read(b, h, j, int(stats[b, h, j, 0]), k.shape[3]))
                owner.append(np.full(len(parts[-1][0]), j))
                readable[j] = True
        keys, values = (np.concatenate(x).astype(np.float64) for x in zip(*parts, strict=True))
        state = _Group(
            np.asarray(q[b, group], np.float64) * scale,
            keys,
            values,
            np.concatenate(owner),
            np.where(live[:, None], summaries[b, h], 0).astype(np.float64),
            np.where(live[:, None], stats[b, h], 0).astype(np.float64),
            sound,
        )
        limit = epsilon / (1 + epsilon) if sound else (epsilon / factor) ** 2
        chosen, late = always.copy(), np.zeros(S, bool)
        read = chosen & readable
        for attempt in range(4):
            open_ = live & ~chosen
            o, mass_read, e = state.attend(read, live & ~read)
            broken = [g for g in range(len(e)) if e[g, open_].sum() > limit]
            if not broken:
                break
            before = chosen.copy()
            for g in broken:
                rest = np.flatnonzero(open_)
                order = rest[np.argsort(-e[g, rest], kind="stable")]
                tail = np.cumsum(e[g, order][::-1])[::-1]
                chosen[order[tail > limit] if attempt < 3 else order] = True
            late |= chosen & ~before & (attempt > 0)
            read = chosen & readable
        else:
            o, mass_read, e = state.attend(read, live & ~read)
        left = e[:, live & ~read].sum(1)
        step.o[b, group], step.mass_read[b, group] = o, mass_read
        with np.errstate(divide="ignore"):
            bound = np.where(left < 1, left / (1 - left), np.inf) if sound else factor * left**0.5
        step.error_bound[b, group] = bound
        step.chosen[b, h] = chosen.astype(np.uint8) + late
        step.rows_read[b, h] = read[state.owner].sum()
    return step


class _Group:
    """The query heads of one kv head: scores of its rows and summaries, in float64."""

    def __init__(
        self, q: Array, k: Array, v: Array, owner: Ints, entry: Array, stats: Array, sound: bool
    ) -> None:
        """q [G, dk] scaled, k [n, dk], v [n, dv], owner [n]: the entry of each row,
        entry [S, 2*dk + dv], stats [S, 2]."""
        dk = q.shape[1]
        centre, spread, self.mean_v = np.split(entry, [dk, 2 * dk], axis=1)
        self.count, self.value_spread, self.sound = stats[:, 0], stats[:, 1], sound
        self.v, self.owner, self.score = v, owner, q @ k.T
        mean = q @ centre.T
        if sound:
            half = np.abs(q) @ spread.T
            self.low, self.high = mean - half, mean + half
        else:
            self.var = np.minimum(q**2 @ (spread**2).T, MAX_VARIANCE)
            self.low = self.high = mean + self.var / 2
        top = np.maximum(self.score.max(1), self.high.max(1, initial=-np.inf))[:, None]
        self.p = np.exp(self.score - top)
        self.low, self.high = (self.count * np.exp(x - top) for x in (self.low, self.high))

    def attend(self, read: NDArray[np.bool_], unread: NDArray[np.bool_]) -> tuple[Array, ...]:
        """o [G, dv], mass_read [G], e [G, S] (0 where not ``unread``)."""
        p = self.p * read[self.owner]
        m = np.where(unread, (self.low + self.high) / 2, 0)
        z = p.sum(1) + m.sum(1)
        o = (p @ self.v + m @ self.mean_v) / z[:, None]
        size = np.maximum(np.linalg.norm(o, axis=1), 1e-30)[:, None]
        away2 = ((self.mean_v - o[:, None]) ** 2).sum(2)
        if self.sound:
            z_low = p.sum(1) + np.where(unread, self.low, 0).sum(1)
            gap = (self.high - self.low) / 2
            reach = np.where(unread, self.value_spread, 0)
            e = (gap * np.sqrt(away2) + self.high * reach) / (z_low[:, None] * size)
        else:
            spread2 = np.where(unread, self.value_spread, 0) ** 2
            count = np.maximum(self.count, 1)
            e = (m / z[:, None]) ** 2 * np.expm1(self.var) / count * (spread2 + away2) / size**2
        return o, p.sum(1) / z, np.where(unread, e, 0)
