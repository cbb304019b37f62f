"""Resolve ``[model] path``: a local folder, or a model on the Hugging Face hub."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from roq.errors import ConfigError
from roq.text import one_line
from roq.weights.safetensors import read_json

__all__ = ["find_model", "is_hub_name", "vocab_size"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Files that workers and trainer read; the same for both, so a host downloads them once.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.py"]
_UNWANTED = ["original/*", "consolidated*"]  # the same weights in another layout


def is_hub_name(path: str) -> bool:
    """Return True for a name on the hub, ``owner/model``, and False for a local folder.

    Raises:
        ConfigError: it is neither.
    """
    if Path(path).is_dir():
        return False
    if _HUB_NAME.fullmatch(path) and not Path(path).exists():
        return True
    raise ConfigError(
        f"model.path = {path!r}: there is no such folder; set a model folder, or a name on the Hugging "
        "Face hub (owner/model)"
    )


def vocab_size(path: str) -> int | None:
    """Size of the vocabulary of a model in a folder here; None if not known, as for one on the hub."""
    config = Path(path) / "config.json"
    if not config.is_file():
        return None
    whole = read_json(config)
    size = whole.get("text_config", whole).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def find_model(path: str) -> Path:
    """The local folder of a model: ``path`` itself, or the download of its hub name.

    Raises:
        ConfigError: there is no such folder, and the model cannot be downloaded.
    """
    if not is_hub_name(path):
        return Path(path)
    try:
        hub = importlib.import_module("huggingface_hub")  # an engine's or a trainer's dependency
        return Path(hub.snapshot_download(path, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except Exception as error:  # noqa: BLE001 - the hub's errors share no base class
        raise ConfigError(
            f"model.path = {path!r}: there is no such folder, and it cannot be downloaded from the Hugging "
            f"Face hub: {one_line(error)}"
        ) from None
