"""Full states at token positions: their own slots, their own LRU, attached to tree nodes."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from serving.prefix_cache.contract import Provenance
from serving.prefix_cache.pool import Pool
from serving.prefix_cache.tree import Node, StateRecord


class StateStore:
    """Evicting a state never touches K/V; a state whose K/V path goes dies with it.

    ``order`` holds the unpinned attached records, least recently used first. The slot of a
    record is free once it is neither attached nor pinned.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.order: OrderedDict[StateRecord, None] = OrderedDict()
        self.evicted = 0

    def allocate(self) -> int | None:
        """A slot to write, at the cost of the least recently used state; None: all pinned."""
        if not self.pool.free and self.order:
            self.evicted += 1
            self.lose(next(iter(self.order)))
        ids = self.pool.allocate(1)
        return int(ids[0]) if len(ids) else None

    def free(self, slot: int) -> None:
        self.pool.unref(np.array([slot], np.int64))

    def generation(self, slot: int) -> int:
        return int(self.pool.issued[slot])

    def attach(self, node: Node, position: int, slot: int, provenance: Provenance) -> bool:
        """Keep it unless one as good is there; a worse one is replaced. False: freed."""
        old = node.states.get(position)
        if old is not None and old.provenance.chain <= provenance.chain:
            self.free(slot)
            return False
        if old is not None:
            self.lose(old)
        record = node.states[position] = StateRecord(node, position, slot, provenance)
        self.order[record] = None
        return True

    def lose(self, record: StateRecord) -> None:
        """Detach; readers that have it pinned keep the slot until they release it."""
        if record.node is not None:
            del record.node.states[record.position]
            record.node = None
            self.order.pop(record, None)
            if record.pins == 0:
                self.free(record.slot)

    def pin(self, record: StateRecord) -> None:
        record.pins += 1
        self.order.pop(record, None)

    def unpin(self, record: StateRecord) -> None:
        record.pins -= 1
        if record.pins == 0:
            if record.node is None:
                self.free(record.slot)
            else:
                self.order[record] = None

    def deepest(self, path: list[Node], hit_len: int, max_chain: int) -> list[StateRecord]:
        """The deepest exact state at or before ``hit_len`` and the deepest derived one after
        it, deepest first."""
        found: list[StateRecord] = []
        for node in reversed(path):
            for position in sorted(node.states, reverse=True):
                record = node.states[position]
                if position > hit_len or record.provenance.chain > max_chain:
                    continue
                if record.provenance.exact:
                    return [*found, record]
                if not found:
                    found.append(record)
        return found
