"""The wheel as a user gets it: its import names, and the core working where no engine is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    return next(folder.glob("*.whl"))


def closure(requirements: list[str]) -> set[str]:
    """Names of the distributions that the unconditional ``requirements`` bring, with what those bring."""
    found: set[str] = set()
    seen: set[str] = set()
    queue = [(Requirement(text), frozenset[str]()) for text in requirements]
    while queue:
        wanted, extras = queue.pop()
        if wanted.marker and not any(wanted.marker.evaluate({"extra": e}) for e in (extras or {""})):
            continue
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        found.add(wanted.name)
        inner = metadata.distribution(wanted.name).requires or []
        queue += [(Requirement(text), frozenset(wanted.extras)) for text in inner]
    return found


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an empty environment with the wheel and what its metadata asks for, and nothing else.

    The packages are copied from this environment, so the test needs no network.
    """
    home = tmp_path_factory.mktemp("core")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    site = next(home.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        asked = metadata.PathDistribution(zipfile.Path(archive, name.removesuffix("METADATA"))).requires
    for name in closure(asked or []):
        for file in metadata.files(name) or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = site / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(file.locate()), target)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, capture_output=True, timeout=60)
    return python


def run(python: Path, *arguments: str) -> str:
    """What the isolated environment prints: no PYTHONPATH, not in the checkout, warnings are errors."""
    done = subprocess.run(
        [python, "-I", "-W", "error", *arguments],
        cwd=python.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_wheel_brings_three_import_names_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
    version = metadata.version("roq")
    assert top == {"roq", "roq_worker", "roq_trainer", f"roq-{version}.dist-info"}


def test_a_wheel_holds_the_whole_lua_library(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("roq/lua/")]
        packed = {name.removeprefix("roq/"): archive.read(name) for name in names}
    there = {str(file.relative_to(ROOT)): file.read_bytes() for file in (ROOT / "lua").rglob("*.lua")}
    assert packed == there
    assert there


def test_a_wheel_holds_the_boards_page(wheel: Path) -> None:
    folder = ROOT / "roq" / "board" / "static"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("roq/board/static/")]
        packed = {name.removeprefix("roq/board/static/"): archive.read(name) for name in names}
    there = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    assert packed == there
    vendored = {"vendor/uplot/uPlot.iife.min.js", "vendor/uplot/LICENSE"}
    assert {"index.html", "state.js", *vendored} <= packed.keys()


def test_a_wheel_holds_the_simulators_cost_models(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("roq/sim/costs/")}
    assert packed == {f"roq/sim/costs/{file.name}" for file in (ROOT / "roq/sim/costs").glob("*.toml")}
    assert packed


def test_the_core_imports_without_the_engines(core: Path) -> None:
    code = (
        "import json, sys, roq, roq.protocol.library, roq.cli\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "heavy = {'torch', 'vllm', 'numpy', 'transformers', 'megatron'} & loaded\n"
        "print(json.dumps([roq.__file__, sorted(heavy), roq.protocol.library.source()]))"
    )
    where, heavy, shipped = json.loads(run(core, "-c", code))
    assert Path(where).is_relative_to(core.parent.parent)
    assert heavy == []
    from roq.protocol import library

    assert shipped == library.source()


def test_the_command_line_runs_without_the_engines(core: Path) -> None:
    assert run(core, str(core.with_name("roq")), "--version").strip() == metadata.version("roq")
    assert "status" in run(core, str(core.with_name("roq")), "--help")


def test_the_board_names_the_extra_that_it_lacks(core: Path) -> None:
    done = subprocess.run(
        [core.with_name("roq"), "board", "--redis", "redis://localhost:1", "--run", "x"],
        cwd=core.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install '.[board]'" in done.stderr
