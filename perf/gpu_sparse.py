"""Sparse decode for perf.gpu: against float64, and its time over that of dense decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plugins.compressed_sparse_attention.kernel import attend
from plugins.compressed_sparse_attention.ref import BLOCK, sparse_decode_attention
from plugins.compressed_sparse_attention.sparse_kernel import SparseStep, sparse_decode

PAGE, EPSILON = 32, 0.05


@dataclass(frozen=True)
class Case:
    """One sequence of rows whose blocks differ in what they weigh; its pages are in order."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    summaries: torch.Tensor
    stats: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1]) ** -0.5

    def sparse(self) -> SparseStep:
        tensors = (self.q, self.k, self.v, self.table, self.rows, self.summaries, self.stats)
        return sparse_decode(*tensors, scale=self.scale, epsilon=EPSILON)

    def dense(self) -> Any:
        lens = self.rows[:, 0].contiguous()
        return attend(self.q[:, None], self.k, self.v, self.table, lens, scale=self.scale)

    def errors(self) -> dict[str, float]:
        """Against ref.py; ``actual``: the error of the whole, to set beside the bound."""
        got, (dense, _) = self.sparse(), self.dense()
        k, v = (x.flatten(0, 1).transpose(0, 1)[None].double().cpu().numpy()
                for x in (self.k, self.v))  # fmt: skip
        arrays = (x.cpu().numpy() for x in (self.rows, self.summaries, self.stats))
        want = sparse_decode_attention(
            self.q.double().cpu().numpy(), k, v, *arrays, scale=self.scale, epsilon=EPSILON
        )
        o, full = got.o.double().cpu().numpy(), dense[:, 0].double().cpu().numpy()
        read = got.chosen.cpu().numpy() > 0
        norm = np.linalg.norm(full, axis=-1)
        return {
            "error_o": float(np.abs(o - want.o).max() / np.abs(want.o).max()),
            "chosen_otherwise": float((read != (want.chosen > 0)).mean()),
            "read": float(read.mean()),
            "bound": float(got.error_bound.max()),
            "actual": float((np.linalg.norm(o - full, axis=-1) / norm).max()),
        }


def make(device: str, Hq: int, Hk: int, D: int, rows: int) -> Case:
    """Keys of a block lie around a centre; queries look for a few of them."""
    blocks, half = rows // BLOCK, torch.bfloat16
    centre = torch.randn(blocks, 1, Hk, D, device=device)
    k = (centre + 0.3 * torch.randn(blocks, BLOCK, Hk, D, device=device)).to(half)
    v = torch.randn(blocks, 1, Hk, D, device=device)
    v = (v + 0.3 * torch.randn(blocks, BLOCK, Hk, D, device=device)).to(half)
    wanted = centre[torch.randint(blocks, (Hq,)), 0, torch.arange(Hq) * Hk // Hq]
    q = (1.5 * wanted + torch.randn(Hq, D, device=device)).to(half)[None]
    mean_k, mean_v = k.float().mean(1).half(), v.float().mean(1).half()
    spread = (k.float() - mean_k[:, None].float()).square().mean(1).sqrt().half()
    far = (v.float() - mean_v[:, None].float()).square().sum(-1).mean(1).sqrt()
    summaries = torch.cat([mean_k, spread, mean_v], -1).transpose(0, 1)[None].contiguous()
    stats = torch.stack([torch.full_like(far, BLOCK), far], -1).transpose(0, 1)[None].contiguous()
    table = torch.arange(blocks, device=device, dtype=torch.int32)[None]
    lens = torch.full((1, Hk), rows, device=device, dtype=torch.int32)
    return Case(q, k, v, table, lens, summaries, stats)
