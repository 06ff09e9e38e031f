"""The mixers that carry a recurrent state or the inputs of a short convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine_configs.mixer import MixerBase, Norm, Shapes


@dataclass(frozen=True)
class GatedDeltaNet(MixerBase):
    """Gated delta rule with a short causal convolution on q, k and v (arXiv 2412.06464).

    Hk query/key heads of ``key_dim``, Hv value heads of ``value_dim``; ``beta`` is scaled by
    ``beta_scale`` (2 allows negative eigenvalues). ``decay_rank`` > 0: a decay for every key
    channel from a projection of that rank (Kimi Delta Attention, arXiv 2510.26692);
    ``gate_rank`` > 0: the output gate's projection has that rank.
    """

    num_k_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    beta_scale: float = 1.0
    decay_rank: int = 0
    gate_rank: int = 0
    gate: Literal["silu", "sigmoid"] = "silu"
    kind: Literal["gated_delta_net"] = "gated_delta_net"

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_k_heads * self.key_dim + self.num_v_heads * self.value_dim

    def weights(self, hidden: int) -> Shapes:
        k, v = self.num_k_heads * self.key_dim, self.num_v_heads * self.value_dim
        return {
            "q_proj": (k, hidden),
            "k_proj": (k, hidden),
            "v_proj": (v, hidden),
            **_low_rank("a", self.units(), hidden, self.decay_rank),
            "b_proj": (self.num_v_heads, hidden),
            **_low_rank("g", v, hidden, self.gate_rank),
            "conv": (self.conv_channels, self.conv_width),
            "A_log": (self.num_v_heads,),
            "dt_bias": (self.units(),),
            "o_norm": (self.value_dim,),
            "o_proj": (hidden, v),
        }

    def conv_state(self) -> tuple[int, ...]:
        return (self.conv_width - 1, self.conv_channels)

    def recurrent_state(self) -> tuple[int, ...]:
        return (self.num_v_heads, self.key_dim, self.value_dim)

    def units(self) -> int:
        return self.num_v_heads * (self.key_dim if self.decay_rank else 1)


@dataclass(frozen=True)
class Mamba2(MixerBase):
    """State-space duality (Dao & Gu, arXiv 2405.21060): per head ``S = exp(A dt) S + B (dt x)^T``.

    H heads of ``head_dim`` (the value dim), G groups that share B and C of ``state_size`` (the key
    dim); dt is clamped to [dt_min, dt_max]. The output is gated by ``silu(z)`` and, with ``norm``,
    normed in groups: after the gate, or before it.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    norm: Norm | None = None
    norm_before_gate: bool = False
    conv_bias: bool = True
    dt_min: float = 0.0
    dt_max: float | None = None
    kind: Literal["mamba2"] = "mamba2"

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.num_groups * self.state_size

    def weights(self, hidden: int) -> Shapes:
        """Rows of in_proj: z, x, B, C, dt."""
        shapes: Shapes = {
            "in_proj": (self.inner + self.conv_channels + self.num_heads, hidden),
            "conv": (self.conv_channels, self.conv_width),
            "A_log": (self.num_heads,),
            "dt_bias": (self.num_heads,),
            "D": (self.num_heads,),
            "o_proj": (hidden, self.inner),
        }
        if self.conv_bias:
            shapes["conv_bias"] = (self.conv_channels,)
        if self.norm:
            shapes["o_norm"] = (self.inner,)
        return shapes

    def conv_state(self) -> tuple[int, ...]:
        return (self.conv_width - 1, self.conv_channels)

    def recurrent_state(self) -> tuple[int, ...]:
        return (self.num_heads, self.state_size, self.head_dim)

    def units(self) -> int:
        return self.num_heads


