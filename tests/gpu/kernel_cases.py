"""Cases of the Triton-lang kernels: ``TRITON_INTERPRET=1 python -m tests.gpu.kernel_cases`` runs
all of them on a CPU and prints, as JSON, the errors of each against ``ref.py``.

Rows that no sequence owns, pages that none uses and outputs before a run hold NaN.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plugins.compressed_sparse_attention.ref import (
    compressed_sparse_attention,
    sparse_decode_attention,
    summarise,
)
from plugins.linear_state_replay.ref import RULES, linear_state_replay

Array = NDArray[Any]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Linear:
    """``lengths`` per sequence, of T rows at most; ``per``: decays per head or key channel."""

    rule: str
    lengths: tuple[int, ...]
    Hq: int = 1
    Hv: int = 2
    dk: int = 32
    dv: int = 32
    per: str = "head"
    dtype: str = "fp32"
    layout: str = "padded"  # or packed: one row of tokens, states in rows of a pool
    keys: str = "random"  # or repeated: one key again and again

    @property
    def name(self) -> str:
        extra = "" if self.keys == "random" else "-" + self.keys
        sizes = f"{self.Hq}:{self.Hv}x{self.dk}x{self.dv}"
        lengths = "+".join(map(str, self.lengths))
        return f"{self.rule}-{self.per}-{lengths}-{sizes}-{self.dtype}-{self.layout}{extra}"

    def inputs(self) -> dict[str, torch.Tensor]:
        """Padded [B, T, ...]; keys of unit length, decays from nearly none to strong."""
        rng = np.random.default_rng(len(self.name))
        B, T = len(self.lengths), max(self.lengths)
        x: dict[str, Array] = {
            "q": rng.standard_normal((B, T, self.Hq, self.dk)),
            "k": rng.standard_normal((B, T, self.Hq, self.dk)),
            "v": rng.standard_normal((B, T, self.Hv, self.dv)),
            "past_state": rng.standard_normal((B, self.Hv, self.dk, self.dv)),
        }
        if self.keys == "repeated":
            x["k"][:] = x["k"][:, :1]
        x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
        if "gated" in self.rule:
            size = (B, T, self.Hv, self.dk) if self.per == "key" else (B, T, self.Hv)
            x["log_decay"] = -np.exp(rng.uniform(-8, 2, size))
        if "delta" in self.rule:
            x["beta"] = rng.uniform(0, 2, (B, T, self.Hv))
        kinds = {n: DTYPES[self.dtype] if n in ("q", "k", "v") else torch.float32 for n in x}
        return {n: torch.from_numpy(a).to(kinds[n]) for n, a in x.items()}

    def run(self) -> dict[str, float]:
        """Largest errors of o and of the state, each over the largest value."""
        from plugins.linear_state_replay import kernel

        x, scale = self.inputs(), self.dk**-0.5
        want_o, want_state = [], []
        for b, n in enumerate(self.lengths):
            cut = {name: (a[b : b + 1] if name == "past_state" else a[b : b + 1, :n]).double()
                   for name, a in x.items()}  # fmt: skip
            o, state = linear_state_replay(
                **{name: a.numpy() for name, a in cut.items()}, update_rule=self.rule, scale=scale
            )
            want_o.append(o[0])
            want_state.append(state[0])
        o, states = self._packed(kernel, x) if self.layout == "packed" else self._padded(kernel, x)
        return {"o": _error(o, want_o), "state": _error(states, want_state)}

    def _padded(self, kernel: Any, x: dict[str, torch.Tensor]) -> tuple[list[Array], list[Array]]:
        for b, n in enumerate(self.lengths):
            for name, a in x.items():
                if name != "past_state":
                    a[b, n:] = float("nan")
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        o, state = kernel.linear_state_replay(
            **x, update_rule=self.rule, scale=self.dk**-0.5, lengths=lengths
        )
        return [_np(o[b, :n]) for b, n in enumerate(self.lengths)], list(_np(state))

    def _packed(self, kernel: Any, x: dict[str, torch.Tensor]) -> tuple[list[Array], list[Array]]:
        """With a row of NaN between sequences; state rows in reverse, one between, in place."""
        B, past = len(self.lengths), x.pop("past_state")
        starts = np.cumsum([1, *(n + 1 for n in self.lengths[:-1])])
        slots = torch.arange(2 * B - 1, -1, -2, dtype=torch.int32)
        pool = torch.full((2 * B, *past.shape[1:]), float("nan"))
        pool[slots.long()] = past
        rows = {}
        for name, a in x.items():
            rows[name] = torch.full((1, sum(self.lengths) + B + 1, *a.shape[2:]), float("nan"))
            rows[name] = rows[name].to(a.dtype)
            for b, (first, n) in enumerate(zip(starts, self.lengths, strict=True)):
                rows[name][0, first : first + n] = a[b, :n]
        o, state = kernel.linear_state_replay(
            **rows, past_state=pool, present_state=pool, update_rule=self.rule,
            scale=self.dk**-0.5, starts=torch.from_numpy(starts).int(), slots=slots,
            lengths=torch.tensor(self.lengths, dtype=torch.int32), max_length=max(self.lengths),
        )  # fmt: skip
        assert state is pool
        assert pool[slots.long() - 1].isnan().all(), "a state row that is no sequence's"
        parts = [o[0, f : f + n] for f, n in zip(starts, self.lengths, strict=True)]
        return [_np(p) for p in parts], list(_np(pool[slots.long()]))


@dataclass(frozen=True)
class Dense:
    """``queries`` of each sequence stand at the last of its ``totals`` rows."""

    queries: tuple[int, ...]
    totals: tuple[int, ...]
    Hq: int = 4
    Hk: int = 2
    D: int = 32
    page: int = 16
    window: int = 0
    append: bool = False
    dtype: str = "fp32"
    layout: str = "padded"

    @property
    def name(self) -> str:
        shape = f"{self.queries}of{self.totals}-{self.Hq}:{self.Hk}x{self.D}".replace(" ", "")
        what = "append" if self.append else "replay"
        return f"attention-{what}-{shape}-w{self.window}-{self.dtype}-{self.layout}"

    def run(self) -> dict[str, float]:
        """Errors of o and log-sum-exp; rows of the pool that differ from what they should hold."""
        from plugins.compressed_sparse_attention import kernel

        rng = np.random.default_rng(len(self.name))
        dtype, B, T = DTYPES[self.dtype], len(self.totals), max(self.queries)
        M = -(-max(self.totals) // self.page)
        table = rng.permutation(B * M + 2)[: B * M].reshape(B, M).astype(np.int32)

        def draw(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

        q = draw(B, T, self.Hq, self.D)
        k, v = (draw(B, self.Hk, M * self.page, self.D) for _ in range(2))
        pools = [torch.full((B * M + 2, self.page, self.Hk, self.D), float("nan")).to(dtype)
                 for _ in range(2)]  # fmt: skip
        full = [p.clone() for p in pools]
        for b, (n, total) in enumerate(zip(self.queries, self.totals, strict=True)):
            for pool, rows in zip((*pools, *full), (k, v, k, v), strict=True):
                cached = total - n if self.append and not any(pool is f for f in full) else total
                for j in range(cached):
                    pool[table[b, j // self.page], j % self.page] = rows[b, :, j]
        q, spans = self._layout(q)
        tables = (torch.from_numpy(table), torch.tensor(self.totals, dtype=torch.int32))
        if self.append:
            news = []
            for rows in (k, v):
                new = torch.zeros(B, T, self.Hk, self.D, dtype=dtype)
                for b, (n, total) in enumerate(zip(self.queries, self.totals, strict=True)):
                    new[b, :n] = rows[b, :, total - n : total].transpose(0, 1)
                news.append(self._layout(new)[0])
            kernel.append_rows(*news, *pools, *tables, **spans)
        o, lse = kernel.attend(q, *pools, *tables, scale=self.D**-0.5, window=self.window, **spans)
        changed = sum(
            (p.float().nan_to_num(1e9) != f.float().nan_to_num(1e9)).sum().item()
            for p, f in zip(pools, full, strict=True)
        )
        errors = [self._compare(b, q, k, v, o, lse, spans) for b in range(B)]
        return {
            "o": max(e[0] for e in errors), "lse": max(e[1] for e in errors), "pool": changed
        }  # fmt: skip

    def _layout(self, rows: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """Padded rows [B, T, ...] as the case wants them, NaN where no sequence has any."""
        for b, n in enumerate(self.queries):
            rows[b, n:] = float("nan")
        lengths = torch.tensor(self.queries, dtype=torch.int32)
        if self.layout == "padded":
            return rows, {"lengths": lengths}
        others = torch.full_like(rows[0, :1], float("nan")).expand(40, *rows.shape[2:])
        packed = torch.cat([others, *(rows[b, :n] for b, n in enumerate(self.queries))])[None]
        starts = 40 + torch.cumsum(lengths, 0).int() - lengths
        return packed, {"starts": starts, "lengths": lengths, "max_length": max(self.queries)}

    def _compare(self, b: int, q: Any, k: Any, v: Any, o: Any, lse: Any, spans: Any) -> Any:
        n, total = self.queries[b], self.totals[b]
        row, first = (0, int(spans["starts"][b])) if "starts" in spans else (b, 0)
        rows = slice(first, first + n)
        none = np.zeros((1, 0, self.Hk, self.D))
        want, *_ = compressed_sparse_attention(
            _np(q[row, rows])[None], none, none, _np(k[b])[None], _np(v[b])[None],
            np.array([total]), scale=self.D**-0.5, window=self.window or None,
        )  # fmt: skip
        at = np.arange(total - n, total)[:, None]
        seen = np.arange(total) <= at
        if self.window:
            seen &= np.arange(total) > at - self.window
        keys = np.repeat(_np(k[b, :, :total]), self.Hq // self.Hk, axis=0)
        score = np.einsum("thd,hnd->htn", _np(q[row, rows]), keys) * self.D**-0.5
        sums = np.log(np.where(seen, np.exp(score), 0).sum(-1)).T
        return (
            float(np.abs(_np(o[row, rows]) - want[0]).max()),
            float(np.abs(_np(lse[row, rows]) - sums).max()),
        )


@dataclass(frozen=True)
class Sparse:
    """``rows`` per sequence and K/V head; ``extra`` entries of evicted rows; all that an entry must
    not look at is NaN, block 0 is always read."""

    rows: tuple[tuple[int, ...], ...]
    epsilon: float
    Hq: int = 8
    D: int = 16
    page: int = 32
    extra: int = 3
    noise: float = 0.3
    sound: bool = False
    dtype: str = "fp32"

    @property
    def name(self) -> str:
        kind = "sound" if self.sound else "calibrated"
        rows = "_".join("+".join(map(str, r)) for r in self.rows)
        return f"sparse-{kind}-{rows}-{self.Hq}x{self.D}-{self.epsilon}-{self.dtype}"

    def run(self) -> dict[str, float]:
        """Errors of o, log-sum-exp, mass and bound; entries chosen otherwise than by ref.py."""
        from plugins.compressed_sparse_attention import sparse_kernel

        rng = np.random.default_rng(len(self.name))
        dtype, rows = DTYPES[self.dtype], np.array(self.rows, np.int32)
        B, Hk = rows.shape
        M = -(-int(rows.max()) // self.page)
        blocks = M * self.page // 32
        S = blocks + self.extra
        k, v = (np.full((B, Hk, S * 32, self.D), np.nan) for _ in range(2))
        summaries = np.full((B, Hk, S, 3 * self.D), np.nan, np.float16)
        stats = np.full((B, Hk, S, 2), np.nan, np.float32)
        for b, h, j in np.ndindex(B, Hk, S):
            n = int(np.clip(rows[b, h] - 32 * j, 0, 32)) if j < blocks else 32
            at = slice(32 * j, 32 * j + n)
            k[b, h, at] = 2 * rng.standard_normal(self.D)
            k[b, h, at] += self.noise * rng.standard_normal((n, self.D))
            v[b, h, at] = rng.standard_normal(self.D)
            v[b, h, at] += self.noise * rng.standard_normal((n, self.D))
            if n:
                pair = summarise(k[b, h, at], v[b, h, at], sound=self.sound)
                summaries[b, h, j], stats[b, h, j] = pair
        stats[:, :, 0, 1] = np.inf
        stats[:, :, S - 1 if self.extra else S :, 0] = 0
        slot = [torch.from_numpy(x[:, :, : blocks * 32]).to(dtype) for x in (k, v)]
        table = rng.permutation(B * M + 2)[: B * M].reshape(B, M)
        pools = []
        for x in slot:
            pool = torch.full((B * M + 2, self.page, Hk, self.D), float("nan")).to(dtype)
            pool[table] = x.unflatten(2, (M, self.page)).permute(0, 2, 3, 1, 4)
            pools.append(pool)
        q = torch.from_numpy(rng.standard_normal((B, self.Hq, self.D))).to(dtype)
        options: dict[str, Any] = {
            "scale": self.D**-0.5, "epsilon": self.epsilon, "sound": self.sound,
            "factor": 1.0 if self.sound else 1.3,
        }  # fmt: skip
        got = sparse_kernel.sparse_decode(
            q, *pools, torch.from_numpy(table).int(), torch.from_numpy(rows),
            torch.from_numpy(summaries), torch.from_numpy(stats), **options,
        )  # fmt: skip
        want = sparse_decode_attention(
            _np(q), *(_np(x) for x in slot), rows, summaries, stats, **options
        )
        bound, wanted = _np(got.error_bound), want.error_bound
        known = np.isfinite(wanted)
        assert (np.isfinite(bound) == known).all()
        assert 0 < want.chosen.sum() < want.chosen.size or self.sound
        return {
            "o": float(np.abs(_np(got.o) - want.o).max()),
            "mass": float(np.abs(_np(got.mass_read) - want.mass_read).max()),
            "bound": float(np.abs(bound - wanted)[known].max(initial=0) / wanted[known].max()),
            "chosen": int((got.chosen.numpy() != (want.chosen > 0)).sum()),
        }


@dataclass(frozen=True)
class Whole:
    """perf.gpu's model: a replay of the whole prefix from zero is the cold run, writes no K/V."""

    model: str
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        return f"whole-{self.model}"

    def run(self) -> dict[str, float]:
        from perf import gpu
        from perf.gpu_model import Model

        prefix, suffix, chunk = 40, 4, 24
        torch.manual_seed(0)
        model = Model(gpu.spec_of(self.model, True), "cpu", prefix + suffix, 3)
        tokens = torch.randint(128, (prefix + suffix,))
        gpu.prefill(model, tokens[:prefix], 0, chunk)
        cold = gpu.prefill(model, tokens[prefix:], prefix, chunk)
        kept = [p.clone() for x in model.attention_layers() if x.pools for p in x.pools]
        assert len(kept) == 2
        short = gpu.hit(model, tokens, prefix, 4, chunk, None)
        hit = gpu.hit(model, tokens, prefix, prefix, chunk, None)
        pools = [p for x in model.attention_layers() if x.pools for p in x.pools]
        size = cold.abs().max()
        assert (short - cold).abs().max() > 2e-2 * size, "a short tail makes no difference"
        return {
            "o": float((hit - cold).abs().max() / size),
            "pool": sum(int((a != b).sum()) for a, b in zip(pools, kept, strict=True)),
        }


