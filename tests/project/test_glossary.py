"""The prose uses the terms of docs/glossary.md, and words that a native reader does not stop at.

Read are Markdown pages (so also the CLI's help, in docs/cli.md), and the strings, docstrings and comments of
Python files. Only what cannot be meant otherwise is rejected.
"""

from __future__ import annotations

import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Files and folders that are held to the rules. Extend it when the prose of another one has been rewritten.
ROOTS = (
    "README.md",
    "CONTRIBUTING.md",
    "docs",
    "examples",
    "trainer/README.md",
    "workers/README.md",
    "roq/__init__.py",
    "roq/admin",
    "roq/board",
    "roq/cli",
    "roq/client",
    "roq/config.py",
    "roq/errors.py",
    "roq/events",
    "roq/job",
    "roq/observe",
    "roq/postprocess.py",
    "roq/processes.py",
    "roq/protocol",
    "roq/rewards.py",
    "roq/run",
    "roq/sim",
    "roq/text.py",
    "roq/trajectory.py",
    "roq/types.py",
    "roq/weights",
)

# What docs/glossary.md lists under "not", as far as it has no other meaning here -> a pattern for its forms.
SYNONYMS = {
    "buried": r"buried",
    "episode": r"episodes?",
    "free places": r"free places",
    "hand back": r"hand(s|ed|ing)?( \w+){0,3} back",
    "off-policyness": r"off-policyness",
    "prompt group": r"prompt groups?",
    "update number": r"update number",
}

# A pattern -> what to write instead.
STOP_WORDS = {
    r"anew": "again",
    r"beside": "next to, with",
    r"(go|goes|going|went) on": "continue, resume",
    r"for people": "human-readable",
    r"(?<!there\s)(is|are|was|were) no (?!longer|more)\w+": "is not a",
    r"mend(s|ed|ing)?": "fix",
    r"meanwhile": "in the meantime; while …",
    r"once more": "again",
    r"one's own": "your own",
    r"since \d+ s": "for 12 s",
    r"so as to": "to",
    r"told": "said, reported, shown",
    r"whoever": "anyone who; name the process",
}


def pattern(words: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{words})\b".replace(" ", r"\s+"), re.IGNORECASE)


REJECTED = {
    **{pattern(form): f"see docs/glossary.md instead of {term!r}" for term, form in SYNONYMS.items()},
    **{pattern(form): instead for form, instead in STOP_WORDS.items()},
}


def files() -> list[Path]:
    found = [ROOT / root for root in ROOTS]
    inside = [file for root in found for kind in ("*.md", "*.py") for file in root.rglob(kind)]
    return [root for root in found if root.is_file()] + inside


def prose(file: Path) -> list[tuple[int, str]]:
    """The passages of a file, each with the number of its first line."""
    if file.suffix == ".py":
        with file.open("rb") as source:
            tokens = list(tokenize.tokenize(source.readline))
        return [(t.start[0], t.string) for t in tokens if t.type in (tokenize.STRING, tokenize.COMMENT)]
    text = file.read_text(encoding="utf-8")
    if file.name == "glossary.md":  # without the column of what not to say
        text = re.sub(r"^(\|.*\|)[^|]*\|$", r"\1", text, flags=re.MULTILINE)
    return [(1, text)]


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_no_word_of_a_private_language(file: Path) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line + text.count(chr(10), 0, match.start())}: {match[0]!r} ({instead})"
        for line, text in prose(file)
        for rejected, instead in REJECTED.items()
        for match in rejected.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_the_synonyms_are_in_the_glossary() -> None:
    rows = re.findall(r"^\|.*\|([^|]*)\|$", (ROOT / "docs/glossary.md").read_text("utf-8"), re.MULTILINE)
    listed = {term.strip() for row in rows for term in re.sub(r"\(.*?\)", "", row).split(",")}
    assert SYNONYMS.keys() <= listed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("it goes\non after step 7", True),
        ("there is no run", False),
        ("this is no archive", True),
        ("it is no longer needed", False),
        ("a worker hands its unfinished work back", True),
        ("recommended", False),
    ],
)
def test_what_is_rejected(text: str, found: bool) -> None:
    assert any(rejected.search(text) for rejected in REJECTED) == found
