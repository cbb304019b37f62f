"""Weights in a folder, in fsspec's local file system and on an S3 server: the same guarantees."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roq.config import Run
from roq.errors import ConfigError, StoreFailed
from roq.weights import FolderStore, ObjectStore, fetch, weight_store

Store = FolderStore | ObjectStore


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("roq.weights.remote.ATTEMPTS", 2)  # pauses of 1 s instead of 15


@pytest.fixture(params=["folder", "other folder", "file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store of every kind."""
    weights = {
        "folder": lambda: None,
        "other folder": lambda: str(tmp_path / "shared" / "weights"),
        "file": lambda: f"file://{tmp_path}/objects/run",
        "s3": lambda: request.getfixturevalue("s3") + "/a/run/",
    }[request.param]()
    return weight_store(Run(name="r", dir=str(tmp_path / "run"), weights=weights))


@pytest.fixture
def remote(s3: str, tmp_path: Path) -> ObjectStore:
    """A store on the S3 server."""
    store = weight_store(Run(name="r", dir=str(tmp_path / "run"), weights=f"{s3}/run"))
    assert isinstance(store, ObjectStore)
    return store


def save(folder: Path, value: float = 0.0) -> dict[str, bytes]:
    """A folder as the trainer exports it; returns its files."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    save_file({"a": np.full(1000, value, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def put(store: Store, version: int, value: float = 0.0, at: str | None = None) -> str:
    """Export a version as the trainer does; returns where it is."""
    location = at or store.new(version)
    save(store.folder(location), value)
    store.put(location)
    return location


def name(location: str) -> str:
    return location.rpartition("/")[2]


def read(location: str) -> dict[str, bytes]:
    with fetch(location) as folder:
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_what_is_put_is_what_is_fetched(store: Store) -> None:
    store.probe()
    location = store.new(7)
    assert not store.is_whole(location)
    files = save(store.folder(location), 1.0)
    store.put(location)
    assert store.is_whole(location)
    assert read(location) == files
    assert store.stored() == {location: 7}
    store.discard(location)
    assert not store.is_whole(location)
    store.discard(location)  # idempotent
    assert store.stored() == {}


def test_two_exports_of_a_version_share_nothing(store: Store) -> None:
    """Version 7 of another timeline has other weights and another location."""
    first, second = put(store, 7, 1.0), put(store, 7, 2.0)
    assert first != second
    assert all(re.fullmatch(r"v00000007-[0-9a-f]{8}", name(location)) for location in (first, second))
    assert store.stored() == {first: 7, second: 7}
    assert read(first) != read(second)
    store.discard(first)
    assert not store.is_whole(first)
    assert store.is_whole(second)
    assert store.stored() == {second: 7}


def test_a_hosts_copy_of_another_timelines_version_is_not_taken(store: Store, tmp_path: Path) -> None:
    """Redis lost its tail, or the run was created again in this place, while this host has the old copy."""
    old = put(store, 7, 1.0)
    assert read(old)
    store.discard(old)  # the trainer has no use for it; a worker's host is not asked
    new = put(store, 7, 2.0)
    wanted = save(tmp_path / "wanted", 2.0)
    assert read(new) == wanted


def test_what_was_lost_is_stored_again_where_it_was(store: Store, tmp_path: Path) -> None:
    location = put(store, 7, 1.0)
    lost = Path(location.removeprefix("file://"))
    if isinstance(store, ObjectStore):
        store._fs.rm_file(f"{store._root}/{name(location)}/model.safetensors")
    else:
        (lost / "model.safetensors").unlink()
        (lost / "config.json").unlink()
        lost.rmdir()
    assert not store.is_whole(location)
    put(store, 7, 1.0, at=location)
    assert store.is_whole(location)
    assert store.stored() == {location: 7}
    assert read(location) == save(tmp_path / "wanted", 1.0)


def test_a_killed_trainer_leaves_nothing_that_is_not_listed_or_cleaned(store: Store) -> None:
    """Half an export is cleaned away; whole ones are listed."""
    kept = put(store, 7)
    other = store.new(8)
    save(store.folder(other).with_name(f".tmp-{name(other)}"))
    earlier = f"{kept.rpartition('/')[0]}/v00000006-0badcafe"
    put(store, 6, at=earlier)
    store.clean()
    assert not list(store.local.glob(".tmp-*"))
    assert store.stored() == {kept: 7, earlier: 6}


def test_a_trainer_that_sends_weights_keeps_its_copy(s3: str, tmp_path: Path) -> None:
    run = Run(name="r", dir=str(tmp_path / "run"), weights=f"{s3}/run", transfer="gloo")
    store = weight_store(run)
    location = put(store, 7, 1.0)
    kept = store.local / name(location)
    assert {file.name: file.read_bytes() for file in kept.iterdir()} == read(location)
    store.discard(location)
    assert not kept.exists()
    assert store.stored() == {}


def test_a_location_elsewhere_is_never_deleted_or_written(store: Store, tmp_path: Path) -> None:
    inside = put(store, 7)
    elsewhere = tmp_path / "other" / name(inside)
    save(elsewhere)
    root = inside.rpartition("/")[0]
    s3 = f"s3://roq-weights/other/{name(inside)}"
    for location in (str(elsewhere), s3, f"{inside}/x", f"{root}/..", f"{root}/", root):
        store.discard(location)
        for action in (store.folder, store.put, store.is_whole):
            with pytest.raises(StoreFailed, match=f"^{re.escape(location)} "):
                action(location)
    assert elsewhere.is_dir()
    assert store.is_whole(inside)


def objects(store: ObjectStore) -> list[str]:
    store._fs.invalidate_cache()
    return [path.partition("/run/")[2] for path in store._fs.find(store._root)]


def test_a_version_exists_once_its_manifest_does(
    remote: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer dies before the last object: the version is nobody's, and the next try makes it whole."""
    location = remote.new(1)
    files = save(remote.folder(location))
    pipe = remote._fs.pipe_file

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(remote._fs, "pipe_file", dies)
    with pytest.raises(KeyboardInterrupt):
        remote.put(location)
    assert objects(remote) == [f"{name(location)}/{file}" for file in ("config.json", "model.safetensors")]
    assert remote.stored() == {location: 1}, "to be deleted once another export of it is published"
    assert not remote.is_whole(location)
    with pytest.raises(StoreFailed, match=name(location)):
        read(location)
    monkeypatch.setattr(remote._fs, "pipe_file", pipe)
    remote.put(location)
    assert read(location) == files


