"""The rollout loop: keep the engine busy with claims from the scheduler, and hand in the trajectories.

    python -m roq_worker --redis redis://localhost:6379 --run demo

One loop, and one task for each trajectory:

- Loop: when the engine has free capacity, reserve that many trajectories with the weights version that
  the engine has *loaded*, and start a task for each claim. After a refusal, sleep until the scheduler
  signals a change.
- Task: generate (or continue the tokens of an earlier worker), score in another process, hand in token
  ids, log-probs, version segments and reward.
- New weights are loaded while tasks run; everything in flight continues, and later tokens are marked with
  the new version.
- A heartbeat thread renews the lease; cancelled claims are stopped in the engine at once.
- The worker that completes a group runs the user's post-processing function, if there is one.
- SIGTERM: stop reserving, release unfinished tokens for another worker to continue, leave.
- Drain: stop reserving, finish what is in flight, leave.

A failed attempt is released as an error; it is never handed in as a reward of 0.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from roq_worker.attempts import Attempts
from roq_worker.follow import Follow
from roq_worker.heartbeat import STALLED_AFTER_S
from roq_worker.inbox import Stopped
from roq_worker.metrics import Rate
from roq_worker.setup import Worker, start_worker
from roq_worker.supply import Supply

__all__ = ["rollout"]

LOG_EVERY_S = 5.0
ENGINE_END_S = 2.0  # of shutdown_s; the rest is for releasing claims


async def rollout(url: str, run: str, name_prefix: str = "") -> None:
    """Work for ``run`` until it ends or SIGTERM arrives; then release all claims.

    Raises:
        ConfigError: something in the job cannot work on this host.
        EngineError: the engine died or hung; all claims were released first.
        RoqError: the run does not exist, or its server cannot be used.
    """
    try:
        worker = await start_worker(url, run, name_prefix)
    except Stopped:
        return
    inbox, engine, counters, settings = worker.inbox, worker.engine, worker.counters, worker.job.rollout
    attempts, follow, supply, rate = Attempts(worker), Follow(worker), Supply(worker), Rate()
    over = draining = False
    problem: Exception | None = None
    logged_at, clock = 0.0, time.monotonic()

    try:
        while not (inbox.stop.is_set() or over or (draining and not attempts)):
            inbox.changed.clear()  # any change from here on ends the sleep below

            # ---- handle the heartbeat's answers, failures and finished weight loads
            while inbox.renewals:
                renewal = inbox.renewals.popleft()
                follow.heard_of(renewal.version)
                over, draining = over or renewal.ended, draining or renewal.draining
                attempts.cancel(renewal.cancelled)
            inbox.raise_failure()
            engine.check(STALLED_AFTER_S)  # a hung engine must lose its claims, so this precedes tick
            worker.beat.tick()
            # Without partial rollout, newer weights are loaded when nothing is in flight.
            idle = not attempts.generating
            if follow.take_turn(may_start=settings.partial_rollout or idle):
                supply.refused = None  # newer weights may reserve where older ones may not

            # ---- fill the free capacity
            free = settings.max_concurrency - attempts.generating
            if draining or (follow.behind and not settings.partial_rollout):
                free = 0
            if grant := await supply.ask(free):
                for claim in grant.reservations:
                    attempts.start(claim)
                free -= len(grant.reservations)
                over = grant.ended
                if follow.heard_of(grant.version):
                    inbox.changed.set()  # there will be no signal for a version that this answer announced

            # ---- report, and sleep until something changes
            _show(worker, attempts, follow, supply, rate, draining=draining)
            if time.monotonic() - logged_at >= LOG_EVERY_S:
                logged_at = time.monotonic()
                worker.log.write(counters, engine, worker.scheduler, inflight=len(attempts))
            idle, blocked = not attempts, bool(attempts) and supply.refused is not None
            with suppress(TimeoutError):
                await asyncio.wait_for(inbox.changed.wait(), supply.sleep_s(free))
            passed, clock = time.monotonic() - clock, time.monotonic()
            counters.idle_s += passed if idle else 0.0
            counters.blocked_s += passed if blocked else 0.0
    except Stopped:
        pass  # during a call; if it granted claims, leaving releases them
    except Exception as error:  # noqa: BLE001 - raised again below, after all claims are released
        problem = error

    why = problem or ("SIGTERM" if inbox.stop.is_set() else "drained")
    reason = "the run has ended" if over else f"stopping ({why})"
    worker.say(f"{reason}; {counters.completed} trajectories handed in, {len(attempts)} unfinished")
    supply.close()
    follow.close()
    try:
        limit_s = max(1.0, settings.shutdown_s - ENGINE_END_S)
        await asyncio.wait_for(_leave(worker, attempts, over=over), limit_s)
    except TimeoutError:
        worker.say(f"not all claims were released within {settings.shutdown_s:g} s; the rest will expire")
    worker.log.write(counters, engine, worker.scheduler, inflight=len(attempts), done=True)
    await worker.close()
    if problem is not None:
        raise problem


async def _leave(worker: Worker, attempts: Attempts, *, over: bool) -> None:
    """Release all claims and leave the run."""
    await attempts.stop()
    worker.beat.stop()  # another renewal would register this worker again
    await attempts.hand_back(wanted=not over)
    await worker.scheduler.leave(worker.name)


def _show(
    worker: Worker, attempts: Attempts, follow: Follow, supply: Supply, rate: Rate, *, draining: bool
) -> None:
    """Set what the next heartbeat reports to status."""
    engine = worker.engine
    doing = "generating" if supply.refused is None else f"waiting: {supply.refused}"
    if draining:
        doing = "draining"
    elif follow.loading:
        doing = f"loading v{follow.newest}"
    worker.beat.info = {
        "roq": worker.beat.info["roq"],
        "doing": doing,
        "version": engine.version,
        "inflight": len(attempts),
        "tokens_per_s": round(rate.update(engine.tokens)),
        "tokens": engine.tokens,
        **worker.counters.shown(),
        **({"error": follow.trouble} if follow.trouble else {}),
    }
