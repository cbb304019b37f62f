"""No data that a process reads is ever run as code: no pickle, no eval, in what is installed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("roq", "workers", "trainer", "examples", "scripts")
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file()
    and "node_modules" not in path.parts
    and (path.suffix == ".py" or path.read_bytes()[:30].startswith(b"#!/usr/bin/env python"))
]

MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle",
    "multiprocessing", "concurrent.futures.process", "code", "codeop",
}  # fmt: skip
BUILTINS = {"eval", "exec", "compile", "__import__"}


OWN_CHILDREN = {"roq/sim/runs.py"}  # spreads simulations over processes; nobody else's data goes there


def dangers(source: str) -> Iterator[str]:
    """What could run data as code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        for name in names:
            if name in MODULES or name.split(".")[0] in MODULES:
                yield f"line {node.lineno}: import {name}"
        if isinstance(node, ast.Call):
            yield from call(node)


def call(node: ast.Call) -> Iterator[str]:
    said = ast.unparse(node.func)
    given = {word.arg: ast.unparse(word.value) for word in node.keywords}
    if said in BUILTINS or said.startswith("builtins."):
        yield f"line {node.lineno}: {said}"
    if said.endswith("torch.load") and given.get("weights_only") != "True":
        yield f"line {node.lineno}: torch.load without weights_only=True"
    if said in ("yaml.load", "yaml.unsafe_load", "yaml.full_load") or given.get("allow_pickle") == "True":
        yield f"line {node.lineno}: {said}"
    if said in ("os.system", "os.popen") or (given.get("shell", "False") != "False"):
        yield f"line {node.lineno}: {said} by a shell"


def test_the_walk_sees_them() -> None:
    bad = """
import pickle, os
from multiprocessing.connection import Client
from joblib import load
eval("1"); exec("1"); compile("1", "", "eval")
torch.load(path); torch.load(path, weights_only=False); numpy.load(path, allow_pickle=True)
subprocess.run("x", shell=True); os.system("x"); yaml.load(x)
model.eval(); torch.load(path, weights_only=True); re.compile("x")
"""
    assert len(list(dangers(bad))) == 14


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_nothing_runs_data(path: Path) -> None:
    found = list(dangers(path.read_text(encoding="utf-8")))
    if path.relative_to(ROOT).as_posix() in OWN_CHILDREN:
        assert found, "it needs no exception any more"
        found = [danger for danger in found if "multiprocessing" not in danger]
    assert found == []


def test_all_of_the_product_is_looked_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(FOLDERS)
    assert len(SOURCES) > 60
