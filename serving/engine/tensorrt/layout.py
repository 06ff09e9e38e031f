"""What an engine of ours takes: sizes, dtypes and names, from the bundle's manifest."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from engine_configs.errors import BundleError
from engine_configs.spec import HybridSpec
from serving.engine.bundle import Bundle
from serving.engine.profiles import Profile

# numpy has no bfloat16: its bits travel as integers.
HALF: dict[str, Any] = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32}


@dataclass(frozen=True)
class State:
    """One state of a row, by the name of its graph input; in_place: the engine updates it where
    it lies, else it writes the new one elsewhere."""

    name: str
    shape: tuple[int, ...]
    in_place: bool

    @property
    def nbytes(self) -> int:
        return 4 * prod(self.shape)


@dataclass(frozen=True)
class Pool:
    """The pages of one layer's K or V: [P, R, Hk, d]; ``shape``: of a page."""

    name: str
    layer: int
    shape: tuple[int, int, int]


@dataclass(frozen=True)
class EngineLayout:
    spec: HybridSpec
    dtype: Any
    block_tokens: int
    states: tuple[State, ...]
    pools: tuple[Pool, ...]
    profiles: tuple[Profile, ...]

    @classmethod
    def of(cls, bundle: Bundle) -> EngineLayout:
        """Raises BundleError where the bundle is none of this target."""
        try:
            engine = bundle.manifest["engine"]
            profiles = tuple(
                Profile(p["name"], *(tuple(p[k]) for k in ("batch", "tokens", "logits")))
                for p in engine["profiles"]
            )
            rows, in_place = int(engine["block_tokens"]), set(engine["in_place"])
            dtype = HALF[bundle.manifest["dtype"]]
        except (KeyError, TypeError, ValueError) as e:
            raise BundleError(
                f"not made for TensorRT: {e!r}",
                where=str(bundle.manifest_file),
                fix="Convert with --target tensorrt",
            ) from None
        states = [
            State(f"{kind}_state_{i}", shape, f"{kind}_state_{i}" in in_place)
            for i, m in bundle.spec.state_layers()
            for kind, shape in (("conv", m.conv_state()), ("recurrent", m.recurrent_state()))
            if shape
        ]
        pools = [
            Pool(f"{kind}_pool_{i}", i, (rows, m.num_kv_heads, m.head_dim))
            for i, m in bundle.spec.attention_layers()
            for kind in ("key", "value")
        ]
        return cls(bundle.spec, dtype, rows, tuple(states), tuple(pools), profiles)

    def page_bytes(self, pool: Pool) -> int:
        return prod(pool.shape) * int(np.dtype(self.dtype).itemsize)

    def profile(self, batch: int, tokens: int, logits: int, append: bool) -> int:
        """The number of the last profile that fits, which is the narrowest; replays have their
        own."""
        for i, p in reversed(list(enumerate(self.profiles))):
            if p.holds(batch, tokens, logits) and (p.name != "replay" or not append):
                return i
        raise BundleError(
            f"no profile of the engine holds B = {batch}, T = {tokens}, N = {logits}",
            where="engine",
            fix="; ".join(f"{p.name}: {p.text()}" for p in self.profiles),
        )
