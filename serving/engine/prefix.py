"""The engine's side of the prefix cache: a slot's rows in and out of the shared arena.

Whatever goes wrong in the cache is a miss for the engine, never a wrong answer and never an
error of the request.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serving.engine.bundle import Bundle
from serving.engine.host_copy import HostCopy
from serving.engine.requests import Request
from serving.engine.slots import Slots
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
    ReplaySource,
    Reservation,
)
from serving.prefix_cache.planner import CostModel, replay_plans
from serving.replay.checkpoint import CheckpointCodec
from serving.replay.gate import Estimator
from serving.replay.policy import policy_of

if TYPE_CHECKING:
    from serving.engine.path import Sequence

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
        checkpoint_positions: tuple[int, ...] = (),
    ) -> Reservation: ...

    def publish(self, lease: int) -> int: ...

    def abort(self, lease: int) -> bool: ...

    def release(self, lease: int) -> bool: ...

    def renew(self, lease: int) -> bool: ...

    def report_corrupt(
        self,
        lease: int,
        *,
        block: int | None = None,
        state: int | None = None,
        checkpoint: int | None = None,
    ) -> object: ...


def arena_layout(bundle: Bundle, block_size: int) -> ArenaLayout:
    """Blocks hold the attention layers' K and V, states what the linear layers carry,
    checkpoints what calibration found worth keeping of it."""
    spec = bundle.spec
    kv = [(m.num_kv_heads, m.head_dim, m.value_dim) for _, m in spec.attention_layers()]
    states = tuple(
        ArraySpec(f"{name}.{i}", shape)
        for i, m in spec.state_layers()
        for name, shape in (("conv", m.conv_state()), ("recurrent", m.recurrent_state()))
        if shape
    )
    if bundle.manifest["dtype"] in ("bf16", "fp16"):  # blocks are the device's pages, bit by bit
        kv = [(heads, dim, dim) for heads, dim, _ in kv]
        dtype = {"bf16": "uint16", "fp16": "float16"}[bundle.manifest["dtype"]]
        layout = ArenaLayout.of_model(block_size, kv, states, dtype=dtype)
    else:
        layout = ArenaLayout.of_model(block_size, kv, states)
    if not bundle.calibration.interval:
        return layout
    records = CheckpointCodec.of(spec, bundle.calibration).layout()
    return replace(layout, checkpoint=tuple(records))


def make_cache(bundle: Bundle, config: CacheConfig) -> PrefixCache:
    """A cache and its arena. Raises ConfigError when the arena cannot be made."""
    config = replace(config, checkpoint_interval=bundle.calibration.interval)
    return PrefixCache(config, Arena.of_config(config, arena_layout(bundle, config.block_size)))


@dataclass(frozen=True)
class Hit:
    """A match, pinned until it is released, and the plans for it, cheapest first."""

    match: Match
    plans: list[ReplayPlan]


# What a plan's start needed beside the K/V: the norms ‖S_u‖ of a checkpoint, by layer.
Norms = dict[int, NDArray[np.float32]]


class Prefixes:
    """Finds, loads and keeps prefixes for one bundle; ``cost``: of running tokens on it."""

    def __init__(self, bundle: Bundle, index: CacheIndex, cost: CostModel = CostModel()) -> None:
        self._index, self._digest = index, bundle.digest
        self._attention = bundle.spec.attention_layers()
        self.failures = 0
        self._host: HostCopy | None = None
        calibration = self.calibration = bundle.calibration
        self.interval = calibration.interval
        self._codec = CheckpointCodec.of(bundle.spec, calibration)
        self._estimator = Estimator(calibration)
        self._policy = policy_of(calibration, cost)

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
        return Hit(match, replay_plans(request.replay, match, self._policy))

    @property
    def block_size(self) -> int:
        return int(self._index.arena.layout.block_size)

    def load_kv(self, hit: Hit, slots: Slots, row: int) -> bool:
        """Copy the hit's K/V into the slot; False (a miss) when any of it is stale."""
        match, arena = hit.match, self._index.arena
        length = max(plan.hit_len for plan in hit.plans)
        block_size = arena.layout.block_size
        blocks = -(-length // block_size)
        ids, generations = match.blocks[:blocks], match.generations[:blocks]
        try:
            good = slots.load(row, arena, ids, generations, length)
            if good == length:
                return True
            self._index.report_corrupt(match.lease, block=good // block_size)
        except Exception:
            self._failed("load")
        return False

    def pin(self, request: Request) -> Match | None:
        """The prompt's blocks, whatever made them, pinned until ``unpin``."""
        try:
            return self._index.match(self.key(request), request.tokens, exact_only=False)
        except Exception:
            self._failed("match")
            return None

    def renew(self, match: Match) -> None:
        """Keep it pinned; to be called more often than leases run out."""
        try:
            self._index.renew(match.lease)
        except Exception:
            self._failed("renew")

    def host_copy(self) -> HostCopy:
        """What is pinned, as it lies in the arena of now."""
        arena = self._index.arena
        if self._host is None or self._host.arena is not arena:
            self._host = HostCopy(arena, [i for i, _ in self._attention])
        return self._host

    def unpin(self, match: Match) -> None:
        try:
            self._index.release(match.lease)
        except Exception:
            self._failed("release")

    def read_blocks(self, match: Match, blocks: Tokens) -> list[NDArray[np.float32]] | None:
        """K [Hk, n, dk], V [Hk, n, dv], K, ... of the pinned prompt's ``blocks`` (by number), one
        after the other; None where any is stale."""
        arena = self._index.arena
        length = len(blocks) * arena.layout.block_size
        shapes = [(m.num_kv_heads, length, d) for _, m in self._attention
                  for d in (m.head_dim, m.value_dim)]  # fmt: skip
        arrays = [np.empty(shape, np.float32) for shape in shapes]
        try:
            ids, generations = match.blocks[blocks], match.generations[blocks]
            return arrays if arena.read_blocks(ids, generations, length, arrays) == length else None
        except Exception:
            self._failed("load")
            return None

    def load_state(self, hit: Hit, plan: ReplayPlan, slots: Slots, row: int) -> Norms | None:
        """Set the slot's state up as planned; None when what it needs is stale."""
        slots.zero_states(row)
        if plan.state is None:
            return {}
        states = {name: array[row] for name, array in slots.states.items()}
        slot, generation, arena = plan.state.slot, plan.state.generation, self._index.arena
        try:
            if plan.source is ReplaySource.STATE:
                if arena.read_state(slot, generation, list(states.values())):
                    return {}
                self._index.report_corrupt(hit.match.lease, state=slot)
                return None
            record = [np.empty(a.shape, a.dtype) for a in arena.layout.checkpoint]
            if arena.read_checkpoint(slot, generation, record):
                self._codec.decode(record, states)
                return self._codec.norms(record)
            self._index.report_corrupt(hit.match.lease, checkpoint=slot)
        except Exception:
            self._failed("load")
        return None

    def replay_error(self, plan: ReplayPlan, decay_sums: dict[str, Any], norms: Norms) -> float:
        """The calibrated error of a replay that has run, its context's included; infinite
        where it is not known.

        decay_sums [units] by graph output name; norms: of the checkpoint it started from.
        """
        if not self.calibration.known:
            return math.inf
        split = plan.source is ReplaySource.SPLIT
        sums = {int(name.rsplit("_", 1)[1]): value for name, value in decay_sums.items()}
        estimate = self._estimator.estimate(sums, norms or None, split=split)
        gate = self.calibration.split if split else self.calibration.zero
        return plan.error - plan.expected + gate.bound(estimate)

    def encode(self, states: dict[str, NDArray[np.float32]]) -> list[NDArray[Any]]:
        """A checkpoint record of one sequence's states."""
        return self._codec.encode(states)

    def release(self, hit: Hit) -> None:
        self.unpin(hit.match)

    def keep(self, request: Request, tokens: Tokens, seq: Sequence) -> None:
        """Store the K/V rows of ``tokens`` [n], the state after them, and what ``seq`` kept on
        the way: full states and checkpoint records by position."""
        if len(tokens) == 0:
            return
        row, slots = seq.row, seq.slots
        states = {p: arrays for p, arrays in seq.states.items() if arrays and p < len(tokens)}
        states[len(tokens)] = [array[row] for array in slots.states.values()]
        try:
            reserved = self._index.reserve(
                self.key(request),
                tokens,
                provenance=seq.provenance,
                state_positions=tuple(sorted(states)),
                checkpoint_positions=tuple(sorted(seq.checkpoints)),
            )
        except Exception:
            self._failed("reserve")
            return
        arena = self._index.arena
        try:
            if reserved.end > reserved.start:
                ids, generations = reserved.blocks, reserved.generations
                slots.store(row, arena, ids, generations, reserved.start, reserved.end)
            for ref in reserved.states:
                arena.write_state(ref.slot, ref.generation, states[ref.position])
            for ref in reserved.checkpoints:
                record = seq.checkpoints[ref.position]
                arena.write_checkpoint(ref.slot, ref.generation, record)
            self._index.publish(reserved.lease)
        except Exception:
            self._failed("store")
            self._abort(reserved)

    def _abort(self, reservation: Reservation) -> None:
        try:
            self._index.abort(reservation.lease)
        except Exception:
            self._failed("abort")

    def _failed(self, what: str) -> None:
        self.failures += 1
        log.warning("prefix cache: %s failed; going on without it", what, exc_info=True)
