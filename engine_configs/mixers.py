"""The mixers a block can run. Each answers for itself what it stores and what it weighs.

Attention-like mixers keep K/V rows in a slot, linear ones a recurrent state, most linear ones also
the last inputs of a short convolution; MLPs keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Norm:
    """RMS norm: ``x / rms(x) * (weight + offset)``; offset 1 for the Gemma and Qwen3.5 spelling."""

    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding over the first ``2 * len(inv_freq)`` dims of a head, halves layout."""

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True)
class MixerBase:
    """What a mixer answers; the defaults are those of a mixer that keeps nothing."""

    def weights(self, hidden: int) -> Shapes:
        """Shape of each weight by its name within the mixer."""
        raise NotImplementedError

    def kv_per_token(self) -> int:
        """Values kept of each token for as long as the sequence lives."""
        return 0

    def conv_state(self) -> tuple[int, ...]:
        """[W-1, channels]: the last inputs of the convolution, oldest first."""
        return ()

    def recurrent_state(self) -> tuple[int, ...]:
        """[Hv, dk, dv]."""
        return ()

    def units(self) -> int:
        """Parts of the state with a decay of their own."""
        return 0


@dataclass(frozen=True)
class Attention(MixerBase):
    """Softmax attention with a KV cache (Hq query heads, Hk key/value heads).

    ``gated``: the output is multiplied by ``sigmoid(g_proj(x))`` before o_proj; ``window``: a query
    sees that many tokens, itself included.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    qk_norm: Norm | None = None
    qk_norm_over: Literal["head", "all"] = "head"
    gated: bool = False
    window: int | None = None
    out_bias: bool = False
    kind: Literal["attention"] = "attention"

    @property
    def value_dim(self) -> int:
        """Columns of a V row that are used; the slot's rows are ``head_dim`` wide."""
        return self.head_dim

    def weights(self, hidden: int) -> Shapes:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: Shapes = {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
        }
        if self.gated:
            shapes["g_proj"] = (q, hidden)
        if self.out_bias:
            shapes["o_proj_bias"] = (hidden,)
        if self.qk_norm:
            per_head = self.qk_norm_over == "head"
            shapes["q_norm"] = (self.head_dim,) if per_head else (q,)
            shapes["k_norm"] = (self.head_dim,) if per_head else (kv,)
        return shapes

    def kv_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttention(MixerBase):
    """Multi-head latent attention without RoPE (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    In the absorbed form: every query head reads one shared K row ``[latent | rotary part]`` of
    ``kv_rank + shared_dim`` values and one shared V row, the latent itself. That stores
    ``2 * kv_rank + shared_dim`` values a token instead of Hq separate keys and values.
    """

    num_heads: int
    nope_dim: int
    shared_dim: int
    output_dim: int
    kv_rank: int
    norm: Norm
    kind: Literal["latent_attention"] = "latent_attention"

    num_kv_heads = 1

    @property
    def head_dim(self) -> int:
        return self.kv_rank + self.shared_dim

    @property
    def value_dim(self) -> int:
        return self.kv_rank

    @property
    def scale(self) -> float:
        return float((self.nope_dim + self.shared_dim) ** -0.5)

    def weights(self, hidden: int) -> Shapes:
        return {
            "q_proj": (self.num_heads * (self.nope_dim + self.shared_dim), hidden),
            "kv_a_proj": (self.kv_rank + self.shared_dim, hidden),
            "kv_norm": (self.kv_rank,),
            "k_b": (self.num_heads, self.nope_dim, self.kv_rank),
            "v_b": (self.num_heads, self.output_dim, self.kv_rank),
            "o_proj": (hidden, self.num_heads * self.output_dim),
        }

    def kv_per_token(self) -> int:
        return self.head_dim + self.value_dim


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


Activation = Literal["silu", "relu2", "gelu", "gelu_tanh"]


@dataclass(frozen=True)
class Mlp(MixerBase):
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` where not gated."""

    intermediate: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    kind: Literal["mlp"] = "mlp"

    def weights(self, hidden: int) -> Shapes:
        inner = (self.intermediate, hidden)
        shapes: Shapes = {"up_proj": inner, "down_proj": (hidden, self.intermediate)}
        if self.gated:
            shapes = {"gate_proj": inner, **shapes}
        return shapes | {f"{n}_bias": s[:1] for n, s in shapes.items() if self.bias}


@dataclass(frozen=True)
class Moe(MixerBase):
    """Mixture of MLPs: each token runs through ``top_k`` of ``num_experts`` plus the shared one.

    scoring: how router logits become weights. ``correction``: a bias per expert takes part in the
    choice only; ``normalize``: the chosen weights sum to ``scale``; with ``num_groups`` > 1 the
    experts come from the best ``top_groups`` groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """

    num_experts: int
    top_k: int
    intermediate: int
    shared: Mlp | None = None
    shared_gate: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    activation: Activation = "silu"
    gated: bool = True
    kind: Literal["moe"] = "moe"

    def weights(self, hidden: int) -> Shapes:
        """Rows of an expert's in_proj: gate, up."""
        rows = self.intermediate * (2 if self.gated else 1)
        shapes: Shapes = {
            "router": (self.num_experts, hidden),
            "experts.in_proj": (self.num_experts, rows, hidden),
            "experts.down_proj": (self.num_experts, hidden, self.intermediate),
        }
        if self.correction:
            shapes["correction"] = (self.num_experts,)
        if self.shared:
            shapes |= {f"shared.{k}": v for k, v in self.shared.weights(hidden).items()}
        if self.shared_gate:
            shapes["shared_gate"] = (1, hidden)
        return shapes


@dataclass(frozen=True)
class SharedTransformer(MixerBase):
    """Zamba2's transformer (arXiv 2411.15242): attention over ``[x | embeddings]``, then an MLP.

    No residual inside; its output goes through a projection of the layer's own. What layers share
    is a matter of the checkpoint: here each has weights of its own, low-rank adapters merged in.
    """

    attention: Attention
    mlp: Mlp
    norm: Norm
    kind: Literal["shared_transformer"] = "shared_transformer"

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def value_dim(self) -> int:
        return self.attention.value_dim

    @property
    def scale(self) -> float:
        return self.attention.scale

    def weights(self, hidden: int) -> Shapes:
        inner = self.attention.weights(2 * hidden)
        inner["o_proj"] = (hidden, inner["o_proj"][1])
        return {
            "input_norm": (2 * hidden,),
            **{f"attn.{name}": shape for name, shape in inner.items()},
            "mlp_norm": (hidden,),
            **{f"mlp.{name}": shape for name, shape in self.mlp.weights(hidden).items()},
            "out_proj": (hidden, hidden),
        }

    def kv_per_token(self) -> int:
        return self.attention.kv_per_token()


LinearMixer = GatedDeltaNet | Mamba1 | Mamba2 | RgLru | Lightning | ShortConv
AttentionMixer = Attention | LatentAttention | SharedTransformer
Mixer = AttentionMixer | LinearMixer | Mlp | Moe


def _low_rank(name: str, rows: int, hidden: int, rank: int) -> Shapes:
    """``x_proj``, or the two factors of one of low rank."""
    if not rank:
        return {f"{name}_proj": (rows, hidden)}
    return {f"{name}_a_proj": (rank, hidden), f"{name}_b_proj": (rows, rank)}
