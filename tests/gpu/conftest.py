"""A tree of the TensorRT target whose graph ONNX Runtime can run: weights in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from build.pipeline import Options, Silent
from build.targets import TARGETS
from engine_configs.names import find_model
from serving.engine.bundle import Bundle
from serving.engine.tensorrt.model import TensorRTModel
from tests.gpu.fake import FakeDevice, FakeExecutor
from tests.serving.engine.conftest import solo

__all__ = ["solo"]  # a fixture

Make = Callable[[str], Bundle]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The tree of hybrid-tiny in a dtype, made once each."""
    made: dict[str, Bundle] = {}

    def make(dtype: str) -> Bundle:
        if dtype not in made:
            known = find_model("hybrid-tiny")
            output = tmp_path_factory.mktemp("tree") / dtype
            common = ("hybrid-tiny", known.family(), known.checkpoint, output)
            options = Options(*common, lowering="tensorrt", dtype=dtype, target="tensorrt")
            made[dtype] = TARGETS["tensorrt"].convert(options, Silent())
        return made[dtype]

    return make


def open_fake(bundle: Bundle) -> tuple[TensorRTModel, FakeDevice, FakeExecutor]:
    device = FakeDevice()
    executor = FakeExecutor(Path(bundle.model_file), device)
    return TensorRTModel(bundle, device, executor), device, executor
