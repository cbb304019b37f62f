"""Weights in a folder that the trainer and all workers see."""

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
    """Versions as folders in ``local``, on a disk that the trainer and all workers see under this path."""

    def __init__(self, local: Path) -> None:
        self.local = local

    def new(self, version: int) -> str:
        """A location for an export of a version, another one each time; nothing is there yet."""
        return str(self.local / new_name(version))

    def folder(self, location: str) -> Path:
        """The folder that is exported to; it appears under this name when it is complete.

        Raises:
            StoreFailed: the location is not in this store.
        """
        return self.local / name_in(str(self.local), location)

    def put(self, location: str) -> None:
        """Store what is in :meth:`folder`, which is where it stays.

        Raises:
            StoreFailed: the location is not in this store.
        """
        self.folder(location)

    def is_whole(self, location: str) -> bool:
        """Whether all files of a version are there, in full length.

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
        """Where versions are, whole or not, and which; of one version there may be several.

        Only what has a name as :meth:`new` gives it: others are people's own copies.
        """
        names = [path.name for path in self.local.iterdir()] if self.local.is_dir() else []
        return {str(self.local / name): v for name in names if (v := version_of(name)) is not None}

    def discard(self, location: str) -> None:
        """Delete a version; a location outside this store is left alone."""
        if is_in(str(self.local), location):
            shutil.rmtree(location, ignore_errors=True)

    def clean(self) -> None:
        """Delete what a trainer left that died while it wrote."""
        for left in self.local.glob(".tmp-*"):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)

    def probe(self) -> None:
        """Write, read back and delete a small file.

        Raises:
            StoreFailed: that does not work here.
        """
        probe = self.local / f".probe-{secrets.token_hex(4)}"
        try:
            self.local.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"roq")
            probe.unlink()
        except OSError as error:
            raise StoreFailed(f"{self.local}: weights cannot be written here: {error}") from None

    def claim(self, run: str) -> None:
        """Note that this store is a run's: another one would take its weights for leftovers.

        Raises:
            ConfigError: it is another run's.
            StoreFailed: it cannot be written.
        """
        owner = self.local / OWNER
        try:
            self.local.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError), owner.open("x", encoding="utf-8") as file:
                file.write(run)
            check_owner(str(self.local), owner.read_text(encoding="utf-8"), run)
        except OSError as error:
            raise StoreFailed(f"{self.local}: weights cannot be written here: {error}") from None


def check_owner(store: str, owner: str, run: str) -> None:
    """Refuse a store that is another run's.

    Raises:
        ConfigError: it is.
    """
    if owner != run:
        raise ConfigError(
            f"run.weights: {store} holds the weights of run {owner!r}; give each run a place of its own "
            f"(or delete {OWNER} there, if that run is over and its weights may go)"
        )


def new_name(version: int) -> str:
    """A name for an export of a version that no other export has."""
    return f"v{version:08d}-{secrets.token_hex(4)}"


def version_of(name: str) -> int | None:
    """The version that was exported under this name, or None."""
    found = _OURS.fullmatch(name)
    return int(found[1]) if found else None


def is_in(store: str, location: str) -> bool:
    """Whether a location is one of a version in this store."""
    parent, _, name = location.rpartition("/")
    return parent == store and _VERSION.fullmatch(name) is not None


def name_in(store: str, location: str) -> str:
    """The name under which this store has what is at ``location``.

    Raises:
        StoreFailed: it is elsewhere.
    """
    if not is_in(store, location):
        raise StoreFailed(
            f"{location} is not in {store}, where this job keeps its weights, and is left alone; "
            "begin a new run, with [model] path set to weights that are whole"
        )
    return location.rpartition("/")[2]
