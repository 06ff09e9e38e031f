"""What a deploy config or a request may say."""

from __future__ import annotations

from typing import Any

import pytest

from engine_configs.errors import ConfigError
from serving.kv_compression.config import CompressionConfig


def test_from_a_mapping() -> None:
    assert CompressionConfig.of({}).mode == "off"
    config = CompressionConfig.of({"mode": "bounded", "epsilon": 0.014, "alpha": 0})
    assert (config.mode, config.epsilon, config.alpha) == ("bounded", 0.014, 0)


@pytest.mark.parametrize(
    "values",
    [
        {"budgit": 1},
        {"mode": "on"},
        {"budget": 0.0},
        {"budget": 1.5},
        {"epsilon": -1},
        {"alpha": 1},
    ],
)
def test_what_cannot_be_served_says_what_can(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Known|Use"):
        CompressionConfig.of(values)
