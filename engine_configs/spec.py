"""What a hybrid model *is*: one frozen dataclass tree, made by one family function per model type.

A model is a stack of layers; a layer is a row of residual blocks; a block runs one mixer (several
side by side for Falcon-H1) between an optional norm before and after:
``skip_scale * skip + residual_scale * post_norm(sum_m mixer_m(pre_norm(x)))``, skip = x or the
normed x.

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
from engine_configs.linear_mixers import (
    GatedDeltaNet,
    Lightning,
    Mamba1,
    Mamba2,
    RgLru,
    ShortConv,
)
from engine_configs.mixer import Norm, Shapes
from engine_configs.mixers import (
    Attention,
    AttentionMixer,
    LatentAttention,
    Mixer,
    Mlp,
    Moe,
    Rope,
    SharedTransformer,
)

__all__ = [
    "Attention",
    "Block",
    "Branch",
    "GatedDeltaNet",
    "HybridSpec",
    "LatentAttention",
    "Lightning",
    "Mamba1",
    "Mamba2",
    "Mixer",
    "Mlp",
    "Moe",
    "Norm",
    "RgLru",
    "Rope",
    "Shapes",
    "SharedTransformer",
    "ShortConv",
    "from_json",
]


@dataclass(frozen=True)
class Branch:
    """One mixer of a block; ``name`` is its place in node paths and weight names."""

    name: str
    mixer: Mixer


@dataclass(frozen=True)
class Block:
    """One residual block; ``beside``: further mixers that read the same input, outputs added;
    ``ahead``: a mixer whose output is added to the block's input, but not to its skip."""

    name: str
    mixer: Mixer
    pre_norm: Norm | None = None
    post_norm: Norm | None = None
    residual_scale: float = 1.0
    skip: Literal["input", "normed"] = "input"
    skip_scale: float = 1.0
    beside: tuple[Branch, ...] = ()
    ahead: Branch | None = None

    def branches(self) -> tuple[Branch, ...]:
        """Every mixer of the block, in the order they run."""
        return (*((self.ahead,) if self.ahead else ()), Branch(self.name, self.mixer), *self.beside)


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
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def mixers(self) -> list[tuple[int, Mixer]]:
        """Every mixer with the index of its layer, in order."""
        rows = ((i, block) for i, blocks in enumerate(self.layers) for block in blocks)
        return [(i, branch.mixer) for i, block in rows for branch in block.branches()]

    def attention_layers(self) -> list[tuple[int, AttentionMixer]]:
        """Layers that keep K/V rows, with their mixer."""
        return [(i, m) for i, m in self.mixers() if isinstance(m, AttentionMixer)]

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
                for branch in block.branches():
                    for name, shape in branch.mixer.weights(hidden).items():
                        shapes[f"layers.{i}.{branch.name}.{name}"] = shape
                path = f"layers.{i}.{block.name}"
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


_KINDS: dict[str, type] = {m.kind: m for m in typing.get_args(Mixer)}


def from_json(data: dict[str, Any], where: str) -> HybridSpec:
    """Read back ``HybridSpec.to_json()``. Raises ConfigError on an unknown or missing key."""
    return typing.cast(HybridSpec, build_dataclass(HybridSpec, data, where))


def build_dataclass(cls: type, data: dict[str, Any], where: str) -> Any:
    """A frozen dataclass tree from JSON. Raises ConfigError on an unknown or missing key."""
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
            return build_dataclass(_KINDS.get(value["kind"], options[0]), value, where)
        return _value(options[0], value, where)
    if origin is tuple:
        return tuple(_value(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return build_dataclass(typing.cast(type, hint), value, where)
    return value
