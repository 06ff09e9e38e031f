"""Does the converted graph compute what transformers computes? Largest logit error of each path."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from build.lab import kl
from engine_configs.errors import ParityError
from serving.engine.model import Model, decode_step, prefill_step
from serving.engine.slots import SlotClass

Logits = NDArray[np.float32]
TOKENS, DECODED = 160, 16
_ODD_CHUNKS = (1, 2, 33, 66, 7)


def reference_logits(checkpoint: Path, ids: NDArray[np.int64]) -> Logits:
    """Logits [T, V] of transformers in fp32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return np.asarray(model(torch.from_numpy(ids)[None]).logits[0].numpy())


def sample_ids(vocab_size: int, tokenizer: Path | None = None) -> NDArray[np.int64]:
    """Half real text where there is a tokenizer, half random tokens."""
    count = TOKENS + DECODED
    ids = np.random.default_rng(0).integers(0, vocab_size, count)
    if tokenizer is not None and tokenizer.exists():
        text = Tokenizer.from_file(str(tokenizer)).encode(pydoc_data.topics.topics["import"]).ids
        ids[: count // 2] = np.resize(np.asarray(text, np.int64), count // 2)
    return ids


def measure(model: Model, reference: Logits, ids: NDArray[np.int64]) -> dict[str, Any]:
    """``{prefill, chunked, decode, replay: {max_abs_logit_error, logit_kl}}`` over ``ids`` [T];
    logit_kl: mean KL of the next-token distributions, reference first."""
    runs: dict[str, Callable[[SlotClass], tuple[Logits, int]]] = {
        "prefill": lambda s: _feed(model, s, ids, [TOKENS]),
        "chunked": lambda s: _feed(model, s, ids, _odd_cuts()),
        "decode": lambda s: _decode(model, s, ids),
        "replay": lambda s: _replay(model, s, ids),
    }
    errors = {}
    for name, run in runs.items():
        slots = SlotClass(model.spec, TOKENS + DECODED + 1, 1)
        for array in slots.kv.values():  # the standard lowering reads the whole slot
            array[:] = 0
        logits, start = run(slots)
        want = reference[start : start + len(logits)]
        errors[name] = {
            "max_abs_logit_error": float(np.abs(logits - want).max()),
            "logit_kl": float(kl(want, logits).mean()),
        }
    return errors


def require(parity: dict[str, Any], measure: str, limit: float) -> None:
    """Raises ParityError naming every path whose ``measure`` is past ``limit``."""
    bad = {k: v[measure] for k, v in parity.items() if not v[measure] <= limit}
    if bad:
        listed = ", ".join(f"{k} {e:.2e}" for k, e in bad.items())
        raise ParityError(
            f"{measure} to transformers is {listed}, allowed {limit:g}",
            fix="" if measure == "max_abs_logit_error" else "Raise --max-kl or take more bits",
        )


def _odd_cuts() -> list[int]:
    return [*np.cumsum(_ODD_CHUNKS).tolist(), TOKENS]


def _feed(
    model: Model, slots: SlotClass, ids: NDArray[np.int64], cuts: list[int]
) -> tuple[Logits, int]:
    parts, start = [], 0
    for end in cuts:
        step = prefill_step(ids[start:end], start, logits=range(end - start))
        parts.append(model.run(slots, 0, step)[0])
        start = end
    return np.concatenate(parts), 0


def _decode(model: Model, slots: SlotClass, ids: NDArray[np.int64]) -> tuple[Logits, int]:
    _feed(model, slots, ids, [TOKENS])
    steps = [decode_step([int(ids[p])], [p]) for p in range(TOKENS, len(ids))]
    return np.concatenate([model.run(slots, 0, step)[0] for step in steps]), TOKENS


def _replay(model: Model, slots: SlotClass, ids: NDArray[np.int64]) -> tuple[Logits, int]:
    """r = L: keep the K/V, forget the states, run the whole prefix again; then one token."""
    _feed(model, slots, ids, [TOKENS])
    slots.zero_states(0)
    replayed = model.run(slots, 0, prefill_step(ids[:TOKENS], 0, append=False))[0]
    assert len(replayed) == 0
    return model.run(slots, 0, decode_step([int(ids[TOKENS])], [TOKENS]))[0], TOKENS
