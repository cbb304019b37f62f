"""The bound of placement: could any legal placement of what is finished have given the trainer its batch?"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["batch_possible"]


def batch_possible(
    finished: Sequence[int], running: Sequence[int], frontier: int, eta: int, batch_size: int, slots: int
) -> bool:
    """Whether some legal placement of all live groups makes the frontier's buffer READY.

    A group of version ``v`` may be in the buffers ``frontier … v + eta``. These intervals all begin at the
    frontier, so they are nested, and Hall's condition needs only be checked for each deadline: the groups
    whose deadline is at most ``d`` must fit into the buffers up to ``d``. Giving the batch the finished
    groups with the earliest deadlines leaves the others the most room (no exchange of two does better).

    Args:
        finished: ``v_traj`` of every finished, untrained group.
        running: ``v_traj`` of every unfinished group.
        frontier: the earliest buffer not yet taken.
        eta: maximum staleness.
        batch_size: finished groups that make a buffer READY (B).
        slots: slots of a buffer (S >= B).
    """
    if len(finished) < batch_size:
        return False
    chosen = sorted(finished)
    if chosen[0] + eta < frontier:
        return False
    rest = sorted([*chosen[batch_size:], *running])
    room_at_frontier = slots - batch_size
    for count, version in enumerate(rest, start=1):
        deadline = version + eta
        if deadline < frontier or count > room_at_frontier + (deadline - frontier) * slots:
            return False
    return True
