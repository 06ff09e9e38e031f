"""The engine's side of the prefix cache: a slot's rows in and out of the shared arena.

Whatever goes wrong in the cache is a miss for the engine, never a wrong answer and never an
error of the request.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_configs.spec import HybridSpec
from serving.engine.requests import Request
from serving.engine.slots import SlotClass
from serving.prefix_cache import (
    Arena,
    ArenaLayout,
    ArraySpec,
    CacheConfig,
    CacheKey,
    Match,
    PrefixCache,
    Provenance,
    ReplayMode,
    ReplayPlan,
    Reservation,
    plan_replay,
)

log = logging.getLogger(__name__)
LAYOUT = "fp32.v1"
Tokens = NDArray[np.int32]


class CacheIndex(Protocol):
    """The calls of ``PrefixCache`` the engine makes, in process or over an RPC."""

    @property
    def arena(self) -> Arena: ...

    def match(self, key: CacheKey, tokens: Tokens, *, exact_only: bool) -> Match: ...

    def reserve(
        self,
        key: CacheKey,
        tokens: Tokens,
        *,
        provenance: Provenance,
        state_positions: tuple[int, ...] = (),
    ) -> Reservation: ...

    def publish(self, lease: int) -> int: ...

    def abort(self, lease: int) -> bool: ...

    def release(self, lease: int) -> bool: ...

    def report_corrupt(
        self, lease: int, *, block: int | None = None, state: int | None = None
    ) -> object: ...


def arena_layout(spec: HybridSpec, block_size: int) -> ArenaLayout:
    """Blocks hold the attention layers' K and V, states what the linear layers carry."""
    kv = [(m.num_kv_heads, m.head_dim, m.value_dim) for _, m in spec.attention_layers()]
    states = [
        ArraySpec(f"{name}.{i}", shape)
        for i, m in spec.state_layers()
        for name, shape in (("conv", m.conv_state()), ("recurrent", m.recurrent_state()))
        if shape
    ]
    return ArenaLayout.of_model(block_size, kv, states)


def make_cache(spec: HybridSpec, config: CacheConfig) -> PrefixCache:
    """A cache and its arena. Raises ConfigError when the arena cannot be made."""
    return PrefixCache(config, Arena.of_config(config, arena_layout(spec, config.block_size)))


@dataclass
class Hit:
    """A match, what was planned from it, and whether it still is pinned."""

    match: Match
    plan: ReplayPlan


class Prefixes:
    """Finds, loads and keeps prefixes for one model."""

    def __init__(self, digest: str, index: CacheIndex) -> None:
        self._index, self._digest = index, digest
        self.failures = 0

    def key(self, request: Request) -> CacheKey:
        return CacheKey(model=self._digest, layout=LAYOUT, salt=request.cache_salt)

    def find(self, request: Request) -> Hit | None:
        """Match and plan; the match stays pinned until ``release``."""
        exact = request.replay.mode is ReplayMode.EXACT
        try:
            match = self._index.match(self.key(request), request.tokens, exact_only=exact)
        except Exception:
            self._failed("match")
            return None
        return Hit(match, plan_replay(request.replay, match))

    def load(self, hit: Hit, slots: SlotClass, row: int) -> bool:
        """Copy the hit's K/V and state into the slot; False (a miss) when any of it is stale."""
        match, plan, arena = hit.match, hit.plan, self._index.arena
        kv = slots.kv_rows(row)
        block_size = arena.layout.block_size
        blocks = -(-plan.hit_len // block_size)
        ids, generations = match.blocks[:blocks], match.generations[:blocks]
        try:
            good = arena.read_blocks(ids, generations, plan.hit_len, kv)
            slots.hold(row, np.array([plan.hit_len]))
            if good < plan.hit_len:
                self._index.report_corrupt(match.lease, block=good // block_size)
                return False
            if plan.state is None:
                return True
            states = [array[row] for array in slots.states.values()]
            if arena.read_state(plan.state.slot, plan.state.generation, states):
                return True
            self._index.report_corrupt(match.lease, state=plan.state.slot)
        except Exception:
            self._failed("load")
        return False

    def release(self, hit: Hit) -> None:
        try:
            self._index.release(hit.match.lease)
        except Exception:
            self._failed("release")

    def keep(
        self,
        request: Request,
        tokens: Tokens,
        provenance: Provenance,
        slots: SlotClass,
        row: int,
    ) -> None:
        """Store the slot's K/V rows of ``tokens`` [n] and its state after them."""
        if len(tokens) == 0:
            return
        try:
            lease = self._index.reserve(
                self.key(request), tokens, provenance=provenance, state_positions=(len(tokens),)
            )
        except Exception:
            self._failed("reserve")
            return
        try:
            kv = slots.kv_rows(row)
            if lease.end > lease.start:
                self._index.arena.write_blocks(
                    lease.blocks, lease.generations, lease.start, lease.end, kv
                )
            for state in lease.states:
                arrays = [array[row] for array in slots.states.values()]
                self._index.arena.write_state(state.slot, state.generation, arrays)
            self._index.publish(lease.lease)
        except Exception:
            self._failed("store")
            self._abort(lease)

    def _abort(self, reservation: Reservation) -> None:
        try:
            self._index.abort(reservation.lease)
        except Exception:
            self._failed("abort")

    def _failed(self, what: str) -> None:
        self.failures += 1
        log.warning("prefix cache: %s failed; going on without it", what, exc_info=True)
