"""The prefix cache: hits of any length, exact and derived variants, one shared arena.

Metadata lives in one process (``PrefixCache``), bulk data in one memory-mapped file
(``Arena``) that other processes open by path. One request:

    match = cache.match(key, prompt, exact_only=...)      # pins
    plan = plan_replay(request, match)                    # pure
    good = arena.read_blocks(match.blocks, match.generations, plan.hit_len, kv)
    if good < plan.hit_len: cache.report_corrupt(match.lease, block=good // block_size) -> miss
    arena.read_state(plan.state.slot, plan.state.generation, states)       # plan.state, if any
    ... replay, compute ...
    res = cache.reserve(
        key, tokens, provenance=plan.provenance, state_positions=(match.hit_len, n - 1, end),
        checkpoint_positions=range(interval, end + 1, interval)
    )
    arena.write_blocks(res.blocks, res.generations, res.start, res.end, kv)
    arena.write_state(ref.slot, ref.generation, states)   # for ref in res.states
    arena.write_checkpoint(ref.slot, ref.generation, arrays)    # for ref in res.checkpoints
    cache.publish(res.lease)                              # or abort(res.lease)
    cache.release(match.lease)

A state at ``match.hit_len``, where the prompt left a cached one, is worth its slot: the next
prompt that branches there finds an exact state (on the workload of ``perf.cache`` exact hits
rise from .68 to .75 of all tokens).
A checkpoint holds the slow units' state and the conv state only: small enough to be kept every
``CacheConfig.checkpoint_interval`` tokens, so that a hit of any length has one shortly before
its end. It lives and dies with the K/V path it sits on, as a full state does.
``kv`` lists one array [H, C, d] for each array of ``ArenaLayout.block``, rows = tokens from 0.

PrefixCache(config, arena, clock=time.monotonic)
    match(key, tokens [n] int32, *, exact_only) -> Match
    reserve(key, tokens [n] int32, *, provenance, state_positions=(), checkpoint_positions=())
        -> Reservation
    publish(lease) -> int          tokens newly visible; 0 if the lease is gone
    abort(lease) / release(lease) -> bool    False if the lease is gone (harmless)
    renew(lease) -> bool           keep a slow client's lease alive
    report_corrupt(lease, *, block=None, state=None, checkpoint=None)
                                   counts it, drops it from the index
    expire(now=None) -> int        leases of dead clients return; match and reserve do it, too
    evict(blocks) -> int           blocks given back, least recently used leaves first
    stats() -> dict[str, int]      check() -> None (AssertionError on a broken invariant)
"""

from serving.prefix_cache.arena import Arena, ArenaLayout, ArraySpec
from serving.prefix_cache.contract import (
    EXACT,
    CacheConfig,
    CacheKey,
    Match,
    MissReason,
    Provenance,
    Reservation,
    StateRef,
)
from serving.prefix_cache.index import PrefixCache
from serving.prefix_cache.planner import (
    ReplayMode,
    ReplayPlan,
    ReplayRequest,
    ReplaySource,
    plan_replay,
)

__all__ = [
    "EXACT",
    "Arena",
    "ArenaLayout",
    "ArraySpec",
    "CacheConfig",
    "CacheKey",
    "Match",
    "MissReason",
    "PrefixCache",
    "Provenance",
    "ReplayMode",
    "ReplayPlan",
    "ReplayRequest",
    "ReplaySource",
    "Reservation",
    "StateRef",
    "plan_replay",
]
