"""Storage of published weights: a folder shared by the trainer and all workers, or an object store.

``[run] weights`` selects it: unset (``weights`` in the run's folder), another folder, or an fsspec URL such
as ``s3://bucket/prefix`` or ``gs://…``. ``publish`` announces the location of a version to workers.

Every export has a unique name, such as ``v00000007-3f9c21ab``, the last part of its location. If Redis lost
its last writes, or the run was created again, version 7 has other weights under another name, so a copy with
the same name has the same weights. Files at a location are written again only if they were lost.

A version in a folder exists once its folder has its final name. An object store cannot rename: there a
version exists once its manifest does, which is written last and has every file's size and digest. A reader
starts from the manifest and discards everything that does not match it.

Credentials are never part of the job: fsspec's drivers read them from the environment, from their own files
or from the host's role (FSSPEC_S3_KEY, AWS_PROFILE, …). The driver handles timeouts and retries of single
requests; roq retries whole operations.
"""

from __future__ import annotations

from pathlib import Path

from roq.config import Run
from roq.weights.fetch import cache_folder, fetch
from roq.weights.folder import FolderStore
from roq.weights.objects import ObjectStore
from roq.weights.remote import is_url

__all__ = ["FolderStore", "ObjectStore", "cache_folder", "fetch", "is_url", "weight_store"]


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
