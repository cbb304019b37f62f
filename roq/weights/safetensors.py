"""Folders of safetensors as Hugging Face lays them out: whether all of the weights are there and whole."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any, cast

from roq.errors import ConfigError

__all__ = ["check_weights", "read_json"]

LONGEST_HEADER = 100_000_000  # bytes, as the safetensors library has it


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder.

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


def check_weights(folder: Path) -> None:
    """Check that all of a Hugging Face folder's weights files are there and whole."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = _shards(index)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise ConfigError(
                f"{folder}: {index.name} names files that are missing: {', '.join(missing) or 'all'}"
            )
    else:
        names = ["model.safetensors"]
    if not (folder / names[0]).is_file():
        raise ConfigError(
            f"{folder}: the model folder has no weights (model.safetensors); make or download the model"
        )
    for name in names:
        _check_safetensors(folder / name)


def _shards(index: Path) -> list[str]:
    """The files that an index names, all of them beside it."""
    shards = read_json(index).get("weight_map", {})
    names: list[Any] = list(cast("dict[str, Any]", shards).values()) if isinstance(shards, dict) else [None]
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise ConfigError(
                f"{index}: weight_map must name *.safetensors files beside it, not {str(name)[:80]!r}; "
                "copy or download it again"
            )
    return sorted(set(names))


def _check_safetensors(path: Path) -> None:
    """Hold the file's length against its header: a download or copy that broke off is found here."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, LONGEST_HEADER):
            raise ConfigError(f"{path}: not a whole safetensors file; copy or download it again")
        try:
            header = json.loads(file.read(length))
            end = max(
                (int(t["data_offsets"][1]) for name, t in header.items() if name != "__metadata__"), default=0
            )
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            raise ConfigError(f"{path}: not a safetensors file") from None
    if 8 + length + end != size:
        raise ConfigError(
            f"{path}: {size} bytes long but should be {8 + length + end}; copy or download it again"
        )
