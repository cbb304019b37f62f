"""A reward function of one's own: the right answer, and honest work on the way to it."""

from __future__ import annotations

import re
from typing import Any


def score(item: dict[str, Any], response: str) -> float:
    """0.7 for the right greatest common divisor, and up to 0.3 for the share of sound steps before it.

    ``item`` is the row of ``prompts.jsonl`` with all its columns: the prompt's question, ``numbers`` and
    the answer. A step such as "38 6, 32 6" is sound if it subtracts the smaller number from the larger.
    A response without a number in the answer tags is wrong, and wrong is 0; what cannot be judged should
    raise instead, since an exception fails the attempt and is never trained on as a reward of 0.
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
