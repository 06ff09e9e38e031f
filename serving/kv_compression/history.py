"""What a sequence's own queries asked for, row by row: all that a retention policy sees."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.kv_compression.grouping import Floats, similar_groups

Mask = NDArray[np.bool_]
# Queries whose weights are computed at once, and keys whose groups show what is common.
_CHUNK, _SAMPLE = 32, 2048


@dataclass(frozen=True)
class Stats:
    """One attention layer of one sequence, T rows of Hk kv heads.

    keys [Hk, T, dk] (after RoPE), values [Hk, T, dv]. Of the softmax weights that the observed
    queries gave each row, [Hk, T]: their sum, the largest (peak), and over the last queries alone
    the mean and the root of the mean square. queries [Hk, n, dk]: some evenly spread over all, then
    every second of the last (``recent_queries`` of them); query_mean [Hk, dk]: of all; both times
    the attention scale. The first ``prompt_len`` rows are the prompt.
    """

    keys: Floats
    values: Floats
    attention_sum: Floats
    attention_peak: Floats
    recent_mean: Floats
    recent_rms: Floats
    queries: Floats
    query_mean: Floats
    recent_queries: int
    prompt_len: int

    @property
    def length(self) -> int:
        return int(self.keys.shape[1])

    @functools.cached_property
    def distinctiveness(self) -> Floats:
        """[Hk, T]: one less the largest cosine between a key and the mean of a group of keys."""
        return np.stack([_distinctiveness(keys) for keys in self.keys])


class AttentionHistory:
    """Softmax weights by row, accumulated over the queries shown to it (not all need be).

    ``recent``: how many of the last observed queries (of one query head) count as recent;
    ``weighed``: about so many queries, spread evenly over ``capacity`` positions, are weighed
    against every row before them.
    """

    def __init__(
        self,
        num_kv_heads: int,
        capacity: int,
        scale: float,
        recent: int = 32,
        weighed: int = 512,
    ) -> None:
        self._scale, self._recent, self._weighed = scale, recent, weighed
        self._sum = np.zeros((num_kv_heads, capacity), np.float32)
        self._peak = np.zeros((num_kv_heads, capacity), np.float32)
        self._queries: Floats | None = None
        self._positions = np.zeros(0, np.int64)
        self._spread: list[Floats] = []
        self._stride = 1
        self._query_sum: Floats | None = None
        self._seen, self._place = 0, -1

    def observe(self, queries: Floats, positions: NDArray[np.int64], keys: Floats) -> None:
        """Queries [n, Hq, dk] at absolute ``positions`` [n], rising; keys [Hk, >= positions + 1,
        dk] of rows 0, 1, ... A query sees the rows up to its own position."""
        scaled = np.asarray(queries, np.float32) * np.float32(self._scale)
        place = positions * self._weighed // self._sum.shape[1]
        weighed = np.flatnonzero(np.diff(place, prepend=self._place))
        self._place = int(np.append(self._place, place)[-1])
        for a in range(0, len(weighed), _CHUNK):
            part, at = scaled[weighed[a : a + _CHUNK]], positions[weighed[a : a + _CHUNK]]
            for h, weights in enumerate(_weights(part, at, keys)):
                n = weights.shape[-1]
                self._sum[h, :n] += weights.sum(0)
                np.maximum(self._peak[h, :n], weights.max(0), out=self._peak[h, :n])
        held = scaled if self._queries is None else np.concatenate([self._queries, scaled])
        self._queries = held[-self._recent :]
        self._positions = np.concatenate([self._positions, positions])[-self._recent :]
        total = scaled.sum(0)
        self._query_sum = total if self._query_sum is None else self._query_sum + total
        for i in range(-self._seen % self._stride, len(positions), self._stride):
            self._spread.append(scaled[i].copy())
        while len(self._spread) > self._recent:
            self._spread, self._stride = self._spread[::2], self._stride * 2
        self._seen += len(positions)

    def stats(self, keys: Floats, values: Floats, prompt_len: int) -> Stats:
        """keys [Hk, T, dk], values [Hk, T, dv]: every row there is. At least one query was seen."""
        assert self._query_sum is not None, "no query was observed"
        assert self._queries is not None
        heads, length, dk = keys.shape
        mean = np.zeros((heads, length), np.float32)
        rms = np.zeros((heads, length), np.float32)
        for h, weights in enumerate(_weights(self._queries, self._positions, keys)):
            n = weights.shape[-1]
            mean[h, :n] = weights.mean(0)
            rms[h, :n] = np.sqrt(np.einsum("nt,nt->t", weights, weights) / len(weights))
        last = self._queries[::-2][::-1]
        shown = np.concatenate([self._spread, last])
        grouped = shown.reshape(len(shown), heads, -1, dk)
        return Stats(
            keys,
            values,
            self._sum[:, :length],
            self._peak[:, :length],
            mean,
            rms,
            grouped.transpose(1, 0, 2, 3).reshape(heads, -1, dk),
            self._query_sum.reshape(heads, -1, dk).mean(1) / self._seen,
            len(last) * grouped.shape[2],
            prompt_len,
        )


def _distinctiveness(keys: Floats) -> Floats:
    """As in Stats; groups are those of a sample, evenly spread: what is rare is in none."""
    part = keys[:: max(1, len(keys) // _SAMPLE)]
    rows = np.concatenate(similar_groups(part, 16))
    means = np.add.reduceat(part[rows], np.arange(0, len(part), 16))
    means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-30)
    size = np.maximum(np.linalg.norm(keys, axis=1), 1e-30)
    return np.asarray(1 - (means @ keys.T).max(0) / size, np.float32)


def _weights(queries: Floats, positions: NDArray[np.int64], keys: Floats) -> Any:
    """Per kv head, softmax weights [n * group, rows visible to the last]; queries [n, Hq, dk]."""
    heads, first, end = keys.shape[0], int(positions[0]) + 1, int(positions[-1]) + 1
    grouped = queries.reshape(len(queries), heads, -1, queries.shape[-1])
    hidden = np.repeat(np.arange(first, end) > positions[:, None], grouped.shape[2], 0)
    for h in range(heads):
        score = grouped[:, h].reshape(len(hidden), -1) @ keys[h, :end].T
        score[:, first:][hidden] = -np.inf
        score -= score.max(1, keepdims=True)
        np.exp(score, out=score)
        score *= 1 / score.sum(1, keepdims=True)
        yield score
