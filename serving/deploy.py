"""Sizes of a deployment, read from the ``parameters`` of a model's config.pbtxt."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from engine_configs.errors import ConfigError

T = TypeVar("T")


def from_parameters(cls: type[T], args: Mapping[str, str]) -> T:
    """A config dataclass from what the server passes to ``initialize``.

    Keys that name no field of ``cls`` raise ConfigError, as do values of the wrong type.
    """
    model = json.loads(args["model_config"])
    where = f"{model['name']}/config.pbtxt"
    given = {k: v["string_value"] for k, v in model.get("parameters", {}).items()}
    hints = get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, text in given.items():
        if key not in names:
            known = ", ".join(sorted(names))
            raise ConfigError(f"unknown parameter {key!r} (value {text!r})", where=where,
                              fix=f"Known: {known}")  # fmt: skip
        values[key] = _parse(hints[key], key, text, where)
    return cls(**values)


def _parse(kind: Any, key: str, text: str, where: str) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise ConfigError(
            f"parameter {key!r} is {text!r}, expected {kind.__name__}", where=where
        ) from None


def bundle_path(model_file: str) -> Path:
    """The bundle around ``<bundle>/model_repository/<model>/1/model.py``."""
    return Path(model_file).resolve().parents[3]


def arena_name() -> str:
    """A file name in shared memory that no other server and no earlier start uses."""
    run = os.environ.get("HYBRID_SERVE_RUN_ID") or f"p{os.getppid()}"
    return f"hybrid-serve-{run}-kv-{os.getpid()}-{time.time_ns():x}"
