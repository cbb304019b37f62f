"""Where published weights are kept: a folder that the trainer and all workers see, or an object store.

``[run] weights`` names it: nothing (``weights`` in the run's folder), another folder, or an fsspec URL such
as ``s3://bucket/prefix`` or ``gs://…``. A version has a location, which is what ``publish`` tells workers.

Every export has a name of its own, such as ``v00000007-3f9c21ab``, which ends its location: after Redis lost
its last moments, or in a run created again, version 7 is other weights, under another name. So whoever has a
copy by that name has these weights. Files under a location are written again only when they were lost.

A version in a folder exists once its folder has its final name. An object store renames nothing: there a
version exists once its manifest does, which is written last and holds every file's size and digest. A
reader starts from the manifest and keeps nothing that does not agree with it.

Credentials never stand in the job: fsspec's drivers take them from the environment, from their own files
or from the host's role (FSSPEC_S3_KEY, AWS_PROFILE, …). Timeouts and retries of single requests are the
driver's; what is done here is retried as a whole.
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
