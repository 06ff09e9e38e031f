"""``PrefixCache``: what is cached, for whom, where; see the package docstring for its use.

One process, one thread. Calls never wait and never touch bulk data: they hand out slots of the
arena and check its generation words. A caller that dies loses its lease, not the cache.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import CacheError
from serving.prefix_cache.arena import Arena
from serving.prefix_cache.audit import audit
from serving.prefix_cache.contract import (
    EXACT,
    CacheConfig,
    CacheKey,
    Ids,
    Match,
    MissReason,
    Provenance,
    Reservation,
    StateRef,
)
from serving.prefix_cache.pool import Pool
from serving.prefix_cache.states import StateStore
from serving.prefix_cache.tree import NO_BLOCKS, Node, RadixTree, StateRecord

SPARE_SHARE = 256
CHECKPOINTS_OFFERED = 4  # a replay may have to start further back than from the deepest


@dataclass(slots=True)
class Draft:
    """What a writer may publish: ``text`` up to its ``end``, blocks from ``start`` on."""

    namespace: bytes
    text: bytes
    start: int
    end: int
    provenance: Provenance
    granted: dict[StateStore, tuple[StateRef, ...]]


@dataclass(slots=True)
class Lease:
    """A reader's pins, or (with a draft) a writer's slots."""

    node: Node | None
    blocks: Ids
    records: list[StateRecord] = field(default_factory=list)
    draft: Draft | None = None


class PrefixCache:
    """Metadata of one arena. ``clock``: seconds, for leases."""

    def __init__(
        self, config: CacheConfig, arena: Arena, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config, self.arena, self.clock = config, arena, clock
        self.block_size = arena.layout.block_size
        self.blocks = Pool(arena.blocks.words)
        self.states = StateStore("state", arena.states, 1)
        self.checkpoints = StateStore("checkpoint", arena.checkpoints, CHECKPOINTS_OFFERED)
        self.stores = (self.states, self.checkpoints)
        self.tree = RadixTree(self.blocks, self.block_size, config.ghosts)
        self.chains = np.zeros(self.blocks.size, np.int16)  # of what each block holds
        self.leases: dict[int, Lease] = {}  # in order of their ids
        self.deadlines: OrderedDict[int, float] = OrderedDict()  # of each lease, earliest first
        self._next_lease = 1
        self._users: dict[bytes, bytes] = {}  # key without salt -> namespace published last
        self._counts: Counter[str] = Counter()
        self._misses: Counter[MissReason] = Counter()

    # -- reading ------------------------------------------------------------------------

    def match(self, key: CacheKey, tokens: NDArray[np.int32], *, exact_only: bool) -> Match:
        """The longest cached prefix of ``tokens`` [n] that leaves its last token to compute.

        Pins what it returns until ``release(match.lease)``, also when nothing was found.
        """
        self.expire()
        namespace, body = key.namespace, _text(tokens[:-1])
        max_chain = 0 if exact_only else self.config.max_chain
        path, hit_len, blocker = self.tree.walk(namespace, body, max_chain)
        self.tree.touch(path)
        exact_len = hit_len
        if path and not path[-1].provenance.exact:
            exact_len = next(n.start for n in path if not n.provenance.exact)
        blocks = self.tree.gather(path, hit_len)
        states, checkpoints = (s.deepest(path, hit_len, max_chain) for s in self.stores)
        reason = self._why(key, body, path, hit_len, blocker)
        match = Match(
            lease=self._lease(path, blocks, states + checkpoints),
            prompt_len=len(tokens),
            hit_len=hit_len,
            exact_hit_len=exact_len,
            blocks=blocks,
            generations=self.blocks.issued[blocks],
            provenance=path[-1].provenance if path else EXACT,
            states=tuple([record.ref for record in states]),
            miss_reason=reason,
            diverged_at=hit_len if reason is MissReason.DIVERGED else -1,
            checkpoints=tuple([record.ref for record in checkpoints]),
        )
        self._counts["matches"] += 1
        self._counts["tokens_asked"] += len(tokens)
        self._counts["tokens_matched"] += hit_len
        self._misses[reason] += 1
        return match

    def _why(
        self, key: CacheKey, body: bytes, path: list[Node], at: int, blocker: Node | None
    ) -> MissReason:
        if 4 * at == len(body):
            return MissReason.NONE
        if blocker is not None:
            return MissReason.DERIVED_ONLY
        if self.tree.was_evicted(key.namespace, path, at, body[4 * at : 4 * at + 4]):
            return MissReason.EVICTED
        if path:
            goes_on = at < path[-1].end or path[-1].children
            return MissReason.DIVERGED if goes_on else MissReason.COLD
        user = self._users.get(key.unsalted, key.namespace)
        known = key.namespace in self.tree.roots or user == key.namespace
        return MissReason.COLD if known else MissReason.SALT

    def report_corrupt(
        self, lease: int, *, block: int | None = None, state: int | None = None,
        checkpoint: int | None = None,
    ) -> None:  # fmt: skip
        """A reader found block number ``block`` of its match, or what slot ``state`` or slot
        ``checkpoint`` holds, stale or damaged. It is counted, and nobody is offered it again."""
        held = self.leases.get(lease)
        if held is None:
            return
        for store, slot in zip(self.stores, (state, checkpoint), strict=True):
            bad = [r for r in held.records if r.store is store and r.ref.slot == slot]
            store.counts["corrupt"] += len(bad)
            store.lose(bad)
        if block is not None and 0 <= block < len(held.blocks):
            self._counts["corrupt_blocks"] += 1
            self._drop_block(held, block)

    def _drop_block(self, held: Lease, block: int) -> None:
        """From the topmost node on the lease's path that still uses the block."""
        node, top = held.node, None
        while node is not None and node.parent is not None:
            at = block - node.start // self.block_size
            if 0 <= at < len(node.blocks) and node.blocks[at] == held.blocks[block]:
                top = node
            node = node.parent
        if top is not None and top.attached:
            self.tree.drop(top, max(top.start, block * self.block_size))

    # -- writing ------------------------------------------------------------------------

    def reserve(
        self, key: CacheKey, tokens: NDArray[np.int32], *, provenance: Provenance,
        state_positions: Sequence[int] = (), checkpoint_positions: Sequence[int] = (),
    ) -> Reservation:  # fmt: skip
        """Slots for what is not cached yet of ``tokens`` [n], evicting what is least used.

        The caller holds K/V rows of all n tokens, none of them worse than ``provenance``.
        ``start`` is where the cache itself stands now: it may lie before or after the caller's
        own hit. States and checkpoints are granted at those 0 < p <= end that have none as good.
        """
        self.expire()
        namespace, text = key.namespace, _text(tokens)
        path, start, _ = self.tree.walk(namespace, text, provenance.chain)
        lease = self._lease(path, NO_BLOCKS, [])  # pins the path while we evict
        end, blocks = start, NO_BLOCKS
        states: tuple[StateRef, ...] = ()
        checkpoints: tuple[StateRef, ...] = ()
        if provenance.chain <= self.config.max_chain:
            end, blocks = self._allocate(start, len(text) // 4)
            states, checkpoints = (
                store.grant(path, start, [p for p in positions if 0 < p <= end], provenance)
                for store, positions in zip(
                    self.stores, (state_positions, checkpoint_positions), strict=True
                )
            )
        granted = {self.states: states, self.checkpoints: checkpoints}
        self.leases[lease].blocks = blocks
        self.leases[lease].draft = Draft(
            namespace, text[: 4 * end], start, end, provenance, granted
        )
        self._users[key.unsalted] = namespace
        self._counts["reservations"] += 1
        self._counts["reservations_cut_short"] += end < len(text) // 4
        generations = self.blocks.issued[blocks]
        return Reservation(lease, start, end, blocks, generations, states, checkpoints)

    def _allocate(self, start: int, length: int) -> tuple[int, Ids]:
        """Blocks for tokens [start, length), or as many of the first ones as there is room."""
        if start >= length:
            return start, NO_BLOCKS
        first = start // self.block_size
        need = -(-length // self.block_size) - first
        if need > self.blocks.free:
            # a little more than needed, so that not every request has to evict
            self.evict(max(need - self.blocks.free, self.blocks.size // SPARE_SHARE))
        blocks = self.blocks.allocate(need)
        end = min(length, (first + len(blocks)) * self.block_size)
        if end <= start:
            self.blocks.unref(blocks)
            return start, NO_BLOCKS
        return end, blocks

    def publish(self, lease: int) -> int:
        """Make a reservation visible; returns the tokens that are new or better than before.

        What the writer did not complete (its generation word says so) stays out, with all
        behind it. 0 if the lease is gone. Raises CacheError for a reader's lease.
        """
        held = self.leases.get(lease)
        if held is None:
            return 0
        draft = held.draft
        if draft is None:
            raise CacheError(
                f"lease {lease} reserved nothing", where="publish", fix="Pass Reservation.lease."
            )
        written = self.blocks.unwritten(held.blocks)
        if written < len(held.blocks):
            self._counts["unwritten_blocks"] += len(held.blocks) - written
            draft.end = min(draft.end, (draft.start // self.block_size + written) * self.block_size)
            draft.end = max(draft.end, draft.start)
        self.chains[held.blocks] = draft.provenance.chain
        path, added, upgraded = self.tree.insert(
            draft.namespace, draft.text[: 4 * draft.end], draft.start, held.blocks,
            draft.provenance, self._next_lease - 1,
        )  # fmt: skip
        for store in self.stores:
            store.publish(path, draft.end, draft.granted.pop(store))
        self._counts["tokens_published"] += added
        self._counts["tokens_upgraded"] += upgraded
        self._end(lease)
        return added + upgraded

    def abort(self, lease: int) -> bool:
        """Give a reservation back unpublished. False if the lease is gone."""
        return self._end(lease)

    def release(self, lease: int) -> bool:
        """Unpin what a match returned. False if the lease is gone."""
        return self._end(lease)

    # -- leases -------------------------------------------------------------------------

    def _lease(self, path: list[Node], blocks: Ids, records: list[StateRecord]) -> int:
        lease = self._next_lease
        self._next_lease += 1
        if path:
            self.tree.pin(path[-1])
        for record in records:
            record.store.pin(record)
        self.deadlines[lease] = self.clock() + self.config.lease_seconds
        self.leases[lease] = Lease(path[-1] if path else None, blocks, records)
        return lease

    def _end(self, lease: int) -> bool:
        held = self.leases.pop(lease, None)
        if held is None:
            return False
        del self.deadlines[lease]
        if held.node is not None:
            self.tree.unpin(held.node)
        for record in held.records:
            record.store.unpin(record)
        if held.draft is not None:
            self.blocks.unref(held.blocks)
            for store, refs in held.draft.granted.items():
                store.free([ref.slot for ref in refs])
        self.blocks.reclaim(next(iter(self.leases), self._next_lease))
        return True

    def renew(self, lease: int) -> bool:
        """Another ``lease_seconds`` from now. False if the lease is gone."""
        if lease in self.leases:
            self.deadlines[lease] = self.clock() + self.config.lease_seconds
            self.deadlines.move_to_end(lease)
        return lease in self.leases

    def expire(self, now: float | None = None) -> int:
        """End every lease whose deadline has passed; returns how many. Free of cost when there
        is none, so ``match`` and ``reserve`` do it, too."""
        now, before = self.clock() if now is None else now, len(self.leases)
        while self.deadlines and next(iter(self.deadlines.values())) < now:
            self._end(next(iter(self.deadlines)))
        ended = before - len(self.leases)
        self._counts["leases_expired"] += ended
        return ended

    # -- upkeep -------------------------------------------------------------------------

    def evict(self, blocks: int) -> int:
        """Give back at least ``blocks`` blocks if what is pinned allows; returns how many."""
        freed = self.tree.evict(blocks)
        self._counts["evicted_blocks"] += freed
        return freed

    def stats(self) -> dict[str, int]:
        """Counters since the start, then gauges."""
        used = self.blocks.refs > 0
        drafts = [held for held in self.leases.values() if held.draft is not None]
        reserved = sum(len(held.blocks) for held in drafts)
        misses = {f"miss_{reason}": self._misses[reason] for reason in MissReason}
        names = (
            "matches", "tokens_asked", "tokens_matched", "reservations", "reservations_cut_short",
            "tokens_published", "tokens_upgraded", "evicted_blocks", "corrupt_blocks",
            "unwritten_blocks", "leases_expired",
        )  # fmt: skip
        stride = self.arena.blocks.stride
        return {
            **{name: self._counts[name] for name in names},
            **misses,
            **self.states.stats(),
            **self.checkpoints.stats(),
            "blocks_total": self.blocks.size,
            "blocks_free": self.blocks.free,
            "blocks_reserved": reserved,
            "blocks_derived": int(np.count_nonzero(used & (self.chains > 0))),
            "blocks_retired": sum(len(ids) for _, ids in self.blocks.retired),
            "blocks_pinned": self._pinned_blocks(),
            "kv_bytes_total": self.blocks.size * stride,
            "kv_bytes_used": (self.blocks.size - self.blocks.free) * stride,
            "leases_read": len(self.leases) - len(drafts),
            "leases_write": len(drafts),
        }

    def _pinned_blocks(self) -> int:
        nodes: set[Node] = set()
        for held in self.leases.values():
            node = held.node
            while node is not None and node not in nodes:
                nodes.add(node)
                node = node.parent
        ids = [node.blocks for node in nodes]
        return len(np.unique(np.concatenate(ids))) if ids else 0

    def check(self) -> None:
        """AssertionError if any invariant of the whole structure is broken. Slow."""
        audit(self)


def _text(tokens: NDArray[np.int32]) -> bytes:
    """Tokens [n] as bytes, 4 per token."""
    if tokens.ndim != 1 or tokens.dtype != np.int32:
        raise CacheError(
            f"tokens are {tokens.dtype}{list(tokens.shape)}", where="cache", fix="Pass [n] int32."
        )
    return tokens.tobytes()
