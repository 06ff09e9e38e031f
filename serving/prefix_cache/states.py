"""What is kept at token positions: full states and checkpoints, each kind in its own slots with
its own LRU, attached to tree nodes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat

import numpy as np

from serving.prefix_cache.arena import Slots
from serving.prefix_cache.contract import Provenance, StateRef
from serving.prefix_cache.pool import Pool
from serving.prefix_cache.tree import Node, StateRecord


class StateStore:
    """Evicting a record never touches K/V; a record whose K/V path goes dies with it.

    name: of its kind, in the singular; offered: how many a match is told of. ``order`` holds
    the unpinned attached records, least recently used first. The slot of a record is free once
    it is neither attached nor pinned.
    """

    def __init__(self, name: str, slots: Slots, offered: int) -> None:
        self.name, self.stride, self.offered = name, slots.stride, offered
        self.pool = Pool(slots.words)
        self.order: OrderedDict[StateRecord, None] = OrderedDict()
        self.counts: Counter[str] = Counter()

    # -- reading ------------------------------------------------------------------------

    def along(self, path: list[Node], end: int, max_chain: int) -> Iterator[StateRecord]:
        """Of the first ``end`` tokens of ``path``, deepest first."""
        for node in reversed(path):
            kept = node.records.get(self)
            for position in sorted(kept, reverse=True) if kept else ():
                record = node.records[self][position]
                if position <= end and record.ref.provenance.chain <= max_chain:
                    yield record

    def deepest(self, path: list[Node], hit_len: int, max_chain: int) -> list[StateRecord]:
        """The ``offered`` deepest ones, and the deepest exact one if those are all derived."""
        if self.pool.free == self.pool.size:
            return []
        records = self.along(path, hit_len, max_chain)
        found = list(islice(records, self.offered))
        if not any(record.ref.provenance.exact for record in found):
            found += islice((record for record in records if record.ref.provenance.exact), 1)
        return found

    def pin(self, record: StateRecord) -> None:
        record.pins += 1
        self.order.pop(record, None)

    def unpin(self, record: StateRecord) -> None:
        record.pins -= 1
        if record.pins == 0:
            if record.node is None:
                self.free([record.ref.slot])
            else:
                self.order[record] = None

    # -- writing ------------------------------------------------------------------------

    def grant(
        self, path: list[Node], start: int, positions: Sequence[int], provenance: Provenance
    ) -> tuple[StateRef, ...]:
        """Slots to write for ``positions`` at which nothing as good is kept on the first
        ``start`` tokens of ``path``, at the cost of what was used least recently; only the
        first ones if too many are pinned."""
        if not positions:
            return ()
        kept = {record.ref.position for record in self.along(path, start, provenance.chain)}
        wanted = sorted(set(positions) - kept)
        short = len(wanted) - self.pool.free
        if short > 0:
            victims = list(islice(self.order, short))
            self.counts["evicted"] += len(victims)
            self.lose(victims)
        slots = self.pool.allocate(len(wanted))
        generations = self.pool.issued[slots].tolist()
        granted = zip(wanted, slots.tolist(), generations, repeat(provenance), strict=False)
        return tuple(map(StateRef._make, granted))

    def publish(self, path: list[Node], end: int, refs: Sequence[StateRef]) -> None:
        """Attach what was written of ``refs`` to its place in the first ``end`` tokens of
        ``path``, unless something as good is there; something worse is replaced."""
        if not refs:
            return
        words = self.pool.words[[ref.slot for ref in refs]].tolist()
        ends, unused, unwritten = [node.end for node in path], [], 0
        for ref, word in zip(refs, words, strict=True):
            at = bisect_left(ends, ref.position)
            unwritten += word != ref.generation
            visible = word == ref.generation and ref.position <= end and at < len(path)
            if not (visible and self._attach(path[at], ref)):
                unused.append(ref.slot)
        self.free(unused)
        self.counts["unwritten"] += unwritten
        self.counts["published"] += len(refs) - len(unused)

    def _attach(self, node: Node, ref: StateRef) -> bool:
        provenance = ref.provenance.worst(node.provenance)
        if provenance is not ref.provenance:
            ref = ref._replace(provenance=provenance)
        kept = node.records.setdefault(self, {})
        old = kept.get(ref.position)
        if old is not None:
            if old.ref.provenance.chain <= provenance.chain:
                return False
            self.lose([old])
        record = kept[ref.position] = StateRecord(self, node, ref)
        self.order[record] = None
        return True

    def lose(self, records: Iterable[StateRecord]) -> None:
        """Detach; readers that have one pinned keep its slot until they release it."""
        unused = []
        for record in records:
            if record.node is not None:
                del record.node.records[self][record.ref.position]
                record.node = None
                self.order.pop(record, None)
                if record.pins == 0:
                    unused.append(record.ref.slot)
        self.free(unused)

    def free(self, slots: list[int]) -> None:
        """Granted slots that are not going to be published, or published ones nobody needs."""
        if slots:
            self.pool.unref(np.array(slots, np.int64))

    def stats(self) -> dict[str, int]:
        counted = {f"{what}_{self.name}s": self.counts[what] for what in ("evicted", "corrupt")}
        return {
            **counted,
            f"unwritten_{self.name}s": self.counts["unwritten"],
            f"{self.name}s_published": self.counts["published"],
            f"{self.name}s_total": self.pool.size,
            f"{self.name}s_free": self.pool.free,
            f"{self.name}_bytes_total": self.pool.size * self.stride,
            f"{self.name}_bytes_used": (self.pool.size - self.pool.free) * self.stride,
        }
