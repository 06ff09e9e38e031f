"""Pages of K/V on the device: who holds which, and which still hold a known block.

A page is free, held by rows (counted), or idle: held by none, but its block may be asked for again.
Blocks are known by the arena's (slot, generation), which names one content for ever.
"""

from __future__ import annotations

from collections import OrderedDict

from engine_configs.errors import OverloadedError

Key = tuple[int, int]


class PagePool:
    """``count`` pages. Page 0 is never given out: unused entries of a block table point there."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._holders = [0] * count
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the one used longest ago first

    def available(self) -> int:
        """Pages that ``take`` can give."""
        return len(self._free) + len(self._idle)

    def held(self) -> bool:
        return any(self._holders)

    def require(self, count: int) -> None:
        """Raises OverloadedError unless so many pages can be taken."""
        if self.available() < count:
            raise OverloadedError(
                f"{count} K/V pages are wanted, {self.available()} of {self.count - 1} are not in "
                "use",
                fix="Lower max_batch or max_seq_len",
            )

    def take(self) -> int:
        """A page for new content. Raises OverloadedError when every page is held."""
        self.require(1)
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        self._holders[page] = 1
        return page

    def share(self, key: Key) -> int | None:
        """The page that holds this block, with one more holder; None where there is none."""
        page = self._page_of.get(key)
        if page is not None:
            self._idle.pop(page, None)
            self._holders[page] += 1
        return page

    def name(self, page: int, key: Key) -> None:
        """The page is full, will not change, and holds this block."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key

    def is_private(self, page: int) -> bool:
        """Nobody else reads the page, now or later: its holder may write."""
        return self._holders[page] == 1 and page not in self._key_of

    def drop(self, page: int) -> None:
        """One holder less."""
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def check(self) -> None:
        """Every page is in exactly one place."""
        held = {p for p, n in enumerate(self._holders) if n}
        places = [*self._free, *self._idle, *held]
        assert sorted(places) == list(range(1, self.count)), places
        assert {p: k for k, p in self._page_of.items()} == self._key_of
