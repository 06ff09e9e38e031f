"""How each mixer of a spec becomes nodes: one function and one row of ``MIXERS`` per kind."""

from __future__ import annotations

from collections.abc import Callable

from build.mixers.attention import attention, latent_attention
from build.mixers.common import StepInputs, rms_norm
from build.mixers.diagonal import mamba1, rg_lru
from build.mixers.linear import gated_delta_net, lightning, mamba2, short_conv
from build.mixers.mlp import mlp, moe
from build.mixers.shared import shared_transformer
from engine_configs.spec import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    Lightning,
    Mamba1,
    Mamba2,
    Mlp,
    Moe,
    RgLru,
    SharedTransformer,
    ShortConv,
)

__all__ = ["MIXERS", "StepInputs", "rms_norm"]

# Each takes (g, step, i, path, mixer, x) and turns hidden [B, T, H] into [B, T, H].
MIXERS: dict[type, Callable[..., str]] = {
    Attention: attention,
    LatentAttention: latent_attention,
    SharedTransformer: shared_transformer,
    GatedDeltaNet: gated_delta_net,
    Mamba1: mamba1,
    Mamba2: mamba2,
    RgLru: rg_lru,
    Lightning: lightning,
    ShortConv: short_conv,
    Mlp: mlp,
    Moe: moe,
}
