"""Reward functions in processes of their own, so that nothing a user's function does can stop a worker.

A call that raises, runs out of time (even in a C loop that holds the GIL) or kills its process
becomes a :class:`roq.errors.RewardError`; the process is replaced. The processes start afresh from
the interpreter: they share no memory, thread or lock with the worker and its engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Any

from roq.config import Reward
from roq.errors import ConfigError, RewardError
from roq_worker.reward_process import LENGTH

__all__ = ["RewardPool"]

END_LIMIT_S = 2.0
START_LIMIT_S = 120.0  # importing a user's module may mean importing torch on a busy machine


class RewardPool:
    """``reward.processes`` copies of the function that ``[reward]`` names."""

    def __init__(self, reward: Reward) -> None:
        self._function = reward.function
        self._timeout_s = reward.timeout_s
        self._processes = reward.processes
        # Every entry is the right to run one call: an idle process, or None where one must be started.
        self._free: asyncio.Queue[Process | None] = asyncio.Queue()

    async def start(self) -> None:
        """Start the processes.

        Raises:
            ConfigError: the function cannot be imported.
        """
        for process in await asyncio.gather(*(self._start() for _ in range(self._processes))):
            self._free.put_nowait(process)

    async def close(self) -> None:
        """End the processes; calls under way end with them."""
        for _ in range(self._free.qsize()):
            await _kill(self._free.get_nowait())

    async def score(self, item: dict[str, Any], response: str) -> float:
        """The reward of ``response``. Calls beyond ``processes`` wait for their turn.

        Raises:
            RewardError: the function raised, ran out of time, died, or returned no finite number.
        """
        request = pickle.dumps((item, response))
        process = await self._free.get()
        answer: dict[str, Any] = {}
        try:
            if process is None:
                process = await self._start()
            assert process.stdin is not None
            process.stdin.write(LENGTH.pack(len(request)) + request)
            answer = await asyncio.wait_for(_read(process), self._timeout_s)
        except TimeoutError:
            raise RewardError(
                f"reward function {self._function} took longer than {self._timeout_s:g} s (reward.timeout_s)"
            ) from None
        except (asyncio.IncompleteReadError, OSError):
            assert process is not None
            code = await process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise RewardError(f"reward function {self._function} ended its process ({how})") from None
        except ConfigError as error:  # it could be imported once, but not again
            raise RewardError(str(error)) from None
        finally:
            # Also when cancelled: a process that still works on a call cannot take the next one.
            if not answer:
                await _kill(process)
                process = None
            self._free.put_nowait(process)
        if "error" in answer:
            raise RewardError(f"reward function {self._function} {answer['error']}")
        return float(answer["reward"])

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "roq_worker.reward_process", self._function),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # a SIGTERM for the worker's group must not cost a finished rollout
        )
        try:
            answer = await asyncio.wait_for(_read(process), START_LIMIT_S)
        except (asyncio.IncompleteReadError, OSError, TimeoutError):
            await _kill(process)
            raise ConfigError(
                f"reward.function = {self._function!r}: its process ended or hung while it was imported"
            ) from None
        except BaseException:
            await _kill(process)
            raise
        if "error" in answer:
            await _kill(process)
            raise ConfigError(answer["error"])
        return process


async def _read(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return json.loads(await process.stdout.readexactly(length))


async def _kill(process: Process | None) -> None:
    if process is None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with whatever the function started
    with suppress(TimeoutError):  # a grandchild of its own session may hold the pipes open
        await asyncio.wait_for(process.wait(), END_LIMIT_S)
    assert process.stdin is not None
    process.stdin.close()
