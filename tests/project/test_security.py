"""Every statement of docs/security.md that names a test names one that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_threat_model_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 15
    for file, test in named:
        text = (ROOT / file).read_text()
        assert re.search(rf"^(async )?def {test or 'test_'}", text, re.MULTILINE), (file, test)


def test_reports_have_an_address() -> None:
    assert "(docs/security.md)" in (ROOT / "SECURITY.md").read_text()
    assert "(docs/security.md)" in (ROOT / "README.md").read_text()
