"""What the Mamba-2 families have in common: how the mixer is configured and named."""

from __future__ import annotations

import math

from engine_configs.families.config import ConfigReader
from engine_configs.families.stack import Stack
from engine_configs.spec import Mamba2, Norm

_TENSORS = {
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "D": "D",
    "in_proj": "in_proj.weight",
    "conv_bias": "conv1d.bias",
    "o_norm": "norm.weight",
    "o_proj": "out_proj.weight",
}


def read_mamba2(
    config: ConfigReader, inner: int, norm: Norm | None, *, norm_before_gate: bool = False
) -> Mamba2:
    """The ``mamba_*`` keys; ``inner``: channels where ``mamba_d_head`` is 'auto'."""
    heads = config.positive("mamba_n_heads")
    auto = config.data.get("mamba_d_head", "auto") == "auto"
    if auto:
        config.ignore("mamba_d_head")
    low, high = time_step_limit(config, "time_step_limit")
    config.expect("mamba_proj_bias", False)
    config.ignore("mamba_chunk_size", "mamba_expand")
    return Mamba2(
        num_heads=heads,
        head_dim=inner // heads if auto else config.positive("mamba_d_head"),
        state_size=config.positive("mamba_d_state"),
        num_groups=config.positive("mamba_n_groups", 1),
        conv_width=config.positive("mamba_d_conv", 4),
        norm=norm,
        norm_before_gate=norm_before_gate,
        conv_bias=config.take("mamba_conv_bias", bool, True),
        dt_min=low,
        dt_max=high,
    )


def time_step_limit(config: ConfigReader, *keys: str) -> tuple[float, float | None]:
    """Clamp of dt; transformers applies it in prefill only, here every step does."""
    low, high = config.first(*keys, kind=list, default=[0.0, math.inf])
    if isinstance(high, dict):  # how transformers writes what JSON has no number for
        high = high.get("__float__")
    high = float(high)
    return float(low), None if math.isinf(high) else high


def take_mamba2(stack: Stack, m: Mamba2, ours: str, theirs: str) -> None:
    names = {name: tensor for name, tensor in _TENSORS.items() if name in m.weights(1)}
    stack.take(ours, theirs, names)
    stack.conv(f"{ours}.conv", f"{theirs}.conv1d")
