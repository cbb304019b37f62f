"""Models that the trainer's tests share, made once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent.parent / "trainer", HERE.parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def pytest_configure(config: pytest.Config) -> None:
    # Megatron's notes about missing Apex and Transformer Engine; its and torch's internal deprecations.
    config.addinivalue_line("filterwarnings", r"ignore:::megatron\.core")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tiny Qwen3 models: ``tied`` and ``untied``."""
    from trainer_support import make_model

    root = tmp_path_factory.mktemp("models")
    for kind in ("tied", "untied"):
        make_model(root / kind, tied=kind == "tied")
    return root
