"""Recurrences of every channel by itself: Mamba-1 and the RG-LRU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from build.mixers.common import (
    StepInputs,
    activate,
    causal_conv,
    masked_dt,
    node_path,
    per_head,
    rms_norm,
    silu,
)
from engine_configs.mixer import MixerBase
from engine_configs.spec import Mamba1, RgLru
from plugins.diagonal_scan.node import diagonal_scan

if TYPE_CHECKING:
    from build.graph import GraphBuilder


def mamba1(g: GraphBuilder, step: StepInputs, i: int, path: str, m: Mamba1, x: str) -> str:
    """transformers' ``JambaMambaMixer``."""
    node = node_path(path)
    sizes = g.const([m.inner, m.inner])
    joined = g.linear(x, f"{path}.in_proj")
    inner, z = g.op("Split", [joined, sizes], f"{node}/in_split", outputs=2, axis=-1)
    inner = causal_conv(g, step, i, path, m.conv_width, m.inner, inner, bias=m.conv_bias, silu=True)
    sizes = g.const([m.dt_rank, m.state_size, m.state_size])
    joined = g.linear(inner, f"{path}.x_proj")
    dt, b, c = g.op("Split", [joined, sizes], f"{node}/x_split", outputs=3, axis=-1)
    if m.norm:
        dt, b, c = (
            rms_norm(g, t, f"{path}.{n}_norm", m.norm) for t, n in ((dt, "dt"), (b, "b"), (c, "c"))
        )
    dt = masked_dt(g, step, path, g.linear(dt, f"{path}.dt_proj"))
    rate = g.small(f"{path}.A_log", lambda a: -np.exp(a.astype(np.float64)))
    pushed = g.op("Mul", [inner, dt], f"{node}/pushed")
    y = _scan(g, i, node, m, [pushed, dt, rate, b, c])
    skip = g.op("Mul", [inner, g.small(f"{path}.D")], f"{node}/skip")
    y = g.op("Add", [y, skip], f"{node}/skipped")
    gate = silu(g, z, f"{node}/gate")
    return g.linear(g.op("Mul", [y, gate], f"{node}/gated"), f"{path}.o_proj")


def rg_lru(g: GraphBuilder, step: StepInputs, i: int, path: str, m: RgLru, x: str) -> str:
    """transformers' ``RecurrentGemmaRecurrentBlock``: h = a h + sqrt(1 - a^2) (gate * x).

    a = exp(-dt), dt = 8 softplus(rate) * recurrent gate. The first token of a sequence enters
    whole, without the square root.
    """
    node = node_path(path)
    y = activate(g, g.linear(x, f"{path}.y_proj", bias=True), "gelu_tanh", f"{node}/y")
    inner = g.linear(x, f"{path}.x_proj", bias=True)
    inner = causal_conv(g, step, i, path, m.conv_width, m.width, inner, bias=True)
    blocks = g.reshape(inner, [0, 0, m.num_blocks, m.width // m.num_blocks], f"{node}/blocks")
    gates = {n: _gate(g, blocks, f"{path}.{n}_gate", m) for n in ("input", "recurrent")}
    slope = g.small(f"{path}.rate", lambda r: 8 * np.logaddexp(0, r.astype(np.float64)))
    dt = g.op("Mul", [g.op("Mul", [gates["recurrent"], slope], f"{node}/dt"), step.mask],
              f"{node}/dt_masked")  # fmt: skip
    squared = g.op("Exp", [g.op("Mul", [dt, g.const(-2, np.float32)], f"{node}/log_a2")],
                   f"{node}/a2")  # fmt: skip
    share = g.op("Sqrt", [g.op("Sub", [g.const(1, np.float32), squared], f"{node}/1_a2")],
                 f"{node}/share")  # fmt: skip
    first = g.op("Equal", [step.position_ids, g.const(0)], f"{node}/first")
    first = g.op("Unsqueeze", [first, g.const([2])], f"{node}/first_column")
    share = g.op("Where", [first, g.const(1, np.float32), share], f"{node}/share_or_all")
    pushed = g.op("Mul", [g.op("Mul", [inner, gates["input"]], f"{node}/gated_input"), share],
                  f"{node}/pushed")  # fmt: skip
    rate = g.const(np.full((m.width, 1), -1), np.float32)
    h = _scan(g, i, node, m, [pushed, dt, rate, step.mask, step.mask])
    return g.linear(g.op("Mul", [h, y], f"{node}/gated"), f"{path}.o_proj", bias=True)


def _gate(g: GraphBuilder, blocks: str, path: str, m: RgLru) -> str:
    node = node_path(path)
    product = per_head(g, blocks, g.experts(path), node)
    flat = g.reshape(product, [0, 0, m.width], f"{node}/flat")
    biased = g.op("Add", [flat, g.small(f"{path}_bias")], f"{node}/biased")
    return str(g.op("Sigmoid", [biased], f"{node}/sigmoid"))


def _scan(g: GraphBuilder, i: int, node: str, m: MixerBase, inputs: list[str]) -> str:
    """The op and the sum of its log-decays [B, units]; inputs x, dt, rate, b, c."""
    total = g.op("ReduceSum", [inputs[1], g.const([1])], f"{node}/dt_sum", keepdims=0)
    column = g.op("Unsqueeze", [total, g.const([2])], f"{node}/dt_sum_column")
    by_unit = g.op("Mul", [column, inputs[2]], f"{node}/decay_by_unit")
    flat = [by_unit, g.const([0, -1])]
    g.op(
        "Reshape", flat, f"{node}/decay_sum", outputs=[g.output(f"decay_sum_{i}", ["B", m.units()])]
    )
    shape = ["B", *m.recurrent_state()]
    past = g.input(f"recurrent_state_{i}", shape)
    present = g.output(f"present_recurrent_state_{i}", shape)
    return diagonal_scan(g, node, [*inputs, past], present)
