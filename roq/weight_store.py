"""Where published weights are kept: a folder that the trainer and all workers see, or an object store.

``[run] weights`` names it: nothing (``weights`` in the run's folder), another folder, or an fsspec URL such
as ``s3://bucket/prefix`` or ``gs://…``. A version has a location, which is what ``publish`` tells workers.

A version in a folder exists once its folder has its final name. An object store renames nothing: there a
version exists once its manifest does, which is written last and holds every file's size and digest. A
reader starts from the manifest and keeps nothing that does not agree with it.

Credentials never stand in the job: fsspec's drivers take them from the environment, from their own files
or from the host's role (FSSPEC_S3_KEY, AWS_PROFILE, …). Timeouts and retries of single requests are the
driver's; what is done here is retried as a whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from roq.checks import check_weights
from roq.config import Run
from roq.errors import ConfigError, RoqError

__all__ = ["FolderStore", "ObjectStore", "StoreFailed", "cache_folder", "fetch", "is_url", "weight_store"]

MANIFEST = "manifest.json"
ATTEMPTS = 5
PARALLEL = 4  # files on their way at once
LOCK_WAIT_S = 3600.0  # for another worker of this host that fetches

_VERSION = re.compile(r"v(\d{8,})", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

T = TypeVar("T")


class StoreFailed(RoqError):
    """An object store cannot be reached, refuses, or gave something else than was put there."""


def is_url(location: str) -> bool:
    """Whether a location is in an object store; otherwise it is a folder."""
    return re.match(r"[a-z][a-z0-9+.-]*://", location) is not None


def weight_store(run: Run) -> FolderStore | ObjectStore:
    """The store of a run.

    Raises:
        ConfigError: fsspec, or its driver for this kind of URL, is not installed here.
    """
    local = Path(run.dir) / "weights"
    if run.weights is None:
        return FolderStore(local)
    if is_url(run.weights):
        return ObjectStore(run.weights, local, keep=run.transfer != "files")
    return FolderStore(Path(run.weights))


# ---- a folder ------------------------------------------------------------------------------------


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
        return {v: str(self.root / name) for name in _names(self.root) if (v := _version(name)) is not None}

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


# ---- an object store -----------------------------------------------------------------------------


class _File(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    files: dict[str, _File]


class ObjectStore:
    """Versions as objects under ``url``; ``local`` is where the trainer exports a version before it is put.

    With ``keep`` a version stays in ``local`` too until it is discarded, for a trainer that sends it.

    Raises:
        ConfigError: fsspec, or its driver for this kind of URL, is not installed here.
    """

    def __init__(self, url: str, local: Path, *, keep: bool = False) -> None:
        self.url = url.rstrip("/")
        self._keep = keep
        self._local = FolderStore(local)
        self._fs, self._root = _open(self.url)

    def target(self, version: int) -> Path:
        """The local folder that a version is exported to."""
        return self._local.target(version)

    def put(self, version: int) -> str:
        """Store what is in :meth:`target`; returns its location. Blocks, and retries.

        Raises:
            StoreFailed: the store did not take it.
        """
        source = self.target(version)
        location = f"{self.url}/{source.name}"
        _persist(location, lambda: self._put(source, f"{self._root}/{source.name}"))
        if not self._keep:
            shutil.rmtree(source, ignore_errors=True)
        return location

    def _put(self, source: Path, prefix: str) -> None:
        _remove(self._fs, [f"{prefix}/{MANIFEST}"])  # a version written again is no version meanwhile

        def put(file: Path) -> tuple[str, _File]:
            entry = _File(file.stat().st_size, _digest(file))
            self._fs.put_file(str(file), f"{prefix}/{file.name}")
            return file.name, entry

        manifest = _Manifest(dict(_parallel(put, sorted(source.iterdir()))))
        self._fs.pipe_file(f"{prefix}/{MANIFEST}", msgspec.json.encode(manifest))

    def is_whole(self, version: int) -> bool:
        """Whether a version's manifest is there and all objects have the size that it says.

        Raises:
            StoreFailed: the store does not answer.
        """
        name = self.target(version).name
        prefix = f"{self._root}/{name}"

        def look() -> bool:
            self._fs.invalidate_cache()
            manifest = _manifest(self._fs, prefix)
            sizes = _parallel(lambda file: self._fs.size(f"{prefix}/{file}"), manifest.files)
            return sizes == [file.bytes for file in manifest.files.values()]

        try:
            return _persist(f"{self.url}/{name}", look)
        except _Lost:
            return False

    def stored(self) -> dict[int, str]:
        """The versions that are there, whole or not, and where.

        Raises:
            StoreFailed: the store does not answer.
        """

        def look() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []  # nothing was ever put there

        names = [path.rstrip("/").rpartition("/")[2] for path in _persist(self.url, look)]
        return {v: f"{self.url}/{name}" for name in names if (v := _version(name)) is not None}

    def discard(self, location: str) -> None:
        """Delete a version; a location outside this store is left alone, and so is a store that is away."""
        if location.rpartition("/")[0] != self.url:
            return
        name = location.rpartition("/")[2]
        self._local.discard(str(self._local.root / name))
        prefix = f"{self._root}/{name}"
        try:
            # The manifest goes first: what is half deleted is no version.
            _remove(self._fs, [f"{prefix}/{MANIFEST}"])
            self._fs.rm(prefix, recursive=True)
        except Exception:  # noqa: BLE001 - drivers' errors share no base class; old files harm nobody
            return

    def clean(self) -> None:
        """Delete what a trainer left on its disk that died before a version was stored."""
        shutil.rmtree(self._local.root, ignore_errors=True)

    def probe(self) -> None:
        """Write, read back and delete a small object.

        Raises:
            StoreFailed: that does not work from here.
        """
        path = f"{self._root}/.probe-{secrets.token_hex(4)}"

        def probe() -> None:
            self._fs.pipe_file(path, b"roq")
            found = self._fs.cat_file(path)
            _remove(self._fs, [path])
            if found != b"roq":
                raise StoreFailed(f"{self.url}: gave something else than was put there")

        _persist(self.url, probe)


# ---- reading -------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where this host keeps its copies of weights: ``$ROQ_CACHE``, or ``~/.cache/roq``."""
    return Path(os.environ.get("ROQ_CACHE") or Path.home() / ".cache" / "roq")


