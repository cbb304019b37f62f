"""Models shared by the trainer's tests, created once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent.parent / "trainer", HERE.parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def pytest_configure(config: pytest.Config) -> None:
    # Megatron warns about missing Apex and Transformer Engine; it and torch about internal deprecations.
    config.addinivalue_line("filterwarnings", r"ignore:::megatron\.core")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models of each architecture, called ``qwen3-tied``, ``qwen3-untied`` and so on."""
    from trainer_support import MODEL_TYPES, make_model

    root = tmp_path_factory.mktemp("models")
    for model_type in MODEL_TYPES:
        for kind in ("tied", "untied"):
            make_model(root / f"{model_type}-{kind}", tied=kind == "tied", model_type=model_type)
    return root
