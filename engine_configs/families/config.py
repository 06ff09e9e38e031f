"""Reads a Hugging Face ``config.json`` so that nothing in it goes unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar, cast

from engine_configs.errors import ConfigError
from engine_configs.spec import Rope

T = TypeVar("T")
_REQUIRED: Any = object()

# Keys that describe training or the file itself: they never change what the model computes.
IRRELEVANT = frozenset(
    [
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "tie_word_embeddings",
        "auto_map",
        "_name_or_path",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "problem_type",
        "id2label",
        "label2id",
    ]
)

# Names of layer kinds, and older names for them.
_LAYER_TYPES = ("full_attention", "linear_attention")
_LEGACY = {"attention": "full_attention", "mamba": "linear_attention"}


class ConfigReader:
    """Takes keys one by one; ``finish`` raises on any key that no one took.

    Raises ConfigError naming the file, the key and the value.
    """

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = data, where
        self._taken: set[str] = set()
        self._children: list[ConfigReader] = []

    @classmethod
    def from_dir(cls, path: Path) -> ConfigReader:
        file = path / "config.json"
        try:
            data = json.loads(file.read_text())
        except FileNotFoundError:
            raise ConfigError(
                "no config.json", where=str(path), fix="Point --checkpoint at a Hugging Face model"
            ) from None
        except (ValueError, UnicodeDecodeError) as e:
            raise ConfigError(f"not JSON: {e}", where=str(file)) from None
        if not isinstance(data, dict):
            raise ConfigError(f"holds {type(data).__name__}, expected an object", where=str(file))
        return cls(data, str(file))

    def take(self, key: str, kind: type[T], default: T = _REQUIRED) -> T:
        """The value of ``key``; ``None`` in the file counts as absent."""
        self._taken.add(key)
        value = self.data.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"key {key!r} is missing", where=self.where)
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return cast(T, float(value))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(
                f"key {key!r} is {value!r}, expected {kind.__name__}", where=self.where
            )
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """``key``, where present, must have one of these values."""
        self._taken.add(key)
        value = self.data.get(key)
        if key in self.data and value not in allowed:
            names = " or ".join(map(repr, allowed))
            raise ConfigError(f"key {key!r} is {value!r}, only {names} is served", where=self.where)

    def ignore(self, *keys: str) -> None:
        """Keys of this family that do not change what the model computes."""
        self._taken.update(keys)

    def finish(self) -> None:
        for key in sorted(set(self.data) - self._taken - IRRELEVANT):
            raise ConfigError(
                f"unknown key {key!r} (value {self.data[key]!r})",
                where=self.where,
                fix="It may change what the model computes, so it is not ignored",
            )
        for child in self._children:
            child.finish()

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.take(key, int) if default is None else self.take(key, int, default)
        if value <= 0:
            raise ConfigError(f"key {key!r} is {value}, expected > 0", where=self.where)
        return value

    def child(self, key: str) -> ConfigReader:
        """The object under ``key``, with the same rules; its keys are checked by this reader."""
        reader = ConfigReader(self.take(key, dict), f"{self.where}: {key}")
        self._children.append(reader)
        return reader

    def layer_types(self, count: int, default: list[str]) -> list[str]:
        """The kind of each layer in the current spelling."""
        types = self.first("layer_types", "layers_block_type", kind=list, default=default)
        if len(types) != count:
            raise ConfigError(
                f"layer_types has {len(types)} entries, not {count}", where=self.where
            )
        types = [_LEGACY.get(t, t) for t in types]
        for i, kind in enumerate(types):
            if kind not in _LAYER_TYPES:
                raise ConfigError(f"layer_types[{i}] is {kind!r}", where=self.where)
        return types

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.data.get(key)
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (value,)

    def first(self, *keys: str, kind: type[T], default: T = _REQUIRED) -> T:
        """One value that goes by several names; two that differ are an error."""
        found = {key: self.take(key, kind) for key in keys if self.data.get(key) is not None}
        self._taken.update(keys)
        if len(set(map(repr, found.values()))) > 1:
            raise ConfigError(f"{found} are one setting with several values", where=self.where)
        return next(iter(found.values())) if found else self.take(keys[0], kind, default)

    def rope(
        self, head_dim: int, *, default_theta: float, rotary_share: float = 1.0
    ) -> Rope | None:
        """``rope_parameters``, or the older ``rope_theta``.

        As transformers reads them: an absent entry or ``rope_theta`` means ``default_theta``, a
        null ``rope_theta`` inside ``rope_parameters`` means no RoPE at all.
        """
        self._taken.update(("rope_parameters", "rope_theta", "rope_scaling"))
        parameters = self.data.get("rope_parameters")
        if parameters is None:
            parameters = {"rope_theta": self.data.get("rope_theta") or default_theta}
            parameters |= self.data.get("rope_scaling") or {}
        theta = parameters.get("rope_theta", default_theta)
        if theta is None:
            return None
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type != "default":
            raise ConfigError(
                f"rope_type is {rope_type!r}, only 'default' is served", where=self.where
            )
        dim = int(head_dim * parameters.get("partial_rotary_factor", rotary_share))
        return Rope(tuple(float(theta) ** (-i / dim) for i in range(0, dim, 2)))
