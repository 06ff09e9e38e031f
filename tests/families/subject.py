"""Our side: one tiny model converted, and the runs that are compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from build.checkpoint import Checkpoint, Weights
from build.pipeline import Options, Silent, new_manifest, write_graph, write_manifest
from engine_configs.families import read_checkpoint_config
from serving.engine.bundle import Bundle
from serving.engine.model import Model, decode_step, prefill_step
from serving.engine.slots import SlotClass
from tests.families import cases, oracle

LENGTH, DECODED, REPLAYED = 160, 32, 48
ODD_CUTS = (1, 3, 36, 102, 109, LENGTH)
CAPACITY = LENGTH + DECODED + 1
Logits = NDArray[np.float32]


@dataclass
class Subject:
    """A case with its reference model and its bundle of each lowering."""

    case: cases.Case
    folder: Path

    def __post_init__(self) -> None:
        self.reference: Any = cases.build(self.case)
        checkpoint = self.folder / "checkpoint"
        self.reference.save_pretrained(checkpoint)
        if self.case.respell:
            file = checkpoint / "config.json"
            file.write_text(json.dumps(self.case.respell(json.loads(file.read_text()))))
        self.family = read_checkpoint_config(checkpoint)
        self.spec = self.family.spec
        rng = np.random.default_rng(1)
        self.ids = rng.integers(3, self.spec.vocab_size, LENGTH + DECODED)
        self.model = self.convert("ort")

    def convert(self, lowering: str) -> Model:
        checkpoint, scratch = self.folder / "checkpoint", self.folder / lowering
        scratch.mkdir()
        options = Options("tiny", self.family, checkpoint, scratch, lowering=lowering)
        weights = Weights(self.family, Checkpoint(checkpoint))
        digest = write_graph(options, weights, scratch, Silent())
        write_manifest(new_manifest(options, digest, scratch), scratch)
        return Model(Bundle.open(scratch), threads=1)

    @cached_property
    def want(self) -> Logits:
        """Logits [LENGTH + DECODED, V] of transformers."""
        return oracle.logits(self.reference, self.ids)

    @cached_property
    def prefilled(self) -> Logits:
        """Our logits [LENGTH, V] of one whole prefill."""
        return self.feed(self.model, self.slots(), [LENGTH])

    def slots(self, rows: int = 1) -> SlotClass:
        slots = SlotClass(self.spec, CAPACITY, rows)
        for array in slots.kv.values():  # the standard lowering reads the whole slot
            array[:] = 0
        return slots

    def feed(
        self, model: Model, slots: SlotClass, cuts: list[int], *, row: int = 0, start: int = 0
    ) -> Logits:
        """Prefill up to each of ``cuts``, a chunk each; logits of every token."""
        parts = []
        for end in cuts:
            step = prefill_step(self.ids[start:end], start, logits=range(end - start))
            parts.append(model.run(slots, row, step)[0])
            start = end
        return np.concatenate(parts)

    def decode(self, model: Model, slots: SlotClass, starts: list[int], count: int) -> Logits:
        """Feed tokens one by one to rows 0.. that stand at ``starts``; [count, rows, V]."""
        steps = (
            decode_step([int(self.ids[p + t]) for p in starts], [p + t for p in starts])
            for t in range(count)
        )
        return np.stack([model.run(slots, 0, step)[0] for step in steps])

    def replay(self, model: Model, slots: SlotClass, hit_len: int, replayed: int) -> None:
        """Forget the states, keep the K/V, run the tail again."""
        slots.zero_states(0)
        start = hit_len - replayed
        rows = model.run(slots, 0, prefill_step(self.ids[start:hit_len], start, append=False))[0]
        assert len(rows) == 0


def error(got: Logits, want: Logits) -> float:
    return float(np.abs(got - want).max())


def errors(subject: Subject, model: Model) -> dict[str, float]:
    """Largest logit error of each path against transformers."""
    s = subject
    found = {"prefill": error(s.feed(model, s.slots(), [LENGTH]), s.want[:LENGTH])}
    slots = s.slots()
    found["chunks"] = error(s.feed(model, slots, list(ODD_CUTS)), s.want[:LENGTH])
    got = s.decode(model, slots, [LENGTH], DECODED)[:, 0]
    found["decode"] = error(got, s.want[LENGTH:])
    slots = s.slots()
    s.feed(model, slots, [LENGTH])
    s.replay(model, slots, LENGTH, REPLAYED)
    got = s.feed(model, slots, [LENGTH + DECODED], start=LENGTH)
    want = oracle.replayed_logits(s.reference, s.ids, LENGTH, REPLAYED)
    found["replay"] = error(got, want)
    return found
