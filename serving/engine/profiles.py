"""The shapes a TensorRT engine is built for; the engine and what builds it read the same table."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_TOKENS = 32  # rows of a block of the KV pool
MAX_BATCH = 16
CHUNK = 512  # tokens of one prefill or replay step


@dataclass(frozen=True)
class Profile:
    """Ranges (min, opt, max) of B sequences, T tokens and N rows of logits wanted."""

    name: str
    batch: tuple[int, int, int]
    tokens: tuple[int, int, int]
    logits: tuple[int, int, int]

    def text(self) -> str:
        """One cell of a table."""
        ranges = (("B", self.batch), ("T", self.tokens), ("N", self.logits))
        return ", ".join(f"{n} {low}..{high} (opt {opt})" for n, (low, opt, high) in ranges)

    def holds(self, batch: int, tokens: int, logits: int) -> bool:
        ranges = (self.batch, self.tokens, self.logits)
        return all(r[0] <= n <= r[2] for r, n in zip(ranges, (batch, tokens, logits), strict=True))


def limits(profiles: tuple[Profile, ...]) -> tuple[int, int, int]:
    """The largest B, T and N of any profile."""
    return (
        max(p.batch[2] for p in profiles),
        max(p.tokens[2] for p in profiles),
        max(p.logits[2] for p in profiles),
    )


# From wide to narrow. A replay needs no logits, a decode one row per sequence.
PROFILES = (
    Profile("prefill", (1, 1, 1), (1, CHUNK, CHUNK), (0, 1, 64)),
    Profile("replay", (1, 1, 1), (1, CHUNK // 2, CHUNK), (0, 0, 0)),
    Profile("decode", (1, MAX_BATCH // 2, MAX_BATCH), (1, 1, 1), (1, MAX_BATCH // 2, MAX_BATCH)),
)
