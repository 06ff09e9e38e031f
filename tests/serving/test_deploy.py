"""Parameters of config.pbtxt to a config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_configs.errors import ConfigError
from serving.deploy import arena_name, bundle_path, from_parameters


@dataclass(frozen=True)
class Sizes:
    rows: int = 1
    share: float = 0.5
    name: str = "x"
    check: bool = True


def read(**parameters: str) -> Sizes:
    values = {k: {"string_value": v} for k, v in parameters.items()}
    return from_parameters(
        Sizes, {"model_config": json.dumps({"name": "engine", "parameters": values})}
    )


def test_each_type_is_read() -> None:
    assert read() == Sizes()
    assert read(rows="7", share="0.25", name="a b", check="False") == Sizes(7, 0.25, "a b", False)
    assert from_parameters(Sizes, {"model_config": '{"name": "engine"}'}) == Sizes()


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"row": "1"}, "unknown parameter 'row' (value '1'). Known: check, name, rows, share"),
        ({"rows": "1.5"}, "parameter 'rows' is '1.5', expected int"),
        ({"rows": ""}, "parameter 'rows' is '', expected int"),
        ({"share": "half"}, "parameter 'share' is 'half', expected float"),
        ({"check": "yes"}, "parameter 'check' is 'yes', expected bool"),
    ],
)
def test_wrong_ones_are_named(parameters: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**parameters)
    assert str(caught.value) == f"engine/config.pbtxt: {says}"


def test_bundle_is_four_levels_up(tmp_path: Path) -> None:
    file = tmp_path / "model_repository" / "llm" / "1" / "model.py"
    assert bundle_path(str(file)) == tmp_path.resolve()


def test_arena_names_never_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_SERVE_RUN_ID", "abc")
    first, second = arena_name(), arena_name()
    assert first != second
    assert first.startswith("hybrid-serve-abc-kv-")
    monkeypatch.delenv("HYBRID_SERVE_RUN_ID")
    assert arena_name().startswith("hybrid-serve-p")
