"""Weights in a folder that the trainer and all workers see."""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path

from roq.checks import check_weights
from roq.errors import ConfigError
from roq.weight_store.remote import StoreFailed

__all__ = ["FolderStore", "version_in"]

_VERSION = re.compile(r"v(\d{8,})", re.ASCII)


class FolderStore:
    """Versions as folders in ``root``, on a disk that the trainer and all workers see under this path."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def target(self, version: int) -> Path:
        """The folder that a version is exported to; it appears under this name when it is complete."""
        return self.root / f"v{version:08d}"

    def put(self, version: int) -> str:
        """Store what is in :meth:`target`; returns its location."""
        return str(self.target(version))

    def is_whole(self, version: int) -> bool:
        """Whether all files of a version are there, in full length."""
        try:
            check_weights(self.target(version))
        except ConfigError:
            return False
        return True

    def stored(self) -> dict[int, str]:
        """The versions that are there, whole or not, and where."""
        return {v: str(self.root / name) for name in _names(self.root) if (v := version_in(name)) is not None}

    def discard(self, location: str) -> None:
        """Delete a version; a location outside this store is left alone."""
        if Path(location).parent == self.root:
            shutil.rmtree(location, ignore_errors=True)

    def clean(self) -> None:
        """Delete what a trainer left that died while it wrote."""
        for left in self.root.glob(".tmp-*"):
            shutil.rmtree(left)

    def probe(self) -> None:
        """Write, read back and delete a small file.

        Raises:
            StoreFailed: that does not work here.
        """
        probe = self.root / f".probe-{secrets.token_hex(4)}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"roq")
            probe.unlink()
        except OSError as error:
            raise StoreFailed(f"{self.root}: weights cannot be written here: {error}") from None


def version_in(name: str) -> int | None:
    """The version that a folder of this name holds, or None."""
    found = _VERSION.fullmatch(name)
    return int(found[1]) if found else None


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []
