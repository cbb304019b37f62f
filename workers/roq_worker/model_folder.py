"""What can be said of a model folder from its files alone, before an engine is touched."""

from __future__ import annotations

import json
from pathlib import Path

from roq.errors import ConfigError, WeightsError
from roq.job import checks
from roq.weights.safetensors import read_header, weight_files

__all__ = ["Shapes", "check_model", "read_shapes", "resolve_model"]

Shapes = dict[str, tuple[int, ...]]


def resolve_model(location: str) -> Path:
    """The local folder of a model: ``location`` itself, or the download of a Hugging Face hub name.

    Raises:
        ConfigError: there is no such folder and no such model can be downloaded.
    """
    path = Path(location)
    if path.is_dir():
        return path
    if path.is_absolute() or location.startswith((".", "~")):
        raise ConfigError(f"model.path = {location!r}: there is no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(location, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]))
    except Exception as error:  # noqa: BLE001 - the hub's errors share no base class
        raise ConfigError(
            f"model.path = {location!r}: not a folder here, and the Hugging Face hub does not give it "
            f"({str(error).splitlines()[0]})"
        ) from None


def read_shapes(folder: Path) -> Shapes:
    """Name and shape of every tensor in the folder; reads the headers of its files only.

    Raises:
        WeightsError: a file is missing, cut short or not safetensors.
    """
    try:
        return {name: t.shape for file in weight_files(folder) for name, t in read_header(file).items()}
    except ConfigError as error:
        raise WeightsError(str(error)) from None


def check_model(folder: Path, max_model_len: int) -> tuple[Shapes, bool]:
    """Check that an engine can start on this folder.

    Returns:
        Its tensors' shapes, and whether its output layer is its embedding (tied).

    Raises:
        ConfigError: no weights, no tokenizer, an unsupported head size, or a context shorter than
            ``max_model_len`` (prompt + response, in tokens).
    """
    checks.check_model(str(folder), engines_here=True, max_model_len=max_model_len)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return read_shapes(folder), bool(config.get("tie_word_embeddings"))
