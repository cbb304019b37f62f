"""A custom reward function: it scores the answer and the steps that lead to it."""

from __future__ import annotations

import re
from typing import Any


def score(item: dict[str, Any], response: str) -> float:
    """Score a response: 0.7 for the right greatest common divisor, up to 0.3 for the share of valid steps.

    ``item`` is the row of ``prompts.jsonl`` with all its columns: the prompt's question, ``numbers`` and
    the answer. A step such as "38 6, 32 6" is valid if it subtracts the smaller number from the larger.
    A response without a number in the answer tags is wrong and scores 0. If a response cannot be
    scored, raise an exception instead: it fails the attempt, which never counts as a reward of 0.
    """
    found = re.fullmatch(r"(.*)<answer>\s*(\d+)\s*</answer>.*", response, re.DOTALL)
    if found is None:
        return 0.0
    work, answer = found.groups()
    states = [tuple(int(n) for n in re.findall(r"\d+", part)) for part in work.split(",")]
    expected = tuple(item["numbers"])
    right_steps = 0
    for state in states:
        right_steps += state == expected
        if len(state) != 2:
            break
        a, b = state
        expected = (a - b, b) if a > b else (a, b - a)
    return 0.7 * (int(answer) == item["answer"]) + 0.3 * right_steps / len(states)
