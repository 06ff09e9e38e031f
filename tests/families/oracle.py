"""What transformers computes: plain logits, and logits after a tail replay.

In the replay the queries of the last r tokens read the exact cached K/V, their own new K/V are
ignored, and every linear state starts from zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache

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
    return logits(model, ids[hit_len:], hit_len, tail)


def new_cache(model: Any) -> Any:
    return (
        MiniMaxCache()
        if model.config.model_type == "minimax"
        else DynamicCache(config=model.config)
    )


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
