"""Single steps of a served model, for a calibration that runs elsewhere.

K/V stays in a slot of the server's; the states, which are small, travel with each step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_configs.errors import RequestError
from serving.engine.model import Step
from serving.engine.runner import Runner
from serving.engine.slots import Slots

Floats = NDArray[np.float32]
# Slots kept for callers; the one used longest ago goes first.
MAX_SLOTS = 4


class StepServer:
    """Runs the steps of callers, each in a slot of its own."""

    def __init__(self, model: Runner, max_tokens: int) -> None:
        self.model, self._max_tokens = model, max_tokens
        self._slots: OrderedDict[str, Slots] = OrderedDict()

    def run(
        self, args: Mapping[str, Any], tokens: NDArray[np.int64], states: Floats
    ) -> tuple[Floats, Floats, dict[str, list[float]]]:
        """``args``: slot, capacity, start, total, valid, append, rows, decay_sums of the step;
        tokens [T]; states: of all layers, end to end. Returns logits [N * V], states, decay sums.

        Raises RequestError where they do not fit this model.
        """
        capacity, digest = int(args["capacity"]), str(args["model"])
        if digest != self.model.bundle.manifest["digest"]:
            raise RequestError(
                f"the server runs model {self.model.bundle.manifest['digest']}, not {digest}",
                fix="Serve the bundle that is to be calibrated",
            )
        if not 0 < args["total"] <= capacity <= self._max_tokens:
            raise RequestError(
                f"{args['total']} tokens in a slot of {capacity}, at most {self._max_tokens}"
            )
        slots = self._slot(str(args["slot"]), capacity)
        unpack_states(states, slots)
        positions = np.arange(args["start"], args["start"] + len(tokens), dtype=np.int64)[None]
        valid = None if args["valid"] is None else np.array([args["valid"]], np.int64)
        step = Step(
            tokens[None],
            positions,
            np.array([args["total"]]),
            bool(args["append"]),
            np.asarray(args["rows"], np.int64),
            valid,
        )
        logits, sums = self.model.run(slots, 0, step, decay_sums=bool(args["decay_sums"]))
        return logits.ravel(), pack_states(slots), {k: v[0].tolist() for k, v in sums.items()}

    def _slot(self, name: str, capacity: int) -> Slots:
        if name not in self._slots:
            self._slots[name] = self.model.new_slots(capacity, 1)
        self._slots.move_to_end(name)
        while len(self._slots) > MAX_SLOTS:
            self._slots.popitem(last=False)[1].close()
        return self._slots[name]


def pack_states(slots: Slots) -> Floats:
    """The states of a slot class of one row, end to end."""
    return np.concatenate([a[0].ravel() for a in slots.states.values()])


def unpack_states(states: Floats, slots: Slots) -> None:
    """The inverse, in place. Raises RequestError where the sizes differ."""
    if states.size != (wanted := sum(a[0].size for a in slots.states.values())):
        raise RequestError(f"states hold {states.size} values, this model has {wanted}")
    at = 0
    for array in slots.states.values():
        array[0][...] = states[at : at + array[0].size].reshape(array[0].shape)
        at += array[0].size
