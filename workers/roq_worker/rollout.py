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
import itertools
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from roq.client import Scheduler
from roq.client.async_scheduler import AsyncScheduler
from roq.errors import (
    EngineError,
    Fenced,
    Invalid,
    InvalidTrajectory,
    RewardError,
    StoreFailed,
    UnknownWeights,
    WeightsError,
)
from roq.processes import unique_name
from roq.trajectory import Trajectory
from roq.types import Renewal, Reservation
from roq_worker.draft import Draft, may_continue, member_of, seed_of
from roq_worker.function_pool import PostProcess, Rewards
from roq_worker.hand_in import HandIn
from roq_worker.heartbeat import STALLED_AFTER_S, Heartbeat
from roq_worker.metrics import Counters, Log, Rate
from roq_worker.setup import Stopped, read_work, start_engine, unless
from roq_worker.texts import encode

__all__ = ["rollout"]

RESERVE_GAP_S = 0.02  # places freed within this time are asked for in one call
REFUSED_WAIT_S = 5.0  # a refused worker asks again after this even if no signal came
LOG_EVERY_S = 5.0
RETRY_WEIGHTS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # then every 30 s


async def rollout(url: str, run: str, name_prefix: str = "") -> None:
    """Work for ``run`` until it has ended or SIGTERM comes; then everything held is handed back.

    Raises:
        ConfigError: something in the job cannot work on this host.
        EngineError: the engine died or hung; what it held was released first.
        RoqError: the run does not exist, or its server cannot be used.
    """
    worker = unique_name(name_prefix)
    loop, stop, changed = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {worker}: {line}", file=sys.stderr, flush=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (stop.set(), changed.set()))

    # ---- 1. The job; heartbeat, reward processes, engine --------------------------------------------

    scheduler = AsyncScheduler(url, run, retry_s=None)  # a server that is away is waited for, with a message
    try:
        job, prompts = await unless(stop, read_work(scheduler))
    except Stopped:
        return
    settings = job.rollout
    oversampled = job.protocol.candidates > job.protocol.group_size
    counters, rate, log = Counters(), Rate(), Log(Path(job.run.dir), worker, say)
    news: deque[Renewal] = deque()
    failures: deque[BaseException] = deque()
    ours = version("roq")
    shown: dict[str, Any] = {"roq": ours, "doing": "starting"}  # what status shows; replaced, never changed

    def from_thread(queue: deque[Any], thing: object) -> None:
        queue.append(thing)
        with suppress(RuntimeError):  # the loop has closed: nobody needs it any more
            loop.call_soon_threadsafe(changed.set)

    beat = Heartbeat(
        Scheduler(url, run, retry_s=None),
        worker,
        job.protocol.lease_s,
        describe=lambda: (shown.get("version"), shown),
        on_renewal=lambda renewal: from_thread(news, renewal),
        on_failure=lambda error: from_thread(failures, error),
        say=say,
    )
    beat.start()  # before the engine: the pin on the weights it loads lasts no longer than our lease
    rewards, post_process = Rewards(job.reward), PostProcess(job.protocol.post_process, job.reward)
    try:
        await unless(stop, asyncio.gather(rewards.start(), post_process.start()))
        engine = await unless(stop, start_engine(scheduler, worker, job, prompts))
    except BaseException as error:
        beat.stop()
        await asyncio.gather(rewards.close(), post_process.close())
        with suppress(TimeoutError):
            await asyncio.wait_for(scheduler.leave(worker), settings.shutdown_s)
        if not isinstance(error, Stopped):
            raise
        return
    say(f"ready with weights v{engine.version} and {settings.max_concurrency} places")

    # ---- 2. One trajectory --------------------------------------------------------------------------

    held: dict[tuple[int, int, int], Draft] = {}
    hand_in = HandIn(scheduler)

    async def roll(draft: Draft) -> None:
        """Generate, score, hand in."""
        claim, saved_at = draft.claim, time.monotonic()
        item = prompts.item(claim.ordinal, job.run.seed)
        prompt = encode(engine.tokenizer, item["prompt"], job.data)  # [P]; the group shares its KV cache
        finish = engine.finished(draft.response.tokens)  # an earlier worker may have left it all but done
        if finish is None:
            room, seed = settings.max_tokens - len(draft.response), seed_of(job.run.seed, claim)
            context = [*prompt, *draft.response.tokens]
            async for delta in engine.generate(context, max_tokens=room, seed=seed):
                draft.response.extend(delta.response)
                finish = delta.finish_reason
                every = settings.save_prefix_every_s
                if every and not finish and time.monotonic() - saved_at > every:
                    await scheduler.save_prefix(claim, draft.response)
                    saved_at = time.monotonic()
        reward = await rewards.score(item, engine.decode(draft.response.tokens))
        draft.handing_in = True
        finished = Trajectory(prompt, **vars(draft.response), reward=reward, finish_reason=finish or "stop")
        done = await hand_in.complete(claim, finished)
        counters.completed += 1
        if done.judgement is not None:  # it was its group's last
            start(done.judgement)
        if oversampled and done.status != "open":
            beat.renew_now()  # the candidates that are not needed any more are stopped at once

    async def judge(draft: Draft) -> None:
        """Post-process a group whose members are all in."""
        claim = draft.claim
        item = prompts.item(claim.ordinal, job.run.seed)
        members = [
            member_of(t, engine.decode(t.tokens)) for t in await scheduler.group_trajectories(claim.group)
        ]
        verdict = await post_process.judge(item, members)
        draft.handing_in = True
        await scheduler.judge(claim, **msgspec.structs.asdict(verdict))
        counters.post_processed += 1

    async def attempt(draft: Draft) -> None:
        """Do what a claim is for. Cancelled, it leaves the draft in ``held``, to be handed back."""
        claim = draft.claim
        try:
            await (roll if claim.member else judge)(draft)
        except Fenced:
            counters.fenced += 1  # another worker has it now, or nobody needs it
        except (RewardError, EngineError, Invalid, InvalidTrajectory) as error:
            if stop.is_set() and isinstance(error, EngineError):
                return  # a SIGTERM for the whole process group reached the engine first
            draft.handing_in = True
            counters.failed += 1
            say(f"attempt {claim.attempt} at {claim.group}.{claim.member} failed: {error}")
            with suppress(Fenced):
                await scheduler.fail(claim, str(error))
        held.pop(draft.key, None)

    def start(claim: Reservation) -> None:
        draft = Draft(claim)
        held[draft.key] = draft
        if claim.prefix is not None and may_continue(claim.prefix, engine.version, settings.partial_rollout):
            draft.response = claim.prefix
        draft.task = asyncio.create_task(attempt(draft))
        draft.task.add_done_callback(ended)

    def cancel(draft: Draft) -> None:
        del held[draft.key]
        counters.cancelled += 1
        if draft.task is not None:
            draft.task.cancel()  # also aborts it in the engine

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()):
            failures.append(error)
        changed.set()

    # ---- 3. New weights, under the requests in flight -----------------------------------------------

    trouble, how = "", "read"

    async def follow() -> None:
        """Load the newest weights; while they cannot be loaded, generation goes on with the old ones."""
        nonlocal trouble, shown, how
        for attempt in itertools.count():
            try:
                newest = await scheduler.pin(worker)
                if newest.version > engine.version:
                    swapped = await engine.swap(newest.location, newest.version, newest.sender)
                    counters.swap_s += swapped.seconds
                    counters.swaps += 1
                    counters.received += swapped.how == "received"
                    if swapped.trouble or swapped.how != how:
                        origin = "" if swapped.how == "received" else f" from {newest.location}"
                        why = swapped.trouble and f": {swapped.trouble}"
                        say(f"weights v{newest.version} {swapped.how}{origin}{why}")
                    how = swapped.how
                trouble, shown = "", shown | {"doing": "generating", "version": engine.version}
                beat.renew_now()  # ends the pin on the old version
                return
            except (WeightsError, StoreFailed, UnknownWeights) as error:
                trouble = str(error)[:2000]  # every heartbeat carries it
                pause = RETRY_WEIGHTS_S[min(attempt, len(RETRY_WEIGHTS_S) - 1)]
                say(f"going on with weights v{engine.version}, next try in {pause:g} s: {error}")
                await asyncio.sleep(pause)

    # ---- 4. The loop --------------------------------------------------------------------------------

    newest, over, draining, refused = engine.version, False, False, None
    watch: asyncio.Task[int] | None = None  # sleeps until the scheduler signals a change
    swap: asyncio.Task[None] | None = None
    reserve_at = logged_at = 0.0
    clock = time.monotonic()
    problem: Exception | None = None

    try:
        while not (stop.is_set() or over or (draining and not held)):
            changed.clear()  # whatever changes from here on ends the sleep below

            while news:  # from the heartbeat
                renewal = news.popleft()
                newest, over = max(newest, renewal.version), over or renewal.ended
                draining = draining or renewal.draining
                for claim in renewal.cancelled:
                    if draft := held.get((claim.group, claim.member, claim.token)):
                        cancel(draft)
            if failures:
                raise failures.popleft()  # noqa: TRY301 - the handler below is the way out

            # A hung engine must lose its claims: no progress, no tick, no renewal.
            silent_s = time.monotonic() - engine.progress_at
            if engine.failure or (engine.inflight and silent_s > STALLED_AFTER_S):
                why = engine.failure or f"vLLM gave no token for {silent_s:.0f} s"
                raise EngineError(why)  # noqa: TRY301
            beat.tick()

            if swap is not None and swap.done():
                swap = refused = None  # newer weights may reserve where older ones may not
            generating = sum(draft.claim.member > 0 for draft in held.values())
            behind = newest > engine.version
            if behind and swap is None and (settings.partial_rollout or not generating):
                swap = asyncio.create_task(follow())
                swap.add_done_callback(ended)

            # Ask for what fits now and no more: a claim that waits here only grows stale.
            if watch is not None and (watch.done() or refused is None):
                if not watch.cancel():
                    watch.result()
                watch = refused = None
            # Without partial rollout, what is in flight ends before newer weights come.
            free = settings.max_concurrency - generating
            if draining or (behind and not settings.partial_rollout):
                free = 0
            granted = 0
            if free and refused is None and time.monotonic() >= reserve_at:
                asked_at = time.monotonic()
                grant = await unless(stop, scheduler.reserve(worker, engine.version, free))
                counters.reserve_wait_s += time.monotonic() - asked_at
                for claim in grant.reservations:
                    start(claim)
                granted = len(grant.reservations)
                if grant.version > newest:
                    changed.set()  # no signal will come for new weights that this answer tells of
                newest, over, refused = max(newest, grant.version), grant.ended, grant.refused
                reserve_at = time.monotonic() + RESERVE_GAP_S
                if refused is not None:
                    watch = asyncio.create_task(scheduler.wait(grant.signal, REFUSED_WAIT_S))
                    watch.add_done_callback(lambda _: changed.set())

            doing = "generating" if refused is None else f"waiting: {refused}"
            if draining:
                doing = "draining"
            elif swap is not None and not swap.done():
                doing = f"loading v{newest}"
            shown = {"roq": ours, "doing": doing, "version": engine.version, "inflight": len(held)}
            shown |= {"tokens_per_s": round(rate.update(engine.tokens)), "tokens": engine.tokens}
            shown |= counters.shown() | ({"error": trouble} if trouble else {})
            if time.monotonic() - logged_at >= LOG_EVERY_S:
                logged_at = time.monotonic()
                log.write(counters, engine, scheduler, inflight=len(held))

            may_ask = refused is None and free > granted
            until = max(0.0, reserve_at - time.monotonic()) if may_ask else 1.0
            idle, blocked = not held, bool(held) and refused is not None
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), until)
            passed, clock = time.monotonic() - clock, time.monotonic()
            counters.idle_s += passed if idle else 0.0
            counters.blocked_s += passed if blocked else 0.0
    except Stopped:
        pass  # in the middle of a call; should it have granted claims, leaving gives them back
    except Exception as error:  # noqa: BLE001 - raised again below, once everything is handed back
        problem = error

    # ---- 5. Hand back, leave ------------------------------------------------------------------------

    why = problem or ("SIGTERM" if stop.is_set() else "drained")
    reason = "the run has ended" if over else f"stopping ({why})"
    say(f"{reason}; {counters.completed} trajectories handed in, {len(held)} unfinished")

    async def hand_back() -> None:
        for draft in held.values():
            if draft.task is not None and not draft.handing_in:
                draft.task.cancel()
        await asyncio.gather(*(d.task for d in held.values() if d.task), return_exceptions=True)
        beat.stop()  # one more renewal would register this worker anew

        async def release(draft: Draft) -> None:
            with suppress(Fenced):
                await scheduler.release(draft.claim, draft.response or None)
                counters.released += 1

        if not over:
            await asyncio.gather(*map(release, held.values()))
        held.clear()
        await scheduler.leave(worker)

    for task in (watch, swap):
        if task is not None:
            task.cancel()
    try:  # the last two seconds are for the engine to end
        await asyncio.wait_for(hand_back(), max(1.0, settings.shutdown_s - 2.0))
    except TimeoutError:
        say(f"not all was handed back within {settings.shutdown_s:g} s; the rest goes back with the lease")
    log.write(counters, engine, scheduler, inflight=len(held), done=True)
    engine.close()
    await asyncio.gather(rewards.close(), post_process.close())
    await scheduler.aclose()
    if problem is not None:
        raise problem
