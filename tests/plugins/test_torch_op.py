"""The ops in PyTorch on a CPU: packed sequences, pages and rows of states against ref.py."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from plugins.compressed_sparse_attention.torch_op import (
    contiguous_pages,
    paged_attention,
    sparse_decode_attention,
)
from plugins.linear_state_replay.ref import linear_state_replay as reference
from plugins.linear_state_replay.torch_op import linear_state_replay
from tests.plugins.paged import PAGE, Paged, ints
from tests.plugins.test_linear_state_replay import CASES, Shape, inputs


def packed(x: dict[str, NDArray[Any]], name: str) -> torch.Tensor | None:
    """[B, T, ...] → [B * T, ...], with a row of NaN before and after that no sequence owns."""
    if name not in x:
        return None
    rows = torch.from_numpy(x[name]).flatten(0, 1)
    edge = torch.full_like(rows[:1], torch.nan)
    return torch.cat([edge, rows, edge])


@pytest.mark.parametrize(("rule", "shape"), CASES)
def test_linear_state_replay(rule: str, shape: Shape) -> None:
    x = inputs(rule, shape)
    want, present = reference(
        x["q"], x["k"], x["v"], x["past_state"], x.get("log_decay"), x.get("beta"),
        update_rule=rule, scale=0.3,
    )  # fmt: skip
    slots = np.random.default_rng(1).permutation(shape.B + 3)[: shape.B]
    states = torch.full((shape.B + 3, *x["past_state"].shape[1:]), torch.nan)
    states[slots] = torch.from_numpy(x["past_state"])
    idle = [i for i in range(shape.B + 3) if i not in slots]
    q, k, v, log_decay, beta = (packed(x, n) for n in ("q", "k", "v", "log_decay", "beta"))
    assert q is not None
    o = linear_state_replay(
        q, k, v, states, log_decay, beta, ints(*(1 + shape.T * b for b in range(shape.B))),
        ints(*[shape.T] * shape.B), ints(*slots), shape.T, rule, 0.3,
    )  # fmt: skip
    np.testing.assert_allclose(o[1:-1].unflatten(0, (shape.B, -1)), want, atol=2e-6)
    np.testing.assert_allclose(states[slots], present, atol=2e-6)
    assert states[idle].isnan().all()


def test_ragged_sequences_do_not_see_each_other() -> None:
    lengths, starts = (5, 1, 9), (0, 5, 6)
    x = inputs("gated_delta", Shape(1, 15, 2, 4, 8, 6, past=False))
    q, k, v, decay, beta = (torch.from_numpy(x[n][0]) for n in ("q", "k", "v", "log_decay", "beta"))
    states = torch.zeros(3, 4, 8, 6)
    o = linear_state_replay(
        q, k, v, states, decay, beta, ints(*starts), ints(*lengths), ints(2, 0, 1), 9,
        "gated_delta", 1.0,
    )  # fmt: skip
    for start, length, slot in zip(starts, lengths, (2, 0, 1), strict=True):
        rows = slice(start, start + length)
        alone = torch.zeros(1, 4, 8, 6)
        want = linear_state_replay(
            q[rows], k[rows], v[rows], alone, decay[rows], beta[rows], ints(0), ints(length),
            ints(0), length, "gated_delta", 1.0,
        )  # fmt: skip
        assert torch.equal(o[rows], want)
        assert torch.equal(states[slot], alone[0])


@pytest.mark.parametrize("window", [None, 5, 1])
@pytest.mark.parametrize(("Hq", "Hk", "dk", "dv"), [(4, 2, 8, 8), (3, 3, 16, 12), (8, 1, 8, 4)])
def test_paged_attention(Hq: int, Hk: int, dk: int, dv: int, window: int | None) -> None:
    totals, lengths = (23, 8, 1, 40), (7, 1, 1, 40)  # a replay or suffix, decode, a first token
    paged = Paged(totals, Hk, dk, dv)
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    q = torch.randn(sum(lengths), Hq, dk, generator=torch.Generator().manual_seed(2))
    o, lse = paged_attention(
        q, paged.pool_k, paged.pool_v, paged.table, ints(*starts), ints(*lengths), ints(*totals),
        40, 0.3, window or 0,
    )  # fmt: skip
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        rows = slice(start, start + length)
        want, _ = paged.want(b, q[rows], 0.3, window)
        np.testing.assert_allclose(o[rows], want, atol=2e-6)
    score = torch.einsum("hgd,nhd->hgn", q[-1].reshape(Hk, -1, dk), paged.k[-1]) * 0.3
    seen = score[..., -window:] if window else score
    np.testing.assert_allclose(lse[-1], seen.logsumexp(-1).flatten(), atol=2e-6)


def test_sparse_decode_attention() -> None:
    totals = (37, 16, 5)
    paged = Paged(totals, 2, 8, 6)
    q = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(3))
    selected = torch.tensor(
        [[[4, 0, 2], [1, -1, 3]], [[0, 1, -1], [1, -1, -1]], [[0, -1, -1], [0, -1, -1]]]
    ).int()
    o, lse = sparse_decode_attention(
        q, paged.pool_k, paged.pool_v, paged.table, ints(*totals), selected, 0.5
    )
    whole = paged_attention(
        q, paged.pool_k, paged.pool_v, paged.table, ints(0, 1, 2), ints(1, 1, 1), ints(*totals),
        1, 0.5, 0,
    )[1]  # fmt: skip
    for b, total in enumerate(totals):
        mask = np.zeros((1, 2, total), bool)
        for h in range(2):
            mask[0, h] = np.isin(np.arange(total) // PAGE, selected[b, h])
        want, lost = paged.want(b, q[b][None], 0.5, None, mask)
        np.testing.assert_allclose(o[b], want[0], atol=2e-6)
        np.testing.assert_allclose((lse[b] - whole[b]).exp(), 1 - lost[0], atol=2e-6)
    assert float((lse[0] - whole[0]).max()) < -0.01
    assert torch.equal(lse[2], whole[2])  # everything was read


def test_interleaved_pages_are_a_view_of_contiguous_ones() -> None:
    """K and V pages in turn: what the GPU kernel, which wants contiguous pools, is given."""
    paged = Paged((37, 16), 2, 8, 8)
    q = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(4))
    rest = (ints(0, 3), ints(3, 2), ints(37, 16), 3, 0.5, 0)
    want = paged_attention(q, paged.pool_k, paged.pool_v, paged.table, *rest)
    (k, step), (v, _) = contiguous_pages(paged.pool_k), contiguous_pages(paged.pool_v)
    assert step == 2
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert k.data_ptr() == paged.pool_k.data_ptr()
    got = paged_attention(q, k, v, paged.table * step, *rest)
    assert torch.equal(got[0], want[0])
    own = torch.zeros(4, 8, 2, 6)
    assert contiguous_pages(own)[1] == 1
    with pytest.raises(ValueError, match="not contiguous"):
        contiguous_pages(own.transpose(1, 2))
    with pytest.raises(ValueError, match="not contiguous"):
        contiguous_pages(own[..., :5])


def test_shapes_without_data_are_those_with_it() -> None:
    """torch's own check of schema, aliasing and the shape functions."""
    states, n = torch.zeros(2, 4, 8, 6), torch.randn
    linear = (n(5, 2, 8), n(5, 2, 8), n(5, 4, 6), states, -n(5, 4).abs(), n(5, 4).abs(),
              ints(0, 2), ints(2, 3), ints(1, 0), 3, "gated_delta", 1.0)  # fmt: skip
    torch.library.opcheck(linear_state_replay, linear)
    pools = (n(5, 2, 8), n(6, 4, 2, 8), n(6, 4, 2, 6), ints(0, 1, 2, 3).reshape(2, 2))
    torch.library.opcheck(paged_attention, (*pools, ints(0, 2), ints(2, 3), ints(7, 3), 3, 0.5, 0))
    one = (n(2, 2, 8), *pools[1:])
    torch.library.opcheck(
        sparse_decode_attention, (*one, ints(7, 3), ints(0, 1, 0, 0).reshape(2, 2, 1), 0.5)
    )


def test_the_gpu_forms_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.plugins.gpu_forms"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors = {n: float(e) for n, e in (line.split("\t") for line in done.stdout.splitlines())}
    assert len(errors) == 3
    assert max(errors.values()) < 5e-6, errors
