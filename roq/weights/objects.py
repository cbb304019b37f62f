"""Weights in an object store: what the trainer does with them."""

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
    """Versions as objects under ``url``; ``local`` is where the trainer exports a version before it is put.

    With ``keep`` a version stays in ``local`` too until it is discarded, for a trainer that sends it.

    Raises:
        ConfigError: fsspec, or its driver for this kind of URL, is not installed here.
    """

    def __init__(self, url: str, local: Path, *, keep: bool = False) -> None:
        self.url = url.rstrip("/")
        self._keep = keep
        self.local = local
        self._fs, self._root = open_url(self.url)

    def new(self, version: int) -> str:
        """A location for an export of a version, another one each time; nothing is there yet."""
        return f"{self.url}/{new_name(version)}"

    def folder(self, location: str) -> Path:
        """The local folder that is exported to.

        Raises:
            StoreFailed: the location is not in this store.
        """
        return self.local / name_in(self.url, location)

    def put(self, location: str) -> None:
        """Store what is in :meth:`folder`. Blocks, and retries.

        Raises:
            StoreFailed: the store did not take it, or the location is not in it.
        """
        source = self.folder(location)
        persist(location, lambda: self._put(source, f"{self._root}/{source.name}"))
        if not self._keep:
            shutil.rmtree(source, ignore_errors=True)

    def _put(self, source: Path, prefix: str) -> None:
        remove(self._fs, [f"{prefix}/{MANIFEST}"])  # a version written again is no version meanwhile

        def put(file: Path) -> tuple[str, File]:
            entry = File(file.stat().st_size, digest(file))
            self._fs.put_file(str(file), f"{prefix}/{file.name}")
            return file.name, entry

        manifest = Manifest(dict(parallel(put, sorted(source.iterdir()))))
        self._fs.pipe_file(f"{prefix}/{MANIFEST}", msgspec.json.encode(manifest))

    def is_whole(self, location: str) -> bool:
        """Whether a version's manifest is there and all objects have the size that it says.

        Raises:
            StoreFailed: the store does not answer, or the location is not in it.
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
        """Where versions are, whole or not, and which; of one version there may be several.

        Raises:
            StoreFailed: the store does not answer.
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
        """Delete a version; a location outside this store is left alone, and so is a store that is away."""
        if not is_in(self.url, location):
            return
        shutil.rmtree(self.folder(location), ignore_errors=True)
        prefix = f"{self._root}/{name_in(self.url, location)}"
        try:
            # The manifest goes first: what is half deleted is no version.
            remove(self._fs, [f"{prefix}/{MANIFEST}"])
            self._fs.rm(prefix, recursive=True)
        except Exception:  # noqa: BLE001 - drivers' errors share no base class; old files harm nobody
            return

    def clean(self) -> None:
        """Delete what a trainer left on its disk that died before a version was stored."""
        shutil.rmtree(self.local, ignore_errors=True)

    def probe(self) -> None:
        """Write, read back and delete a small object.

        Raises:
            StoreFailed: that does not work from here.
        """
        path = f"{self._root}/.probe-{secrets.token_hex(4)}"

        def probe() -> None:
            self._fs.pipe_file(path, b"roq")
            found = self._fs.cat_file(path)
            remove(self._fs, [path])
            if found != b"roq":
                raise StoreFailed(f"{self.url}: gave something else than was put there")

        persist(self.url, probe)

    def claim(self, run: str) -> None:
        """Note that this store is a run's: another one would take its weights for leftovers.

        Raises:
            ConfigError: it is another run's.
            StoreFailed: it does not answer.
        """
        path = f"{self._root}/{OWNER}"

        def claim() -> str:
            self._fs.invalidate_cache()
            if not self._fs.exists(path):
                self._fs.pipe_file(path, run.encode())
            return self._fs.cat_file(path).decode()

        check_owner(self.url, persist(self.url, claim), run)
