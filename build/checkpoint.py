"""Reads a checkpoint's weights one tensor at a time, after checking all of them.

Only safetensors are read: pickled files run code. Nothing is loaded before it is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from engine_configs.errors import CheckpointError
from engine_configs.families.weights import Family, Source

_READABLE = ("F32", "F16", "BF16", "F64")
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "consolidated*.pth")


class Checkpoint:
    """Tensors of a directory of safetensors files, by name.

    Raises CheckpointError for a missing shard, a truncated file, pickled weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}
        for file in self._shards():
            handle = _open(path / file)
            self._files[file] = handle
            self._where |= dict.fromkeys(handle.keys(), file)

    def _shards(self) -> list[str]:
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            try:
                files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
                missing = [f for f in files if not (self.path / f).is_file()]
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                raise CheckpointError(f"not an index: {e!r}", where=str(index)) from None
            if missing:
                raise CheckpointError(
                    f"missing {len(missing)} of {len(files)} shards: {', '.join(missing)}",
                    where=str(self.path),
                    fix="Download the checkpoint again",
                )
            return files
        files = sorted(f.name for f in self.path.glob("*.safetensors"))
        if not files:
            pickles = sorted(f.name for p in _PICKLES for f in self.path.glob(p))
            if pickles:
                raise CheckpointError(
                    f"holds pickled weights only ({', '.join(pickles)}); loading them runs code",
                    where=str(self.path),
                    fix="Save the model with safe_serialization=True",
                )
            raise CheckpointError("no *.safetensors file", where=str(self.path))
        return files

    def names(self) -> set[str]:
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._files[self._where[name]].get_slice(name).get_dtype())

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor in fp32. Raises CheckpointError where it is not finite."""
        tensor = self._files[self._where[name]].get_tensor(name)
        array = cast(NDArray[np.float32], np.ascontiguousarray(tensor.float().numpy()))
        if not np.isfinite(array).all():
            raise CheckpointError(f"{name} is not finite in fp32", where=str(self.path))
        return array


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as e:
        raise CheckpointError(
            f"cannot be read: {e}", where=str(file), fix="The file is damaged or incomplete"
        ) from None


class Weights:
    """The canonical weights of a family, read from a checkpoint on demand.

    Raises CheckpointError listing every missing, extra, wrongly shaped or typed tensor at once.
    """

    def __init__(self, family: Family, checkpoint: Checkpoint) -> None:
        self._family, self._checkpoint = family, checkpoint
        self.shapes = family.spec.weights()
        problems = list(self._problems())
        if problems:
            raise CheckpointError(
                f"{len(problems)} tensors do not fit {family.spec.model_type}:\n  "
                + "\n  ".join(problems),
                where=str(checkpoint.path),
            )

    def _source(self, weight: str) -> Source:
        names = self._checkpoint.names()
        spellings = self._family.sources[weight]
        return next((s for s in spellings if names.issuperset(s.names)), spellings[0])

    def _problems(self) -> Iterator[str]:
        checkpoint, used = self._checkpoint, set[str]()
        for weight, shape in self.shapes.items():
            source = self._source(weight)
            used.update(source.names)
            missing = [n for n in source.names if n not in checkpoint.names()]
            if missing:
                yield f"missing {', '.join(missing)} {source.expected(shape)}"
                continue
            found = [checkpoint.shape(n) for n in source.names]
            if not source.fits(shape, found):
                shapes = " + ".join(map(str, found))
                names = ", ".join(source.names)
                yield f"{names} has shape {shapes}, expected {source.expected(shape)}"
            for name in source.names:
                if (dtype := checkpoint.dtype(name)) not in _READABLE:
                    yield f"{name} has dtype {dtype}, expected one of {', '.join(_READABLE)}"
        # A tied head may be stored all the same.
        tied = {w for w in self._family.sources if w not in self.shapes}
        used.update(n for w in tied for s in self._family.sources[w] for n in s.names)
        for name in sorted(checkpoint.names() - used):
            if not (self._family.unused and name.startswith(self._family.unused)):
                yield f"unexpected {name} {checkpoint.shape(name)}"

    def read(self, weight: str) -> NDArray[np.float32]:
        """One canonical weight in fp32."""
        source = self._source(weight)
        tensors = [self._checkpoint.read(name) for name in source.names]
        weights = source.read(*tensors) if source.read else tensors[0]
        return weights


class RandomWeights:
    """Seeded weights of the right shapes, for sizes and speed; no quality is claimed for them.

    Decays are spread log-uniformly so that heads remember from 10 to 10,000 tokens.
    """

    def __init__(self, family: Family, seed: int) -> None:
        self.shapes = family.spec.weights()
        self._order = {name: i for i, name in enumerate(self.shapes)}
        self._seed = seed

    def read(self, weight: str) -> NDArray[np.float32]:
        shape = self.shapes[weight]
        rng = np.random.default_rng((self._seed, self._order[weight]))
        leaf = weight.rsplit(".", 1)[-1]
        if leaf.endswith("norm"):
            return np.ones(shape, np.float32)
        if leaf == "dt_bias":
            return np.full(shape, 0.5413, np.float32)  # softplus(0.5413) = 1
        if leaf in ("A_log", "rate"):
            rates = np.logspace(-4, -1, math.prod(shape)).reshape(shape)
            # RG-LRU: 8 softplus(rate) times a gate around 1/2
            raw = np.log(rates) if leaf == "A_log" else np.log(np.expm1(rates / 4))
            return np.asarray(raw, np.float32)
        scale = 1.0 if weight == "embed" else shape[-1] ** -0.5
        values: NDArray[np.float32] = rng.standard_normal(shape, np.float32)
        values *= np.float32(scale)
        return values
