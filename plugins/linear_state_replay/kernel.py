"""``hybrid::LinearStateReplay`` on a GPU, in Triton-lang.

``ref.py`` says what it computes. Prefill and replay cut a sequence in chunks of C tokens. With G
the log-decay summed within a chunk (inclusive) and S the state before it, the recurrence is::

    (I + A) u = beta (v - (k e^G) S)         A_ts = beta_t k_t e^(G_t - G_s) k_s,  s < t
    o = scale ((q e^G) S + M u)              M_ts = q_t e^(G_t - G_s) k_s,         s <= t
    S' = e^(G_C) S + (k e^(G_C - G))^T u

(the UT transform: Yang et al., "DeltaNet", arXiv 2406.06484 section 3, with the decay of "Gated
Delta Networks", 2412.06464 section 3.3; u = v and no A without delta: "Mamba-2", 2405.21060
section 6). `chunk_products` and `chunk_inverse` make (I + A)^-1 of all chunks at once,
`chunk_states` walks the chunks and leaves S and u of each, from which `chunk_outputs` makes o of
all at once. `recurrent` takes tokens one by one: decode. No exponent is positive.

Only machines with a GPU, builds and tests import this module: serving never does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from plugins.aot import Variant
from plugins.linear_state_replay.ref import RULES
from plugins.tiles import product, span


@triton.jit
def _state_row(slots, b):
    """Row of the states that sequence b reads and writes. Null pointer: row b."""
    row = b.to(tl.int64)
    if slots is not None:
        given = slots.to(tl.int64) != 0
        row = tl.where(given, tl.load(slots + b, mask=given, other=0).to(tl.int64), row)
    return row


@triton.jit
def recurrent(
    q, k, v, log_decay, beta, past, present, o, starts, lengths, slots, T, Hq, Hv, scale,
    DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DECAY: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Token by token. Grid (ceil(DV / BV), B * Hv): one program per [DK, BV] tile of a state."""
    ov = tl.program_id(0) * BV + tl.arange(0, BV)
    b, h = tl.program_id(1) // Hv, tl.program_id(1) % Hv
    hq = h // (Hv // Hq)
    ok = tl.arange(0, BK)
    mk, mv = ok < DK, ov < DV
    first, count = span(starts, lengths, b, T)
    tile = ((_state_row(slots, b) * Hv + h) * DK + ok[:, None]) * DV + ov[None, :]
    inside = mk[:, None] & mv[None, :]
    S = tl.load(past + tile, mask=inside, other=0.0)
    for t in range(count):
        row = first + t
        kt = tl.load(k + (row * Hq + hq) * DK + ok, mask=mk, other=0.0).to(tl.float32)
        qt = tl.load(q + (row * Hq + hq) * DK + ok, mask=mk, other=0.0).to(tl.float32)
        u = tl.load(v + (row * Hv + h) * DV + ov, mask=mv, other=0.0).to(tl.float32)
        if DECAY == 1:
            S *= tl.exp(tl.load(log_decay + row * Hv + h))
        if DECAY == 2:
            decay = tl.load(log_decay + (row * Hv + h) * DK + ok, mask=mk, other=0.0)
            S *= tl.exp(decay)[:, None]
        if DELTA:
            u = tl.load(beta + row * Hv + h) * (u - tl.sum(S * kt[:, None], 0))
        S += kt[:, None] * u[None, :]
        ot = tl.sum(S * qt[:, None], 0) * scale
        tl.store(o + (row * Hv + h) * DV + ov, ot.to(o.dtype.element_ty), mask=mv)
    tl.store(present + tile, S, mask=inside)


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
    own = (_state_row(slots, b) * Hv + h) * DK * DV
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


@dataclass(frozen=True)
class Tile:
    """Value columns per program and how Triton-lang schedules it."""

    BV: int
    num_warps: int = 4
    num_stages: int = 1


