"""How a sequence's K/V may be compressed, as the deploy config and a request say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine_configs.errors import ConfigError

MODES = ("off", "bounded")


@dataclass(frozen=True)
class CompressionConfig:
    """mode: off = dense; bounded = keep ``budget`` of the K/V bytes (summaries included) and answer
    each step within the relative error ``epsilon``, violated at most in the share ``alpha`` of head
    steps (alpha = 0: never, by box bounds). Sequences shorter than ``min_tokens`` stay dense.

    Raises ConfigError for values that cannot be served.
    """

    mode: str = "off"
    budget: float = 0.345
    epsilon: float = 0.05
    alpha: float = 0.05
    min_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(
                f"kv_compression mode is {self.mode!r}", fix=f"Use one of {', '.join(MODES)}"
            )
        for name, top in (("budget", 1.0), ("epsilon", 1.0), ("alpha", 0.5)):
            value = getattr(self, name)
            if not (0 < value <= top or (name == "alpha" and value == 0)):
                raise ConfigError(
                    f"kv_compression {name} is {value!r}", fix=f"Use a value in (0, {top:g}]"
                )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CompressionConfig:
        """From a mapping; unknown keys raise ConfigError."""
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(
                f"unknown key {unknown[0]!r} in kv_compression", fix=f"Known: {', '.join(known)}"
            )
        return cls(**values)
