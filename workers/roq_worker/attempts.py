"""The claims of this worker, each with a task that generates or post-processes and hands the result in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from roq.errors import EngineError, Fenced, Invalid, InvalidTrajectory, RewardError
from roq.job.tokens import encode
from roq.trajectory import Trajectory
from roq.types import Cancelled, Reservation
from roq_worker.draft import Draft, may_continue, member_of, seed_of
from roq_worker.hand_in import HandIn
from roq_worker.setup import Worker

__all__ = ["Attempts"]


class Attempts:
    """Start, cancel and release the attempts of a worker.

    A failed attempt is released as an error; it is never handed in as a reward of 0.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._held: dict[tuple[int, int, int], Draft] = {}
        self._hand_in = HandIn(worker.scheduler)
        protocol = worker.job.protocol
        self._oversampled = protocol.candidates > protocol.group_size

    def __len__(self) -> int:
        return len(self._held)

    @property
    def generating(self) -> int:
        """How many use engine capacity; the others post-process a group."""
        return sum(draft.claim.member > 0 for draft in self._held.values())

    def start(self, claim: Reservation) -> None:
        """Start the task of a claim, from the tokens of an earlier worker if they may be continued."""
        draft, worker = Draft(claim), self._worker
        self._held[draft.key] = draft
        partial = worker.job.rollout.partial_rollout
        if claim.prefix is not None and may_continue(claim.prefix, worker.engine.version, partial):
            draft.response = claim.prefix
        draft.task = asyncio.create_task(self._attempt(draft))
        draft.task.add_done_callback(worker.inbox.ended)

    def cancel(self, claims: Iterable[Cancelled]) -> None:
        """Stop the attempts that the scheduler cancelled, in the engine too."""
        for claim in claims:
            draft = self._held.pop((claim.group, claim.member, claim.token), None)
            if draft is not None and draft.task is not None:
                self._worker.counters.cancelled += 1
                draft.task.cancel()

    async def stop(self) -> None:
        """Cancel all tasks, except those that are handing in a result; wait for these."""
        for draft in self._held.values():
            if draft.task is not None and not draft.handing_in:
                draft.task.cancel()
        tasks = [draft.task for draft in self._held.values() if draft.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def hand_back(self, *, wanted: bool) -> None:
        """Forget the attempts that :meth:`stop` cancelled; if ``wanted``, release them with their tokens."""
        if wanted:
            await asyncio.gather(*map(self._release, self._held.values()))
        self._held.clear()

    async def _release(self, draft: Draft) -> None:
        with suppress(Fenced):
            await self._worker.scheduler.release(draft.claim, draft.response or None)
            self._worker.counters.released += 1

    async def _attempt(self, draft: Draft) -> None:
        """Run a claim to its end. A cancelled one stays held, so that it can be released."""
        claim, worker = draft.claim, self._worker
        try:
            await (self._roll if claim.member else self._judge)(draft)
        except Fenced:
            worker.counters.fenced += 1  # another worker has it now, or it is no longer needed
        except (RewardError, EngineError, Invalid, InvalidTrajectory) as error:
            if worker.inbox.stop.is_set() and isinstance(error, EngineError):
                return  # a SIGTERM for the whole process group reached the engine first
            draft.handing_in = True
            worker.counters.failed += 1
            worker.say(f"attempt {claim.attempt} at {claim.group}.{claim.member} failed: {error}")
            with suppress(Fenced):
                await worker.scheduler.fail(claim, str(error))
        self._held.pop(draft.key, None)

    async def _roll(self, draft: Draft) -> None:
        """Generate, score and hand in a trajectory."""
        claim, worker = draft.claim, self._worker
        item = worker.prompts.item(claim.ordinal, worker.job.run.seed)
        # [P]; the group shares its KV cache
        prompt = encode(worker.engine.tokenizer, item["prompt"], worker.job.data)
        finish_reason = await self._generate(draft, prompt)
        reward = await worker.rewards.score(item, worker.engine.decode(draft.response.tokens))
        draft.handing_in = True
        trajectory = Trajectory(prompt, **vars(draft.response), reward=reward, finish_reason=finish_reason)
        done = await self._hand_in.complete(claim, trajectory)
        worker.counters.completed += 1
        if done.judgement is not None:  # the group is complete
            self.start(done.judgement)
        if self._oversampled and done.status != "open":
            worker.beat.renew_now()  # learn at once which candidates are no longer needed

    async def _generate(self, draft: Draft, prompt: list[int]) -> str:
        """Complete the response and return its finish reason."""
        engine, settings, saved_at = self._worker.engine, self._worker.job.rollout, time.monotonic()
        finish = engine.finished(draft.response.tokens)  # an earlier worker may have left only the hand-in
        if finish is not None:
            return finish
        room = settings.max_tokens - len(draft.response)
        seed = seed_of(self._worker.job.run.seed, draft.claim)
        context = [*prompt, *draft.response.tokens]
        async for delta in engine.generate(context, max_tokens=room, seed=seed):
            draft.response.extend(delta.response)
            finish = delta.finish_reason
            every = settings.save_prefix_every_s
            if every and not finish and time.monotonic() - saved_at > every:
                await self._worker.scheduler.save_prefix(draft.claim, draft.response)
                saved_at = time.monotonic()
        return finish or "stop"

    async def _judge(self, draft: Draft) -> None:
        """Post-process a complete group."""
        claim, worker = draft.claim, self._worker
        item = worker.prompts.item(claim.ordinal, worker.job.run.seed)
        trajectories = await worker.scheduler.group_trajectories(claim.group)
        members = [member_of(t, worker.engine.decode(t.tokens)) for t in trajectories]
        verdict = await worker.post_process.judge(item, members)
        draft.handing_in = True
        await worker.scheduler.judge(claim, **msgspec.structs.asdict(verdict))
        worker.counters.post_processed += 1
