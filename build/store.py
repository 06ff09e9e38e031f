"""Writes a bundle's files: weights streamed beside the graph, the whole directory moved at once."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from engine_configs.errors import ConversionError

_ALIGN = 4096  # so that a runtime may map a tensor straight from the file


class ExternalWeights:
    """Appends tensors to one file; each becomes an initializer that only points there.

    Bytes that are there already (weights that layers share) are pointed to, not written again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._hash = hashlib.blake2b(digest_size=16)
        self._offsets: dict[bytes, int] = {}

    def add(self, name: str, value: NDArray[Any]) -> onnx.TensorProto:
        value = np.ascontiguousarray(value)
        raw = value.reshape(-1).view(np.uint8).data  # Python's buffers know no bfloat16
        digest = hashlib.blake2b(raw, digest_size=16).digest()
        self._hash.update(digest)
        if digest not in self._offsets:
            self._file.write(b"\0" * (-self._file.tell() % _ALIGN))
            self._offsets[digest] = self._file.tell()
            self._file.write(raw)
        tensor = onnx.TensorProto(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(value.dtype),
            dims=value.shape,
            data_location=onnx.TensorProto.EXTERNAL,
        )
        entries = {
            "location": self.path.name,
            "offset": self._offsets[digest],
            "length": value.nbytes,
        }
        for key, item in entries.items():
            tensor.external_data.add(key=key, value=str(item))
        return tensor

    def digest(self) -> str:
        """Hash of every weight so far."""
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A scratch directory that becomes ``target`` when the block ends well, else is removed.

    An older bundle at ``target`` is replaced only then; anything else there is left alone.
    Raises ConversionError when the place is taken or cannot be written, or the disk is full.
    """
    scratch, old = (
        target.parent / f".{target.name}.{kind}-{os.getpid()}" for kind in ("partial", "old")
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clean_up(target)
        if target.exists() and not (target / "manifest.json").is_file():
            raise ConversionError(
                "exists and is not a bundle", where=str(target), fix="Give another --output"
            )
        scratch.mkdir()
        yield scratch
        _replace(scratch, target, old)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConversionError(
                "the disk is full", where=str(target.parent), fix="Free some space and run again"
            ) from e
        raise ConversionError(str(e), where=str(target)) from e
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _replace(scratch: Path, target: Path, old: Path) -> None:
    if target.exists():
        target.rename(old)
    try:
        scratch.rename(target)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(old, ignore_errors=True)


def _clean_up(target: Path) -> None:
    """What conversions that were killed left behind: half-written, or moved away and not yet
    replaced."""
    for kind in ("old", "partial"):
        for stale in target.parent.glob(f".{target.name}.{kind}-*"):
            pid = stale.name.rsplit("-", 1)[-1]
            if pid.isdigit() and (int(pid) == os.getpid() or not _alive(int(pid))):
                if kind == "old" and not target.exists():
                    stale.rename(target)
                shutil.rmtree(stale, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
