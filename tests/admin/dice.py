"""A run driven by the dice: workers, a trainer and an operator make calls of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from roq import Refused, Reservation, Response, RunConfig, Scheduler
from tests.conftest import Server
from tests.protocol.play import expire, trajectory

DICE = RunConfig(
    eta=2,
    batch_size=2,
    buffer_slots=3,
    group_size=2,
    group_candidates=3,
    prompts=400,
    total_steps=60,
    filter_zero_variance=True,
    post_process="some:function",
    max_attempts=2,
    max_inflight=30,
)


def attempt(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Make a call that the protocol may refuse; None when it did."""
    with suppress(Refused):
        return call(*arguments, **named)
    return None


class Dice:
    """Claims that are held, and the trainer's step; each :meth:`turn` is one random act."""

    def __init__(
        self, worker: Scheduler, trainer: Scheduler, operator: Scheduler, server: Server, seed: int = 11
    ) -> None:
        self.dice = random.Random(seed)
        self.move(worker, trainer, operator, server)
        self.version, self.taken, self.turns = 0, False, 0
        self.held: list[Reservation] = []

    def move(self, worker: Scheduler, trainer: Scheduler, operator: Scheduler, server: Server) -> None:
        """Go on with these clients."""
        self.worker, self.trainer, self.operator, self.server = worker, trainer, operator, server

    def turn(self) -> None:
        self.turns += 1
        name = self.dice.choice(["w0", "w1", "w2", "w3"])
        match self.dice.randrange(12):
            case 0 | 1 | 2:
                version = self.worker.pin(name).version
                self.held += self.worker.reserve(name, version, self.dice.randint(1, 6)).reservations
            case 3 | 4 | 5 | 6 if self.held:
                self._hand_in(self.held.pop(self.dice.randrange(len(self.held))))
            case 7 if self.held:
                self._give_back(self.held.pop())
            case 8:
                self.worker.renew(name, self.version, {"doing": "dice"})
                if self.dice.random() < 0.1:
                    with Scheduler(self.server.url, self.worker.run) as admin:
                        expire(admin, name)
            case 9 | 10:
                self._train()
                if self.held and self.dice.random() < 0.2:
                    who = self.dice.choice([self.trainer, self.operator])
                    call = self.dice.choice([who.drop, who.filter])
                    attempt(call, self.dice.choice(self.held).group, "the dice")
            case 11:
                self._steer(name)
            case _:
                pass

    def _hand_in(self, claim: Reservation) -> None:
        if claim.member == 0:
            attempt(self.worker.judge, claim, keep=self.dice.random() < 0.9, reason="the dice")
            return
        reward = self.dice.choice([0.0, 1.0])
        done = attempt(self.worker.complete, claim, trajectory(claim.v_traj, reward))
        self.held += [done.judgement] if done is not None and done.judgement is not None else []

    def _give_back(self, claim: Reservation) -> None:
        kept = None
        if claim.member > 0:
            kept = Response([1, 2], [-0.1, -0.2], [(claim.v_traj, 2)])
            if self.dice.random() < 0.5:
                attempt(self.worker.save_prefix, claim, kept)
                return  # and forget it: its lease will run out
        if self.dice.random() < 0.5:
            attempt(self.worker.fail, claim, "the dice")
        else:
            attempt(self.worker.release, claim, kept)

    def _train(self) -> None:
        if not self.taken:
            self.taken = attempt(self.trainer.take, "t0") is not None
            return
        self.version, self.taken = self.version + 1, False
        self.trainer.publish(self.version, f"w{self.version}", "t0", {"reward/mean": 0.5})
        self.trainer.announce_sender(f"host:{self.version}/secret", "t0")
        if self.version % 3 == 0:
            self.trainer.checkpointed(self.version, "t0")
        self.trainer.retire_weights("t0", 2)

    def _steer(self, name: str) -> None:
        self.operator.pause()
        self.operator.resume()
        for letter in self.operator.dead()[:1]:
            attempt(self.operator.revive, letter.ordinal)
        if self.dice.random() < 0.2:
            attempt(self.operator.drain, name)
        if self.dice.random() < 0.2:
            self.worker.leave(name)
