"""Synthetic attention traces with a known structure, one random generator for every policy.

Per kv head, a key is the sum of its topic's direction, what is its own, and a slow-to-fast rotation
with its position (as RoPE leaves it); a query asks for the topic at hand, for its position, for
the direction of heavy hitters and for something of its own, times the head's temperature. Values
are a common mean, the topic's value and noise. In this crowd lie families of look-alikes, half of
them in the prompt: keys in no topic's direction, that share a direction among themselves. One row
of each family, its anchor, is asked for at one decode step; nobody asks before, and nothing but
that question tells an anchor from its decoys.

                peaky        mixed                      flat
temperature     12 - 24      3 - 24, one for each head  1.5 - 3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

KV_HEADS, HEADS, DIM = 2, 4, 64
SCALE = DIM**-0.5
TEMPERATURES = {"peaky": (12.0, 24.0), "mixed": (3.0, 24.0), "flat": (1.5, 3.0)}
LENGTHS = (4096, 8192, 16384, 32768)
STEPS, EVERY, ANCHORS = 16, 16, 4
# Shares of all rows: the prompt, anchors with their decoys, heavy hitters.
PROMPT, FAMILIES, HEAVY = 1 / 12, 0.015, 0.004
_TOPICS, _SEGMENT, _RECALL = 16, 400, 0.05
# Lengths of the parts of a key, and of a query before its temperature.
_KEY = {"topic": 3.2, "own": 1.8, "place": 2.0, "heavy": 2.0}
_QUERY = {"topic": 0.8, "own": 0.5, "place": 0.5, "heavy": 0.5, "anchor": 1.6}


@dataclass(frozen=True)
class Trace:
    """keys, values [Hk, T, d]; history [n, Hq, d]: the queries at positions ``history_at`` [n];
    queries [S, Hq, d]: decode steps after the last row; asked [S]: the row of the anchor asked for,
    or -1; look_alikes [T]: anchors and decoys; temperatures [Hq]."""

    regime: str
    keys: Floats
    values: Floats
    history: Floats
    history_at: Ints
    queries: Floats
    asked: Ints
    look_alikes: NDArray[np.bool_]
    temperatures: Floats
    prompt_len: int


def make_trace(regime: str, length: int, seed: int) -> Trace:
    rng = np.random.default_rng([seed, length, list(TEMPERATURES).index(regime)])
    prompt = int(length * PROMPT)
    history_at = np.arange(EVERY - 1, length, EVERY)
    at = np.concatenate([history_at, np.full(STEPS, length - 1) + np.arange(1, STEPS + 1)])
    topics = _topics(rng, length + STEPS)
    wanted = topics[at]
    recall = rng.random(len(at)) < _RECALL
    wanted[recall] = topics[(rng.random(recall.sum()) * np.minimum(at[recall], length)).astype(int)]
    family, anchors = _families(rng, length, prompt)
    heavy = rng.random(length) < HEAVY
    heavy[:4] = True
    heavy[family >= 0] = False
    asked = np.full(STEPS, -1, np.int64)
    asked[rng.permutation(STEPS)[:ANCHORS]] = anchors
    place = _place(np.arange(length + STEPS))
    keys = np.empty((KV_HEADS, length, DIM), np.float32)
    values = np.empty_like(keys)
    queries = np.empty((len(at), HEADS, DIM), np.float32)
    temperatures = rng.uniform(*TEMPERATURES[regime], HEADS).astype(np.float32)
    for h in range(KV_HEADS):
        basis = np.linalg.qr(rng.standard_normal((DIM, DIM)))[0].astype(np.float32)
        rotation, hit = basis[: place.shape[1]], basis[place.shape[1]]
        themes = _unit(rng, _TOPICS)
        keys[h] = _keys(rng, themes[topics[:length]], family)
        keys[h] += _KEY["place"] * place[:length] @ rotation
        keys[h, heavy] += _KEY["heavy"] * hit
        values[h] = 0.5 * _unit(rng, 1) + 0.8 * _unit(rng, _TOPICS)[topics[:length]]
        values[h] += rng.standard_normal((length, DIM), np.float32) / DIM**0.5
        direction = keys[h, asked] / np.linalg.norm(keys[h, asked], axis=1, keepdims=True)
        for g in range(h * HEADS // KV_HEADS, (h + 1) * HEADS // KV_HEADS):
            q = _QUERY["topic"] * themes[wanted] + _QUERY["heavy"] * hit
            q += _QUERY["place"] * place[at] @ rotation + _QUERY["own"] * _unit(rng, len(at))
            q[-STEPS:] += _QUERY["anchor"] * direction * (asked >= 0)[:, None]
            queries[:, g] = q * temperatures[g] * (DIM**0.5 / 4)
    return Trace(
        regime, keys, values, queries[:-STEPS], history_at, queries[-STEPS:], asked,
        family >= 0, temperatures, prompt,
    )  # fmt: skip


def _topics(rng: np.random.Generator, length: int) -> Ints:
    """[length]: segments of one topic each; topics come back."""
    sizes = rng.geometric(1 / _SEGMENT, length // 64 + 64)
    topics = np.repeat(rng.integers(_TOPICS, size=len(sizes)), sizes)
    while len(topics) < length:
        topics = np.concatenate([topics, topics])
    return topics[:length]


def _families(rng: np.random.Generator, length: int, prompt: int) -> tuple[Ints, Ints]:
    """family [length]: -1 or the number of a row's family, and the anchors, one of each: half of
    the families' rows and of the anchors lie in the prompt, none among the last 512 rows."""
    size = max(11, int(FAMILIES * length / ANCHORS))
    half = ANCHORS * size // 2
    early = 8 + rng.permutation(prompt - 8)[:half]
    late = prompt + rng.permutation(length - 512 - prompt)[: ANCHORS * size - half]
    anchors = np.concatenate([early[: ANCHORS // 2], late[: ANCHORS // 2]])
    decoys = rng.permutation(np.concatenate([early[ANCHORS // 2 :], late[ANCHORS // 2 :]]))
    family = np.full(length, -1, np.int64)
    family[anchors] = np.arange(ANCHORS)
    family[decoys] = np.arange(len(decoys)) % ANCHORS
    return family, anchors


def _keys(rng: np.random.Generator, themes: Floats, family: Ints) -> Any:
    """[T, d] without place and heavy parts; themes [T, d]: the direction of each row's topic.

    Look-alikes are as long as other keys."""
    own = _KEY["own"] * rng.uniform(0.75, 1.25, (len(family), 1)).astype(np.float32)
    keys = _KEY["topic"] * themes + own * _unit(rng, len(family))
    rows = np.flatnonzero(family >= 0)
    shared = _unit(rng, ANCHORS)[family[rows]]
    alike = 0.3**0.5 * shared + 0.7**0.5 * _unit(rng, len(rows))
    keys[rows] = np.hypot(_KEY["topic"], own[rows]) * alike
    return keys


def _place(at: Ints) -> Floats:
    """[n, 8], of length 1: rotations with periods from 48 to 200,000 rows."""
    angle = at[:, None] * (2 * np.pi / np.geomspace(48, 2e5, 4))
    return np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32) / 2


def _unit(rng: np.random.Generator, count: int) -> Any:
    """[count, d] directions."""
    x = rng.standard_normal((count, DIM), np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)
