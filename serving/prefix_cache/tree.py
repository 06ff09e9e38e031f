"""The radix tree over tokens, one root per namespace, and its leaf-first LRU order.

A node holds tokens [start, end) and the blocks that cover them, the first and last perhaps
only in part. Published blocks never change. Where a path leaves another inside a block, each
side has its own copy of that block: the deeper node's copy also holds the rows before its
start, so along a path the deeper node's block counts. Along a path the provenance chain never
falls: nothing exact lies below something derived.

Tokens are kept as bytes, 4 per token: comparing a node is one memcmp, splitting it one copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from serving.prefix_cache.contract import EXACT, Ids, Provenance, StateRef
from serving.prefix_cache.pool import Pool

if TYPE_CHECKING:
    from serving.prefix_cache.states import StateStore

NO_BLOCKS: Ids = np.empty(0, np.int64)


class StateRecord:
    """What ``store`` keeps on ``node``, which is None once it let it go."""

    __slots__ = ("node", "pins", "ref", "store")

    def __init__(self, store: StateStore, node: Node, ref: StateRef) -> None:
        self.store, self.ref, self.pins = store, ref, 0
        self.node: Node | None = node


class Node:
    __slots__ = (
        "attached", "blocks", "children", "end", "key", "parent", "pins", "provenance",
        "records", "start", "uid", "used",
    )  # fmt: skip

    def __init__(
        self, uid: int | bytes, parent: Node | None, key: bytes, start: int, blocks: Ids,
        provenance: Provenance,
    ) -> None:  # fmt: skip
        self.uid, self.parent, self.key, self.blocks = uid, parent, key, blocks
        self.start, self.end = start, start + len(key) // 4
        self.provenance = provenance
        self.children: dict[bytes, Node] = {}
        self.records: dict[StateStore, dict[int, StateRecord]] = {}  # by position
        self.pins = 0
        self.used = 0
        self.attached = True

    @property
    def first(self) -> bytes:
        """First token: the node's name among its siblings."""
        return self.key[:4]


def common_tokens(key: bytes, text: bytes, at: int) -> int:
    """How many leading tokens of ``key`` equal those of ``text`` from token ``at`` on."""
    if text.startswith(key, 4 * at):
        return len(key) // 4
    n = min(len(key), len(text) - 4 * at) // 4
    differ = np.frombuffer(key, np.int32, n) != np.frombuffer(text, np.int32, n, 4 * at)
    first = int(differ.argmax())
    return first if differ[first] else n