def test_other_bytes_than_those_put_are_refused(remote: ObjectStore) -> None:
    location = put(remote, 1)
    path = f"{remote._root}/{name(location)}/model.safetensors"
    good = remote._fs.cat_file(path)
    remote._fs.pipe_file(path, b"\0" * len(good))
    with pytest.raises(StoreFailed, match=rf"{name(location)}/model\.safetensors"):
        read(location)
    remote._fs.pipe_file(path, good[:-1])
    assert not remote.is_whole(location)
    remote._fs.rm_file(path)
    assert not remote.is_whole(location)
    with pytest.raises(StoreFailed, match=name(location)):
        read(location)
    remote._fs.pipe_file(path, good)
    assert read(location)["model.safetensors"] == good


def test_a_manifest_cannot_write_outside_the_cache(remote: ObjectStore, tmp_path: Path) -> None:
    location = put(remote, 1)
    path = f"{remote._root}/{name(location)}/manifest.json"
    manifest = json.loads(remote._fs.cat_file(path))
    manifest["files"]["../../../evil"] = manifest["files"]["config.json"]
    remote._fs.pipe_file(path, json.dumps(manifest).encode())
    with pytest.raises(StoreFailed, match="evil"):
        read(location)
    assert not list(tmp_path.rglob("evil"))


FETCH = """\
import sys, time
from roq.weights import fetch
with fetch(sys.argv[1]) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_host_keeps_one_copy_and_none_is_taken_from_under_a_reader(remote: ObjectStore) -> None:
    """Two processes read version 1; version 2 waits for them, then takes its place; kill -9 lets go."""
    locations = {version: put(remote, version, float(version)) for version in (1, 2)}

    def reader(version: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", FETCH, locations[version]]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    first, second = reader(1), reader(1)
    third = None
    try:
        assert first.stdout is not None
        assert second.stdout is not None
        folder = Path(first.stdout.readline().strip())
        assert Path(second.stdout.readline().strip()) == folder
        third = reader(2)
        with pytest.raises(subprocess.TimeoutExpired):
            third.wait(1.5)
        assert folder.is_dir()
        first.kill()
        second.kill()
        assert third.stdout is not None
        assert Path(third.stdout.readline().strip()).name == name(locations[2])
        assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [name(locations[2])]
    finally:
        for process in (first, second, third):
            if process is not None:
                process.kill()
                process.communicate(timeout=10)


def test_a_store_that_is_away_or_refuses(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(name="r", dir=str(tmp_path / "run"), weights=f"{s3}-missing/run")
    with pytest.raises(StoreFailed, match="missing"):
        weight_store(run).probe()
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    store = weight_store(Run(name="r", dir=str(tmp_path / "run"), weights=f"{s3}/run"))
    with pytest.raises(StoreFailed, match=r"127\.0\.0\.1:1"):
        store.probe()
    store.discard(f"{s3}/run/v00000001")  # old files can wait


def test_a_driver_that_is_missing_is_named(tmp_path: Path) -> None:
    for url, said in (("nosuch://bucket/x", "not known: nosuch"), ("gs://bucket/x", "gcsfs")):
        with pytest.raises(ConfigError, match=f"run.weights = '{url}'.*{said}"):
            weight_store(Run(name="r", dir=str(tmp_path), weights=url))


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/x", "https://h/x?token=1", "/", ""])
def test_no_credentials_in_a_job(url: str) -> None:
    with pytest.raises(ValueError, match="weights"):
        Run(name="r", dir="x", weights=url)


def test_a_store_belongs_to_one_run(store: Store) -> None:
    """Another run would delete its weights as leftovers."""
    store.claim("gcd")
    store.claim("gcd")
    with pytest.raises(ConfigError, match="gcd"):
        store.claim("gcd-2")
    assert store.stored() == {}


def test_what_people_keep_beside_is_left_alone(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "w")
    mine = ("v00000001", "v00000001-best", "v00000002-bad", "v00000002.bak", "keep", "v99999999999")
    for name in mine:
        save(tmp_path / "w" / name)
    assert store.stored() == {}
    (tmp_path / "w" / ".tmp-a").mkdir()
    (tmp_path / "w" / ".tmp-b").write_text("a file")
    (tmp_path / "w" / ".tmp-c").symlink_to(tmp_path / "w" / "keep")
    (tmp_path / "w" / ".tmp-d").symlink_to(tmp_path / "nowhere")
    store.clean()
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == sorted(mine)
    assert list((tmp_path / "w" / "keep").iterdir())
