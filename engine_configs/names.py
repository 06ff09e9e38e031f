"""Models known by name: values in ``*.toml`` here, trained checkpoints in folders here."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_configs.errors import ConfigError, UnsupportedModelError
from engine_configs.families import read_checkpoint_config, read_family
from engine_configs.families.config import ConfigReader
from engine_configs.families.weights import Family

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Dtypes:
    """The dtype weights are converted to unless asked otherwise, per kind of target."""

    cpu: str = "fp32"
    gpu: str = "bf16"


@dataclass(frozen=True)
class NamedModel:
    """``hub_id``: where the weights are published ('' = shipped here); ``config``: what
    ``config.json`` says there, so that a plan needs no download."""

    name: str
    hub_id: str
    config: dict[str, Any]
    checkpoint: Path | None = None
    dtype: Dtypes = Dtypes()

    def family(self) -> Family:
        if self.checkpoint:
            return read_checkpoint_config(self.checkpoint)
        return read_family(ConfigReader(dict(self.config), f"engine_configs/{self.name}.toml"))


def known_models() -> dict[str, NamedModel]:
    """Every model known by name, shipped checkpoints first."""
    shipped = [
        NamedModel(d.name, "", {}, d)
        for d in sorted(_HERE.iterdir())
        if (d / "config.json").is_file() and (d / "model.safetensors").is_file()
    ]
    named = [_read(file) for file in sorted(_HERE.glob("*.toml"))]
    return {m.name: m for m in [*shipped, *named]}


def find_model(name: str) -> NamedModel:
    """Raises UnsupportedModelError listing the names there are."""
    models = known_models()
    if name not in models:
        raise UnsupportedModelError(
            f"no model is named {name!r}",
            fix=f"Known: {', '.join(models)}; or give --checkpoint with any name",
        )
    return models[name]


def _read(file: Path) -> NamedModel:
    data = tomllib.loads(file.read_text())
    known = {f.name for f in dataclasses.fields(NamedModel)} - {"name", "checkpoint"}
    for key in data:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} (value {data[key]!r})", where=str(file))
    for key in sorted(known - set(data)):
        raise ConfigError(f"key {key!r} is missing", where=str(file))
    try:
        dtype = Dtypes(**data["dtype"])
    except TypeError as e:
        raise ConfigError(f"dtype: {e}", where=str(file), fix="Give cpu and gpu") from None
    return NamedModel(file.stem, data["hub_id"], _with_nulls(data["config"]), dtype=dtype)


def _with_nulls(value: Any) -> Any:
    """TOML has no null: the string "null" stands for it."""
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    return None if value == "null" else value
