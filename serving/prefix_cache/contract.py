"""What travels between the prefix cache and its callers: frozen records of ints and arrays."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import ConfigError

Ids = NDArray[np.int64]  # not int32: numpy would convert them at each use as an index
Words = NDArray[np.uint64]


class Provenance(NamedTuple):
    """How a block, state or checkpoint came to be.

    chain: approximations on the way to it (0 = exact); estimate: their summed error estimate.
    """

    chain: int = 0
    estimate: float = 0.0

    @property
    def exact(self) -> bool:
        return self.chain == 0

    def worst(self, other: Provenance) -> Provenance:
        """Of something computed from both."""
        if self == other:
            return self
        return Provenance(max(self.chain, other.chain), max(self.estimate, other.estimate))


EXACT = Provenance()


@dataclass(frozen=True)
class CacheConfig:
    """Sizes and limits of one cache.

    name: file name of the arena in the shared-memory folder; kv_bytes and state_bytes: byte
    budgets of the two pools, independent of each other; block_size: tokens per block;
    checkpoint_interval: tokens from one slow-unit checkpoint to the next, 0 = none; their pool
    comes on top of the budgets, as many as the blocks hold intervals and a few for branches;
    max_chain: derived blocks, states and checkpoints beyond it are neither kept nor served;
    lease_seconds: a client silent for longer is taken for dead; ghosts: evictions remembered
    to tell "evicted" from "never seen"; checksum: verify the data of every block read.
    """

    name: str = "hybrid-serve-kv"
    kv_bytes: int = 1 << 30
    state_bytes: int = 256 << 20
    block_size: int = 32
    checkpoint_interval: int = 0
    max_chain: int = 4
    lease_seconds: float = 60.0
    ghosts: int = 4096
    checksum: bool = True

    def __post_init__(self) -> None:
        for field in ("kv_bytes", "block_size", "lease_seconds"):
            if getattr(self, field) <= 0:
                raise ConfigError(f"{field} = {getattr(self, field)}, must be > 0", where="cache")
        for field in ("state_bytes", "checkpoint_interval", "max_chain", "ghosts"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field} = {getattr(self, field)}, must be >= 0", where="cache")


@dataclass(frozen=True)
class CacheKey:
    """Whose cache: nothing is ever shared between two different keys.

    model: digest of the weights; layout: dtype and layout version of the blocks;
    salt: tenant secret, "" = the common one; adapter: id of the adapter, "" = none.
    """

    model: str
    layout: str
    salt: str = ""
    adapter: str = ""

    @cached_property
    def namespace(self) -> bytes:
        """Injective: every part is tagged and length-prefixed, so no two keys meet."""
        return self.unsalted + _tagged(b"S", self.salt)

    @cached_property
    def unsalted(self) -> bytes:
        """What all tenants of one model and adapter have in common."""
        return _tagged(b"M", self.model) + _tagged(b"L", self.layout) + _tagged(b"A", self.adapter)


def _tagged(tag: bytes, text: str) -> bytes:
    data = text.encode()
    return tag + len(data).to_bytes(4, "little") + data


class MissReason(StrEnum):
    """Why a hit ends where it ends."""

    NONE = "none"  # everything but the last prompt token is cached
    COLD = "cold"  # the rest was never seen (or so long ago that even its ghost is gone)
    DIVERGED = "diverged"  # another continuation is cached; see Match.diverged_at
    EVICTED = "evicted"  # at least one more token was cached once
    DERIVED_ONLY = "derived_only"  # the rest is cached, but only approximately
    SALT = "salt"  # nothing under this salt, while other salts use the same model


class StateRef(NamedTuple):
    """A full state or a checkpoint after ``position`` tokens, in slot ``slot`` of its kind."""

    position: int
    slot: int
    generation: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class Match:
    """What is cached of a prompt. Pinned until ``release(lease)``.

    hit_len: L, at most prompt_len - 1; exact_hit_len: its leading part made of exact blocks;
    blocks [ceil(L / block_size)] and their generations: the last one may be cut short by L,
    and ``blocks[: exact_hit_len // block_size]`` are exact;
    provenance: of the whole context [0, L); states: the deepest exact one and, for a request
    that is not exact, a deeper derived one if there is; checkpoints: the four deepest, and the
    deepest exact one if all four are derived; both deepest first, at positions <= hit_len, and
    only exact ones for an exact request; diverged_at: -1 unless DIVERGED.
    """

    lease: int
    prompt_len: int
    hit_len: int
    exact_hit_len: int
    blocks: Ids
    generations: Words
    provenance: Provenance
    states: tuple[StateRef, ...]
    miss_reason: MissReason
    diverged_at: int
    checkpoints: tuple[StateRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Reservation:
    """What the caller may write before ``publish(lease)``.

    blocks [n] hold tokens [start // block_size * block_size, end): all rows from the first
    block's first token, also those before ``start``. Empty when start == end. ``end`` is
    short of the sequence when there was no room. states, checkpoints: the granted ones of
    those asked for, by position.
    """

    lease: int
    start: int
    end: int
    blocks: Ids
    generations: Words
    states: tuple[StateRef, ...]
    checkpoints: tuple[StateRef, ...] = ()