@contextmanager
def fetch(location: str) -> Generator[Path]:
    """A local folder with the weights at ``location``, for as long as the context lasts. Blocks.

    A folder is used as it is. Of an object store, a host keeps one copy of one version, which its workers
    share: the first one fetches it, the others wait for that.

    Raises:
        StoreFailed: it cannot be fetched, or what came is not what the manifest says.
        ConfigError: fsspec, or its driver for this kind of URL, is not installed here.
    """
    if not is_url(location):
        yield Path(location)
        return
    store, _, version = location.rpartition("/")
    if not _NAME.fullmatch(version):
        raise StoreFailed(f"{location} is not where roq puts a version of weights")
    place = cache_folder() / hashlib.sha256(store.encode()).hexdigest()[:16]
    folder = place / version
    deadline = time.monotonic() + LOCK_WAIT_S
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = (place / "lock").open("w")
    except OSError as error:
        raise StoreFailed(f"{place}: no room for copies of weights: {error}; set ROQ_CACHE") from None
    with lock:  # closing it lets go; so does a kill -9
        while True:
            _lock(lock.fileno(), fcntl.LOCK_SH, location, deadline)
            if folder.is_dir():
                yield folder
                return
            _lock(lock.fileno(), fcntl.LOCK_EX, location, deadline)  # nobody uses any copy now
            if not folder.is_dir():
                for other in place.iterdir():
                    if other.is_dir():
                        shutil.rmtree(other)
                _persist(location, partial(_fetch, location, folder))


def _fetch(location: str, folder: Path) -> None:
    fs, prefix = _open(location)
    fs.invalidate_cache()
    manifest = _manifest(fs, prefix)
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()

    def get(name: str) -> None:
        file, entry = temporary / name, manifest.files[name]
        fs.get_file(f"{prefix}/{name}", str(file))
        if file.stat().st_size != entry.bytes or _digest(file) != entry.sha256:
            raise StoreFailed(f"{prefix}/{name}: not the bytes that its manifest names")

    _parallel(get, manifest.files)
    temporary.rename(folder)


def _lock(handle: int, how: int, location: str, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(handle, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreFailed(
                    f"{location}: another worker of this host has held the copies in {cache_folder()} "
                    f"for {LOCK_WAIT_S:.0f} s"
                ) from None
            time.sleep(0.05)


# ---- what both directions need -------------------------------------------------------------------


class _Lost(StoreFailed):
    """No such version, or not a whole one: asking again does not help."""


def _open(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it."""
    protocol = url.partition("://")[0]
    try:
        import fsspec  # pyright: ignore[reportMissingTypeStubs]

        # Only a local file system has folders to make.
        options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        found = cast("Any", fsspec.core.url_to_fs(url, **options))  # pyright: ignore[reportUnknownMemberType]
    except ImportError as error:
        raise ConfigError(
            f"run.weights = {url!r} needs fsspec and its driver for {protocol}:// ({error}); "
            "run `pip install '.[store]'` and the driver, such as s3fs or gcsfs"
        ) from None
    except ValueError as error:
        raise ConfigError(f"run.weights = {url!r}: {error}") from None
    return found[0], str(found[1])


def _manifest(fs: Any, prefix: str) -> _Manifest:
    try:
        manifest = msgspec.json.decode(fs.cat_file(f"{prefix}/{MANIFEST}"), type=_Manifest)
    except FileNotFoundError:
        raise _Lost(f"{prefix}: no complete version of weights is there") from None
    except msgspec.DecodeError as error:
        raise _Lost(f"{prefix}/{MANIFEST}: {error}") from None
    # They become names on this disk.
    if odd := [name for name in manifest.files if not _NAME.fullmatch(name)]:
        raise _Lost(f"{prefix}/{MANIFEST} names a file {odd[0]!r}")
    return manifest


def _remove(fs: Any, paths: Iterable[str]) -> None:
    for path in paths:
        try:
            fs.rm_file(path)
        except FileNotFoundError:
            continue


def _version(name: str) -> int | None:
    """The version that a folder of this name holds, or None."""
    found = _VERSION.fullmatch(name)
    return int(found[1]) if found else None


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _parallel(action: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(action, items))


def _persist(what: str, action: Callable[[], T]) -> T:
    """Try a few times, over about 15 s of pauses; whatever the driver raises becomes ours."""

    def attempt() -> T:
        try:
            return action()
        except RoqError:
            raise
        except FileNotFoundError as error:
            raise _Lost(f"{what}: {error}") from error
        except Exception as error:
            raise StoreFailed(f"{what}: {' '.join(str(error).split()) or type(error).__name__}") from error

    retrying = Retrying(
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_exponential(multiplier=1, max=8),
        retry=retry_if_exception(lambda e: isinstance(e, StoreFailed) and not isinstance(e, _Lost)),
        reraise=True,
    )
    return retrying(attempt)
