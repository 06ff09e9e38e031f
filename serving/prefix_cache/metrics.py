"""What an operator sees of the cache: ``PrefixCache.stats()`` as counters and gauges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from serving.prefix_cache.contract import MissReason

_GAUGES = {
    "blocks_exact": {"pool": "blocks", "state": "exact"},
    "blocks_derived": {"pool": "blocks", "state": "derived"},
    "blocks_free": {"pool": "blocks", "state": "free"},
    "blocks_pinned": {"pool": "blocks", "state": "pinned"},
    "states_used": {"pool": "states", "state": "used"},
    "states_free": {"pool": "states", "state": "free"},
    "checkpoints_used": {"pool": "checkpoints", "state": "used"},
    "checkpoints_free": {"pool": "checkpoints", "state": "free"},
}
_LEASES = ("leases_read", "leases_write")
_COUNTERS = {
    "tokens_asked": ("hybrid_cache_tokens_asked_total", "Prompt tokens looked up"),
    "tokens_matched": ("hybrid_cache_tokens_matched_total", "Prompt tokens found"),
    "evicted_blocks": ("hybrid_cache_evicted_blocks_total", "Blocks evicted"),
    "evicted_states": ("hybrid_cache_evicted_states_total", "States evicted"),
    "corrupt_blocks": ("hybrid_cache_corrupt_blocks_total", "Blocks found stale or damaged"),
    "corrupt_states": ("hybrid_cache_corrupt_states_total", "States found stale or damaged"),
    "evicted_checkpoints": ("hybrid_cache_evicted_checkpoints_total", "Checkpoints evicted"),
    "corrupt_checkpoints": (
        "hybrid_cache_corrupt_checkpoints_total",
        "Checkpoints found stale or damaged",
    ),
    "leases_expired": ("hybrid_cache_leases_expired_total", "Leases of clients gone silent"),
}


class Registry(Protocol):
    """Where metrics are made: Triton's, in production."""

    def counter(self, name: str, description: str, labels: list[dict[str, str]]) -> list[Any]: ...

    def gauge(self, name: str, description: str, labels: list[dict[str, str]]) -> list[Any]: ...


class CacheMetrics:
    """Pushes stats into a registry; counters move by what changed since the last push."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry  # its families must outlive their metrics
        slots = registry.gauge(
            "hybrid_cache_slots", "Arena slots by what they hold", list(_GAUGES.values())
        )
        self._gauges = dict(zip(_GAUGES, slots, strict=True))
        leases = registry.gauge(
            "hybrid_cache_leases", "Leases held", [{"kind": n[7:]} for n in _LEASES]
        )
        self._gauges |= dict(zip(_LEASES, leases, strict=True))
        self._counters = {
            key: registry.counter(name, text, [{}])[0] for key, (name, text) in _COUNTERS.items()
        }
        misses = registry.counter(
            "hybrid_cache_lookups_total",
            "Lookups by the reason the hit ended where it did",
            [{"miss_reason": str(r)} for r in MissReason],
        )
        self._counters |= {f"miss_{r}": m for r, m in zip(MissReason, misses, strict=True)}
        self._last: dict[str, int] = {}

    def update(self, stats: Mapping[str, int]) -> None:
        used = stats["blocks_total"] - stats["blocks_free"] - stats["blocks_derived"]
        values = dict(stats)
        values["blocks_exact"] = used - stats["blocks_reserved"] - stats["blocks_retired"]
        for kind in ("states", "checkpoints"):
            values[f"{kind}_used"] = stats[f"{kind}_total"] - stats[f"{kind}_free"]
        for key, gauge in self._gauges.items():
            gauge.set(values[key])
        for key, counter in self._counters.items():
            grown = values[key] - self._last.get(key, 0)
            if grown:
                counter.increment(grown)
            self._last[key] = values[key]
