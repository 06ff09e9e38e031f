"""``hybrid::LinearStateReplay`` on a GPU, in Triton-lang.

``ref.py`` says what it computes. Up to `FEW` tokens are taken one by one (decode), more in chunks
(``chunk_kernel.py``: prefill and replay).

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
from plugins.linear_state_replay.chunk_kernel import (
    chunk_inverse,
    chunk_outputs,
    chunk_products,
    chunk_states,
    key_decay,
    state_row,
)
from plugins.linear_state_replay.ref import RULES
from plugins.tiles import span


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
    tile = ((state_row(slots, b) * Hv + h) * DK + ok[:, None]) * DV + ov[None, :]
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


CHUNK = 64
FEW = 16  # tokens up to which they are taken one by one
RULE_OF = {rule: ("gated" in rule, "delta" in rule) for rule in RULES}
# By the power of two that holds dk.
RECURRENT_TILES = {64: Tile(32, 2), 128: Tile(16, 4), 256: Tile(16, 4)}
STATE_TILES = {64: Tile(32, 4, 2), 128: Tile(32, 8, 2), 256: Tile(16, 8)}
OUTPUT_TILES = (Tile(64, 4, 2), Tile(64, 4, 2), Tile(32, 8))  # by the kind of decay


def padded(dk: int) -> int:
    """The power of two, at least 64, that holds ``dk`` key channels."""
    return max(64, int(triton.next_power_of_2(dk)))


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
    if T <= FEW:
        tile = RECURRENT_TILES[padded(dk)]
        recurrent[(triton.cdiv(dv, tile.BV), count * Hv)](
            q, k, v, log_decay, beta, past_state, present_state, o, starts, lengths, slots,
            T, Hq, Hv, scale, DK=dk, DV=dv, BK=padded(dk), BV=tile.BV, **rule,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return o, present_state
    NC = triton.cdiv(T, CHUNK)
    grid = (NC, count * Hv)
    new: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
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
    ("gated_delta", 1, 32, 32),  # hybrid-tiny
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
