"""``hybrid::LinearStateReplay`` on a GPU, in Triton-lang.

``ref.py`` says what it computes. Prefill and replay cut a sequence in chunks of C tokens. With G
the log-decay summed within a chunk (inclusive) and S the state before it, the recurrence is::

    (I + A) u = beta (v - (k e^G) S)         A_ts = beta_t k_t e^(G_t - G_s) k_s,  s < t
    o = scale ((q e^G) S + M u)              M_ts = q_t e^(G_t - G_s) k_s,         s <= t
    S' = e^(G_C) S + (k e^(G_C - G))^T u

(the UT transform: Yang et al., "DeltaNet", arXiv 2406.06484 section 3, with the decay of "Gated
Delta Networks", 2412.06464 section 3.3; u = v and no A without delta: "Mamba-2", 2405.21060
section 6). `chunk_matrices` makes M and (I + A)^-1 of all chunks at once, `chunk_scan` then walks
the chunks of one state tile. `recurrent` takes tokens one by one: decode. No exponent is positive.

Only machines with a GPU, builds and tests import this module: serving never does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl

from plugins.aot import Variant


@triton.jit
def _span(starts, lengths, b, T):
    """First row and number of rows of sequence b. Null pointers: row b of [B, T], all of it."""
    first = b.to(tl.int64) * T
    count = T
    if starts is not None:
        given = starts.to(tl.int64) != 0
        first = tl.where(given, tl.load(starts + b, mask=given, other=0).to(tl.int64), first)
    if lengths is not None:
        given = lengths.to(tl.int64) != 0
        count = tl.load(lengths + b, mask=given, other=T)
    return first, count


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
    first, count = _span(starts, lengths, b, T)
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


@dataclass(frozen=True)
class Tile:
    """Value columns per program and how Triton-lang schedules it."""

    BV: int
    num_warps: int = 4
    num_stages: int = 1


_BK = {64: 64, 96: 128, 128: 128, 192: 256, 256: 256}
RECURRENT_TILES = {64: Tile(32, 2), 128: Tile(16, 4), 256: Tile(16, 4)}
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


def variants() -> Iterator[Variant]:
    """What plugins.aot compiles."""
    for dtype in ("bf16", "fp16"):
        for rule, decay, dk, dv in SHAPES:
            where = f"{rule}_{('', 'head', 'key')[decay]}_{dk}x{dv}_{dtype}"
            tile = RECURRENT_TILES[_BK[dk]]
            rows = dict.fromkeys(("q", "k", "v"), f"*{dtype}")
            rows |= dict.fromkeys(("log_decay", "beta", "past", "present"), "*fp32")
            rows |= {"o": f"*{dtype}"} | dict.fromkeys(("starts", "lengths", "slots"), "*i32")
            rows |= {"T": "i32", "Hq": "i32", "Hv": "i32", "scale": "fp32"}
            constants = {
                "DK": dk, "DV": dv, "BK": _BK[dk], "BV": tile.BV,
                "DECAY": decay, "DELTA": rule.endswith("delta"),
            }  # fmt: skip
            yield Variant(
                "linear_state_replay", recurrent, f"recurrent_{where}", rows, constants,
                tile.num_warps, tile.num_stages,
            )  # fmt: skip
