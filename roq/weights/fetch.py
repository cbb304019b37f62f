"""Fetch weights for a worker: a folder is used in place, an object store through a copy on this host."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from roq.errors import StoreFailed
from roq.text import is_file_name
from roq.weights.remote import (
    digest,
    is_url,
    open_url,
    parallel,
    persist,
    read_manifest,
)

__all__ = ["cache_folder", "fetch"]

LOCK_WAIT_S = 3600.0  # for another worker on this host


def cache_folder() -> Path:
    """The folder of this host's copies of weights: ``$ROQ_CACHE``, or ``~/.cache/roq``."""
    return Path(os.environ.get("ROQ_CACHE") or Path.home() / ".cache" / "roq")


@contextmanager
def fetch(location: str) -> Generator[Path]:
    """A local folder with the weights at ``location``, while the context is open. Blocks.

    A folder is used in place. From an object store a host has one copy of one version, which its workers
    share: the first one fetches it, the others wait. Exports have unique names, so an existing copy is right.

    Raises:
        StoreFailed: the weights cannot be fetched, or do not match the manifest.
        ConfigError: fsspec, or its driver for this kind of URL, is not installed.
    """
    if not is_url(location):
        yield Path(location)
        return
    store, _, version = location.rpartition("/")
    if not is_file_name(version):
        raise StoreFailed(f"{location}: not the location of a weights version")
    place = cache_folder() / hashlib.sha256(store.encode()).hexdigest()[:16]
    folder = place / version
    deadline = time.monotonic() + LOCK_WAIT_S
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = (place / "lock").open("w")
    except OSError as error:
        raise StoreFailed(f"{place}: cannot store copies of weights: {error}; set ROQ_CACHE") from None
    with lock:  # closing it releases the lock; so does a kill -9
        while True:
            _lock(lock.fileno(), fcntl.LOCK_SH, location, deadline)
            if folder.is_dir():
                yield folder
                return
            _lock(lock.fileno(), fcntl.LOCK_EX, location, deadline)  # no worker uses a copy now
            if not folder.is_dir():
                for other in place.iterdir():
                    if other.is_dir():
                        shutil.rmtree(other)
                persist(location, partial(_fetch, location, folder))


def _fetch(location: str, folder: Path) -> None:
    fs, prefix = open_url(location)
    fs.invalidate_cache()
    manifest = read_manifest(fs, prefix)
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()

    def get(name: str) -> None:
        file, entry = temporary / name, manifest.files[name]
        fs.get_file(f"{prefix}/{name}", str(file))
        if file.stat().st_size != entry.bytes or digest(file) != entry.sha256:
            raise StoreFailed(f"{prefix}/{name}: size or digest does not match the manifest")

    parallel(get, manifest.files)
    temporary.rename(folder)


def _lock(handle: int, how: int, location: str, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(handle, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreFailed(
                    f"{location}: another worker on this host has locked the copies in {cache_folder()} "
                    f"for {LOCK_WAIT_S:.0f} s"
                ) from None
            time.sleep(0.05)
