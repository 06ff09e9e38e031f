"""A hybrid model in PyTorch from its spec: what build/graph.py is as a graph.

It knows nothing of TensorRT-LLM; ``engine.py`` joins the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.nn import functional as F

from engine_configs.errors import CheckpointError, UnsupportedModelError
from engine_configs.spec import Block, Branch, HybridSpec

from .layers import MIXERS, Context, Select
from .step import Step, Storage


class HybridModel(torch.nn.Module):
    """Weights by their canonical names; vectors (norms, biases, decays) stay fp32.

    Raises UnsupportedModelError for a spec with a mixer that is not in ``MIXERS``.
    """

    def __init__(self, spec: HybridSpec, dtype: torch.dtype) -> None:
        super().__init__()
        require_supported(spec)
        self.spec, self.dtype = spec, dtype
        self.weights = torch.nn.ParameterDict()
        for name, shape in spec.weights().items():
            kind = dtype if matrix(name, shape) else torch.float32
            empty = torch.empty(shape, dtype=kind)
            self.weights[_key(name)] = torch.nn.Parameter(empty, requires_grad=False)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises CheckpointError for weights that are missing, unknown or of another shape."""
        missing = dict(self.spec.weights())
        for name, value in weights:
            if missing.pop(name, None) != tuple(value.shape):
                raise CheckpointError(f"{name} {tuple(value.shape)} is no weight of this model")
            self.weights[_key(name)].data.copy_(value)
        if missing:
            raise CheckpointError(f"{len(missing)} weights are missing: {', '.join(missing)}")

    def hidden(
        self, tokens: torch.Tensor, step: Step, storage: Storage, select: Select | None = None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Tokens [N] through all layers, normed; K/V and states change in place.

        Returns hidden [N, H] fp32 and, by layer with a state, its summed log-decay [B, units].
        """
        context = Context(_Names(self.weights), step, storage, select)
        x = F.embedding(tokens, self.weights[_key("embed")]).float() * self.spec.embedding_scale
        for i, blocks in enumerate(self.spec.layers):
            for block in blocks:
                x = _block(context, i, block, x)
        return context.rms_norm(x, "final_norm", self.spec.final_norm), context.decay_sums

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [R, H] → [R, V] fp32."""
        weight = self.weights[_key("embed" if self.spec.tie_embeddings else "lm_head")]
        logits = F.linear(hidden.to(weight.dtype), weight).float() * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return (logits / cap).tanh() * cap if cap else logits


def require_supported(spec: HybridSpec) -> None:
    """Raises UnsupportedModelError naming every mixer that PyTorch code is missing for."""
    missing = sorted({type(m).__name__ for _, m in spec.mixers() if type(m) not in MIXERS})
    if missing:
        raise UnsupportedModelError(
            f"no PyTorch form of {', '.join(missing)}",
            where=spec.model_type,
            fix="Use --target onnx, which has every mixer",
        )


# Projections that set decays, the recurrence's gates and routing: small, and errors compound.
_KEPT = ("a_proj", "b_proj", "a_a_proj", "a_b_proj", "router", "shared_gate", "conv")


def matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Is this weight a large factor of a matrix product, and so kept in 16 bits?"""
    return len(shape) > 1 and name.rsplit(".", 1)[-1] not in _KEPT


class _Names(Mapping[str, torch.Tensor]):
    """A ParameterDict's keys may hold no dots."""

    def __init__(self, weights: torch.nn.ParameterDict) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> torch.Tensor:
        weight: torch.Tensor = self._weights[_key(name)]
        return weight

    def __iter__(self) -> Iterable[str]:  # type: ignore[override]
        return (k.replace("/", ".") for k in self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _key(name: str) -> str:
    return name.replace(".", "/")


def _block(c: Context, i: int, block: Block, x: torch.Tensor) -> torch.Tensor:
    path = f"layers.{i}.{block.name}"

    def run(branch: Branch, into: torch.Tensor) -> torch.Tensor:
        mixer = MIXERS[type(branch.mixer)]
        return mixer(c, i, f"layers.{i}.{branch.name}", branch.mixer, into)

    source = x + run(block.ahead, x) if block.ahead else x
    normed = c.rms_norm(source, f"{path}.pre_norm", block.pre_norm) if block.pre_norm else source
    h = run(Branch(block.name, block.mixer), normed)
    for branch in block.beside:
        h = h + run(branch, normed)
    if block.post_norm:
        h = c.rms_norm(h, f"{path}.post_norm", block.post_norm)
    skip = normed if block.skip == "normed" else x
    return block.skip_scale * skip + block.residual_scale * h
