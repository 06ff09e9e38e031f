"""A random client of the prefix cache, with an oracle that knows each row's full prefix.

Every row of K/V, every state and every checkpoint the client writes is a fingerprint of (key,
all tokens up to there) and the length of the approximation chain behind it. Whatever the cache
returns later is compared with the fingerprints of the prompt it was returned for: what belongs
to any other prefix cannot pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from serving.prefix_cache import (
    Arena,
    ArenaLayout,
    ArraySpec,
    CacheConfig,
    CacheKey,
    Match,
    PrefixCache,
    Provenance,
    Reservation,
    StateRef,
)

BLOCK = 4
INTERVAL = 6  # of the checkpoints: neither a multiple nor a divisor of a block
ROWS = 64
MAX_CHAIN = 2
KEYS = (
    CacheKey("model", "fp32", "a"),
    CacheKey("model", "fp32", "b"),
    CacheKey("model", "fp32", "a", "adapter"),
    CacheKey("model2", "fp32", "a"),
)
LAYOUT = ArenaLayout(
    BLOCK,
    (ArraySpec("print", (1, BLOCK, 2), "uint32"), ArraySpec("chain", (1, BLOCK, 1), "int32")),
    (ArraySpec("print", (2,), "uint32"), ArraySpec("chain", (1,), "int32")),
    (ArraySpec("print", (2,), "uint32"), ArraySpec("chain", (1,), "int32")),
)

# mostly one key, so that its prompts meet
keys = st.sampled_from((KEYS[0],) * 5 + KEYS[1:])
# a prompt is an old sequence, cut somewhere, and some new tokens of few values
bases = st.integers(0, 7)
cuts = st.just(ROWS) | st.integers(0, 30)
news = st.lists(st.integers(0, 2), max_size=10)
picks = st.integers(0, 7)
places = st.lists(st.integers(0, 40), max_size=2)


def fingerprints(key: CacheKey, tokens: np.ndarray) -> np.ndarray:
    """[n, 2] uint32: row i depends on the key and on tokens [0, i]."""
    low = zlib.crc32(repr(key).encode())
    high = zlib.crc32(repr(key).encode(), 1)
    out = np.empty((len(tokens), 2), np.uint32)
    for i, token in enumerate(tokens.tolist()):
        low = zlib.crc32(token.to_bytes(4, "little"), low)
        high = zlib.crc32(token.to_bytes(4, "big") + b"+", high)
        out[i] = low, high
    return out


def empty_slot() -> list[np.ndarray]:
    return [np.full((1, ROWS, 2), 0xDEAD, np.uint32), np.full((1, ROWS, 1), -1, np.int32)]


@dataclass
class Reader:
    """A match, what the client loaded by it, and what it asked."""

    key: CacheKey
    prompt: np.ndarray
    exact: bool
    match: Match
    slot: list[np.ndarray]


@dataclass
class Writer:
    key: CacheKey
    tokens: np.ndarray
    slot: list[np.ndarray]
    provenance: Provenance
    reservation: Reservation


@dataclass
class Oracle:
    """Prefixes that must be there: published, and nothing was taken away since."""

    published: list[tuple[CacheKey, np.ndarray, int]] = field(default_factory=list)

    def least_hit(self, key: CacheKey, prompt: np.ndarray, max_chain: int) -> int:
        """Longest prefix of ``prompt`` that some published sequence shares."""
        best = 0
        for other, seq, chain in self.published:
            if other == key and chain <= max_chain:
                n = min(len(seq), len(prompt) - 1)
                differ = np.flatnonzero(seq[:n] != prompt[:n])
                best = max(best, int(differ[0]) if len(differ) else n)
        return best


class CacheMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(6, 90), states=st.integers(0, 4), checkpoints=st.integers(0, 20))
    def start(self, blocks: int, states: int, checkpoints: int) -> None:
        self.now = 0.0
        self.folder = Path(mkdtemp(prefix="hybrid-serve-test-"))
        self.arena = Arena.create(self.folder / "arena", LAYOUT, blocks, states, checkpoints)
        config = CacheConfig(block_size=BLOCK, max_chain=MAX_CHAIN, lease_seconds=10, ghosts=8)
        self.cache = PrefixCache(config, self.arena, clock=lambda: self.now)
        self.oracle = Oracle()
        self.past: list[np.ndarray] = [np.zeros(20, np.int32)]
        self.readers: list[Reader] = []
        self.writers: list[Writer] = []
        self.stale: list[Reader] = []

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.die()
            self.cache.check()
            self.cache.evict(self.cache.blocks.size)
            stats = self.cache.stats()
            assert stats["blocks_free"] == stats["blocks_total"], "blocks leaked"
            assert stats["states_free"] == stats["states_total"], "states leaked"
            assert stats["checkpoints_free"] == stats["checkpoints_total"], "checkpoints leaked"
            self.arena.unlink()
            self.folder.rmdir()

    # -- the client -----------------------------------------------------------------------

    @rule(key=keys, base=bases, cut=cuts, new=news, exact=st.booleans())
    def match(self, key: CacheKey, base: int, cut: int, new: list[int], exact: bool) -> None:
        old = self.past[-1 - base % len(self.past)][:cut]
        prompt = np.concatenate([old, np.array(new, np.int32)])[: ROWS - 24].astype(np.int32)
        if len(prompt):
            self.look_up(key, prompt, exact)

    def look_up(self, key: CacheKey, prompt: np.ndarray, exact: bool) -> None:
        match = self.cache.match(key, prompt, exact_only=exact)
        assert 0 <= match.exact_hit_len <= match.hit_len < len(prompt) == match.prompt_len
        least = self.oracle.least_hit(key, prompt, 0 if exact else MAX_CHAIN)
        assert match.hit_len >= least, f"hit {match.hit_len}, but {least} are cached"
        reader = Reader(key, prompt, exact, match, empty_slot())
        self.readers.append(reader)
        self.verify(reader, must_be_good=True)

    def verify(self, reader: Reader, *, must_be_good: bool) -> None:
        """Rows read through a match are those of its prompt, and no worse than it says."""
        match, slot = reader.match, reader.slot
        good = self.arena.read_blocks(match.blocks, match.generations, match.hit_len, slot)
        if must_be_good:
            assert good == match.hit_len, "a pinned block was lost"
        want = fingerprints(reader.key, reader.prompt)[:good]
        assert np.array_equal(slot[0][0, :good], want), "rows of another prefix"
        chains = slot[1][0, :good, 0]
        assert (chains <= match.provenance.chain).all(), "rows worse than the match says"
        assert (chains[: match.exact_hit_len // BLOCK * BLOCK] == 0).all(), "not exact"
        assert not reader.exact or not chains.any(), "an exact request got derived rows"
        for refs, read in (
            (match.states, self.arena.read_state),
            (match.checkpoints, self.arena.read_checkpoint),
        ):
            places = [ref.position for ref in refs]
            assert places == sorted(set(places), reverse=True), "not the deepest first"
            for ref in refs:
                self.verify_record(reader, ref, read, must_be_good=must_be_good)

    def verify_record(
        self, reader: Reader, ref: StateRef, read: Callable[..., bool], *, must_be_good: bool
    ) -> None:
        """A state or a checkpoint is that of the prompt up to its position."""
        match = reader.match
        assert 0 < ref.position <= (match.exact_hit_len if reader.exact else match.hit_len)
        assert ref.provenance.exact or not reader.exact, "an exact request got a derived one"
        arrays = [np.zeros(2, np.uint32), np.zeros(1, np.int32)]
        good = read(ref.slot, ref.generation, arrays)
        assert good or not must_be_good, "a pinned one was lost"
        if good:
            want = fingerprints(reader.key, reader.prompt[: ref.position])[-1]
            assert np.array_equal(arrays[0], want), "that of another prefix"
            assert arrays[1][0] <= ref.provenance.chain, "worse than it says"

    @precondition(lambda self: self.readers)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        """What was pinned is still what it was."""
        reader = self.readers.pop(pick % len(self.readers))
        self.verify(reader, must_be_good=True)
        assert self.cache.release(reader.match.lease)
        assert not self.cache.release(reader.match.lease), "released twice"

    @precondition(lambda self: self.readers)
    @rule(pick=picks, more=news, derive=st.booleans(), states=places)
    def reserve(self, pick: int, more: list[int], derive: bool, states: list[int]) -> None:
        """Compute the rest of the prompt and some answer, exactly or after a replay."""
        reader = self.readers[pick % len(self.readers)]
        tokens = np.concatenate([reader.prompt, np.array(more, np.int32)]).astype(np.int32)
        context = reader.match.provenance
        provenance = Provenance(context.chain + 1, 0.1) if derive and not reader.exact else context
        slot = [array.copy() for array in reader.slot]
        hit = reader.match.hit_len
        slot[0][0, hit : len(tokens)] = fingerprints(reader.key, tokens)[hit:]
        slot[1][0, hit : len(tokens)] = provenance.chain
        reservation = self.cache.reserve(
            reader.key, tokens, provenance=provenance,
            state_positions=[*states, len(reader.prompt) - 1, len(tokens)],
            checkpoint_positions=range(INTERVAL, len(tokens) + 1, INTERVAL),
        )  # fmt: skip
        self.note_losses()
        assert reservation.start <= reservation.end <= len(tokens)
        self.past = [*self.past[-7:], tokens]
        self.writers.append(Writer(reader.key, tokens, slot, provenance, reservation))

    @precondition(lambda self: self.writers)
    @rule(pick=picks, keep=st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0]))
    def publish(self, pick: int, keep: float) -> None:
        """Write all of it, or die half-way and publish nevertheless."""
        writer = self.writers.pop(pick % len(self.writers))
        res = writer.reservation
        count = round(keep * len(res.blocks))
        end = min(res.end, (res.start // BLOCK + count) * BLOCK) if count else res.start
        end = max(end, res.start)
        self.arena.write_blocks(
            res.blocks[:count], res.generations[:count], res.start, end, writer.slot
        )
        chain = np.array([writer.provenance.chain], np.int32)
        prints = fingerprints(writer.key, writer.tokens)
        for refs, write in (
            (res.states, self.arena.write_state),
            (res.checkpoints, self.arena.write_checkpoint),
        ):
            for ref in refs[: round(keep * len(refs))]:
                write(ref.slot, ref.generation, [prints[ref.position - 1], chain])
        self.cache.publish(res.lease)
        if writer.provenance.chain <= MAX_CHAIN:
            seen = writer.tokens[: end if count < len(res.blocks) else res.end]
            self.oracle.published.append((writer.key, seen, writer.provenance.chain))

    @rule(
        key=keys, base=bases, cut=cuts, new=news, exact=st.booleans(), more=news,
        derive=st.booleans(), states=places,
    )  # fmt: skip
    def turn(
        self, key: CacheKey, base: int, cut: int, new: list[int], exact: bool, more: list[int],
        derive: bool, states: list[int],
    ) -> None:  # fmt: skip
        """A whole request."""
        before = len(self.readers)
        self.match(key, base, cut, new, exact)
        if len(self.readers) > before:
            self.answer(more, derive, states)

    def answer(self, more: list[int], derive: bool, states: list[int]) -> None:
        """The rest of a request, for the reader that came last."""
        last = len(self.readers) - 1
        self.reserve(last, more, derive, states)
        self.publish(len(self.writers) - 1, 1.0)
        self.release(last)

    @rule(base=bases, cut=cuts, new=news, more=news, states=places)
    def upgrade(
        self, base: int, cut: int, new: list[int], more: list[int], states: list[int]
    ) -> None:
        """A prompt is answered after a replay, and then exactly while someone reads the first."""
        before = len(self.readers)
        self.match(KEYS[0], base, cut, new, False)
        if len(self.readers) > before:
            self.answer(more, True, states)
            prompt = self.past[-1]
            self.look_up(KEYS[0], prompt, False)
            self.look_up(KEYS[0], prompt, True)
            self.answer([], False, states)

    @precondition(lambda self: self.writers)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        writer = self.writers.pop(pick % len(self.writers))
        assert self.cache.abort(writer.reservation.lease)
        assert self.cache.publish(writer.reservation.lease) == 0

    # -- the world ------------------------------------------------------------------------

    @rule(blocks=st.integers(1, 20))
    def evict(self, blocks: int) -> None:
        free = self.cache.blocks.free
        given = self.cache.evict(blocks)
        assert self.cache.blocks.free == free + given
        self.note_losses()

    @precondition(lambda self: len(self.readers) > 1)
    @rule()
    def die(self) -> None:
        """Every lease of now expires; the readers do not notice and read on."""
        self.now += 11
        assert self.cache.expire() == len(self.readers) + len(self.writers)
        self.stale = [*self.stale, *self.readers][-6:]
        self.readers.clear()
        self.writers.clear()

    @precondition(lambda self: self.stale)
    @rule()
    def stale_read(self) -> None:
        """Their blocks may hold anything by now, but they never take them for their own."""
        for reader in self.stale:
            self.verify(reader, must_be_good=False)

    @precondition(lambda self: any(reader.match.hit_len for reader in self.readers))
    @rule(pick=picks, where=st.floats(0, 0.99), word=st.booleans(), sure=st.integers(0, 3))
    def corrupt(self, pick: int, where: float, word: bool, sure: int) -> None:
        """Damage a block in use: it is noticed, counted, and not offered again."""
        reader = self.readers[pick % len(self.readers)]
        match = reader.match
        if sure or not match.hit_len:
            return
        number = int(where * len(match.blocks))
        block = int(match.blocks[number])
        if word:
            self.arena.blocks.words[block] += np.uint64(2)
        else:
            self.arena.blocks.arrays[0][block, 0, 0, 1] ^= np.uint32(1 << 7)
        good = self.arena.read_blocks(match.blocks, match.generations, match.hit_len, empty_slot())
        assert good == number * BLOCK, "damage not noticed"
        before = self.cache.stats()["corrupt_blocks"]
        self.cache.report_corrupt(match.lease, block=number)
        assert self.cache.stats()["corrupt_blocks"] == before + 1
        again = self.cache.match(reader.key, reader.prompt, exact_only=reader.exact)
        assert block not in again.blocks, "a damaged block offered again"
        self.cache.release(again.lease)
        self.oracle.published.clear()
        # others that have it pinned would find out by themselves, as this one did
        self.die()

    def note_losses(self) -> None:
        """After an eviction the oracle no longer knows what must be there."""
        evicted = self.cache.stats()["evicted_blocks"]
        if evicted != getattr(self, "evicted", 0):
            self.evicted = evicted
            self.oracle.published.clear()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()


__all__ = ["BLOCK", "KEYS", "CacheMachine"]
