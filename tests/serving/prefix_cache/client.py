"""A small client: one arena, one cache, rows that say which prefix they belong to."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serving.prefix_cache import (
    EXACT,
    Arena,
    ArenaLayout,
    ArraySpec,
    CacheConfig,
    CacheKey,
    Match,
    PrefixCache,
    Provenance,
    Reservation,
)
from tests.serving.prefix_cache.machine import fingerprints

KEY = CacheKey("model", "fp32")
B = 32


class Client:
    """Rows: fingerprint [2] of the prefix up to the row, and its approximation chain."""

    def __init__(
        self, path: Path, *, blocks: int = 256, states: int = 4, checkpoints: int = 4,
        **config: float | int,
    ) -> None:  # fmt: skip
        self.now = 0.0
        layout = ArenaLayout(
            B,
            (ArraySpec("print", (1, B, 2), "uint32"), ArraySpec("chain", (1, B, 1), "int32")),
            (ArraySpec("print", (2,), "uint32"),),
            (ArraySpec("print", (2,), "uint32"),),
        )
        self.arena = Arena.create(path / "arena", layout, blocks, states, checkpoints)
        self.cache = PrefixCache(
            CacheConfig(**config),  # type: ignore[arg-type]
            self.arena,
            clock=lambda: self.now,
        )

    def slot(self, length: int) -> list[np.ndarray]:
        return [np.zeros((1, length, 2), np.uint32), np.full((1, length, 1), -1, np.int32)]

    def match(self, tokens: np.ndarray, key: CacheKey = KEY, *, exact: bool = True) -> Match:
        """Match and check every row it offers."""
        match = self.cache.match(key, tokens, exact_only=exact)
        self.read(match, tokens, key)
        return match

    def read(self, match: Match, tokens: np.ndarray, key: CacheKey = KEY) -> np.ndarray:
        """Chains [hit_len] of the rows read, after checking that they are those of tokens."""
        slot = self.slot(len(tokens))
        good = self.arena.read_blocks(match.blocks, match.generations, match.hit_len, slot)
        assert good == match.hit_len
        assert np.array_equal(slot[0][0, :good], fingerprints(key, tokens[:good]))
        return slot[1][0, :good, 0]

    def reserve(
        self, tokens: np.ndarray, key: CacheKey = KEY, *, provenance: Provenance = EXACT,
        states: tuple[int, ...] = (), checkpoints: tuple[int, ...] = (),
    ) -> Reservation:  # fmt: skip
        return self.cache.reserve(
            key, tokens, provenance=provenance, state_positions=states,
            checkpoint_positions=checkpoints,
        )  # fmt: skip

    def write(
        self, res: Reservation, tokens: np.ndarray, key: CacheKey = KEY, *,
        provenance: Provenance = EXACT,
    ) -> None:  # fmt: skip
        slot = self.slot(len(tokens))
        slot[0][0] = fingerprints(key, tokens)
        slot[1][0] = provenance.chain
        self.arena.write_blocks(res.blocks, res.generations, res.start, res.end, slot)
        for ref in res.states:
            state = fingerprints(key, tokens[: ref.position])[-1]
            self.arena.write_state(ref.slot, ref.generation, [state])
        for ref in res.checkpoints:
            state = fingerprints(key, tokens[: ref.position])[-1]
            self.arena.write_checkpoint(ref.slot, ref.generation, [state])

    def run(
        self, tokens: np.ndarray, key: CacheKey = KEY, *, exact: bool = True,
        provenance: Provenance = EXACT, states: tuple[int, ...] = (),
        checkpoints: tuple[int, ...] = (),
    ) -> Match:  # fmt: skip
        """One whole request."""
        match = self.match(tokens, key, exact=exact)
        res = self.reserve(
            tokens, key, provenance=provenance, states=states, checkpoints=checkpoints
        )
        self.write(res, tokens, key, provenance=provenance)
        self.cache.publish(res.lease)
        self.cache.release(match.lease)
        self.cache.check()
        return match

    def peek(self, tokens: np.ndarray, key: CacheKey = KEY, *, exact: bool = True) -> Match:
        match = self.match(tokens, key, exact=exact)
        self.cache.release(match.lease)
        return match


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length, dtype=np.int32)


def branch(tokens: np.ndarray, at: int, more: int, seed: int = 1) -> np.ndarray:
    """``tokens`` up to ``at``, then a different token and ``more - 1`` others."""
    other = prompt(more, seed)
    if at < len(tokens):
        other[0] = tokens[at] + 1
    return np.concatenate([tokens[:at], other])
