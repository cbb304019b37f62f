"""Where ``[model] path`` leads: to a folder here, or to a model on the Hugging Face hub."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from roq.errors import ConfigError
from roq.text import one_line

__all__ = ["find_model", "is_hub_name"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What workers and trainer read of a model; the same on both, so that a host downloads it once.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.py"]
_UNWANTED = ["original/*", "consolidated*"]  # the same weights in another layout


def is_hub_name(path: str) -> bool:
    """Whether this is a name on the hub, ``owner/model``, and nothing on this host.

    Raises:
        ConfigError: it is neither, nor a folder here.
    """
    if Path(path).is_dir():
        return False
    if _HUB_NAME.fullmatch(path) and not Path(path).exists():
        return True
    raise ConfigError(
        f"model.path = {path!r}: there is no such folder; name a folder with a model, or one on the Hugging "
        "Face hub (owner/model)"
    )


def find_model(path: str) -> Path:
    """The local folder of a model: ``path`` itself, or the download of its hub name.

    Raises:
        ConfigError: there is no such folder, and no such model can be downloaded.
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
