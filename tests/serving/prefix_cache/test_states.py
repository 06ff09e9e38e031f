"""Full states and checkpoints: budgets, life with their path, provenance, damage. One rule for
both kinds, but for how many a match is told of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.prefix_cache import EXACT, Match, Provenance, Reservation, StateRef
from serving.prefix_cache.metrics import CacheMetrics
from serving.prefix_cache.rpc import RemoteIndex, handle
from tests.serving.prefix_cache.client import KEY, Client, branch, prompt
from tests.serving.prefix_cache.machine import fingerprints

DERIVED = Provenance(1, 0.1)


@pytest.fixture(params=["states", "checkpoints"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def refs(source: Match | Reservation, kind: str) -> tuple[StateRef, ...]:
    return tuple(getattr(source, kind))


def positions(source: Match | Reservation, kind: str) -> list[int]:
    return [ref.position for ref in refs(source, kind)]


def read(client: Client, kind: str, ref: StateRef) -> np.ndarray | None:
    state = np.zeros(2, np.uint32)
    call = client.arena.read_state if kind == "states" else client.arena.read_checkpoint
    return state if call(ref.slot, ref.generation, [state]) else None


# -- budgets and life ---------------------------------------------------------------------


def test_own_budget(client: Client, kind: str) -> None:
    """Evicting one leaves the K/V and the other kind; the least recently used one goes."""
    other = "checkpoints" if kind == "states" else "states"
    prompts = [prompt(100, seed) for seed in range(5)]
    client.run(prompts[1], **{other: (99,)})
    for tokens in prompts[:4]:
        client.run(tokens, **{kind: (99,)})
    client.peek(prompts[0])
    client.run(prompts[4], **{kind: (99,)})
    assert [len(refs(client.peek(tokens), kind)) for tokens in prompts] == [1, 0, 1, 1, 1]
    assert all(client.peek(tokens).hit_len == 99 for tokens in prompts)
    assert positions(client.peek(prompts[1]), other) == [99]
    stats = client.cache.stats()
    assert (stats[f"evicted_{kind}"], stats[f"evicted_{other}"]) == (1, 0)


def test_dies_with_its_path(client: Client, kind: str) -> None:
    tokens = prompt(100)
    client.run(tokens, **{kind: (40, 99)})
    client.cache.evict(1)
    assert positions(client.peek(tokens), kind) == [40]
    client.cache.evict(10_000)
    assert client.cache.stats()[f"{kind}_free"] == 4
    client.cache.check()


def test_pinned_ones_are_not_evicted(client: Client, kind: str) -> None:
    old = [prompt(100, seed) for seed in range(4)]
    for tokens in old:
        client.run(tokens, **{kind: (99,)})
    readers = [client.match(tokens) for tokens in old]
    assert refs(client.reserve(prompt(100, 9), **{kind: (99,)}), kind) == ()
    for reader, tokens in zip(readers, old, strict=True):
        got = read(client, kind, refs(reader, kind)[0])
        assert np.array_equal(got, fingerprints(KEY, tokens[:99])[-1])


def test_pinned_one_outlives_its_path_until_released(client: Client, kind: str) -> None:
    tokens = prompt(100)
    client.run(tokens, **{kind: (99,)})
    reader = client.match(tokens)
    client.cache.report_corrupt(reader.lease, block=0)
    assert client.peek(tokens).hit_len == 0
    assert read(client, kind, refs(reader, kind)[0]) is not None
    assert client.cache.stats()[f"{kind}_free"] == 3
    client.cache.release(reader.lease)
    assert client.cache.stats()[f"{kind}_free"] == 4
    client.cache.check()


def test_granted_only_where_none_as_good_is_kept(tmp_path: Path, kind: str) -> None:
    client = Client(tmp_path, states=8, checkpoints=8)
    tokens = prompt(300)
    client.run(tokens, exact=False, provenance=DERIVED, **{kind: (100, 200)})

    def granted(of: np.ndarray, provenance: Provenance) -> list[int]:
        res = client.reserve(of, provenance=provenance, **{kind: (0, 100, 200, 300, 999)})
        client.cache.abort(res.lease)
        return positions(res, kind)

    assert granted(tokens, DERIVED) == [300]
    assert granted(tokens, EXACT) == [100, 200, 300]
    assert granted(branch(tokens, 150, 150), DERIVED) == [200, 300]


def test_state_is_found_from_any_longer_prompt(client: Client) -> None:
    tokens = prompt(300)
    client.run(tokens, states=(100, 200, 300))
    for length, position in ((101, 100), (150, 100), (201, 200), (250, 200)):
        assert positions(client.peek(branch(tokens, length - 1, 50)), "states") == [position]
    assert client.peek(branch(tokens, 99, 50)).states == ()


def test_the_four_deepest_checkpoints_are_offered(tmp_path: Path) -> None:
    """At or before the hit, also across nodes."""
    client = Client(tmp_path, checkpoints=40)
    tokens, every = prompt(640), tuple(range(64, 641, 64))
    client.run(tokens, checkpoints=every)
    client.run(branch(tokens, 150, 400), checkpoints=every)  # splits the node
    for shared in (63, 64, 65, 128, 200, 256, 500, 639):
        match = client.peek(branch(tokens, shared, 50))
        want = [position for position in every if position <= shared][-4:]
        assert positions(match, "checkpoints") == want[::-1]
    assert len(client.peek(branch(tokens, 150, 400)).checkpoints) == 4


def test_a_long_conversation_writes_each_checkpoint_once(tmp_path: Path) -> None:
    client = Client(tmp_path, checkpoints=40)
    tokens, every = prompt(640), tuple(range(64, 641, 64))
    for end in range(50, 641, 50):
        client.run(tokens[:end], checkpoints=every)
    stats = client.cache.stats()
    assert stats["checkpoints_published"] == 600 // 64
    assert stats["checkpoints_total"] - stats["checkpoints_free"] == 600 // 64


# -- provenance ---------------------------------------------------------------------------


def test_derived_is_invisible_to_exact(client: Client, kind: str) -> None:
    tokens = prompt(300)
    client.run(tokens[:100], **{kind: (90,)})
    client.run(tokens, exact=False, provenance=DERIVED, **{kind: (80, 200, 299)})
    assert positions(client.peek(tokens), kind) == [90]
    offered = refs(client.peek(tokens, exact=False), kind)
    assert offered[0] == (299, offered[0].slot, offered[0].generation, DERIVED)
    assert offered[-1 if kind == "states" else 2].provenance == EXACT


def test_exact_one_is_offered_behind_many_derived(tmp_path: Path) -> None:
    client = Client(tmp_path, checkpoints=20)
    tokens = prompt(640)
    client.run(tokens[:120], checkpoints=(60, 120))
    later = tuple(range(180, 640, 60))
    client.run(tokens, exact=False, provenance=DERIVED, checkpoints=later)
    offered = client.peek(tokens, exact=False).checkpoints
    assert [ref.position for ref in offered] == [600, 540, 480, 420, 120]
    assert [ref.provenance.exact for ref in offered] == [False] * 4 + [True]


def test_exact_replaces_derived_and_not_the_reverse(client: Client, kind: str) -> None:
    """A reader of the derived one keeps it until it is done."""
    tokens = prompt(300)
    client.run(tokens, exact=False, provenance=DERIVED, **{kind: (200,)})
    reader = client.match(tokens, exact=False)
    client.run(tokens[:250], **{kind: (200,)})
    assert read(client, kind, refs(reader, kind)[0]) is not None
    assert client.cache.stats()[f"{kind}_free"] == 2
    client.cache.release(reader.lease)
    client.cache.check()
    assert client.cache.stats()[f"{kind}_free"] == 3
    client.run(tokens, exact=False, provenance=DERIVED, **{kind: (200,)})
    for exact in (True, False):
        assert [ref.provenance for ref in refs(client.peek(tokens, exact=exact), kind)] == [EXACT]


def test_long_chains_are_not_kept(tmp_path: Path, kind: str) -> None:
    client = Client(tmp_path, max_chain=2)
    tokens = prompt(100)
    client.run(tokens, exact=False, provenance=Provenance(3), **{kind: (50,)})
    assert client.cache.stats()[f"{kind}_free"] == 4
    client.run(tokens, exact=False, provenance=Provenance(2), **{kind: (50,)})
    assert positions(client.peek(tokens, exact=False), kind) == [50]


# -- damage -------------------------------------------------------------------------------


def test_unwritten_ones_stay_out(client: Client, kind: str) -> None:
    tokens = prompt(100)
    res = client.reserve(tokens, **{kind: (50, 99)})
    client.write(res, tokens)
    slots = getattr(client.arena, kind)
    slots.words[refs(res, kind)[1].slot] -= np.uint64(1)  # as if the writer died in it
    client.cache.publish(res.lease)
    client.cache.check()
    assert positions(client.peek(tokens), kind) == [50]
    stats = client.cache.stats()
    assert (stats[f"unwritten_{kind}"], stats[f"{kind}_published"]) == (1, 1)


def test_damaged_one_is_a_counted_miss(client: Client, kind: str) -> None:
    """Named by slot and kind: the other kind's record in the slot of that number stays."""
    tokens = prompt(200)
    client.run(tokens, states=(150, 199), checkpoints=(150, 199))
    match = client.match(tokens)
    ref = refs(match, kind)[0]
    getattr(client.arena, kind).arrays[0][ref.slot, 0] ^= np.uint32(4)
    assert read(client, kind, ref) is None
    client.cache.report_corrupt(match.lease, **{kind[:-1]: ref.slot})
    client.cache.release(match.lease)
    client.cache.check()
    other = "checkpoints" if kind == "states" else "states"
    stats, again = client.cache.stats(), client.peek(tokens)
    assert (stats[f"corrupt_{kind}"], stats[f"corrupt_{other}"]) == (1, 0)
    assert positions(again, kind) == [150]
    assert positions(again, other)[0] == 199


