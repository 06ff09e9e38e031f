"""What transformers computes: plain logits, and logits after a tail replay.

In the replay the queries of the last r tokens read the exact cached K/V, their own new K/V are
ignored, and every linear state starts from zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache

# In transformers these go on from their states one token at a time only.
SINGLE_STEPS = ("jamba", "recurrent_gemma")
Ids = NDArray[np.int64]
Logits = NDArray[np.float32]


def logits(model: Any, ids: Ids, start: int = 0, cache: Any = None) -> Logits:
    """[T, V] of ids [T] at positions ``start``.., continuing ``cache`` where given."""
    # Given in full: not every model counts what its cache holds.
    positions = torch.arange(start, start + len(ids))[None]
    tokens = torch.from_numpy(ids)[None]
    with torch.no_grad():
        out = model(tokens, position_ids=positions, cache=cache, use_cache=cache is not None)
    return np.asarray(out.logits[0].numpy())


def replayed_logits(model: Any, ids: Ids, hit_len: int, replayed: int) -> Logits:
    """Logits [len(ids) - hit_len, V] after a hit of ``hit_len`` and a replay of its tail."""
    full = new_cache(model)
    logits(model, ids[:hit_len], cache=full)
    tail = _forgotten(model, full)
    start = hit_len - replayed
    for i, layer in enumerate(tail.layers):
        source = full.layers[i] if i < len(full.layers) else None
        if getattr(source, "keys", None) is not None:
            _hold(layer, source, start)
    logits(model, ids[start:hit_len], start, tail)
    for layer in tail.layers:
        layer.__dict__.pop("update", None)
        layer.__dict__.pop("get_seq_length", None)
    if model.config.model_type not in SINGLE_STEPS:
        return logits(model, ids[hit_len:], hit_len, tail)
    singles = (logits(model, ids[p : p + 1], p, tail) for p in range(hit_len, len(ids)))
    return np.concatenate(list(singles))


def new_cache(model: Any) -> Any:
    if model.config.model_type == "minimax":
        return MiniMaxCache()
    if hasattr(model, "_setup_cache"):  # RecurrentGemma: states live in the modules
        model._setup_cache(model.config, 1, "cpu", torch.float32)
    cache = DynamicCache(config=model.config)
    # Layers that see a window drop what is before it; a replay needs it.
    windowed = (DynamicSlidingWindowLayer,)
    cache.layers = [_WholeLayer() if isinstance(x, windowed) else x for x in cache.layers]
    return cache


class _WholeLayer(DynamicLayer):
    """Keeps all keys and values of a layer whose queries see a window of them."""

    is_sliding = True


def _forgotten(model: Any, full: Any) -> Any:
    """A cache like ``full`` whose linear states are zero."""
    cache = new_cache(model)
    if isinstance(cache, MiniMaxCache):  # it makes layers as it fills, states in a list beside
        cache.layers = [DynamicLayer() for _ in full.layers]
        cache.linear_cache = [0 * s if len(s) else [] for s in full.linear_cache]
        cache.linear_cache += [[]] * (len(full.layers) - len(full.linear_cache))
    return cache


def _hold(layer: Any, source: Any, start: int) -> None:
    """Let ``layer`` answer with all of ``source``'s K/V to queries that follow ``start``."""
    layer.keys, layer.values = source.keys.clone(), source.values.clone()
    layer.device, layer.dtype = source.keys.device, source.keys.dtype
    layer.is_initialized = True
    layer.get_seq_length = lambda: start
    layer.update = lambda *_, **__: (layer.keys, layer.values)
