"""The condition for a possible batch, against brute-force matching."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from roq.sim.bound import batch_possible


def by_matching(
    finished: list[int], running: list[int], frontier: int, eta: int, batch_size: int, slots: int
) -> bool:
    """Every choice of the batch's groups, and a matching of all others to the slots that are left."""
    for chosen in combinations(range(len(finished)), batch_size):
        if any(finished[i] + eta < frontier for i in chosen):
            continue
        rest = [v for i, v in enumerate(finished) if i not in chosen] + running
        last = max((v + eta for v in rest), default=frontier)
        buffers = [frontier] * (slots - batch_size)
        buffers += [b for b in range(frontier + 1, last + 1) for _ in range(slots)]
        if not rest:
            return True
        if not buffers:
            continue
        legal = np.array([[b <= v + eta for b in buffers] for v in rest], dtype=int)
        matched = maximum_bipartite_matching(csr_matrix(legal), perm_type="column")
        if (matched >= 0).all():
            return True
    return False


def test_against_brute_force() -> None:
    rng = random.Random(1)
    answers = {True: 0, False: 0}
    for _ in range(3000):
        eta, batch = rng.randint(0, 3), rng.randint(1, 3)
        slots, frontier = batch + rng.randint(0, 2), rng.randint(0, 3)
        versions = range(max(0, frontier - eta), frontier + 1)
        finished = [rng.choice(versions) for _ in range(rng.randint(0, 6))]
        running = [rng.choice(versions) for _ in range(rng.randint(0, 6))]
        case = (finished, running, frontier, eta, batch, slots)
        expected = by_matching(*case)
        assert batch_possible(*case) == expected, case
        answers[expected] += 1
    assert min(answers.values()) > 500


def test_a_running_group_that_must_be_in_the_batch_blocks_it() -> None:
    """eta = 1, B = S = 2, frontier 1: a running group of v0 can be nowhere but in buffer 1."""
    assert not batch_possible([0, 1], [0], 1, 1, 2, 2)
    assert batch_possible([0, 1], [1], 1, 1, 2, 2)
    assert batch_possible([0, 1], [0], 1, 1, 2, 3)
