"""What several mixers are made of: norms, activations, the short convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine_configs.spec import Norm
from plugins.causal_conv.node import causal_conv as convolution
from plugins.onnx_graph import Nodes

if TYPE_CHECKING:
    from build.graph import GraphBuilder


@dataclass(frozen=True)
class StepInputs:
    """Names of the step's inputs and of what every layer derives from them."""

    input_ids: str
    position_ids: str  # [B, T]
    last_row: str  # [B] int32, seqlens - 1
    total_len: str
    valid_len: str  # [B] int64
    kv_append: str  # [1]
    logit_rows: str
    mask: str  # [B, T, 1] fp32, 0 at padding
    seqlens: str = ""  # [B] int32
    block_table: str = ""  # [B, M] int32, ``tensorrt`` only
    embedded: str = ""  # [B, T, H], what the first layer reads
    tokens: str = "T"  # how the number of tokens at hand is called


def node_path(path: str) -> str:
    """``layers.3.attn`` → ``/layers/3/attn``."""
    return f"/{path.replace('.', '/')}"


def rms_norm(g: GraphBuilder, x: str, path: str, norm: Norm) -> str:
    """RMS norm over the last axis of any x."""
    weight = g.small(path, lambda w: w + norm.offset)
    return str(g.op("RMSNormalization", [x, weight], node_path(path), axis=-1, epsilon=norm.eps))


def plain_rms_norm(
    g: GraphBuilder, x: str, dim: int, eps: float, path: str, scale: float = 1.0
) -> str:
    """RMS norm over the last axis of x [..., dim], the same weight for every channel."""
    weight = g.const(np.full(dim, scale), np.float32)
    return str(g.op("RMSNormalization", [x, weight], path, axis=-1, epsilon=eps))


def silu(g: Nodes, x: str, path: str) -> str:
    gate = g.op("Sigmoid", [x], f"{path}/sigmoid")
    return str(g.op("Mul", [x, gate], path))


def precise_sigmoid(g: Nodes, x: str, path: str) -> str:
    """``1 / (1 + exp(-x))``: the runtime's Sigmoid is off by 2e-7 absolutely, which is more than a
    beta of sigmoid(-16) itself, and a slow unit adds that up over the whole sequence."""
    falling = g.op("Exp", [g.op("Neg", [x], f"{path}/neg")], f"{path}/exp")
    above_one = g.op("Add", [falling, g.const(1, np.float32)], f"{path}/above_one")
    return str(g.op("Reciprocal", [above_one], path))


def activate(g: Nodes, x: str, kind: str, path: str) -> str:
    if kind == "silu":
        return silu(g, x, path)
    if kind == "sigmoid":
        return str(g.op("Sigmoid", [x], path))
    if kind == "gelu":
        return str(g.op("Gelu", [x], path))
    if kind == "gelu_tanh":
        return str(g.op("Gelu", [x], path, approximate="tanh"))
    assert kind == "relu2", kind
    positive = g.op("Relu", [x], f"{path}/relu")
    return str(g.op("Mul", [positive, positive], path))


def per_head(g: GraphBuilder, x: str, weight: str, path: str) -> str:
    """x [B, T, H, a] times weight [H, a, b] → [B, T, H, b]."""
    heads = g.op("Transpose", [x], f"{path}/heads", perm=[0, 2, 1, 3])
    product = g.matmul(heads, weight, path)
    return str(g.op("Transpose", [product], f"{path}/back", perm=[0, 2, 1, 3]))


def causal_conv(
    g: GraphBuilder,
    step: StepInputs,
    i: int,
    path: str,
    width: int,
    channels: int,
    x: str,
    *,
    bias: bool = False,
    silu: bool = False,
) -> str:
    """Depthwise causal convolution of x [B, T, channels] that carries its last W-1 inputs."""
    shape = ["B", width - 1, channels]
    weight = g.small(f"{path}.conv", lambda w: w.T)
    total = g.small(f"{path}.conv_bias") if bias else ""
    return convolution(
        g,
        f"{node_path(path)}/conv",
        [x, g.input(f"conv_state_{i}", shape), weight, step.valid_len, total],
        g.output(f"present_conv_state_{i}", shape),
        width=width,
        silu=silu,
    )


def masked_dt(
    g: GraphBuilder,
    step: StepInputs,
    path: str,
    x: str,
    low: float = 0.0,
    high: float | None = None,
) -> str:
    """``softplus(x + dt_bias)`` clamped to [low, high]; 0 at padding, so that nothing changes."""
    node = f"{node_path(path)}/dt"
    biased = g.op("Add", [x, g.small(f"{path}.dt_bias")], f"{node}/biased")
    dt = g.op("Softplus", [biased], f"{node}/softplus")
    if low > 0 or high is not None:
        ends = [g.const(low, np.float32), "" if high is None else g.const(high, np.float32)]
        dt = g.op("Clip", [dt, *ends], f"{node}/clip")
    return str(g.op("Mul", [dt, step.mask], node))
