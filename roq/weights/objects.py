"""Weights in an object store, on the trainer's side."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import msgspec

from roq.errors import StoreFailed, VersionLost
from roq.weights.folder import OWNER, check_owner, is_in, name_in, new_name, version_of
from roq.weights.remote import (
    MANIFEST,
    File,
    Manifest,
    digest,
    open_url,
    parallel,
    persist,
    read_manifest,
    remove,
)

__all__ = ["ObjectStore"]


class ObjectStore:
    """Versions as objects under ``url``; the trainer exports a version to ``local`` first.

    With ``keep``, a version also stays in ``local`` until it is discarded, for a trainer that sends it.

    Raises:
        ConfigError: fsspec, or its driver for this kind of URL, is not installed.
    """

    def __init__(self, url: str, local: Path, *, keep: bool = False) -> None:
        self.url = url.rstrip("/")
        self._keep = keep
        self.local = local
        self._fs, self._root = open_url(self.url)

    def new(self, version: int) -> str:
        """A new, unused location for an export of a version."""
        return f"{self.url}/{new_name(version)}"

    def folder(self, location: str) -> Path:
        """The local folder to export to.

        Raises:
            StoreFailed: the location is not in this store.
        """
        return self.local / name_in(self.url, location)

    def put(self, location: str) -> None:
        """Upload the export in :meth:`folder`. Blocks, and retries.

        Raises:
            StoreFailed: the store failed, or the location is not in it.
        """
        source = self.folder(location)
        persist(location, lambda: self._put(source, f"{self._root}/{source.name}"))
        if not self._keep:
            shutil.rmtree(source, ignore_errors=True)

    def _put(self, source: Path, prefix: str) -> None:
        remove(self._fs, [f"{prefix}/{MANIFEST}"])  # a version does not exist while it is rewritten

        def put(file: Path) -> tuple[str, File]:
            entry = File(file.stat().st_size, digest(file))
            self._fs.put_file(str(file), f"{prefix}/{file.name}")
            return file.name, entry

        manifest = Manifest(dict(parallel(put, sorted(source.iterdir()))))
        self._fs.pipe_file(f"{prefix}/{MANIFEST}", msgspec.json.encode(manifest))

    def is_whole(self, location: str) -> bool:
        """Return True if a version's manifest exists and all objects have the sizes in it.

        Raises:
            StoreFailed: the store is unreachable, or the location is not in it.
        """
        prefix = f"{self._root}/{name_in(self.url, location)}"

        def look() -> bool:
            self._fs.invalidate_cache()
            manifest = read_manifest(self._fs, prefix)
            sizes = parallel(lambda file: self._fs.size(f"{prefix}/{file}"), manifest.files)
            return sizes == [file.bytes for file in manifest.files.values()]

        try:
            return persist(location, look)
        except VersionLost:
            return False

    def stored(self) -> dict[str, int]:
        """Location -> version of all exports, complete or not; a version may have several.

        Raises:
            StoreFailed: the store is unreachable.
        """

        def look() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []  # nothing was ever put there

        names = [path.rstrip("/").rpartition("/")[2] for path in persist(self.url, look)]
        return {f"{self.url}/{name}": v for name in names if (v := version_of(name)) is not None}

    def discard(self, location: str) -> None:
        """Delete a version; ignores a location outside this store, and a store that fails."""
        if not is_in(self.url, location):
            return
        shutil.rmtree(self.folder(location), ignore_errors=True)
        prefix = f"{self._root}/{name_in(self.url, location)}"
        try:
            # The manifest first: a partly deleted version does not exist.
            remove(self._fs, [f"{prefix}/{MANIFEST}"])
            self._fs.rm(prefix, recursive=True)
        except Exception:  # noqa: BLE001 - drivers' errors share no base class; old files do no harm
            return

    def clean(self) -> None:
        """Delete the local leftovers of a trainer that died before an upload ended."""
        shutil.rmtree(self.local, ignore_errors=True)

    def probe(self) -> None:
        """Write, read back and delete a small object.

        Raises:
            StoreFailed: the store is unreachable or not writable.
        """
        path = f"{self._root}/.probe-{secrets.token_hex(4)}"

        def probe() -> None:
            self._fs.pipe_file(path, b"roq")
            found = self._fs.cat_file(path)
            remove(self._fs, [path])
            if found != b"roq":
                raise StoreFailed(f"{self.url}: returned other data than was written")

        persist(self.url, probe)

    def claim(self, run: str) -> None:
        """Record that this store belongs to a run: another run would delete its weights as leftovers.

        Raises:
            ConfigError: it belongs to another run.
            StoreFailed: the store is unreachable.
        """
        path = f"{self._root}/{OWNER}"

        def claim() -> str:
            self._fs.invalidate_cache()
            if not self._fs.exists(path):
                self._fs.pipe_file(path, run.encode())
            return self._fs.cat_file(path).decode()

        check_owner(self.url, persist(self.url, claim), run)
