"""Users' functions in separate processes: nothing they do can stop a worker.

A call that raises, times out (even in a C loop that holds the GIL) or kills its process becomes a
:class:`roq.errors.RewardError`; the process is replaced. The processes are spawned, not forked: they
share no memory, thread or lock with the worker and its engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Any

import msgspec

from roq.config import Reward
from roq.errors import ConfigError, RewardError
from roq.postprocess import Member, Verdict
from roq_worker.function_process import KINDS, LENGTH

__all__ = ["FunctionPool", "PostProcess", "Rewards"]

END_LIMIT_S = 2.0
START_LIMIT_S = 120.0  # importing a user's module may mean importing torch on a busy machine


class FunctionPool:
    """A pool of ``processes`` processes that run the function ``module:function``.

    Args:
        kind: one of :data:`roq_worker.function_process.KINDS`.
        timeout_s: a call that takes longer has failed.
    """

    def __init__(self, kind: str, function: str, timeout_s: float, processes: int) -> None:
        self._kind = kind
        self._setting = KINDS[kind][0]
        self._function = function
        self._timeout_s = timeout_s
        self._processes = processes
        # Each entry permits one call: an idle process, or None where one must be started.
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

    async def call(self, *arguments: object) -> Any:
        """Call the function. Calls beyond ``processes`` wait for a free process.

        Raises:
            RewardError: the function raised, timed out, died, or returned an invalid value.
        """
        request = json.dumps(arguments, default=_plain).encode()
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
                f"{self._setting} {self._function} took longer than {self._timeout_s:g} s (reward.timeout_s)"
            ) from None
        except (asyncio.IncompleteReadError, OSError):
            assert process is not None
            code = await process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise RewardError(f"{self._setting} {self._function} ended its process ({how})") from None
        except ConfigError as error:  # it could be imported once, but not again
            raise RewardError(str(error)) from None
        finally:
            # Also when cancelled: a process that is busy with a call cannot take the next one.
            if not answer:
                await _kill(process)
                process = None
            self._free.put_nowait(process)
        if "error" in answer:
            raise RewardError(f"{self._setting} {self._function} {answer['error']}")
        return answer["result"]

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "roq_worker.function_process", self._kind, self._function),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # a SIGTERM to the worker's group must not lose a finished rollout
        )
        try:
            answer = await asyncio.wait_for(_read(process), START_LIMIT_S)
        except (asyncio.IncompleteReadError, OSError, TimeoutError):
            await _kill(process)
            raise ConfigError(
                f"{self._setting} = {self._function!r}: its process ended or hung while it was imported"
            ) from None
        except BaseException:
            await _kill(process)
            raise
        if "error" in answer:
            await _kill(process)
            raise ConfigError(answer["error"])
        return process


def _plain(thing: Any) -> Any:
    """Convert values that JSON lacks: dates and sets of parquet rows, numpy scalars of reasoning-gym."""
    try:
        return msgspec.to_builtins(thing)
    except TypeError:
        return thing.tolist() if hasattr(thing, "tolist") else str(thing)


async def _read(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return json.loads(await process.stdout.readexactly(length))


async def _kill(process: Process | None) -> None:
    if process is None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # including processes that the function started
    with suppress(TimeoutError):  # a grandchild in another session may hold the pipes open
        await asyncio.wait_for(process.wait(), END_LIMIT_S)
    assert process.stdin is not None
    process.stdin.close()


class Rewards(FunctionPool):
    """The function that ``[reward]`` names."""

    def __init__(self, reward: Reward) -> None:
        super().__init__("reward", reward.function, reward.timeout_s, reward.processes)

    async def score(self, item: dict[str, Any], response: str) -> float:
        """Return the reward of ``response``; raises as :meth:`call`."""
        return float(await self.call(item, response))


class PostProcess(FunctionPool):
    """The function that ``protocol.post_process`` names, in ``reward.processes`` processes."""

    def __init__(self, function: str | None, reward: Reward) -> None:
        processes = 0 if function is None else reward.processes
        super().__init__("post_process", function or "", reward.timeout_s, processes)

    async def judge(self, item: dict[str, Any], members: list[Member]) -> Verdict:
        """Return the verdict on a group; raises as :meth:`call`."""
        return msgspec.convert(await self.call(item, members), Verdict)
