"""A rollout worker without vLLM: samples from the published weights with Hugging Face's model."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from trainer_support import TEMPERATURE, VOCAB

from roq import Reservation, Scheduler, Trajectory
from roq.errors import StoreFailed
from roq.weights import fetch


class Player:
    """Generate through the real protocol until the run ends or it is stopped."""

    def __init__(self, sched: Scheduler, name: str = "player", limit: int = 8) -> None:
        self.sched, self.name, self.limit = sched, name, limit
        self.version = -1
        self.stopping = threading.Event()
        self.error: BaseException | None = None

    def sync(self) -> None:
        newest = self.sched.renew(self.name).version
        if newest > self.version:
            found = self.sched.pin(self.name)
            try:
                with fetch(found.location) as folder:
                    self.load(folder)
            except StoreFailed:
                return  # as a worker does: it keeps its weights until these can be read
            self.version = found.version

    def load(self, folder: Path) -> None:
        if self.version < 0:
            from transformers import AutoModelForCausalLM

            torch.set_num_threads(1)  # idle threads of this process would slow the trainer down
            self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        # Not strict: tied weights are stored once.
        self.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)

    @torch.no_grad()
    def generate(self, reservation: Reservation) -> Trajectory:
        draw = random.Random(f"{reservation.ordinal} {reservation.member} {reservation.attempt}")
        prompt = [reservation.ordinal % VOCAB, 1, 2, 3]
        tokens: list[int] = []
        logprobs: list[float] = []
        for _ in range(draw.randint(2, 8)):
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0, -1] / TEMPERATURE
            logp = torch.log_softmax(logits, dim=-1)
            token = draw.choices(range(VOCAB), logp.exp().tolist())[0]
            tokens.append(token)
            logprobs.append(min(float(logp[token]), 0.0))
        reward = sum(token % 2 for token in tokens) / len(tokens)
        assert math.isfinite(reward)
        return Trajectory(prompt, tokens, logprobs, [(self.version, len(tokens))], reward)

    def play(self) -> None:
        try:
            while not self.stopping.is_set():
                self.sync()
                grant = self.sched.reserve(self.name, self.version, self.limit)
                if grant.ended:
                    return
                for reservation in grant.reservations:
                    self.sched.complete(reservation, self.generate(reservation))
                if not grant.reservations:
                    self.sched.wait(grant.signal, 0.2)
        except BaseException as error:
            self.error = error
            raise


@contextmanager
def playing(connect: Callable[[], Scheduler]) -> Iterator[Player]:
    """A player in a thread; it is stopped, and its failure raised, at the end."""
    with connect() as sched:
        player = Player(sched)
        thread = threading.Thread(target=player.play)
        thread.start()
        try:
            yield player
        finally:
            player.stopping.set()
            thread.join(30)
        assert player.error is None
        assert not thread.is_alive()
