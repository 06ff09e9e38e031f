"""The state machine on the real cache, and on caches with a planted fault: each is caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from serving.prefix_cache import arena, contract, pool, tree
from tests.serving.prefix_cache.machine import BLOCK, CacheMachine

SETTINGS = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def test_machine() -> None:
    run_state_machine_as_test(CacheMachine, settings=SETTINGS)


def stale_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(arena.Slots, "first_stale", lambda self, ids, generations: len(ids))


def salt_not_in_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(contract.CacheKey, "namespace", property(lambda self: self.unsalted))


def prefix_not_compared(patch: pytest.MonkeyPatch) -> None:
    """Only the first token of each span decides."""

    def first_only(key: bytes, text: bytes, at: int) -> int:
        return min(len(key), len(text) - 4 * at) // 4

    patch.setattr(tree, "common_tokens", first_only)


def pinned_evicted(patch: pytest.MonkeyPatch) -> None:
    """A pin is counted but does not take the leaf out of the eviction order."""
    unpin = tree.RadixTree.unpin

    def pin(self: tree.RadixTree, node: tree.Node) -> None:
        node.pins += 1

    def unless_gone(self: tree.RadixTree, node: tree.Node) -> None:
        """An evicted leaf in the order again would only crash the next eviction."""
        unpin(self, node)
        if node.parent and node.parent.children.get(node.first) is not node:
            self.leaves.pop(node, None)

    patch.setattr(tree.RadixTree, "pin", pin)
    patch.setattr(tree.RadixTree, "unpin", unless_gone)


def derived_seen_by_exact(patch: pytest.MonkeyPatch) -> None:
    walk = tree.RadixTree.walk

    def blind(self: tree.RadixTree, namespace: bytes, text: bytes, max_chain: int) -> object:
        return walk(self, namespace, text, 99)

    patch.setattr(tree.RadixTree, "walk", blind)


def off_by_one_at_block_end(patch: pytest.MonkeyPatch) -> None:
    """A span that leaves another at a block's last token is taken to leave it one later."""
    common = tree.common_tokens

    def one_more(key: bytes, text: bytes, at: int) -> int:
        n = common(key, text, at)
        room = min(len(key), len(text) - 4 * at) // 4
        return n + 1 if n < room and (at + n) % BLOCK == BLOCK - 1 else n

    patch.setattr(tree, "common_tokens", one_more)


def replaced_block_freed_under_its_reader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pool.Pool, "retire", lambda self, ids, last_lease: self.unref(ids))


def checkpoint_outlives_its_blocks(patch: pytest.MonkeyPatch) -> None:
    """What is cut off the end of a leaf, or all of it, goes without its checkpoints."""

    def states_only(self: tree.RadixTree, node: tree.Node, end: int) -> None:
        for store, kept in node.records.items():
            if store.name == "state":
                store.lose([record for position, record in kept.items() if position > end])

    patch.setattr(tree.RadixTree, "_lose_records", states_only)


FAULTS = (
    stale_generation, salt_not_in_key, prefix_not_compared, pinned_evicted,
    derived_seen_by_exact, off_by_one_at_block_end, replaced_block_freed_under_its_reader,
    checkpoint_outlives_its_blocks,
)  # fmt: skip


@pytest.mark.parametrize("plant", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("audited", [True, False], ids=["audited", "answers-only"])
def test_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], audited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the audit of all invariants, and by what the client sees alone."""
    plant(monkeypatch)
    if not audited:
        monkeypatch.setattr("serving.prefix_cache.index.audit", lambda cache: None)
    hunt = settings(SETTINGS, max_examples=400, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(CacheMachine, settings=hunt)