def _np(x: torch.Tensor) -> Array:
    return x.double().numpy()


def _error(got: list[Array], want: list[Array]) -> float:
    size = max(np.abs(w).max() for w in want)
    return float(max(np.abs(g - w).max() for g, w in zip(got, want, strict=True)) / size)


LINEAR = [
    *(Linear(rule, (70,)) for rule in RULES),
    *(Linear(rule, (3, 1), Hq=2, dk=24, dv=20, layout="packed") for rule in RULES),
    Linear("gated", (70,), per="key"),
    Linear("gated_delta", (70,), per="key"),
    Linear("gated_delta", (7, 2), per="key"),
    Linear("gated_delta", (129, 1), Hv=1, dk=16, dv=48),
    Linear("gated_delta", (65, 17), dk=16, dv=16, layout="packed"),
    Linear("gated_delta", (65, 17), Hv=1, dk=16, dv=16, per="key", layout="packed"),
    Linear("gated", (33, 80), Hv=4, dk=16, dv=16, layout="packed"),
    Linear("gated_delta", (65,), Hv=1, dk=96, dv=192),
    Linear("gated_delta", (128,), Hv=1, keys="repeated"),
    *(Linear("gated_delta", (66,), dtype=dtype) for dtype in ("fp16", "bf16")),
    *(Linear("gated_delta", (66,), Hv=1, per="key", dtype=dtype) for dtype in ("fp16", "bf16")),
    *(Linear("gated", (66,), dtype=dtype) for dtype in ("fp16", "bf16")),
    Linear("gated_delta", (3,), dtype="bf16"),
]
DENSE = [
    Dense((7, 3), (40, 13)),
    Dense((7, 3), (40, 13), append=True, layout="packed"),
    Dense((33, 20), (70, 33), Hq=6, D=24, window=9, append=True),
    Dense((1, 1), (600, 5), D=16),
    Dense((1, 1), (600, 257), D=16, window=100, append=True),
    Dense((2, 1), (530, 40), D=16, layout="packed"),
    Dense((17,), (90,), Hq=3, Hk=3, D=96, dtype="fp16", append=True),
    Dense((17,), (90,), Hq=3, Hk=3, D=64, dtype="bf16"),
]
SPARSE = [
    Sparse(((300, 170), (33, 490)), 0.3),
    Sparse(((300, 170),), 0.05),
    Sparse(((200,),), 0.003, Hq=3, D=24, page=64, extra=0),
    Sparse(((300,),), 0.2, Hq=2, noise=0.02, extra=0, sound=True),
    Sparse(((200,),), 0.2, Hq=2, sound=True),
    Sparse(((300,),), 0.1, Hq=2, dtype="bf16"),
]
WHOLE = [Whole(name) for name in ("qwen3.5-9b", "nemotron-h-8b")]
CASES: list[Any] = [*LINEAR, *DENSE, *SPARSE, *WHOLE]


def main(log: Callable[[str], Any] = sys.stderr.write) -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    errors = {}
    for case in [c for c in CASES if len(sys.argv) < 2 or sys.argv[1] in c.name]:
        errors[case.name] = case.run()
        log(f"{case.name} {errors[case.name]}\n")
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