# -- what others see ----------------------------------------------------------------------


def test_bytes_are_counted(client: Client) -> None:
    client.run(prompt(100), states=(99,), checkpoints=(40, 80))
    stats, layout = client.cache.stats(), client.arena.layout
    assert (stats["kv_bytes_used"], stats["kv_bytes_total"]) == (
        4 * layout.block_bytes, 256 * layout.block_bytes,
    )  # fmt: skip
    assert (stats["state_bytes_used"], stats["state_bytes_total"]) == (
        layout.state_bytes, 4 * layout.state_bytes,
    )  # fmt: skip
    assert (stats["checkpoint_bytes_used"], stats["checkpoint_bytes_total"]) == (
        2 * layout.checkpoint_bytes, 4 * layout.checkpoint_bytes,
    )  # fmt: skip


def test_remote_index_tells_the_same(client: Client) -> None:
    remote, tokens = RemoteIndex(lambda call: handle(client.cache, call)), prompt(200)
    res = remote.reserve(
        KEY, tokens, provenance=DERIVED, state_positions=(199,), checkpoint_positions=(64, 128)
    )
    client.write(res, tokens)
    assert positions(res, "checkpoints") == [64, 128]
    assert remote.publish(res.lease) == 200
    match, local = (c.match(KEY, tokens, exact_only=False) for c in (remote, client.cache))
    assert match.checkpoints == local.checkpoints
    assert match.states == local.states
    assert remote.arena.read_checkpoint(*match.checkpoints[0][1:3], [np.zeros(2, np.uint32)])
    remote.report_corrupt(match.lease, checkpoint=match.checkpoints[0].slot)
    assert remote.stats()["corrupt_checkpoints"] == 1
    assert positions(client.peek(tokens, exact=False), "checkpoints") == [64]


