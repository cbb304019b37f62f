"""Helpers for reading from and writing to an object store."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from roq.errors import ConfigError, RoqError, StoreFailed, VersionLost
from roq.text import is_file_name

__all__ = [
    "MANIFEST",
    "File",
    "Manifest",
    "digest",
    "is_url",
    "open_url",
    "parallel",
    "persist",
    "read_manifest",
    "remove",
]

MANIFEST = "manifest.json"
ATTEMPTS = 5
PARALLEL = 4  # files in flight

T = TypeVar("T")


class File(msgspec.Struct, frozen=True):
    """A file in a version's manifest."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """All files of a version; written last."""

    files: dict[str, File]


def is_url(location: str) -> bool:
    """Return True if a location is in an object store, False if it is a folder."""
    return re.match(r"[a-z][a-z0-9+.-]*://", location) is not None


def open_url(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it."""
    protocol = url.partition("://")[0]
    try:
        import fsspec  # pyright: ignore[reportMissingTypeStubs]

        # Only a local file system has folders to create.
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


def read_manifest(fs: Any, prefix: str) -> Manifest:
    """The manifest under ``prefix``.

    Raises:
        VersionLost: it is missing or invalid.
    """
    try:
        manifest = msgspec.json.decode(fs.cat_file(f"{prefix}/{MANIFEST}"), type=Manifest)
    except FileNotFoundError:
        raise VersionLost(f"{prefix}: no complete version of the weights") from None
    except msgspec.DecodeError as error:
        raise VersionLost(f"{prefix}/{MANIFEST}: {error}") from None
    # They become file names on this host.
    if odd := [name for name in manifest.files if not is_file_name(name)]:
        raise VersionLost(f"{prefix}/{MANIFEST} names a file {odd[0]!r}")
    return manifest


def remove(fs: Any, paths: Iterable[str]) -> None:
    """Delete objects; missing ones are ignored."""
    for path in paths:
        try:
            fs.rm_file(path)
        except FileNotFoundError:
            continue


def digest(file: Path) -> str:
    """A file's SHA-256."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def parallel(action: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
    """Apply ``action`` to all items, a few at a time; the results in order."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(action, items))


def persist(what: str, action: Callable[[], T]) -> T:
    """Run ``action``, with retries over about 15 s; a driver's errors become StoreFailed or VersionLost."""

    def attempt() -> T:
        try:
            return action()
        except RoqError:
            raise
        except FileNotFoundError as error:
            raise VersionLost(f"{what}: {error}") from error
        except Exception as error:
            raise StoreFailed(f"{what}: {' '.join(str(error).split()) or type(error).__name__}") from error

    retrying = Retrying(
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_exponential(multiplier=1, max=8),
        retry=retry_if_exception(lambda e: isinstance(e, StoreFailed) and not isinstance(e, VersionLost)),
        reraise=True,
    )
    return retrying(attempt)
