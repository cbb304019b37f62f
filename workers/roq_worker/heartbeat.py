"""Renew a worker's lease from a separate thread, even while the worker's event loop is blocked.

A lease lasts ``lease_s``; a rollout may take many times that. The thread renews three times per lease
on its own connection, so a slow reward, a weight swap or a blocked event loop does not lose a claim.
A worker without progress must lose its claims: when :meth:`Heartbeat.tick` has not been called for
:data:`STALLED_AFTER_S`, the thread stops renewing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from roq.errors import RoqError, ServerUnavailable
from roq.types import Renewal

__all__ = ["STALLED_AFTER_S", "Heartbeat", "Renewer"]

STALLED_AFTER_S = 300.0  # longer than any engine step or weight load


class Renewer(Protocol):
    """The part of ``roq.Scheduler`` that a heartbeat uses."""

    def renew(self, worker: str, version: int | None = None, info: dict[str, Any] | None = None) -> Renewal:
        """See ``roq.Scheduler.renew``."""
        ...


class Heartbeat:
    """Renew ``worker``'s lease every ``lease_s / 3`` until :meth:`stop`.

    Args:
        scheduler: a synchronous scheduler that only this thread uses.
        on_renewal: gets each answer; runs in the thread.
        on_failure: gets a permanent refusal, such as an unknown run; runs in the thread.
        say: prints one line.

    Attributes:
        info: shown in status; its ``version`` is the one that the engine has loaded. The main thread
            replaces the dict and never changes it in place.
    """

    def __init__(
        self,
        scheduler: Renewer,
        worker: str,
        lease_s: float,
        *,
        on_renewal: Callable[[Renewal], None],
        on_failure: Callable[[RoqError], None],
        say: Callable[[str], None],
        stalled_after_s: float = STALLED_AFTER_S,
    ) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._every_s = lease_s / 3
        self.info: dict[str, Any] = {}
        self._on_renewal = on_renewal
        self._on_failure = on_failure
        self._say = say
        self._stalled_after_s = stalled_after_s
        self._ticked_at = time.monotonic()
        self._stop = threading.Event()
        self._now = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roq-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread; the first renewal, which registers the worker, comes at once."""
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Stop renewing; wait at most ``timeout_s`` for a renewal in progress."""
        self._stop.set()
        self._now.set()
        self._thread.join(timeout_s)

    def tick(self) -> None:
        """Report progress."""
        self._ticked_at = time.monotonic()

    def renew_now(self) -> None:
        """Renew without waiting for the next turn, e.g. to show a new weights version in status."""
        self._now.set()

    def _run(self) -> None:
        stalled = away = False
        while not self._stop.is_set():
            began = time.monotonic()
            silent_s = began - self._ticked_at
            if silent_s > self._stalled_after_s:
                if not stalled:
                    self._say(f"no progress for {silent_s:.0f} s: no longer renewing the lease")
                stalled = True
            else:
                stalled = False
                try:
                    info = self.info
                    self._on_renewal(self._scheduler.renew(self._worker, info.get("version"), info))
                    away = False
                except ServerUnavailable as error:
                    if not away:
                        self._say(f"heartbeat: {error}")
                    away = True
                except RoqError as error:
                    self._on_failure(error)
                    return
            self._now.wait(max(0.0, self._every_s - (time.monotonic() - began)))
            self._now.clear()