class RadixTree:
    """Nodes, their order of use, and the ghosts of what was evicted.

    ``leaves`` holds the unpinned leaves, least recently used first: eviction takes from its
    front and never searches. Blocks are owned through ``pool`` references, one per node.
    """

    def __init__(self, pool: Pool, block_size: int, ghosts: int) -> None:
        self.pool, self.block_size, self.max_ghosts = pool, block_size, ghosts
        self.roots: dict[bytes, Node] = {}
        self.leaves: OrderedDict[Node, None] = OrderedDict()
        self.ghosts: OrderedDict[tuple[int | bytes, bytes], None] = OrderedDict()
        self.clock = 0
        self._uid = 0

    # -- reading ------------------------------------------------------------------------

    def walk(
        self, namespace: bytes, text: bytes, max_chain: int
    ) -> tuple[list[Node], int, Node | None]:
        """Nodes along ``text``, tokens matched, and the node too derived to go on, if any."""
        path: list[Node] = []
        at, node = 0, self.roots.get(namespace)
        while node is not None and 4 * at < len(text):
            child = node.children.get(text[4 * at : 4 * at + 4])
            if child is None:
                break
            if child.provenance.chain > max_chain:
                return path, at, child
            path.append(child)
            at += common_tokens(child.key, text, at)
            node = child if at == child.end else None
        return path, at, None

    def gather(self, path: list[Node], length: int) -> Ids:
        """Block ids of tokens [0, length) along ``path``."""
        out: Ids = np.empty(-(-length // self.block_size), np.int64)
        for node in path:
            at = node.start // self.block_size
            ids = node.blocks[: len(out) - at]
            out[at : at + len(ids)] = ids
        return out

    def was_evicted(self, namespace: bytes, path: list[Node], at: int, token: bytes) -> bool:
        """Whether ``token`` was once cached after the ``at`` tokens of ``path``."""
        if path and at < path[-1].end:
            return False
        return (path[-1].uid if path else namespace, token) in self.ghosts

    def touch(self, path: list[Node]) -> None:
        self.clock += 1
        for node in path:
            node.used = self.clock

    # -- pins ---------------------------------------------------------------------------

    def pin(self, node: Node) -> None:
        """Keep the node and its ancestors. A pin stays with the deeper part of a split."""
        node.pins += 1
        self.leaves.pop(node, None)

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        if node.pins == 0 and not node.children:
            if node.attached:
                self.leaves[node] = None
            else:
                self._free_detached(node)

    # -- growing ------------------------------------------------------------------------

    def insert(
        self, namespace: bytes, text: bytes, start: int, blocks: Ids, provenance: Provenance,
        last_lease: int,
    ) -> tuple[list[Node], int, int]:  # fmt: skip
        """Make tokens [start, end of text) visible.

        blocks [n]: cover [start // B * B, end), referenced by the caller. What is there
        already and no worse stays; what is worse is replaced. Returns the path of the whole
        text (shorter if [0, start) is gone), tokens added and tokens upgraded.
        """
        end, at, added, upgraded = len(text) // 4, 0, 0, 0
        path: list[Node] = []
        node = root = self.roots.get(namespace) or Node(namespace, None, b"", 0, NO_BLOCKS, EXACT)
        while at < end:
            child = node.children.get(text[4 * at : 4 * at + 4])
            if child is None:
                if at < start:
                    break
                self.roots[namespace] = root
                path.append(self._attach(node, text, at, start, blocks, provenance, last_lease))
                added = end - at
                break
            same = common_tokens(child.key, text, at)
            worse = child.provenance.chain > provenance.chain
            if at + same < child.end and (worse or at + same < end):
                child = self._split(child, at + same)
            if worse and at >= start:
                self._replace(child, start, blocks, provenance, last_lease)
                upgraded += child.end - child.start
            path.append(child)
            node, at = child, child.end
        self.touch(path)
        return path, added, upgraded

    def _own(self, start: int, end: int, base: int, blocks: Ids) -> Ids:
        """Of ``blocks`` (the first one holds token ``base``), those that cover [start, end)."""
        size = self.block_size
        low = start // size - base // size
        return blocks[low : low + -(-end // size) - start // size].copy()

    def _attach(
        self, parent: Node, text: bytes, at: int, start: int, blocks: Ids,
        provenance: Provenance, last_lease: int,
    ) -> Node:  # fmt: skip
        self._uid += 1
        provenance = provenance.worst(parent.provenance)
        ids = self._own(at, len(text) // 4, start, blocks)
        leaf = Node(self._uid, parent, text[4 * at :], at, ids, provenance)
        self.pool.ref(ids)
        parent.children[leaf.first] = leaf
        self.leaves.pop(parent, None)
        self.leaves[leaf] = None
        self._share_tail(parent, int(ids[0]), provenance, last_lease)
        return leaf

    def _share_tail(
        self, parent: Node, longer: int, provenance: Provenance, last_lease: int
    ) -> None:
        """A child's first block also holds the rows of the parent's cut-short last block: let
        the parent use it too and give its own back, unless others use that or it is better."""
        cut_short = parent.end % self.block_size != 0
        if cut_short and provenance.chain == parent.provenance.chain:
            old = parent.blocks[-1:]
            if self.pool.refs[old[0]] == 1:
                parent.blocks = parent.blocks.copy()
                parent.blocks[-1] = longer
                self.pool.ref(parent.blocks[-1:])
                self.pool.retire(old, last_lease)

    def _replace(
        self, node: Node, start: int, blocks: Ids, provenance: Provenance, last_lease: int
    ) -> None:
        assert node.parent is not None
        self.pool.retire(node.blocks, last_lease)
        node.blocks = self._own(node.start, node.end, start, blocks)
        node.provenance = provenance.worst(node.parent.provenance)
        self.pool.ref(node.blocks)

    def _split(self, node: Node, at: int) -> Node:
        """Cut at token ``at``; returns the new upper part, ``node`` stays the lower one."""
        parent = node.parent
        assert parent is not None
        assert node.start < at < node.end, "a cut outside the node"
        self._uid += 1
        cut = 4 * (at - node.start)
        upper = Node(
            self._uid, parent, node.key[:cut], node.start,
            self._own(node.start, at, node.start, node.blocks), node.provenance,
        )  # fmt: skip
        upper.used = node.used
        lower = self._own(at, node.end, node.start, node.blocks)
        if at % self.block_size:
            self.pool.ref(lower[:1])
        node.key, node.start, node.blocks, node.parent = node.key[cut:], at, lower, upper
        upper.children[node.first] = node
        parent.children[upper.first] = upper
        for store, kept in node.records.items():
            upper.records[store] = {p: kept.pop(p) for p in list(kept) if p <= at}
            for record in upper.records[store].values():
                record.node = upper
        return upper

    # -- shrinking ----------------------------------------------------------------------

    def evict(self, wanted: int) -> int:
        """Give back at least ``wanted`` blocks if unpinned leaves allow; returns how many."""
        freed = 0
        while freed < wanted and self.leaves:
            runs, count = [], 0
            while freed + count < wanted and self.leaves:
                runs.append(self._trim(next(iter(self.leaves)), wanted - freed - count))
                count += len(runs[-1])
            freed += self.pool.unref_all(runs)  # less than count if some are shared
        return freed

    def _trim(self, leaf: Node, count: int) -> Ids:
        """Cut ``count`` blocks off the end of a leaf, all of it if need be. Returns blocks to
        unref."""
        keep = len(leaf.blocks) - count
        if keep <= 0:
            self._ghost(leaf.parent, leaf.first)
            return self._remove(leaf)
        end = (leaf.start // self.block_size + keep) * self.block_size
        cut = 4 * (end - leaf.start)
        self._ghost(leaf, leaf.key[cut : cut + 4])
        cut_off = leaf.blocks[keep:]
        leaf.key, leaf.end, leaf.blocks = leaf.key[:cut], end, leaf.blocks[:keep].copy()
        self._lose_records(leaf, end)
        return cut_off

    def _remove(self, leaf: Node) -> Ids:
        parent = leaf.parent
        assert parent is not None
        del self.leaves[leaf]
        self._lose_records(leaf, 0)
        del parent.children[leaf.first]
        self._bereave(parent, leaf)
        return leaf.blocks

    def _bereave(self, parent: Node, gone: Node) -> None:
        """``parent`` has just lost its child ``gone``."""
        if parent.children:
            return
        if isinstance(parent.uid, bytes):
            del self.roots[parent.uid]
        elif parent.pins == 0:
            self.leaves[parent] = None
            # used since only if a request ended right in it; if not, it is the oldest, too
            if parent.used <= gone.used:
                self.leaves.move_to_end(parent, last=False)

    def _ghost(self, parent: Node | None, token: bytes) -> None:
        assert parent is not None
        self.ghosts[parent.uid, token] = None
        if len(self.ghosts) > self.max_ghosts:
            self.ghosts.popitem(last=False)

    def _lose_records(self, node: Node, end: int) -> None:
        """Those after token ``end``: the K/V they continue is going."""
        for store, kept in node.records.items():
            store.lose([record for position, record in kept.items() if position > end])

    def drop(self, node: Node, at: int) -> None:
        """Take everything from token ``at`` of ``node`` on out of the index; what is pinned
        keeps its blocks until it is released."""
        if at > node.start:
            self._split(node, at)
        parent = node.parent
        assert parent is not None
        below = list(subtree(node))
        for each in below:
            each.attached = False
            self.leaves.pop(each, None)
        del parent.children[node.first]
        node.parent = None
        self._bereave(parent, node)
        for each in reversed(below):
            if not each.children and each.pins == 0:
                self._free_detached(each)

    def _free_detached(self, node: Node) -> None:
        """Free a detached leaf and every ancestor that it alone kept."""
        current: Node | None = node
        while current is not None and not current.children and current.pins == 0:
            self._lose_records(current, 0)
            self.pool.unref(current.blocks)
            current.blocks = NO_BLOCKS
            parent, current.parent = current.parent, None
            if parent is not None:
                del parent.children[current.first]
            current = parent


def subtree(top: Node) -> Iterator[Node]:
    """``top`` and everything below it, parents first."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
