"""Zamba2's shared transformer, made of an attention and an MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from build.mixers.attention import attention
from build.mixers.common import StepInputs, node_path, rms_norm
from build.mixers.mlp import mlp
from engine_configs.spec import SharedTransformer

if TYPE_CHECKING:
    from build.graph import GraphBuilder


def shared_transformer(
    g: GraphBuilder, step: StepInputs, i: int, path: str, m: SharedTransformer, x: str
) -> str:
    """transformers' ``Zamba2AttentionDecoderLayer`` and the projection after it."""
    both = g.op("Concat", [x, step.embedded], f"{node_path(path)}/both", axis=-1)
    h = rms_norm(g, both, f"{path}.input_norm", m.norm)
    h = attention(g, step, i, f"{path}.attn", m.attention, h)
    h = rms_norm(g, h, f"{path}.mlp_norm", m.norm)
    h = mlp(g, step, i, f"{path}.mlp", m.mlp, h)
    return g.linear(h, f"{path}.out_proj")
