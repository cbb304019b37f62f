"""The documentation's commands and snippets do what they say."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

import roq.events.event
import roq.observe.plots
import roq.observe.timeline
import roq.observe.words
import roq.text
from roq.events.fields import EVENTS
from tests.conftest import Server, environment

ROOT = Path(__file__).parents[2]


def test_the_readmes_snippet_runs(server: Server) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = snippet.replace("redis://localhost:6379", server.url)
    assert code != snippet
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "occupied 0 1"
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0]"


def test_torchrun_is_kept_from_reading_our_options() -> None:
    """Without ``--`` it takes ``--run`` for an abbreviation of its own."""
    seen = 0
    for path in (
        *ROOT.glob("*.md"),
        *(p for d in ("docs", "examples", "trainer", "workers") for p in (ROOT / d).rglob("*")),
    ):
        if path.suffix in (".md", ".toml", ".py"):
            for command in re.findall(r"torchrun[^`]*?roq_trainer", path.read_text(), re.DOTALL):
                if len(command) < 200 and "--nproc" in command:
                    seen += 1
                    assert "-m -- roq_trainer" in command, (path, command)
    assert seen >= 3


def test_links_lead_somewhere() -> None:
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")):
        for link in re.findall(r"\]\(([^)#]+)", path.read_text()):
            if "://" not in link:
                assert (path.parent / link).exists(), (path, link)


@pytest.mark.parametrize("script", ["architecture", "config-reference", "dashboard", "docs"])
def test_generated_files_are_up_to_date(script: str) -> None:
    command = [sys.executable, ROOT / "scripts" / script, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_event_is_documented() -> None:
    told = set(re.findall(r"`(\w+)`", (ROOT / "docs/observing.md").read_text()))
    assert set(EVENTS) <= told | {"gap"}


def test_examples_in_docstrings() -> None:
    for module in (
        roq.text,
        roq.observe.words,
        roq.events.event,
        roq.observe.plots,
        roq.observe.timeline,
    ):
        done = doctest.testmod(module)
        assert done.attempted
        assert not done.failed
