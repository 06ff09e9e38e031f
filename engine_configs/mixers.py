"""The mixers a block can run. Each answers for itself what it stores and what it weighs.

Attention-like mixers keep K/V rows in a slot, linear ones a recurrent state, most linear ones also
the last inputs of a short convolution; MLPs keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine_configs.linear_mixers import (
    GatedDeltaNet,
    Lightning,
    Mamba1,
    Mamba2,
    RgLru,
    ShortConv,
)
from engine_configs.mixer import MixerBase, Norm, Shapes


@dataclass(frozen=True)
class Rope:
    """Rotary embedding over the first ``2 * len(inv_freq)`` dims of a head, halves layout."""

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


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
