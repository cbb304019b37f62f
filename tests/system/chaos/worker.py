"""A light worker for the chaos driver: speaks the real protocol, and sleeps where vLLM would generate."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import random
import signal
import sys
import uuid
from contextlib import suppress

from roq import AsyncScheduler, Fenced, Reservation, Response, Trajectory

CONCURRENCY = 8
MEAN_S = 0.4
LEASE_S = 1.0


class Draft:
    """What is generated so far."""

    def __init__(self, claim: Reservation) -> None:
        self.claim = claim
        self.response = claim.prefix or Response()

    def grow(self, version: int, count: int) -> None:
        """``count`` more tokens from weights ``version``."""
        start = len(self.response)
        tokens = [self.claim.ordinal * 100 + i for i in range(start, start + count)]
        self.response.extend(Response(tokens, [-0.25] * count, [(version, count)]))


def show_tasks() -> None:
    """Where every task waits."""
    for task in asyncio.all_tasks():
        task.print_stack(limit=8)


async def main(url: str, run: str, seed: int) -> None:
    """Work until SIGTERM, or until asked to drain."""
    dice = random.Random(seed)
    worker = f"chaos-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    print(worker, flush=True)
    sched = AsyncScheduler(url, run, retry_s=None)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    faulthandler.register(signal.SIGUSR1)  # where it is, when the driver finds that it does not end
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, show_tasks)
    version = (await sched.pin(worker)).version
    newest, draining = version, False
    held: dict[int, tuple[Draft, asyncio.Task[None]]] = {}

    async def judge(draft: Draft) -> None:
        claim = draft.claim
        members = await sched.group_trajectories(claim.group)
        await asyncio.sleep(dice.expovariate(20))
        fate = dice.random()
        if fate < 0.02:
            await sched.fail(claim, "the dice did not say")
        elif fate < 0.05:
            await sched.judge(claim, keep=False, reason="dull")
        else:
            await sched.judge(claim, advantages=[t.reward - 0.5 for t in members])

    async def roll(draft: Draft) -> None:
        claim = draft.claim
        try:
            if claim.member == 0:
                await judge(draft)
                return
            for part in range(4):
                await asyncio.sleep(dice.lognormvariate(0, 1.0) * MEAN_S / 6)
                draft.grow(max(version, claim.v_traj), dice.randint(1, 12))
                if part == 1 and dice.random() < 0.3:
                    await sched.save_prefix(claim, draft.response)
            if dice.random() < 0.01:
                await sched.fail(claim, "the dice said so")
            else:
                payload = Trajectory([claim.ordinal], **vars(draft.response), reward=dice.random())
                done = await sched.complete(claim, payload)
                if done.judgement is not None:
                    start(done.judgement)
        except Fenced:
            pass
        finally:
            if not stop.is_set():
                held.pop(claim.token, None)

    def start(claim: Reservation) -> None:
        draft = Draft(claim)
        held[claim.token] = draft, asyncio.create_task(roll(draft))

    async def beat() -> None:
        nonlocal newest, draining
        while True:
            renewal = await sched.renew(worker, version)
            newest, draining = max(newest, renewal.version), draining or renewal.draining
            for claim in renewal.cancelled:
                if claim.token in held:
                    held.pop(claim.token)[1].cancel()
            await asyncio.sleep(LEASE_S / 3)

    beating = asyncio.create_task(beat())
    stopping = asyncio.create_task(stop.wait())
    while not (stop.is_set() or (draining and not held)):
        if newest > version:  # pin, load, and only then say so
            version = (await sched.pin(worker)).version
        if not draining and len(held) < CONCURRENCY:
            grant = await sched.reserve(worker, version, CONCURRENCY - len(held))
            newest = max(newest, grant.version)
            for claim in grant.reservations:
                start(claim)
        timeout = 1.0 if len(held) >= CONCURRENCY else 0.1
        await asyncio.wait(
            [stopping, *(task for _, task in held.values())],
            timeout=timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
    beating.cancel()
    for _, task in held.values():
        task.cancel()
    await asyncio.gather(*(task for _, task in held.values()), return_exceptions=True)
    for draft, _ in list(held.values()):
        with suppress(Fenced):
            await sched.release(draft.claim, draft.response or None)
    await sched.leave(worker)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
