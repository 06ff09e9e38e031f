"""Hits, eviction, provenance and leases, rule by rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_configs.errors import CacheError
from serving.prefix_cache import EXACT, CacheKey, MissReason, Provenance
from tests.serving.prefix_cache.client import KEY, B, Client, branch, prompt

DERIVED = Provenance(1, 0.1)


# -- how long a hit is --------------------------------------------------------------------


@pytest.mark.parametrize("shared", [1, B - 1, B, B + 1, 480, 481])
def test_cached_is_what_is_shared(client: Client, shared: int) -> None:
    old = prompt(700)
    client.run(old)
    assert client.run(branch(old, shared, 100)).hit_len == shared


def test_no_cliff_at_any_shared_length(client: Client) -> None:
    """Also when all those branches are cached at once, and seen from each of them."""
    old = prompt(4 * B)
    client.run(old)
    for shared in range(1, 3 * B + 1):
        assert client.run(branch(old, shared, 3, seed=shared)).hit_len == shared
    for shared in range(1, 3 * B + 1):
        assert client.peek(branch(old, shared, 3, seed=shared)).hit_len == shared + 2
    assert client.peek(old).hit_len == len(old) - 1


def test_divergence_inside_an_old_prompt(client: Client) -> None:
    old = prompt(500)
    client.run(old)
    new = branch(old, 333, 200)
    match = client.run(new)
    assert (match.hit_len, match.miss_reason, match.diverged_at) == (333, MissReason.DIVERGED, 333)
    assert client.peek(old).hit_len == 499
    assert client.peek(new).hit_len == 532


def test_same_prompt_twice(client: Client) -> None:
    tokens = prompt(300)
    client.run(tokens, states=(299, 300))
    match = client.run(tokens, states=(299, 300))
    assert (match.hit_len, match.miss_reason) == (299, MissReason.NONE)
    assert [ref.position for ref in match.states] == [299]
    assert client.cache.stats()["tokens_published"] == 300


def test_one_token_prompt_has_no_hit(client: Client) -> None:
    client.run(prompt(1))
    assert client.run(prompt(1)).hit_len == 0


def test_next_turn_extends_a_partial_block_in_place_of_the_old_one(client: Client) -> None:
    """While the old one is being read it stays as it is; afterwards it is given back."""
    first = prompt(B + 5)
    client.run(first)
    reader = client.match(branch(first, len(first), 1))
    assert reader.hit_len == len(first)
    second = branch(first, len(first), 50)
    client.run(second)
    client.read(reader, first)
    assert client.peek(second).blocks[1] != reader.blocks[1]
    client.cache.release(reader.lease)
    client.cache.check()
    used = client.cache.blocks.size - client.cache.blocks.free
    assert used == -(-len(second) // B)


def test_same_prompt_in_flight_twice_is_stored_once(client: Client) -> None:
    tokens = prompt(200)
    one, two = client.reserve(tokens), client.reserve(tokens)
    client.write(one, tokens)
    client.write(two, tokens)
    assert client.cache.publish(one.lease) == 200
    assert client.cache.publish(two.lease) == 0
    client.cache.check()
    assert client.cache.blocks.size - client.cache.blocks.free == -(-200 // B)


# -- who may share ------------------------------------------------------------------------


def test_salts_never_share(client: Client) -> None:
    a, b = (CacheKey("model", "fp32", salt) for salt in "ab")
    tokens = prompt(200)
    client.run(tokens, a)
    assert client.peek(tokens, a).hit_len == 199
    match = client.run(tokens, b)
    assert (match.hit_len, match.miss_reason) == (0, MissReason.SALT)


@pytest.mark.parametrize("field", ["model", "layout", "adapter"])
def test_models_layouts_and_adapters_never_share(client: Client, field: str) -> None:
    parts = {"model": "model", "layout": "fp32", "adapter": ""}
    client.run(prompt(200))
    other = CacheKey(**{**parts, field: "other"})
    match = client.run(prompt(200), other)
    assert (match.hit_len, match.miss_reason) == (0, MissReason.COLD)


@given(st.tuples(*[st.text("MLSA\0", max_size=3)] * 4), st.tuples(*[st.text("MLSA\0")] * 4))
def test_key_is_injective(one: tuple[str, ...], two: tuple[str, ...]) -> None:
    assert (CacheKey(*one).namespace == CacheKey(*two).namespace) == (one == two)


# -- eviction -----------------------------------------------------------------------------


def test_pinned_leaf_survives_eviction_to_zero(client: Client) -> None:
    """With everything above it, readable to the last row."""
    old = prompt(300)
    client.run(old)
    new = branch(old, 200, 150)
    client.run(new)
    reader = client.match(new)
    client.cache.evict(10_000)
    client.read(reader, new)
    assert client.peek(old).hit_len == 200
    client.cache.release(reader.lease)
    client.cache.evict(10_000)
    client.cache.check()
    assert client.cache.blocks.free == client.cache.blocks.size
    assert client.peek(new).hit_len == 0


def test_least_recently_used_leaf_goes_first(client: Client) -> None:
    prompts = [prompt(4 * B, seed) for seed in range(4)]
    for tokens in prompts:
        client.run(tokens)
    client.peek(prompts[0])
    assert client.cache.evict(4) == 4
    assert [client.peek(tokens).hit_len for tokens in prompts] == [127, 0, 127, 127]


def test_eviction_takes_the_end_of_a_leaf_and_remembers(client: Client) -> None:
    tokens = prompt(4 * B + 7)
    client.run(tokens)
    assert client.cache.evict(2) == 2
    match = client.peek(tokens)
    assert (match.hit_len, match.miss_reason) == (3 * B, MissReason.EVICTED)
    client.cache.evict(3)
    match = client.peek(tokens)
    assert (match.hit_len, match.miss_reason) == (0, MissReason.EVICTED)
    assert client.peek(prompt(50, 9)).miss_reason is MissReason.COLD


def test_parent_outlives_its_children(client: Client) -> None:
    system = prompt(100)
    for seed in range(1, 4):
        client.run(branch(system, 90, 60, seed))
    client.cache.evict(3)
    assert all(client.peek(branch(system, 90, 60, seed)).hit_len >= 90 for seed in range(1, 4))


def test_ghosts_are_bounded(tmp_path: Path) -> None:
    client = Client(tmp_path, ghosts=5)
    for seed in range(20):
        client.run(prompt(40, seed))
    client.cache.evict(10_000)
    assert len(client.cache.tree.ghosts) == 5
    assert client.peek(prompt(40, 19)).miss_reason is MissReason.EVICTED
    assert client.peek(prompt(40, 0)).miss_reason is MissReason.COLD


def test_prompt_larger_than_the_cache_keeps_its_beginning(tmp_path: Path) -> None:
    client = Client(tmp_path, blocks=5)
    tokens = prompt(10 * B)
    client.run(prompt(3 * B, 1))
    res = client.reserve(tokens, states=(5 * B, 6 * B))
    assert (res.start, res.end, len(res.blocks)) == (0, 5 * B, 5)
    assert [ref.position for ref in res.states] == [5 * B]
    client.write(res, tokens)
    assert client.cache.publish(res.lease) == 5 * B
    assert client.peek(tokens).hit_len == 5 * B
    client.cache.check()


# -- provenance ---------------------------------------------------------------------------


def test_derived_is_invisible_to_exact(client: Client) -> None:
    tokens = prompt(300)
    client.run(tokens[:100])
    client.run(tokens, exact=False, provenance=DERIVED, states=(299,))
    match = client.peek(tokens)
    assert (match.hit_len, match.miss_reason, match.states) == (100, MissReason.DERIVED_ONLY, ())
    match = client.peek(tokens, exact=False)
    assert (match.hit_len, match.exact_hit_len, match.provenance) == (299, 100, DERIVED)
    assert [ref.position for ref in match.states] == [299]
    assert client.cache.stats()["blocks_derived"] == len(match.blocks) - 100 // B


def test_exact_replaces_derived_under_a_reader(client: Client) -> None:
    """Also only a part of it, ending inside a block; the reader keeps what it was given."""
    tokens = prompt(300)
    client.run(tokens, exact=False, provenance=DERIVED, states=(200,))
    reader = client.match(tokens, exact=False)
    client.run(tokens[:250], states=(200,))
    assert (client.read(reader, tokens) == 1).all()
    match = client.peek(tokens, exact=False)
    assert (match.hit_len, match.exact_hit_len) == (299, 250)
    assert match.states[0].provenance == EXACT
    assert (client.read(match, tokens)[: 250 // B * B] == 0).all()
    assert client.peek(tokens).hit_len == 250
    client.cache.release(reader.lease)
    client.cache.check()
    assert client.cache.stats()["tokens_upgraded"] == 250
    assert client.cache.blocks.size - client.cache.blocks.free == 300 // B + 2


def test_derived_never_replaces_exact(client: Client) -> None:
    tokens = prompt(300)
    client.run(tokens, states=(299,))
    client.run(tokens, exact=False, provenance=DERIVED, states=(299,))
    match = client.peek(tokens)
    assert (match.hit_len, match.states[0].provenance) == (299, EXACT)


def test_long_chains_are_not_kept(tmp_path: Path) -> None:
    client = Client(tmp_path, max_chain=2)
    tokens = prompt(100)
    client.run(tokens, exact=False, provenance=Provenance(3), states=(99,))
    assert client.peek(tokens, exact=False).hit_len == 0
    client.run(tokens, exact=False, provenance=Provenance(2))
    assert client.peek(tokens, exact=False).hit_len == 99


def test_shorter_chain_replaces_longer(client: Client) -> None:
    tokens = prompt(100)
    client.run(tokens, exact=False, provenance=Provenance(2))
    client.run(tokens, exact=False, provenance=Provenance(1))
    assert client.peek(tokens, exact=False).provenance.chain == 1


# -- leases and damage --------------------------------------------------------------------


def test_dead_reader_returns_its_pins(client: Client) -> None:
    client.run(prompt(100))
    reader = client.match(prompt(100))
    client.now = 59.0
    assert client.cache.renew(reader.lease)
    client.now = 61.0
    assert client.cache.expire() == 0
    client.now = 120.0
    assert client.cache.expire() == 1
    assert not client.cache.release(reader.lease)
    client.cache.evict(10_000)
    assert client.cache.blocks.free == client.cache.blocks.size


def test_match_and_reserve_end_overdue_leases(client: Client) -> None:
    """Nobody calls expire here; also one that an older but renewed lease stands before."""
    client.run(prompt(100))
    renewed, dead = client.match(prompt(100)), client.match(prompt(100))
    client.now = 50.0
    assert client.cache.renew(renewed.lease)
    client.now = 61.0
    match = client.match(prompt(100))
    assert (client.cache.stats()["leases_expired"], client.cache.release(dead.lease)) == (1, False)
    client.now = 115.0
    client.reserve(prompt(50, 1))
    client.cache.check()
    assert client.cache.stats()["leases_expired"] == 2
    assert not client.cache.release(renewed.lease)
    assert client.cache.release(match.lease)


def test_a_full_cache_of_dead_leases_serves_on(client: Client) -> None:
    client.reserve(prompt(256 * B))
    assert client.reserve(prompt(64, 1)).end == 0
    client.now = 61.0
    assert client.reserve(prompt(64, 1)).end == 64


def test_dead_writer_returns_its_blocks_and_cannot_write_late(client: Client) -> None:
    tokens = prompt(256 * B)
    late = client.reserve(tokens, states=(5,))
    assert len(late.blocks) == 256
    client.now = 61.0
    client.cache.expire()
    assert client.cache.stats()["blocks_free"] == 256
    assert client.cache.stats()["states_free"] == 4
    client.run(prompt(256 * B, 1), states=(1, 2, 3, 4))
    with pytest.raises(CacheError, match="taken back"):
        client.write(late, tokens)
    assert client.cache.publish(late.lease) == 0
    assert client.peek(prompt(256 * B, 1)).hit_len == 256 * B - 1


def test_aborted_reservation_leaves_nothing(client: Client) -> None:
    tokens = prompt(100)
    res = client.reserve(tokens, states=(50, 100))
    client.write(res, tokens)
    assert client.cache.abort(res.lease)
    assert not client.cache.abort(res.lease)
    client.cache.check()
    assert client.peek(tokens).hit_len == 0
    stats = client.cache.stats()
    assert (stats["blocks_free"], stats["states_free"], stats["leases_write"]) == (256, 4, 0)


def test_half_written_reservation_publishes_its_written_part(client: Client) -> None:
    tokens = prompt(100)
    res = client.reserve(tokens, states=(50, 100))
    client.write(res, tokens)
    client.arena.blocks.words[res.blocks[2]] -= np.uint64(1)  # as if the writer died in it
    assert client.cache.publish(res.lease) == 2 * B
    match = client.peek(tokens)
    assert (match.hit_len, [ref.position for ref in match.states]) == (2 * B, [50])
    assert client.cache.stats()["unwritten_blocks"] == 2
    client.cache.check()


@pytest.mark.parametrize("what", ["data", "word"])
def test_damaged_block_is_a_counted_miss(client: Client, what: str) -> None:
    tokens = prompt(200)
    client.run(tokens)
    match = client.match(tokens)
    if what == "data":
        client.arena.blocks.arrays[0][match.blocks[3], 0, 5, 1] ^= np.uint32(4)
    else:
        client.arena.blocks.words[match.blocks[3]] += np.uint64(1)
    slot = client.slot(200)
    good = client.arena.read_blocks(match.blocks, match.generations, match.hit_len, slot)
    assert good == 3 * B
    client.cache.report_corrupt(match.lease, block=good // B)
    client.cache.release(match.lease)
    client.cache.check()
    assert client.cache.stats()["corrupt_blocks"] == 1
    assert client.peek(tokens).hit_len == 3 * B
    client.run(tokens)
    assert client.peek(tokens).hit_len == 199


def test_misuse_is_told(client: Client) -> None:
    with pytest.raises(CacheError, match="int64"):
        client.cache.match(KEY, np.arange(5), exact_only=True)
    match = client.match(prompt(5))
    with pytest.raises(CacheError, match="reserved nothing"):
        client.cache.publish(match.lease)


def test_stats_add_up(client: Client) -> None:
    client.run(prompt(100), states=(99,))
    client.run(prompt(100), states=(99,))
    reader = client.match(prompt(100))
    res = client.reserve(branch(prompt(100), 60, 64))
    stats = client.cache.stats()
    assert stats["matches"] == 3
    assert stats["tokens_asked"] == 300
    assert stats["tokens_matched"] == 198
    assert stats["miss_cold"] == 1
    assert stats["miss_none"] == 2
    assert (stats["leases_read"], stats["leases_write"]) == (1, 1)
    assert stats["blocks_pinned"] == len(reader.blocks)
    assert stats["blocks_reserved"] == len(res.blocks) == 3
    assert stats["blocks_total"] - stats["blocks_free"] == 4 + 3
