"""Packages of roq/ import downwards only, and no two modules import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Top to bottom. A package may import those below it, and itself.
LAYERS = (
    ("cli",),
    ("sim",),
    ("run",),
    ("admin",),
    ("job", "observe", "board"),
    ("client",),
    ("events", "weights"),
    ("types", "limits"),
    ("protocol",),
    ("config", "trajectory", "rewards", "postprocess", "processes"),
    ("errors", "text"),
)
FLOOR = {package: -number for number, layer in enumerate(LAYERS) for package in layer}


def modules() -> dict[str, Path]:
    files = (ROOT / "roq").rglob("*.py")
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


MODULES = modules()


def imports(module: str) -> Iterator[str]:
    """The modules of roq/ that a module imports, at its top or within a function."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield from (found for found in (name, node.module) if found in MODULES and found != module)


def package(module: str) -> str:
    return module.split(".")[1]


def test_every_package_has_a_layer() -> None:
    assert {package(module) for module in MODULES if module != "roq"} == FLOOR.keys()


def test_imports_go_down() -> None:
    upward = [
        f"{module} imports {target}"
        for module in MODULES
        if module != "roq"
        for target in imports(module)
        if target == "roq"
        or (package(module) != package(target) and FLOOR[package(module)] <= FLOOR[package(target)])
    ]
    assert upward == []


def test_no_cycles() -> None:
    # `from roq.client import x` inside roq.client names the module x, not the package
    graph = {
        module: {target for target in imports(module) if not module.startswith(f"{target}.")}
        for module in MODULES
    }
    TopologicalSorter(graph).prepare()


def test_no_module_is_private() -> None:
    """Public is what ``roq``, ``roq.rewards``, ``roq.postprocess`` and ``roq.events`` export, not a name."""
    assert [module for module in MODULES if any(part.startswith("_") for part in module.split("."))] == []
