"""The article's worked example (eta = 1, B = 4, six at once), step by step, on both servers."""

from __future__ import annotations

from roq import RunConfig, Scheduler
from tests.protocol.play import Named


def test_worked_example(sched: Scheduler) -> None:
    run = Named(sched, RunConfig(eta=1, batch_size=4))

    # 1: six are admitted, as late as is legal
    assert run.admit(0, 6) == "A 1.4, B 1.3, C 1.2, D 1.1, E 0.4, F 0.3"
    # 2: A completes; F takes its place, A the earliest Empty slot
    assert run.complete("A").slot == 1
    assert run.admit(0, 1) == "G 0.3"
    assert run.picture() == ["O:A . R:G R:E", "R:D R:C R:B R:F"]
    # 3
    run.complete("D")
    assert run.admit(0, 1) == "H 0.3"
    assert run.picture() == ["O:A O:D R:H R:E", "R:G R:C R:B R:F"]
    # 4: the window is full, so I is not admitted although only five run
    run.complete("C")
    assert run.picture() == ["O:A O:D O:C R:E", "R:G R:H R:B R:F"]
    assert run.sched.reserve("w0", 0, 1).refused == "window_full"
    # 5
    assert run.take() is None
    assert run.complete("E").ready == 0
    assert run.take() == "ADCE"
    assert sched.reserve("w0", 0, 2).refused == "window_full"
    # 6
    run.complete("F")
    assert run.picture() == ["O:F R:H R:B R:G"]
    assert sched.reserve("w0", 0, 1).refused == "window_full"
    # 7
    run.complete("G")
    assert run.picture() == ["O:F O:G R:B R:H"]
    # 8: v1 opens buffer 2
    run.publish(1)
    assert run.admit(1, 4) == "I 2.4, J 2.3, K 2.2, L 2.1"
    # 9: H and B may not move to buffer 2; L may
    run.complete("J")
    assert run.picture() == ["O:F O:G R:B R:H", "O:J R:K R:L R:I"]
    # 10
    run.complete("H")
    assert run.picture() == ["O:F O:G O:H R:B", "O:J R:K R:L R:I"]
    # 11
    run.complete("K")
    assert run.picture() == ["O:F O:G O:H R:B", "O:J O:K R:L R:I"]
    # 12
    assert run.complete("B").ready == 1
    assert run.take() == "FGHB"
    # 13: buffer 2 is READY while the trainer is still busy
    run.complete("L")
    assert run.complete("I").ready == 2
    assert sched.status().buffers[1].state == "READY"
    # 14
    run.publish(2)
    assert run.take() == "JKLI"
    batch = sched.take("t0")
    assert batch is not None
    assert [group.staleness for group in batch.groups] == [1, 1, 1, 1]
