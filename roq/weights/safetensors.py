"""Hugging Face model folders: config.json, and the weights in safetensors files.

Headers are read without torch or numpy. Only :class:`WeightFiles`, which reads the tensors, needs torch and
the safetensors library.
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec

from roq.errors import ConfigError
from roq.text import is_file_name

__all__ = [
    "Shapes",
    "TensorInfo",
    "WeightFiles",
    "check_weights",
    "read_header",
    "read_json",
    "read_shapes",
    "weight_files",
]

Shapes = dict[str, tuple[int, ...]]

NonNegative = Annotated[int, msgspec.Meta(ge=0)]

LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file of a model folder.

    Raises:
        ConfigError: the file is missing, or is not a JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: the model folder has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return cast("dict[str, Any]", found)


class TensorInfo(msgspec.Struct, frozen=True):
    """The description of a tensor in its file's header.

    Attributes:
        dtype: its safetensors name, such as "BF16".
        shape: outermost dimension first.
        data_offsets: its first byte and the one after its last, counted from the end of the header.
    """

    dtype: str
    shape: tuple[NonNegative, ...]
    data_offsets: tuple[NonNegative, NonNegative]


def weight_files(folder: Path) -> list[Path]:
    """The weights files of a folder: those that its index names, or model.safetensors.

    Raises:
        ConfigError: one is missing, or the index is invalid.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        if not (folder / "model.safetensors").is_file():
            raise ConfigError(
                f"{folder}: the model folder has no weights (model.safetensors); make or download the model"
            )
        return [folder / "model.safetensors"]
    names = _shards(index)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise ConfigError(
            f"{folder}: {index.name} names files that are missing: {', '.join(missing) or 'all'}"
        )
    return [folder / name for name in names]


def _shards(index: Path) -> list[str]:
    """The files that an index names, all of them next to it."""
    shards = read_json(index).get("weight_map", {})
    names: list[Any] = list(cast("dict[str, Any]", shards).values()) if isinstance(shards, dict) else [None]
    for name in names:
        if not isinstance(name, str) or not (is_file_name(name) and name.endswith(".safetensors")):
            raise ConfigError(
                f"{index}: weight_map must name *.safetensors files next to it, not {str(name)[:80]!r}; "
                "copy or download it again"
            )
    return sorted(set(names))


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors in a safetensors file, in the order of their names.

    Raises:
        ConfigError: the file cannot be read, is not safetensors, or is truncated.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, LONGEST_HEADER):
                raise ConfigError(f"{path}: not a complete safetensors file; copy or download it again")
            found = json.loads(file.read(length))
        found.pop("__metadata__", None)
        header = msgspec.convert(found, dict[str, TensorInfo])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except (ValueError, AttributeError, TypeError, RecursionError, msgspec.MsgspecError):
        raise ConfigError(f"{path}: not a safetensors file") from None
    whole = 8 + length + max((tensor.data_offsets[1] for tensor in header.values()), default=0)
    if whole != size:
        raise ConfigError(f"{path}: {size} bytes long but should be {whole}; copy or download it again")
    return dict(sorted(header.items()))


def check_weights(folder: Path) -> None:
    """Raise ConfigError unless all weights files of a folder exist and are complete."""
    for file in weight_files(folder):
        read_header(file)


def read_shapes(folder: Path) -> Shapes:
    """The shape of every tensor in a folder, by name. Only headers are read.

    Raises:
        ConfigError: a weights file is missing or incomplete.
    """
    return {name: info.shape for file in weight_files(folder) for name, info in read_header(file).items()}


class WeightFiles(Mapping[str, Any]):
    """The tensors in a folder by name, as torch tensors on the CPU. Each is read when it is looked up.

    All files are mapped from the start until :meth:`close`, so they may be deleted.

    Attributes:
        tensors: their headers' descriptions.

    Raises:
        ConfigError: a file is missing or incomplete.
    """

    def __init__(self, folder: Path) -> None:
        safetensors: Any = importlib.import_module("safetensors")
        self.tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, Any] = {}
        with ExitStack() as stack:
            for path in weight_files(folder):
                header = read_header(path)
                try:
                    file: Any = stack.enter_context(safetensors.safe_open(path, framework="pt"))
                except (OSError, safetensors.SafetensorError) as error:
                    raise ConfigError(f"{path}: cannot be read: {error}") from None
                self.tensors |= header
                self._files |= dict.fromkeys(header, file)
            self._opened = stack.pop_all()

    def __getitem__(self, name: str) -> Any:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors  # without reading it

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files."""
        self._files.clear()
        self._opened.close()