@dataclass(frozen=True)
class Mamba1(MixerBase):
    """Selective state space with a decay per channel and state (Gu & Dao, arXiv 2312.00752).

    ``norm``: of dt, B and C before they are used (Jamba).
    """

    inner: int
    state_size: int
    dt_rank: int
    conv_width: int
    norm: Norm | None = None
    conv_bias: bool = True
    kind: Literal["mamba1"] = "mamba1"

    def weights(self, hidden: int) -> Shapes:
        """Rows of in_proj: x, z; of x_proj: dt, B, C."""
        shapes: Shapes = {
            "in_proj": (2 * self.inner, hidden),
            "conv": (self.inner, self.conv_width),
            "x_proj": (self.dt_rank + 2 * self.state_size, self.inner),
            "dt_proj": (self.inner, self.dt_rank),
            "dt_bias": (self.inner,),
            "A_log": (self.inner, self.state_size),
            "D": (self.inner,),
            "o_proj": (hidden, self.inner),
        }
        if self.conv_bias:
            shapes["conv_bias"] = (self.inner,)
        if self.norm:
            shapes |= {"dt_norm": (self.dt_rank,)}
            shapes |= {f"{n}_norm": (self.state_size,) for n in ("b", "c")}
        return shapes

    def conv_state(self) -> tuple[int, ...]:
        return (self.conv_width - 1, self.inner)

    def recurrent_state(self) -> tuple[int, ...]:
        return (self.inner, self.state_size, 1)

    def units(self) -> int:
        return self.inner * self.state_size


@dataclass(frozen=True)
class RgLru(MixerBase):
    """Griffin's recurrent block (arXiv 2402.19427): a convolution, then a gated linear recurrence
    of every channel by itself; its gates are block-diagonal in ``num_blocks`` blocks."""

    width: int
    num_blocks: int
    conv_width: int
    kind: Literal["rg_lru"] = "rg_lru"

    def weights(self, hidden: int) -> Shapes:
        """Gates are [block, in, out]."""
        size = self.width // self.num_blocks
        shapes: Shapes = {
            "conv": (self.width, self.conv_width),
            "conv_bias": (self.width,),
            "rate": (self.width,),
            "o_proj": (hidden, self.width),
            "o_proj_bias": (hidden,),
        }
        for name in ("x_proj", "y_proj"):
            shapes |= {name: (self.width, hidden), f"{name}_bias": (self.width,)}
        for name in ("input_gate", "recurrent_gate"):
            shapes |= {name: (self.num_blocks, size, size), f"{name}_bias": (self.width,)}
        return shapes

    def conv_state(self) -> tuple[int, ...]:
        return (self.conv_width - 1, self.width)

    def recurrent_state(self) -> tuple[int, ...]:
        return (self.width, 1, 1)

    def units(self) -> int:
        return self.width


@dataclass(frozen=True)
class Lightning(MixerBase):
    """Linear attention with a constant decay per head (Lightning Attention, arXiv 2401.04658)."""

    num_heads: int
    head_dim: int
    log_decay: tuple[float, ...]
    norm: Norm
    kind: Literal["lightning"] = "lightning"

    def weights(self, hidden: int) -> Shapes:
        inner = self.num_heads * self.head_dim
        shapes: Shapes = {f"{n}_proj": (inner, hidden) for n in ("q", "k", "v", "g")}
        return shapes | {"o_norm": (inner,), "o_proj": (hidden, inner)}

    def recurrent_state(self) -> tuple[int, ...]:
        return (self.num_heads, self.head_dim, self.head_dim)

    def units(self) -> int:
        return self.num_heads


@dataclass(frozen=True)
class ShortConv(MixerBase):
    """Gated short convolution (LFM2): ``out(C * conv(B * x))``. It forgets all after W-1 tokens."""

    channels: int
    conv_width: int
    kind: Literal["short_conv"] = "short_conv"

    def weights(self, hidden: int) -> Shapes:
        """Rows of in_proj: B, C, x."""
        return {
            "in_proj": (3 * self.channels, hidden),
            "conv": (self.channels, self.conv_width),
            "o_proj": (hidden, self.channels),
        }

    def conv_state(self) -> tuple[int, ...]:
        return (self.conv_width - 1, self.channels)


def _low_rank(name: str, rows: int, hidden: int, rank: int) -> Shapes:
    """``x_proj``, or the two factors of one of low rank."""
    if not rank:
        return {f"{name}_proj": (rows, hidden)}
    return {f"{name}_a_proj": (rank, hidden), f"{name}_b_proj": (rows, rank)}
