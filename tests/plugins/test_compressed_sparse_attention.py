"""The attention op: reference against plain softmax, ONNX forms against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from plugins.compressed_sparse_attention.node import compressed_sparse_attention as emit
from plugins.compressed_sparse_attention.ref import compressed_sparse_attention
from plugins.onnx_graph import Nodes
from tests.plugins.running import run_op

Array = NDArray[Any]


@dataclass(frozen=True)
class Shape:
    """``totals``: rows visible to the last query of each sequence; T: queries of the step."""

    T: int
    totals: tuple[int, ...]
    Hq: int
    Hk: int
    d: int = 8
    C: int = 40
    append: bool = True


SHAPES = [
    Shape(5, (5,), 2, 2),  # the first chunk of a prompt
    Shape(7, (19,), 4, 2),  # a later one, odd, grouped
    Shape(2, (40,), 4, 1),  # up to the last row of the slot
    Shape(1, (1,), 2, 2),  # the first token of all
    Shape(1, (17,), 6, 2, d=16),
    Shape(1, (3, 40, 1, 22), 4, 2),  # a ragged batch decodes
    Shape(6, (19,), 4, 2, append=False),  # replay inside the slot
    Shape(19, (19,), 2, 2, append=False),  # replay of everything
    Shape(1, (11,), 4, 2, append=False),
    Shape(4, (9,), 2, 1, append=False),
]
IDS = [f"{'append' if s.append else 'replay'}-{i}" for i, s in enumerate(SHAPES)]


def inputs(s: Shape, seed: int = 0, unused: float = np.nan) -> dict[str, Array]:
    """Slot rows that no query may see hold ``unused``."""
    rng = np.random.default_rng(seed)
    B, new = len(s.totals), s.T if s.append else 0
    x = {
        "q": rng.standard_normal((B, s.T, s.Hq, s.d)),
        "k_new": rng.standard_normal((B, new, s.Hk, s.d)),
        "v_new": rng.standard_normal((B, new, s.Hk, s.d)),
        "past_k": rng.standard_normal((B, s.Hk, s.C, s.d)),
        "past_v": rng.standard_normal((B, s.Hk, s.C, s.d)),
    }
    for b, total in enumerate(s.totals):
        for name in ("past_k", "past_v"):
            x[name][b, :, total - new :] = unused
    return {name: value.astype(np.float32) for name, value in x.items()}


def reference(s: Shape, x: dict[str, Array], selected: Any = None) -> tuple[Array, ...]:
    return compressed_sparse_attention(
        **x, total_lens=np.array(s.totals), selected=selected, scale=s.d**-0.5
    )


def run_onnx(lowering: str, s: Shape, x: dict[str, Array]) -> tuple[Array, Array, Array]:
    B = len(s.totals)
    totals = np.array(s.totals)
    feeds = {
        n: a if n.startswith("past") else a.reshape(B, a.shape[1], a.shape[2] * s.d)
        for n, a in x.items()
    }
    feeds["seqlens"] = (totals - 1).astype(np.int32)
    feeds["total_len"] = np.array(totals.max(), np.int32)
    feeds["positions"] = totals[:, None] - s.T + np.arange(s.T)

    def op(g: Nodes) -> str:
        return emit(
            g, "/op", list(feeds), ("present_k", "present_v"),
            num_heads=s.Hq, num_kv_heads=s.Hk, head_dim=s.d, scale=s.d**-0.5,
        )  # fmt: skip

    present = {"present_k": "past_k", "present_v": "past_v"}
    o, present_k, present_v = run_op(lowering, feeds, present, op)
    return o.reshape(B, s.T, s.Hq, s.d), present_k, present_v


def rows(s: Shape, b: int) -> slice:
    return slice(0, s.totals[b])


@pytest.mark.parametrize("lowering", ["ort", "standard"])
@pytest.mark.parametrize("s", SHAPES, ids=IDS)
def test_onnx_form_computes_the_reference(lowering: str, s: Shape) -> None:
    # ai.onnx Attention reads masked rows too (times 0), so there they must be finite.
    x = inputs(s, unused=np.nan if lowering == "ort" else 1e3)
    want_o, want_k, want_v, _, _ = reference(s, x)
    o, k, v = run_onnx(lowering, s, x)
    assert np.abs(o - want_o).max() < 2e-6
    for b in range(len(s.totals)):
        assert np.array_equal(k[b, :, rows(s, b)], want_k[b, :, rows(s, b)].astype(np.float32))
        assert np.array_equal(v[b, :, rows(s, b)], want_v[b, :, rows(s, b)].astype(np.float32))


@pytest.mark.parametrize("lowering", ["ort", "standard"])
@pytest.mark.parametrize("s", [s for s in SHAPES if not s.append], ids=str)
def test_replay_leaves_every_bit_of_the_slot(lowering: str, s: Shape) -> None:
    x = inputs(s, unused=7.0)
    _, k, v = run_onnx(lowering, s, x)
    assert np.array_equal(k, x["past_k"])
    assert np.array_equal(v, x["past_v"])


def test_replay_reads_what_appending_wrote() -> None:
    """The same queries over the same rows: replayed and appended agree to the bit."""
    append = Shape(6, (19,), 4, 2)
    x = inputs(append)
    o, k, v = run_onnx("ort", append, x)
    replay = Shape(6, (19,), 4, 2, append=False)
    empty = np.zeros((1, 0, 2, 8), np.float32)
    y = {"q": x["q"], "k_new": empty, "v_new": empty, "past_k": k, "past_v": v}
    assert np.array_equal(run_onnx("ort", replay, y)[0], o)


def test_a_batch_decodes_like_each_sequence_alone() -> None:
    s = Shape(1, (3, 40, 1, 22), 4, 2)
    x = inputs(s)
    o, _, _ = run_onnx("ort", s, x)
    for b, total in enumerate(s.totals):
        alone = {n: a[b : b + 1] for n, a in x.items()}
        assert np.array_equal(run_onnx("ort", Shape(1, (total,), 4, 2), alone)[0][0], o[b])


@pytest.mark.parametrize("s", SHAPES, ids=IDS)
def test_reference_is_softmax_attention(s: Shape) -> None:
    x = inputs(s)
    o, k, v, dropped, kept = reference(s, x)
    for b, total in enumerate(s.totals):
        group = s.Hq // s.Hk
        keys = np.repeat(k[b, :, :total], group, axis=0)
        values = np.repeat(v[b, :, :total], group, axis=0)
        causal = np.tril(np.ones((total, total), bool))[total - s.T :]
        q = torch.from_numpy(x["q"][b].astype(np.float64)).transpose(0, 1)
        want = torch.nn.functional.scaled_dot_product_attention(
            q, torch.from_numpy(keys), torch.from_numpy(values), torch.from_numpy(causal)
        )
        assert np.abs(o[b] - want.transpose(0, 1).numpy()).max() < 1e-12
    assert not dropped.any()
    assert np.array_equal(kept, np.repeat(np.array(s.totals)[:, None], s.Hk, 1))


def test_reference_reports_the_mass_of_rows_it_did_not_read() -> None:
    s = Shape(1, (12,), 4, 2, C=16)
    x = inputs(s)
    selected = np.zeros((1, 2, 16), bool)
    selected[0, 0, [0, 5, 11]] = True
    selected[0, 1, 4:] = True  # rows past the end do not count
    o, k, v, dropped, kept = reference(s, x, selected)
    assert kept.tolist() == [[3, 8]]
    for g in range(4):
        score = k[0, g // 2, :12] @ x["q"][0, 0, g].astype(np.float64) * 8**-0.5
        p = np.exp(score) / np.exp(score).sum()
        use = selected[0, g // 2, :12]
        assert dropped[0, 0, g] == pytest.approx(1 - p[use].sum(), abs=1e-12)
        want = p[use] @ v[0, g // 2, :12][use] / p[use].sum()
        assert np.abs(o[0, 0, g] - want).max() < 1e-12


def test_reference_ignores_rows_that_are_not_selected() -> None:
    s = Shape(1, (12,), 2, 2, C=16)
    x = inputs(s)
    selected = np.ones((1, 2, 16), bool)
    selected[0, :, 3] = False
    o = reference(s, x, selected)[0]
    x["past_v"][0, :, 3] = 1e6
    assert np.array_equal(reference(s, x, selected)[0], o)
