"""The chunked form of ``hybrid::LinearStateReplay`` in Triton-lang, for prefill and replay.

A sequence is cut in chunks of C tokens. With G the log-decay summed within a chunk (inclusive) and
S the state before it, the recurrence of ``ref.py`` is::

    (I + A) u = beta (v - (k e^G) S)         A_ts = beta_t k_t e^(G_t - G_s) k_s,  s < t
    o = scale ((q e^G) S + M u)              M_ts = q_t e^(G_t - G_s) k_s,         s <= t
    S' = e^(G_C) S + (k e^(G_C - G))^T u

(the UT transform: Yang et al., "DeltaNet", arXiv 2406.06484 section 3, with the decay of "Gated
Delta Networks", 2412.06464 section 3.3; u = v and no A without delta: "Mamba-2", 2405.21060
section 6). `chunk_products` and `chunk_inverse` make (I + A)^-1 of all chunks at once,
`chunk_states` walks the chunks and leaves S and u of each, from which `chunk_outputs` makes o of
all at once. No exponent is positive. NC below is the number of chunks, DECAY 0 for none, 1 for one
per head, 2 for one per key channel.

Only machines with a GPU, builds and tests import this module: serving never does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plugins.tiles import product, span


@triton.jit
def state_row(slots, b):
    """Row of the states that sequence b reads and writes. Null pointer: row b."""
    row = b.to(tl.int64)
    if slots is not None:
        given = slots.to(tl.int64) != 0
        row = tl.where(given, tl.load(slots + b, mask=given, other=0).to(tl.int64), row)
    return row


@triton.jit
def _product_with_fp32(a, x):
    """a x in fp32. In 16 bits a meets both halves of x, which leaves an error of 2^-16 (bf16)."""
    if a.dtype == tl.float32:
        return product(a, x)
    high = x.to(a.dtype)
    return product(a, high) + product(a, (x - high.to(tl.float32)).to(a.dtype))


@triton.jit
def _head_decay(log_decay, row, live, h, Hv):
    """G [C] of one decay per head."""
    return tl.cumsum(tl.load(log_decay + row * Hv + h, mask=live, other=0.0), 0)


@triton.jit
def key_decay(
    k, log_decay, sums, entering, leaving, starts, lengths, T, Hq, Hv,
    DK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For a decay per key channel: G in fp32, k e^G and k e^(G_C - G), all [B * Hv, NC * C, DK].

    Grid (NC = ceil(T / C), B * Hv).
    """
    c, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    h = tl.program_id(1) % Hv
    first, count = span(starts, lengths, tl.program_id(1) // Hv, T)
    i = tl.arange(0, C)
    live = (c * C + i < count)[:, None]
    row = first + c * C + i
    for d in tl.range(0, DK, BD):
        od = d + tl.arange(0, BD)[None, :]
        decay = tl.load(log_decay + (row * Hv + h)[:, None] * DK + od, mask=live, other=0.0)
        kd = tl.load(k + (row * Hq + h // (Hv // Hq))[:, None] * DK + od, mask=live, other=0.0)
        G = tl.cumsum(decay, 0)
        kind = entering.dtype.element_ty
        into = ((bh * tl.num_programs(0) + c) * C + i)[:, None] * DK + od
        tl.store(sums + into, G)
        tl.store(entering + into, (kd * tl.exp(G)).to(kind))
        tl.store(leaving + into, (kd * tl.exp(tl.sum(decay, 0)[None, :] - G)).to(kind))


@triton.jit
def _decayed_products(
    a, k, G, k_rows, G_rows, row_stride, live, DK: tl.constexpr, C: tl.constexpr, R: tl.constexpr
):
    """sum_d a_i k_j e^(G_i - G_j) for i >= j, decays per key channel; a, k, G [C, BD] in fp32.

    Off the diagonal R x R blocks the exponent is split at the first row of i's block, so that both
    parts are negative; on them it is taken pair by pair. k_rows, G_rows [BD]: where row 0 lies.
    """
    i = tl.arange(0, C)
    out = tl.zeros([C, C], tl.float32)
    for n in tl.range(1, C // R):
        at = tl.load(G_rows + n * R * DK)[None, :]
        left = tl.where((i // R == n)[:, None], a * tl.exp(tl.minimum(G - at, 0.0)), 0.0)
        right = tl.where((i // R < n)[:, None], k * tl.exp(tl.minimum(at - G, 0.0)), 0.0)
        out += tl.dot(left, tl.trans(right), input_precision="tf32x3")
    for s in tl.range(0, R):
        j = i // R * R + s
        kj = tl.load(k_rows + j[:, None] * row_stride, mask=(j < live)[:, None], other=0.0)
        Gj = tl.load(G_rows + j[:, None] * DK)
        column = tl.sum(a * kj.to(tl.float32) * tl.exp(tl.minimum(G - Gj, 0.0)), 1)
        out = tl.where(j[:, None] == i[None, :], column[:, None], out)
    return out


@triton.jit
def chunk_products(
    k, log_decay, beta, sums, products, starts, lengths, T, Hq, Hv,
    DK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """A [B * Hv, NC, C, C]. Grid (NC = ceil(T / C), B * Hv)."""
    c, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    h = tl.program_id(1) % Hv
    hq = h // (Hv // Hq)
    first, count = span(starts, lengths, tl.program_id(1) // Hv, T)
    if c * C < count:
        i = tl.arange(0, C)
        live = c * C + i < count
        row = first + c * C + i
        into = (bh * tl.num_programs(0) + c) * C
        A = tl.zeros([C, C], tl.float32)
        for d in tl.range(0, DK, BD):
            od = d + tl.arange(0, BD)
            place = (row * Hq + hq)[:, None] * DK + od[None, :]
            kd = tl.load(k + place, mask=live[:, None], other=0.0)
            if DECAY == 2:
                kd = kd.to(tl.float32)
                G = tl.load(sums + (into + i)[:, None] * DK + od[None, :])
                k_rows = k + ((first + c * C) * Hq + hq) * DK + od
                G_rows = sums + into * DK + od
                A += _decayed_products(kd, kd, G, k_rows, G_rows, Hq * DK, count - c * C, DK, C, 16)
            else:
                A += product(kd, tl.trans(kd))
        if DECAY == 1:
            G = _head_decay(log_decay, row, live, h, Hv)
            A *= tl.exp(tl.minimum(G[:, None] - G[None, :], 0.0))
        A *= tl.load(beta + row * Hv + h, mask=live, other=0.0)[:, None]
        A = tl.where(i[:, None] > i[None, :], A, 0.0)
        tl.store(products + (into + i)[:, None] * C + i[None, :], A)


@triton.jit
def chunk_inverse(products, starts, lengths, T, Hv, C: tl.constexpr):
    """A becomes (I + A)^-1. Grid (NC, B * Hv).

    By substitution, row after row: the product (I - A)(I + A^2)(I + A^4)... would not do, because
    with repeated keys the powers of A grow to 1e18 before they cancel.
    """
    c, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, count = span(starts, lengths, tl.program_id(1) // Hv, T)
    if c * C < count:
        i = tl.arange(0, C)
        square = ((bh * tl.num_programs(0) + c) * C + i)[:, None] * C + i[None, :]
        A = tl.load(products + square)
        X = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for s in tl.range(1, C):
            here = (i == s)[:, None]
            weights = tl.trans(tl.sum(tl.where(here, A, 0.0), 0)[None, :])
            X = tl.where(here, X - tl.sum(weights * X, 0)[None, :], X)
        tl.store(products + square, X)


@triton.jit
def chunk_states(
    k, v, log_decay, beta, sums, entering, leaving, inverse, past, present, states, updates,
    starts, lengths, slots, T, NC, Hq, Hv,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Chunk after chunk: S before each [B * Hv, NC, DK, DV] and u [B, T, Hv, DV], both in the type
    of v, and the state after the last. Without delta u is v: ``updates`` is left alone.

    Grid (ceil(DV / BV), B * Hv).
    """
    ov = tl.program_id(0) * BV + tl.arange(0, BV)
    bh = tl.program_id(1).to(tl.int64)
    b, h = tl.program_id(1) // Hv, tl.program_id(1) % Hv
    hq = h // (Hv // Hq)
    ok, i = tl.arange(0, BK), tl.arange(0, C)
    mk, mv = ok < DK, ov < DV
    first, count = span(starts, lengths, b, T)
    tile = ok[:, None] * DV + ov[None, :]
    inside = mk[:, None] & mv[None, :]
    own = (state_row(slots, b) * Hv + h) * DK * DV
    S = tl.load(past + own + tile, mask=inside, other=0.0)
    for c in tl.range(0, tl.cdiv(count, C)):
        chunk = bh * NC + c
        kept = S.to(states.dtype.element_ty)
        tl.store(states + chunk * DK * DV + tile, kept, mask=inside)
        live = c * C + i < count
        row = first + c * C + i
        keys = (row * Hq + hq)[:, None] * DK + ok[None, :]
        if DECAY == 2:
            keys = (chunk * C + i)[:, None] * DK + ok[None, :]
        whole = live[:, None] & mk[None, :]
        kc = tl.load((entering if DECAY == 2 else k) + keys, mask=whole, other=0.0)
        values = (row * Hv + h)[:, None] * DV + ov[None, :]
        mask = live[:, None] & mv[None, :]
        if DECAY == 1:
            G = _head_decay(log_decay, row, live, h, Hv)
            last = tl.min(G, 0)
        if DELTA:
            known = _product_with_fp32(kc, S)
            if DECAY == 1:
                known *= tl.exp(G)[:, None]
        u = tl.load(v + values, mask=mask, other=0.0).to(tl.float32)
        if DELTA:
            u = (u - known) * tl.load(beta + row * Hv + h, mask=live, other=0.0)[:, None]
            square = (chunk * C + i)[:, None] * C + i[None, :]
            u = tl.dot(tl.load(inverse + square), u)
            tl.store(updates + values, u.to(updates.dtype.element_ty), mask=mask)
        if DECAY == 1:
            u *= tl.exp(last - G)[:, None]
            S *= tl.exp(last)
        if DECAY == 2:
            kc = tl.load(leaving + keys, mask=whole, other=0.0)
            last = tl.load(sums + (chunk * C + C - 1) * DK + ok, mask=mk, other=0.0)
            S *= tl.exp(last)[:, None]
        S += _product_with_fp32(tl.trans(kc), u)
    tl.store(present + own + tile, S, mask=inside)


@triton.jit
def chunk_outputs(
    q, k, log_decay, sums, states, updates, o, starts, lengths, T, NC, Hq, Hv, scale,
    DK: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr,
):  # fmt: skip
    """o [B, T, Hv, DV] of all chunks at once. Grid (ceil(DV / BV), NC, B * Hv)."""
    ov = tl.program_id(0) * BV + tl.arange(0, BV)
    c, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    h = tl.program_id(2) % Hv
    hq = h // (Hv // Hq)
    first, count = span(starts, lengths, tl.program_id(2) // Hv, T)
    if c * C < count:
        i, mv = tl.arange(0, C), ov < DV
        live = c * C + i < count
        row = first + c * C + i
        into = (bh * NC + c) * C
        out = tl.zeros([C, BV], tl.float32)
        M = tl.zeros([C, C], tl.float32)
        for d in tl.range(0, DK, BD):
            od = d + tl.arange(0, BD)
            place = (row * Hq + hq)[:, None] * DK + od[None, :]
            qd = tl.load(q + place, mask=live[:, None], other=0.0)
            kd = tl.load(k + place, mask=live[:, None], other=0.0)
            tile = ((bh * NC + c) * DK + od[:, None]) * DV + ov[None, :]
            S = tl.load(states + tile, mask=mv[None, :], other=0.0)
            if DECAY == 2:
                qf = qd.to(tl.float32)
                G = tl.load(sums + (into + i)[:, None] * DK + od[None, :])
                k_rows = k + ((first + c * C) * Hq + hq) * DK + od
                G_rows = sums + into * DK + od
                M += _decayed_products(
                    qf, kd.to(tl.float32), G, k_rows, G_rows, Hq * DK, count - c * C, DK, C, 16
                )
                qd = (qf * tl.exp(G)).to(S.dtype)
            else:
                M += product(qd, tl.trans(kd))
            out += product(qd, S)
        if DECAY == 1:
            G = _head_decay(log_decay, row, live, h, Hv)
            out *= tl.exp(G)[:, None]
            M *= tl.exp(tl.minimum(G[:, None] - G[None, :], 0.0))
        values = (row * Hv + h)[:, None] * DV + ov[None, :]
        mask = live[:, None] & mv[None, :]
        u = tl.load(updates + values, mask=mask, other=0.0)
        M = tl.where(i[:, None] >= i[None, :], M, 0.0).to(u.dtype)
        out += product(M, u)
        tl.store(o + values, (out * scale).to(o.dtype.element_ty), mask=mask)
