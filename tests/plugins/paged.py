"""Sequences in scrambled pages, for tests of the PyTorch ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from plugins.compressed_sparse_attention.ref import compressed_sparse_attention
from plugins.compressed_sparse_attention.torch_op import write_kv

PAGE = 8


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Paged:
    """Sequences of ``totals`` tokens in scrambled pages; rows of no sequence are NaN."""

    def __init__(self, totals: tuple[int, ...], Hk: int, dk: int, dv: int) -> None:
        rng = np.random.default_rng(0)
        blocks = [-(-n // PAGE) for n in totals]
        pages = iter(rng.permutation(sum(blocks) + 2).tolist())
        self.totals = totals
        self.k = [torch.from_numpy(rng.standard_normal((n, Hk, dk))).float() for n in totals]
        self.v = [torch.from_numpy(rng.standard_normal((n, Hk, dv))).float() for n in totals]
        pool = torch.full((sum(blocks) + 2, 2, PAGE, Hk, max(dk, dv)), torch.nan)
        self.pool_k, self.pool_v = pool[:, 0, :, :, :dk], pool[:, 1, :, :, :dv]  # strided views
        table = [[next(pages) for _ in range(n)] for n in blocks]
        self.table = torch.tensor(
            [[*row, *[0] * (max(blocks) - len(row))] for row in table], dtype=torch.int32
        )
        for row, k, v in zip(table, self.k, self.v, strict=True):
            at = torch.tensor([row[t // PAGE] * PAGE + t % PAGE for t in range(len(k))])
            write_kv(self.pool_k, self.pool_v, at, k, v)

    def want(
        self, b: int, q: torch.Tensor, scale: float, window: int | None, selected: Any = None
    ) -> tuple[Any, Any]:
        slots = (self.k[b].movedim(0, 1)[None].numpy(), self.v[b].movedim(0, 1)[None].numpy())
        none = (np.zeros((1, 0, *a.shape[1:2], a.shape[-1])) for a in slots)
        o, _, _, dropped, _ = compressed_sparse_attention(
            q[None].numpy(), *none, *slots, np.array([self.totals[b]]), selected,
            scale=scale, window=window,
        )  # fmt: skip
        return o[0], dropped[0]