class Recorder:
    """A metrics registry that keeps each value under its family's name and labels."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], int] = {}

    def gauge(self, name: str, description: str, labels: list[dict[str, str]]) -> list[Any]:
        return [Cell(self.values, (name, *each.values())) for each in labels]

    counter = gauge


class Cell:
    def __init__(self, values: dict[tuple[str, ...], int], key: tuple[str, ...]) -> None:
        self.values, self.key = values, key

    def set(self, value: int) -> None:
        self.values[self.key] = value

    def increment(self, by: int) -> None:
        self.values[self.key] = self.values.get(self.key, 0) + by


def test_metrics_show_checkpoints(client: Client) -> None:
    recorder = Recorder()
    metrics = CacheMetrics(recorder)
    client.run(prompt(100), states=(99,), checkpoints=(40, 80))
    match = client.match(prompt(100))
    client.cache.report_corrupt(match.lease, checkpoint=match.checkpoints[0].slot)
    client.cache.release(match.lease)
    metrics.update(client.cache.stats())
    metrics.update(client.cache.stats())
    assert recorder.values["hybrid_cache_slots", "checkpoints", "used"] == 1
    assert recorder.values["hybrid_cache_slots", "checkpoints", "free"] == 3
    assert recorder.values["hybrid_cache_slots", "states", "used"] == 1
    assert recorder.values["hybrid_cache_corrupt_checkpoints_total",] == 1
