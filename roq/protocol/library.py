"""The server-side library: its source, assembled from ``lua/``, and its version."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

__all__ = ["NAME", "REVISION", "load_order", "lua_text", "older_than_ours", "source", "version"]

NAME = "roq"
REVISION = 2  # raise it with every change that breaks older clients or existing runs


def _folder() -> Path:
    here = Path(__file__).resolve().parents[1]
    installed = here / "lua"
    return installed if installed.is_dir() else here.parent / "lua"


def lua_text(path: str) -> str:
    """The text of a file below ``lua/``, such as "lib/events.lua"."""
    return (_folder() / path).read_text()


@cache
def _body() -> str:
    folder = _folder()
    modules = {path.stem: path.read_text() for path in sorted((folder / "lib").glob("*.lua"))}
    functions = [path.read_text() for path in sorted((folder / "functions").glob("*.lua"))]
    parts = [
        *(f"local {module} = (function()\n{modules[module]}end)()" for module in load_order(modules)),
        *(f"do\n{code}end" for code in functions),
    ]
    return "\n".join(parts) + "\n"


def load_order(modules: Mapping[str, str]) -> list[str]:
    """The names of the files in ``lua/lib``, each after those it uses (``slots.move``).

    Raises:
        graphlib.CycleError: two of them use each other.
    """
    name = re.compile(rf"(?<![.\w\"])({'|'.join(modules)})\.\w")
    uses = {  # sorted, because the library's digest must not depend on a set's order
        module: sorted(set(name.findall(re.sub(r"--.*", "", code))) - {module})
        for module, code in modules.items()
    }
    return list(TopologicalSorter(uses).static_order())


@cache
def version() -> str:
    """Revision and digest of the source, such as ``1 5f0c33d19ab2``."""
    return f"{REVISION} {hashlib.sha256(_body().encode()).hexdigest()[:12]}"


@cache
def source() -> str:
    """The library as ``FUNCTION LOAD`` takes it (``roq library | redis-cli -x FUNCTION LOAD``)."""
    return (
        f'#!lua name={NAME}\nlocal LIBRARY_VERSION, LIBRARY_REVISION = "{version()}", {REVISION}\n{_body()}'
    )


def older_than_ours(loaded: str) -> bool | None:
    """Compare a loaded version: True if older or different (replace it), False if newer, None if equal."""
    if loaded == version():
        return None
    return int(loaded.split(maxsplit=1)[0]) <= REVISION
