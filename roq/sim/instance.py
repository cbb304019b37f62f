"""A rollout instance: continuous batching, a KV cache of finite size, weights that change under requests."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from typing import Any

import simpy

from roq.sim.cost import RolloutCost

__all__ = ["Group", "Instance", "Sample"]

EPSILON = 1e-6  # tokens: rounding of sums of seconds, far below one token
WATERMARK = 0.01  # share of the KV cache kept free when a request is let in, as vLLM does


class Group:
    """One prompt on its way: admitted at version ``start``, of members ``samples``.

    ``state`` is "running" (some members are not finished), "waiting" (finished, untrained), "trained" or
    "discarded".
    """

    __slots__ = ("ordinal", "prompt", "samples", "start", "state", "unfinished")

    def __init__(self, ordinal: int, start: int, prompt: int, lengths: Iterable[int]) -> None:
        self.ordinal = ordinal
        self.start = start
        self.prompt = prompt
        self.samples = [Sample(self, length) for length in lengths]
        self.unfinished = len(self.samples)
        self.state = "running"

    @property
    def tokens(self) -> float:
        """Response tokens of its finished members."""
        return sum(sample.length for sample in self.samples if sample.finished)


class Sample:
    """One response. ``done`` counts its tokens while it does not run; see :meth:`Instance.progress`."""

    __slots__ = ("done", "finish_at", "finished", "group", "instance", "length")

    def __init__(self, group: Group, length: int) -> None:
        self.group = group
        self.length = length
        self.done = 0.0
        self.finished = False
        self.finish_at = 0.0  # the instance's step count at which it ends
        self.instance: Instance | None = None


class Instance:
    """One engine, as a process in the simulation's time.

    Every change first advances the state to now (:meth:`_advance`) and then has the process recompute the
    time of the next event (:meth:`_touch`).

    Args:
        env: the simulation's time.
        number: which instance.
        cost: the cost model.
        places: concurrent requests.
        finished: called with the responses that end at one moment.
    """

    def __init__(
        self,
        env: simpy.Environment,
        number: int,
        cost: RolloutCost,
        places: int,
        finished: Callable[[list[Sample]], None],
    ) -> None:
        self.number = number
        self.version = 0  # of the weights that it serves
        self.free = places
        self.places = places
        self.place_s = 0.0  # integral of the places in use
        self.stalled_s = 0.0  # prefill, weights: no decoding
        self.tokens = 0.0  # decoded
        self.prefilled = 0.0
        self.preempted = 0
        self._env = env
        self._cost = cost
        self._finished = finished
        self._at = 0.0
        self._speed = 1.0
        self._stall = 0.0
        self._steps = 0.0
        self._context = 0.0
        self._running: dict[Sample, None] = {}  # in the order in which they were let in
        self._ends: list[tuple[float, int, Sample]] = []
        self._waiting: deque[Sample] = deque()
        self._order = itertools.count()
        self._process = env.process(self._run())

    def add(self, samples: Iterable[Sample]) -> None:
        """Start responses, within the free capacity."""
        self._advance()
        for sample in samples:
            sample.instance = self
            self.free -= 1
            self._waiting.append(sample)
        self._touch()

    def abort(self, sample: Sample) -> None:
        """Stop a response; its tokens so far stay in ``done``."""
        self._advance()
        if sample in self._running:
            self._stop(sample)
        else:
            self._waiting.remove(sample)
        sample.instance = None
        self.free += 1
        self._touch()

    def pause(self, seconds: float) -> None:
        """Pause for this long."""
        self._advance()
        self._stall += seconds
        self._touch()

    def refill(self) -> None:
        """Recompute the KV cache of everything in flight."""
        self._advance()
        prompts: set[Group] = set()
        for sample in self._running:
            shared = sample.group.prompt if sample.group in prompts else 0
            prompts.add(sample.group)
            self._prefill(sample.group.prompt + self.progress(sample) - shared)
        self._touch()

    def slow_down(self, share: float) -> None:
        """Work at ``1 - share`` of the speed from now on."""
        self._advance()
        self._speed = 1.0 - share
        self._touch()

    def progress(self, sample: Sample) -> float:
        """Response tokens of a sample here so far, as of the last event."""
        return sample.length - (sample.finish_at - self._steps) if sample in self._running else sample.done

    def close(self) -> None:
        """Bring the counters up to now."""
        self._advance()

    # -- time ---------------------------------------------------------------------------------------

    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            self._advance()
            ended = self._settle()
            if ended:
                self._hand_in(ended)
                continue
            with suppress(simpy.Interrupt):
                yield self._next_event()

    def _touch(self) -> None:
        if self._process is not self._env.active_process:
            self._process.interrupt()

    def _next_event(self) -> simpy.Event:
        n = len(self._running)
        if n == 0:
            return self._env.event()  # until something is added
        while self._ends[0][2] not in self._running or self._ends[0][0] != self._ends[0][2].finish_at:
            heapq.heappop(self._ends)  # aborted, or preempted and perhaps back
        steps = self._ends[0][0] - self._steps
        if n > 1:
            steps = min(steps, max(0.0, self._cost.kv_tokens - self._context) / n)
        work = self._stall + self._cost.decode_s(max(0.0, steps), n, self._context)
        return self._env.timeout(work / self._speed)

    def _advance(self) -> None:
        seconds = self._env.now - self._at
        self._at = self._env.now
        self.place_s += seconds * (self.places - self.free)
        work = seconds * self._speed
        stalled = min(work, self._stall)
        self._stall -= stalled
        self.stalled_s += stalled / self._speed
        n = len(self._running)
        if n and work > stalled:
            steps = self._cost.steps_in(work - stalled, n, self._context)
            self._steps += steps
            self._context += n * steps
            self.tokens += n * steps

    def _settle(self) -> list[Sample]:
        """End finished responses, then admit those that fit or preempt those that do not."""
        ended: list[Sample] = []
        while self._ends and self._ends[0][0] <= self._steps + EPSILON:
            finish_at, _, sample = heapq.heappop(self._ends)
            if sample in self._running and finish_at == sample.finish_at:
                self._stop(sample)
                sample.done = float(sample.length)
                ended.append(sample)
        while len(self._running) > 1 and self._context >= self._cost.kv_tokens - EPSILON:
            latest = next(reversed(self._running))
            self._stop(latest)
            self._waiting.appendleft(latest)
            self.preempted += 1
        room = self._cost.kv_tokens * (1 - WATERMARK)
        while self._waiting:
            sample = self._waiting[0]
            context = sample.group.prompt + sample.done
            if self._running and self._context + context > room:
                break
            self._waiting.popleft()
            shared = any(other.group is sample.group for other in self._running)
            self._prefill(context - (sample.group.prompt if shared else 0))
            self._stall += self._cost.admit_s
            sample.finish_at = self._steps + sample.length - sample.done
            self._running[sample] = None
            self._context += context
            heapq.heappush(self._ends, (sample.finish_at, next(self._order), sample))
        return ended

    def _stop(self, sample: Sample) -> None:
        sample.done = self.progress(sample)
        del self._running[sample]
        self._context -= sample.group.prompt + sample.done

    def _prefill(self, tokens: float) -> None:
        self.prefilled += tokens
        self._stall += self._cost.prefill_s(tokens)

    def _hand_in(self, ended: list[Sample]) -> None:
        if self._cost.latency_s > 0:
            self._env.process(self._release_later(ended))
        else:
            self._release(ended)

    def _release_later(self, ended: list[Sample]) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(self._cost.latency_s)
        self._release(ended)

    def _release(self, ended: list[Sample]) -> None:
        self._advance()
        for sample in ended:
            sample.instance = None
            sample.finished = True
            self.free += 1
        self._finished(ended)
