"""Slots of the arena: which are free, who refers to them, which generation each one holds."""

from __future__ import annotations

from collections import deque

import numpy as np

from serving.prefix_cache.contract import Ids, Words


class Pool:
    """Reference-counted slots 0..n-1, handed out in ascending runs.

    A slot is free exactly when nothing refers to it. References that readers without a count
    of their own may still use are dropped late: ``retire`` now, ``reclaim`` once every lease
    of that time has ended. ``words`` [n] are the arena's generation words: allocation makes
    them odd (not readable), the writer makes them even when its data is complete.
    """

    def __init__(self, words: Words) -> None:
        self.words = words
        self.size = len(words)
        self.refs = np.zeros(self.size, np.int16)
        self.issued: Words = np.zeros(self.size, np.uint64)
        self._stack: Ids = np.arange(self.size, dtype=np.int64)
        self.free = self.size
        self._generation = 0
        self.retired: deque[tuple[int, Ids]] = deque()

    def allocate(self, wanted: int) -> Ids:
        """At most ``wanted`` slots, each with one reference, ready to be written."""
        count = min(wanted, self.free)
        ids: Ids = self._stack[self.free - count : self.free].copy()
        self.free -= count
        self._generation += 2  # never used before by any slot, so never taken for another
        self.issued[ids] = self._generation
        self.words[ids] = self._generation - 1
        self.refs[ids] = 1
        return ids

    def ref(self, ids: Ids) -> None:
        """One more reference on each (ids are distinct)."""
        self.refs[ids] += 1

    def unref(self, ids: Ids) -> int:
        """Drop one reference on each (ids are distinct); returns how many became free."""
        left = self.refs[ids]
        left -= 1
        self.refs[ids] = left
        dead = ids[left == 0] if np.count_nonzero(left) else ids
        self._stack[self.free : self.free + len(dead)] = dead
        self.free += len(dead)
        return len(dead)

    def unref_all(self, runs: list[Ids]) -> int:
        """As unref for each of ``runs``, in one go where no id is in several of them."""
        ids = np.sort(np.concatenate(runs), kind="stable")
        if (ids[1:] == ids[:-1]).any():
            return sum([self.unref(run) for run in runs])
        return self.unref(ids)

    def retire(self, ids: Ids, last_lease: int) -> None:
        """Drop one reference on each, but not before all leases up to ``last_lease`` ended."""
        if len(ids):
            self.retired.append((last_lease, ids))

    def reclaim(self, oldest_lease: int) -> None:
        """``oldest_lease``: of those still active."""
        while self.retired and self.retired[0][0] < oldest_lease:
            self.unref(self.retired.popleft()[1])

    def unwritten(self, ids: Ids) -> int:
        """Index of the first slot whose data is not the one issued last; len(ids) if none."""
        bad = self.words[ids] != self.issued[ids]
        return int(bad.argmax()) if bad.any() else len(ids)

    def check(self) -> None:
        """The stack holds exactly the slots without a reference, each once."""
        stack = np.sort(self._stack[: self.free])
        assert np.array_equal(stack, np.flatnonzero(self.refs == 0)), "free slots and refs differ"
        assert (self.refs >= 0).all(), "negative reference count"
        assert (self.issued % np.uint64(2) == 0).all(), "an odd generation was issued"