CHUNK = 64
RULE_OF = {rule: ("gated" in rule, "delta" in rule) for rule in RULES}
# By the power of two that holds dk.
RECURRENT_TILES = {64: Tile(32, 2), 128: Tile(16, 4), 256: Tile(16, 4)}
STATE_TILES = {64: Tile(32, 4), 128: Tile(32, 8, 2), 256: Tile(16, 8)}
OUTPUT_TILES = (Tile(64, 4, 2), Tile(64, 4, 2), Tile(32, 8))  # by the kind of decay


def padded(dk: int) -> int:
    """The power of two, at least 64, that holds ``dk`` key channels."""
    return max(64, triton.next_power_of_2(dk))


def key_step(dk: int, decay: int) -> int:
    """Key channels that are taken at once: a power of two that divides ``dk``."""
    return min(16 if decay == 2 else 64, dk & -dk)


def linear_state_replay(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past_state: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    *,
    update_rule: str,
    scale: float,
    present_state: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    max_length: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op of ``ref.py`` on a GPU. Every tensor is contiguous.

    q, k [B, T, Hq, dk], v [B, T, Hv, dv] in fp16, bf16 or fp32; past_state [S, Hv, dk, dv],
    log_decay [B, T, Hv] or [B, T, Hv, dk], beta [B, T, Hv] in fp32.
    Sequence b is row b, cut at lengths[b] (int32) where given. Packed sequences: B = 1, and
    sequence b is the rows starts[b] .. starts[b] + lengths[b], at most ``max_length`` of them.
    Its state is row b, or slots[b] (int32), of past_state and present_state. log_decay <= 0.
    Returns o [B, T, Hv, dv], unwritten beyond the sequences, and present_state: written in place
    where given (it may be past_state itself), else new.
    """
    gated, delta = RULE_OF[update_rule]
    decay = 0 if not gated else 1 if _given(log_decay, "log_decay").ndim == 3 else 2
    if delta:
        _given(beta, "beta")
    _, T, Hq, dk = q.shape
    Hv, dv = v.shape[2:]
    count = len(past_state) if slots is None else len(slots)
    if starts is None:
        count = q.shape[0]
    else:
        count, T = len(starts), max_length
        _given(lengths, "lengths")
    o = torch.empty_like(v)
    if present_state is None:
        present_state = past_state.clone() if slots is not None else torch.empty_like(past_state)
    rule = {"DECAY": decay, "DELTA": delta}
    if T <= 16:
        tile = RECURRENT_TILES[padded(dk)]
        recurrent[(triton.cdiv(dv, tile.BV), count * Hv)](
            q, k, v, log_decay, beta, past_state, present_state, o, starts, lengths, slots,
            T, Hq, Hv, scale, DK=dk, DV=dv, BK=padded(dk), BV=tile.BV, **rule,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return o, present_state
    NC = triton.cdiv(T, CHUNK)
    grid, new = (NC, count * Hv), {"dtype": torch.float32, "device": q.device}
    step = key_step(dk, decay)
    states = torch.empty(count * Hv, NC, dk, dv, dtype=v.dtype, device=q.device)
    sums, entering, leaving, inverse, updates = None, None, None, None, v
    if decay == 2:
        sums = torch.empty(count * Hv, NC * CHUNK, dk, **new)
        entering, leaving = (torch.empty_like(sums, dtype=k.dtype) for _ in range(2))
        key_decay[grid](
            k, log_decay, sums, entering, leaving, starts, lengths, T, Hq, Hv,
            DK=dk, BD=step, C=CHUNK,
        )  # fmt: skip
    if delta:
        inverse = torch.empty(count * Hv, NC, CHUNK, CHUNK, **new)
        updates = torch.empty_like(v)
        chunk_products[grid](
            k, log_decay, beta, sums, inverse, starts, lengths, T, Hq, Hv,
            DK=dk, BD=step, C=CHUNK, DECAY=decay,
        )  # fmt: skip
        chunk_inverse[grid](inverse, starts, lengths, T, Hv, C=CHUNK)
    tile = STATE_TILES[padded(dk)]
    chunk_states[(triton.cdiv(dv, tile.BV), count * Hv)](
        k, v, log_decay, beta, sums, entering, leaving, inverse, past_state, present_state,
        states, updates, starts, lengths, slots, T, NC, Hq, Hv,
        DK=dk, DV=dv, BK=padded(dk), BV=tile.BV, C=CHUNK, DECAY=decay, DELTA=delta,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    tile = OUTPUT_TILES[decay]
    chunk_outputs[(triton.cdiv(dv, tile.BV), *grid)](
        q, k, log_decay, sums, states, updates, o, starts, lengths, T, NC, Hq, Hv, scale,
        DK=dk, DV=dv, BD=step, BV=tile.BV, C=CHUNK, DECAY=decay,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return o, present_state


def _given(tensor: torch.Tensor | None, name: str) -> torch.Tensor:
    if tensor is None:
        raise ValueError(f"{name} is missing")
    return tensor


# Rule, decay (1 per head, 2 per key channel), dk, dv: what the published models need.
SHAPES = (
    ("gated_delta", 1, 64, 64),
    ("gated_delta", 1, 96, 192),  # OLMo-Hybrid
    ("gated_delta", 1, 128, 128),  # Qwen3-Next, Qwen3.5
    ("gated_delta", 1, 256, 256),
    ("gated_delta", 2, 128, 128),  # Kimi-Linear
    ("gated", 1, 128, 64),  # Mamba-2: Nemotron-H, Granite-4-H, Bamba
    ("gated", 1, 256, 64),  # Falcon-H1
    ("gated", 1, 128, 128),  # lightning
)


# Arguments in the type of the activations; others are fp32, or int32 as told below.
HALVES = ("q", "k", "v", "o", "states", "updates", "entering", "leaving")


def variants() -> Iterator[Variant]:
    """What plugins.aot compiles: the kernels of each of `SHAPES`, in bf16 and fp16."""
    yield Variant(
        op="linear_state_replay",
        kernel=chunk_inverse,
        name="chunk_inverse",
        types={"products": "*fp32", "starts": "*i32", "lengths": "*i32", "T": "i32", "Hv": "i32"},
        constants={"C": CHUNK},
        num_warps=4,
        num_stages=1,
    )
    for dtype in ("bf16", "fp16"):
        for rule, decay, dk, dv in SHAPES:
            kinds = dict.fromkeys(HALVES, f"*{dtype}")
            kinds |= dict.fromkeys(("starts", "lengths", "slots"), "*i32")
            kinds |= dict.fromkeys(("T", "NC", "Hq", "Hv"), "i32") | {"scale": "fp32"}
            values = {
                "DK": dk, "DV": dv, "BK": padded(dk), "BD": key_step(dk, decay), "C": CHUNK,
                "DECAY": decay, "DELTA": RULE_OF[rule][1],
            }  # fmt: skip
            kernels = [
                (recurrent, RECURRENT_TILES[padded(dk)]),
                (chunk_states, STATE_TILES[padded(dk)]),
                (chunk_outputs, OUTPUT_TILES[decay]),
            ]
            if RULE_OF[rule][1]:
                kernels.append((chunk_products, Tile(0)))
            if decay == 2:
                kernels.append((key_decay, Tile(0)))
            for kernel, tile in kernels:
                values["BV"] = tile.BV
                what = f"{rule}_{('', 'head', 'key')[decay]}_{dk}x{dv}_{dtype}"
                constants = {n: values[n] for n in kernel.arg_names if n in values}
                names = [n for n in kernel.arg_names if n not in values]
                yield Variant(
                    op="linear_state_replay",
                    kernel=kernel,
                    name=f"{kernel.fn.__name__}_{what}",
                    types={n: kinds.get(n, "*fp32") for n in names},
                    constants=constants,
                    num_warps=tile.num_warps,
                    num_stages=tile.num_stages,
                )
