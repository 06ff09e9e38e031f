"""Every invariant of a prefix cache, checked against a recount from scratch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from serving.prefix_cache.tree import Node, subtree

if TYPE_CHECKING:
    from serving.prefix_cache.index import PrefixCache
    from serving.prefix_cache.states import StateStore


def audit(cache: PrefixCache) -> None:
    """AssertionError naming the first broken invariant."""
    attached, detached = _nodes(cache)
    _check_tree(cache, attached)
    _check_pins(cache, attached + detached)
    _check_blocks(cache, attached + detached)
    for store in cache.stores:
        _check_records(cache, store, attached + detached)
    assert list(cache.deadlines.values()) == sorted(cache.deadlines.values()), "deadline order"
    assert cache.deadlines.keys() == cache.leases.keys(), "deadlines and leases differ"


def _nodes(cache: PrefixCache) -> tuple[list[Node], list[Node]]:
    """Nodes in the index without the roots, and dropped ones that leases still hold."""
    attached: list[Node] = []
    for namespace, root in cache.tree.roots.items():
        assert root.uid == namespace, "a misplaced root"
        assert root.children, "an empty root"
        attached += [node for node in subtree(root) if node is not root]
    detached: dict[Node, None] = {}
    for held in cache.leases.values():
        node = held.node
        while node is not None and not node.attached:
            detached[node] = None
            node = node.parent
    return attached, list(detached)


def _check_tree(cache: PrefixCache, attached: list[Node]) -> None:
    size = cache.block_size
    for node in attached:
        assert node.attached, "a dropped node in the index"
        assert node.parent is not None, "a node without parent in the index"
        assert node.parent.children[node.first] is node, "a child under a wrong token"
        assert node.start == node.parent.end, "a gap between parent and child"
        assert node.end - node.start == len(node.key) // 4 > 0, "token count and span differ"
        assert len(node.blocks) == -(-node.end // size) - node.start // size, "blocks and span"
        chain = node.provenance.chain
        assert chain >= node.parent.provenance.chain, "something exact below something derived"
        assert (cache.chains[node.blocks] <= chain).all(), "a node calls itself too exact"
        assert chain <= cache.config.max_chain, "a node beyond max_chain"
    idle = {node for node in attached if not node.children and not node.pins}
    assert idle == set(cache.tree.leaves), "the LRU order is not the set of unpinned leaves"


def _check_pins(cache: PrefixCache, nodes: list[Node]) -> None:
    wanted = Counter(held.node for held in cache.leases.values() if held.node is not None)
    for node in nodes:
        assert node.pins == wanted.pop(node, 0), "pins and leases differ"
    assert not wanted, "a lease pins a node that is nowhere"


def _check_blocks(cache: PrefixCache, nodes: list[Node]) -> None:
    refs = np.zeros(cache.blocks.size, np.int64)
    for node in nodes:
        assert len(np.unique(node.blocks)) == len(node.blocks), "a block twice in one node"
        refs[node.blocks] += 1
    for _, ids in cache.blocks.retired:
        refs[ids] += 1
    for held in cache.leases.values():
        if held.draft is not None:
            refs[held.blocks] += 1
        else:
            assert (cache.blocks.refs[held.blocks] > 0).all(), "a pinned block was given back"
    assert np.array_equal(refs, cache.blocks.refs), "block references and users differ"
    cache.blocks.check()


def _check_records(cache: PrefixCache, store: StateStore, nodes: list[Node]) -> None:
    slots, idle, kind = [], set(), store.name
    held = [record for lease in cache.leases.values() for record in lease.records]
    pins = Counter(record for record in held if record.store is store)
    for node in nodes:
        for position, record in node.records.get(store, {}).items():
            assert record.store is store, f"a {kind} in the wrong store"
            assert (record.node, record.ref.position) == (node, position), f"a misfiled {kind}"
            assert node.start < position <= node.end, f"a {kind} outside its node"
            assert record.ref.provenance.chain >= node.provenance.chain, f"a {kind} too exact"
            slots.append(record.ref.slot)
            if record.pins == 0:
                idle.add(record)
    for record, count in pins.items():
        assert record.pins == count, f"{kind} pins and leases differ"
        if record.node is None:
            slots.append(record.ref.slot)
    for lease in cache.leases.values():
        slots += [ref.slot for ref in lease.draft.granted[store]] if lease.draft else []
    assert idle == set(store.order), f"the {kind} order is not the set of unpinned ones"
    assert len(slots) == len(set(slots)), f"a {kind} slot used twice"
    assert len(slots) == store.pool.size - store.pool.free, f"{kind} slots leaked"
    store.pool.check()
