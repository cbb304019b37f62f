"""Errors are one tree, in one module, and a process ends with the code of its error."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import roq
from roq import errors
from roq.errors import CODES, ConfigError, Fenced, Refused, RoqError, UnknownRun, refusal
from roq.processes import report_error

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [file for folder in ("roq", "workers", "trainer") for file in (ROOT / folder).rglob("*.py")]


def tree(root: type[RoqError]) -> Iterator[type[RoqError]]:
    for cls in root.__subclasses__():
        yield cls
        yield from tree(cls)


TREE = {RoqError, *tree(RoqError)}


def test_every_error_is_in_the_tree_and_public() -> None:
    assert {cls.__module__ for cls in TREE} == {"roq.errors"}
    assert {cls.__name__ for cls in TREE} == set(errors.__all__)
    assert set(errors.__all__) <= set(roq.__all__)


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_other_module_adds_to_the_tree(file: Path) -> None:
    """Read, not imported: some of them need an engine."""
    if file == ROOT / "roq/errors.py":
        return
    names = {cls.__name__ for cls in TREE}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            bases = {
                base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
                for base in node.bases
            }
            assert not bases & names, f"class {node.name} belongs into roq/errors.py"


def test_a_code_belongs_to_one_refusal() -> None:
    refusals = set(tree(Refused))
    assert set(CODES.values()) == refusals
    assert len({cls.code for cls in refusals}) == len(refusals)


def test_a_server_reply_becomes_its_refusal() -> None:
    fenced = refusal("ROQ_FENCED the claim was superseded")
    assert (type(fenced), str(fenced)) == (Fenced, "the claim was superseded")
    assert (type(refusal("ROQ_NEW what")), str(refusal("ROQ_NEW what"))) == (Refused, "what")


@pytest.mark.parametrize("cls", sorted(TREE, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_a_process_ends_with_one_line_and_the_code_of_its_error(
    cls: type[RoqError], capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error("roq", cls("two\nlines")) == cls.exit_code
    assert capsys.readouterr().err == "roq: two lines\n"
    assert cls.exit_code in (1, 2)


def test_exit_code_2_is_for_input_that_can_never_work() -> None:
    assert (ConfigError.exit_code, UnknownRun.exit_code, Fenced.exit_code) == (2, 2, 1)
