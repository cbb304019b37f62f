"""``[model] path``: a folder, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from roq.errors import ConfigError
from roq.job.model_folder import find_model, is_hub_name


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some" / "folder").mkdir(parents=True)
    (tmp_path / "some" / "file").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", ["some/folder", "./some/folder", "some"])
def test_a_folder_is_used_as_it_is(path: str) -> None:
    assert not is_hub_name(path)
    assert find_model(path) == Path(path)


@pytest.mark.parametrize(
    "path",
    [
        "/some/model",
        "./some/model",
        "../some/model",
        "~/model",
        "some/file",
        "model",
        "a/b/c",
        ".hidden/model",
    ],
)
def test_what_is_neither_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"model.path = {path!r}")):
        is_hub_name(path)
    with pytest.raises(ConfigError, match=re.escape(f"model.path = {path!r}")):
        find_model(path)


def test_a_hub_name_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def snapshot_download(name: str, **_: object) -> str:
        asked.append(name)
        if name == "some/gone":
            raise OSError("404 no such\nrepository")
        return str(tmp_path)

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert is_hub_name("Qwen/Qwen3-0.6B")
    assert find_model("Qwen/Qwen3-0.6B") == tmp_path
    with pytest.raises(ConfigError, match="404 no such repository"):
        find_model("some/gone")
    assert asked == ["Qwen/Qwen3-0.6B", "some/gone"]
