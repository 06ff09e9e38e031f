"""What a hybrid model *is*: one frozen dataclass tree, made by one family function per model type.

A model is a stack of layers; a layer is a row of residual blocks; a block runs one mixer (several
in parallel for Falcon-H1) between an optional norm before and after:
``x + residual_scale * post_norm(sum_m mixer_m(pre_norm(x)))``.

Each mixer answers for itself what it stores and what it weighs; the model adds the answers up, so
nothing outside asks which kind a layer is.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from engine_configs.errors import ConfigError

UpdateRule = Literal["linear", "gated", "delta", "gated_delta"]
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
class Attention:
    """Softmax attention with a KV cache (Hq query heads, Hk key/value heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    qk_norm: Norm | None = None
    qk_norm_over: Literal["head", "all"] = "head"
    kind: Literal["attention"] = "attention"

    def weights(self, hidden: int) -> Shapes:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: Shapes = {
            "q_proj": (q, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, q),
        }
        if self.qk_norm:
            per_head = self.qk_norm_over == "head"
            shapes["q_norm"] = (self.head_dim,) if per_head else (q,)
            shapes["k_norm"] = (self.head_dim,) if per_head else (kv,)
        return shapes

    def kv_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim

    def conv_state(self) -> tuple[int, ...]:
        return ()

    def recurrent_state(self) -> tuple[int, ...]:
        return ()

    def units(self) -> int:
        return 0


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta rule with a short causal convolution on q, k and v (arXiv 2412.06464).

    Hk query/key heads of ``key_dim``, Hv value heads of ``value_dim``; ``beta`` is scaled by
    ``beta_scale`` (2 allows negative eigenvalues).
    """

    num_k_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm_eps: float
    beta_scale: float = 1.0
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
            "a_proj": (self.num_v_heads, hidden),
            "b_proj": (self.num_v_heads, hidden),
            "g_proj": (v, hidden),
            "conv": (self.conv_channels, self.conv_width),
            "A_log": (self.num_v_heads,),
            "dt_bias": (self.num_v_heads,),
            "o_norm": (self.value_dim,),
            "o_proj": (hidden, v),
        }

    def kv_per_token(self) -> int:
        return 0

    def conv_state(self) -> tuple[int, ...]:
        """[W-1, channels]: the last inputs of the convolution, oldest first."""
        return (self.conv_width - 1, self.conv_channels)

    def recurrent_state(self) -> tuple[int, ...]:
        """[Hv, dk, dv]."""
        return (self.num_v_heads, self.key_dim, self.value_dim)

    def units(self) -> int:
        """Parts of the state with a decay of their own: one per head."""
        return self.num_v_heads


@dataclass(frozen=True)
class Mlp:
    """Gated MLP: ``down(act(gate(x)) * up(x))``."""

    intermediate: int
    activation: Literal["silu"] = "silu"
    kind: Literal["mlp"] = "mlp"

    def weights(self, hidden: int) -> Shapes:
        inner = (self.intermediate, hidden)
        return {"gate_proj": inner, "up_proj": inner, "down_proj": (hidden, self.intermediate)}

    def kv_per_token(self) -> int:
        return 0

    def conv_state(self) -> tuple[int, ...]:
        return ()

    def recurrent_state(self) -> tuple[int, ...]:
        return ()

    def units(self) -> int:
        return 0


Mixer = Attention | GatedDeltaNet | Mlp


@dataclass(frozen=True)
class Block:
    """One residual block; ``name`` is its place in node paths and weight names."""

    name: str
    mixer: Mixer
    pre_norm: Norm | None = None
    post_norm: Norm | None = None
    residual_scale: float = 1.0


@dataclass(frozen=True)
class HybridSpec:
    """A whole model. ``layers[i]`` is a tuple of blocks run one after the other."""

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[tuple[Block, ...], ...]
    final_norm: Norm
    max_position: int
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def mixers(self) -> list[tuple[int, Mixer]]:
        """Every mixer with the index of its layer, in order."""
        return [(i, b.mixer) for i, blocks in enumerate(self.layers) for b in blocks]

    def attention_layers(self) -> list[tuple[int, Attention]]:
        return [(i, m) for i, m in self.mixers() if isinstance(m, Attention)]

    def state_layers(self) -> list[tuple[int, Mixer]]:
        """Layers that carry a state from token to token, with their mixer."""
        return [(i, m) for i, m in self.mixers() if m.conv_state() or m.recurrent_state()]

    def weights(self) -> Shapes:
        """Shape of every weight by its canonical name (``layers.3.attn.q_proj``)."""
        hidden = self.hidden_size
        shapes: Shapes = {"embed": (self.vocab_size, hidden), "final_norm": (hidden,)}
        if not self.tie_embeddings:
            shapes["lm_head"] = (self.vocab_size, hidden)
        for i, blocks in enumerate(self.layers):
            for block in blocks:
                path = f"layers.{i}.{block.name}"
                for name, shape in block.mixer.weights(hidden).items():
                    shapes[f"{path}.{name}"] = shape
                if block.pre_norm:
                    shapes[f"{path}.pre_norm"] = (hidden,)
                if block.post_norm:
                    shapes[f"{path}.post_norm"] = (hidden,)
        return shapes

    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weights().values())

    def kv_bytes_per_token(self, bytes_per_value: int = 4) -> int:
        return bytes_per_value * sum(m.kv_per_token() for _, m in self.mixers())

    def state_bytes(self, bytes_per_value: int = 4) -> int:
        """Bytes of one sequence's state: conv inputs and recurrent states (always fp32)."""
        conv = sum(math.prod(m.conv_state()) for _, m in self.mixers() if m.conv_state())
        recurrent = sum(
            math.prod(m.recurrent_state()) for _, m in self.mixers() if m.recurrent_state()
        )
        return bytes_per_value * conv + 4 * recurrent

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_KINDS: dict[str, type] = {
    "attention": Attention,
    "gated_delta_net": GatedDeltaNet,
    "mlp": Mlp,
}


def from_json(data: dict[str, Any], where: str) -> HybridSpec:
    """Read back ``HybridSpec.to_json()``. Raises ConfigError on an unknown or missing key."""
    return typing.cast(HybridSpec, _build(HybridSpec, data, where))


def _build(cls: type, data: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            raise ConfigError(f"unknown key {key!r} (value {data[key]!r})", where=where)
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _value(hints[name], data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"key {name!r} is missing", where=where)
    return cls(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        options = [a for a in args if a is not type(None)]
        if isinstance(value, dict) and "kind" in value:
            return _build(_KINDS.get(value["kind"], options[0]), value, where)
        return _value(options[0], value, where)
    if origin is tuple:
        return tuple(_value(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    return value
