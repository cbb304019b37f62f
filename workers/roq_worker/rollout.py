"""The rollout loop: keep an engine full of trajectories that the scheduler wants, and hand them in.

    python -m roq_worker --redis redis://localhost:6379 --run demo

One loop, and one task for each trajectory:

- loop: whenever the engine has free places, ask the scheduler for as many trajectories, with the
  weights version that the engine *really* has loaded; start a task for each claim granted. When the
  scheduler refuses, sleep until it signals a change.
- task: generate (going on from the tokens that an earlier worker left), score in another process,
  hand in token ids, log-probs, version segments and reward.
- new weights are loaded under the tasks' feet: everything in flight goes on, and later tokens are
  marked with the new version.
- a heartbeat thread keeps the claims; what it is told to stop is stopped in the engine at once.
- a group whose members are all in may need post-processing: whoever completed it runs the user's function.
- SIGTERM: stop asking, hand unfinished tokens back for another worker to continue, leave.
- asked to drain: stop asking, end what is in flight, leave.

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
ENGINE_END_S = 2.0  # of shutdown_s; the rest is for handing back


async def rollout(url: str, run: str, name_prefix: str = "") -> None:
    """Work for ``run`` until it has ended or SIGTERM comes; then everything held is handed back.

    Raises:
        ConfigError: something in the job cannot work on this host.
        EngineError: the engine died or hung; what it held was released first.
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
            inbox.changed.clear()  # whatever changes from here on ends the sleep below

            # ---- what happened: the heartbeat's answers, failures, a load that ended
            while inbox.renewals:
                renewal = inbox.renewals.popleft()
                follow.heard_of(renewal.version)
                over, draining = over or renewal.ended, draining or renewal.draining
                attempts.cancel(renewal.cancelled)
            inbox.raise_failure()
            engine.check(STALLED_AFTER_S)  # a hung engine must lose its claims: no tick, no renewal
            worker.beat.tick()
            # Without partial rollout, what is in flight ends before newer weights come.
            idle = not attempts.generating
            if follow.take_turn(may_start=settings.partial_rollout or idle):
                supply.ask_again()

            # ---- fill the free places
            free = settings.max_concurrency - attempts.generating
            if draining or (follow.behind and not settings.partial_rollout):
                free = 0
            if grant := await supply.ask(free):
                for claim in grant.reservations:
                    attempts.start(claim)
                free -= len(grant.reservations)
                over = grant.ended
                if follow.heard_of(grant.version):
                    inbox.changed.set()  # no signal will come for new weights that this answer tells of

            # ---- tell, and sleep until something changes
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
        pass  # in the middle of a call; should it have granted claims, leaving gives them back
    except Exception as error:  # noqa: BLE001 - raised again below, once everything is handed back
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
        worker.say(f"not all was handed back within {settings.shutdown_s:g} s; leases give back the rest")
    worker.log.write(counters, engine, worker.scheduler, inflight=len(attempts), done=True)
    await worker.close()
    if problem is not None:
        raise problem


async def _leave(worker: Worker, attempts: Attempts, *, over: bool) -> None:
    """Hand everything back."""
    await attempts.stop()
    worker.beat.stop()  # one more renewal would register this worker anew
    await attempts.hand_back(wanted=not over)
    await worker.scheduler.leave(worker.name)


def _show(
    worker: Worker, attempts: Attempts, follow: Follow, supply: Supply, rate: Rate, *, draining: bool
) -> None:
    """Have the next heartbeat carry what status shows of this worker."""
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
