"""Weights in a folder shared by the trainer and all workers."""

from __future__ import annotations

import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from roq.errors import ConfigError, StoreFailed
from roq.weights.safetensors import check_weights

__all__ = ["OWNER", "FolderStore", "check_owner", "is_in", "name_in", "new_name", "version_of"]

_OURS = re.compile(r"v(\d{8,})-[0-9a-f]{8}", re.ASCII)
_VERSION = re.compile(r"v(\d{8,})(-[0-9a-f]+)?", re.ASCII)  # of older releases too
OWNER = "roq-run"  # the name of the run that a store belongs to


class FolderStore:
    """Versions as folders in ``local``, a path shared by the trainer and all workers."""

    def __init__(self, local: Path) -> None:
        self.local = local

    def new(self, version: int) -> str:
        """A new, unused location for an export of a version."""
        return str(self.local / new_name(version))

    def folder(self, location: str) -> Path:
        """The folder to export to; it appears under this name when it is complete.

        Raises:
            StoreFailed: the location is not in this store.
        """
        return self.local / name_in(str(self.local), location)

    def put(self, location: str) -> None:
        """Store the export in :meth:`folder`, where it stays.

        Raises:
            StoreFailed: the location is not in this store.
        """
        self.folder(location)

    def is_whole(self, location: str) -> bool:
        """Return True if all files of a version exist with their full length.

        Raises:
            StoreFailed: the location is not in this store.
        """
        folder = self.folder(location)
        try:
            check_weights(folder)
        except ConfigError:
            return False
        return True

    def stored(self) -> dict[str, int]:
        """Location -> version of all exports, complete or not; a version may have several.

        Only names that :meth:`new` creates count: others are users' copies.
        """
        names = [path.name for path in self.local.iterdir()] if self.local.is_dir() else []
        return {str(self.local / name): v for name in names if (v := version_of(name)) is not None}

    def discard(self, location: str) -> None:
        """Delete a version; a location outside this store is ignored."""
        if is_in(str(self.local), location):
            shutil.rmtree(location, ignore_errors=True)

    def clean(self) -> None:
        """Delete the leftovers of a trainer that died during an export."""
        for left in self.local.glob(".tmp-*"):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)

    def probe(self) -> None:
        """Write, read back and delete a small file.

        Raises:
            StoreFailed: the folder is not writable.
        """
        probe = self.local / f".probe-{secrets.token_hex(4)}"
        try:
            self.local.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"roq")
            probe.unlink()
        except OSError as error:
            raise StoreFailed(f"{self.local}: cannot write weights: {error}") from None

    def claim(self, run: str) -> None:
        """Record that this store belongs to a run: another run would delete its weights as leftovers.

        Raises:
            ConfigError: it belongs to another run.
            StoreFailed: the folder is not writable.
        """
        owner = self.local / OWNER
        try:
            self.local.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError), owner.open("x", encoding="utf-8") as file:
                file.write(run)
            check_owner(str(self.local), owner.read_text(encoding="utf-8"), run)
        except OSError as error:
            raise StoreFailed(f"{self.local}: cannot write weights: {error}") from None


def check_owner(store: str, owner: str, run: str) -> None:
    """Raise ConfigError if the store belongs to another run."""
    if owner != run:
        raise ConfigError(
            f"run.weights: {store} has the weights of run {owner!r}; use a separate location for each run "
            f"(or delete {OWNER} there, if that run is over and its weights may be deleted)"
        )


def new_name(version: int) -> str:
    """A unique name for an export of a version."""
    return f"v{version:08d}-{secrets.token_hex(4)}"


def version_of(name: str) -> int | None:
    """The version that was exported under this name, or None."""
    found = _OURS.fullmatch(name)
    return int(found[1]) if found else None


def is_in(store: str, location: str) -> bool:
    """Return True if a location is that of a version in this store."""
    parent, _, name = location.rpartition("/")
    return parent == store and _VERSION.fullmatch(name) is not None


def name_in(store: str, location: str) -> str:
    """The name of the export at ``location``.

    Raises:
        StoreFailed: the location is not in this store.
    """
    if not is_in(store, location):
        raise StoreFailed(
            f"{location} is not in this job's weights store {store}; "
            "start a new run, with [model] path set to complete weights"
        )
    return location.rpartition("/")[2]
