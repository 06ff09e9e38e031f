"""``Mamba2Metadata`` takes "K/V is cached" for "there is a linear state": here the two part.

Its ``prepare`` sets has_initial_states = num_cached_tokens_per_seq > 0. With tail replay a chunk
may have cached K/V and start from zeros; only the cache manager knows. The hook lets TensorRT-LLM
prepare, then corrects the flags of the batch's context requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def with_replay(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """``Mamba2Metadata.prepare`` that asks the manager which requests have a state."""

    @wraps(prepare)
    def prepared(self: Any, attn_metadata: Any) -> Any:
        result = prepare(self, attn_metadata)
        manager = attn_metadata.kv_cache_manager
        if hasattr(manager, "has_linear_state") and attn_metadata.num_contexts:
            ids = attn_metadata.request_ids[: attn_metadata.num_contexts]
            correct_flags(self, [manager.has_linear_state(i) for i in ids])
        return result

    return prepared


def correct_flags(metadata: Any, has_state: list[bool]) -> None:
    """Set the flags of the first requests, and what is derived from them."""
    names = ("has_initial_states_cpu", "has_initial_states")
    for flags in (getattr(metadata, n) for n in names if hasattr(metadata, n)):
        for i, flag in enumerate(has_state):
            flags[i] = flag
    metadata.use_initial_states = any(has_state)
    if hasattr(metadata, "prefill_needs_state_reset"):  # newer versions reset slots by it
        metadata.prefill_needs_state_reset = not all(has_state)
