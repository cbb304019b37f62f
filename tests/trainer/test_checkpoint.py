"""Which checkpoint a run resumes from: the newest that is whole and that the server can follow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from roq.errors import CheckpointDamaged, ConfigError, StateLost
from roq_trainer import checkpoint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of 10 and 20 updates."""
    for steps in (10, 20):
        folder = tmp_path / f"step_{steps:08d}"
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(bytes(range(256)) * 100)
        (folder / "metadata.json").write_text("{}")
        checkpoint._list_files(folder)
    return tmp_path


def steps(path: Path | None) -> int | None:
    return None if path is None else int(path.name[-8:])


def test_one_that_was_being_written_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "none") is None
    for name in ("step_00000004", ".tmp-step_00000012", "damaged-step_00000014", "step_00000016.old"):
        (tmp_path / name).mkdir()
    assert steps(checkpoint.newest(tmp_path)) == 4


@pytest.mark.parametrize(
    ("version", "covered", "expected"),
    [
        (25, 20, 20),  # as usual: the newest
        (25, 10, 20),
        (20, 20, 20),
        (19, 10, 10),  # Redis lost the last moments: an older one that it can continue
        (19, 0, 10),
        (9, 0, None),  # from the base model, all batches being kept
        (0, 0, StateLost),  # Redis lost everything
        (9, 5, StateLost),
        (40, 30, CheckpointDamaged),  # the checkpoints were lost
    ],
)
def test_where_to_resume(
    root: Path, version: int, covered: int, expected: int | type[Exception] | None
) -> None:
    if isinstance(expected, type):
        with pytest.raises(expected):
            checkpoint.to_resume(root, version, covered)
    else:
        assert steps(checkpoint.to_resume(root, version, covered)) == expected


def test_without_any_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.to_resume(tmp_path / "none", 0, 0) is None
    assert checkpoint.to_resume(tmp_path / "none", 3, 0) is None
    with pytest.raises(CheckpointDamaged, match="10 to 12"):
        checkpoint.to_resume(tmp_path / "none", 12, 10)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def change(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def garbage(file: Path) -> None:
    file.write_bytes(b"\xff" * file.stat().st_size)


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json", "files.json"])
@pytest.mark.parametrize("damage", [cut, change, garbage, Path.unlink])
def test_a_damaged_checkpoint_is_set_aside_and_named(
    root: Path, name: str, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    newest = root / "step_00000020"
    if name == "metadata.json" and damage is cut:
        (newest / name).write_text("")
    else:
        damage(newest / name)
    with pytest.raises(CheckpointDamaged, match=f"{newest} is damaged"):
        checkpoint.check(newest)
    assert steps(checkpoint.to_resume(root, 25, 10)) == 10
    (line,) = caplog.messages
    assert str(newest) in line
    assert "\n" not in line
    assert sorted(path.name for path in root.iterdir()) == ["damaged-step_00000020", "step_00000010"]
    assert steps(checkpoint.to_resume(root, 25, 10)) == 10


def test_when_no_kept_checkpoint_is_whole(root: Path) -> None:
    for folder in list(root.iterdir()):
        cut(folder / "__0_0.distcp")
    with pytest.raises(CheckpointDamaged, match="10 to 25") as error:
        checkpoint.to_resume(root, 25, 10)
    assert "Redis" not in str(error.value), "the disk is to blame"


def test_when_all_are_damaged_but_all_batches_are_kept(root: Path) -> None:
    for folder in list(root.iterdir()):
        cut(folder / "__0_0.distcp")
    assert checkpoint.to_resume(root, 25, 0) is None


def test_a_list_of_files_that_is_none(root: Path) -> None:
    (root / "step_00000020" / "files.json").write_text(json.dumps(["__0_0.distcp"]))
    with pytest.raises(CheckpointDamaged):
        checkpoint.check(root / "step_00000020")


def test_one_that_may_not_be_read_is_not_damaged(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> tuple[int, int]:
        raise PermissionError(13, "Permission denied", "x")

    monkeypatch.setattr(checkpoint, "_sum", refuse)
    with pytest.raises(ConfigError):
        checkpoint.to_resume(root, 25, 10)
    assert (root / "step_00000020").is_dir()


def test_which_batches_stay(root: Path) -> None:
    assert checkpoint.oldest_kept(root, 1) == 20
    assert checkpoint.oldest_kept(root, 2) == 10
    assert checkpoint.oldest_kept(root, 3) == 0, "the base model counts while there are fewer"
