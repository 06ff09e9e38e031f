"""What the engine asks of a model, on whatever device it runs."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine_configs.spec import HybridSpec
from serving.engine.bundle import Bundle
from serving.engine.model import Model, Step
from serving.engine.slots import Slots

Floats = NDArray[np.float32]


class Runner(Protocol):
    """One compiled graph. ``slots``: made by this runner's ``new_slots``."""

    @property
    def bundle(self) -> Bundle: ...

    @property
    def spec(self) -> HybridSpec: ...

    def new_slots(self, capacity: int, rows: int) -> Slots: ...

    def run(
        self, slots: Any, row: int, step: Step, *, decay_sums: bool = False, queries: bool = False
    ) -> tuple[Floats, dict[str, Floats]]:
        """As ``Model.run``."""
        ...


def open_runner(bundle: Bundle, threads: int = 0) -> Runner:
    """The class that runs bundles of this target. Raises BundleError."""
    if bundle.manifest.get("target") == "tensorrt":
        from serving.engine.tensorrt.model import TensorRTModel

        return TensorRTModel.open(bundle)
    return Model(bundle, threads)
