"""Many simulations at once: worker processes, a server of its own for each, a progress bar."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import msgspec

from roq.client.connect import connect
from roq.run.embedded_server import EmbeddedServer
from roq.sim.outcome import Outcome
from roq.sim.policies import load_policy
from roq.sim.scenario import Scenario
from roq.sim.workload import Workload
from roq.sim.world import World

__all__ = ["Case", "run_cases", "scratch_server", "simulate"]


class Case(msgspec.Struct, frozen=True):
    """One simulation."""

    scenario: Scenario
    policy: str
    seed: int


def simulate(
    scenario: Scenario,
    policy: str,
    seed: int = 0,
    server: str | None = None,
    workload: Workload | None = None,
) -> Outcome:
    """Simulate a run; the outcome is a function of the arguments.

    Args:
        scenario: what is simulated.
        policy: the name of a policy, see :func:`roq.sim.policies.policy_names`.
        seed: of the lengths.
        server: URL of a server for roq's own library; only the policy ``roq`` needs it.
        workload: lengths, instead of the scenario's for this seed.

    Raises:
        ConfigError: the scenario cannot work; the message says why.
    """
    return World(scenario.checked(), load_policy(policy), seed, server, workload).run()


@contextmanager
def scratch_server() -> Generator[str]:
    """Start a temporary server without an append-only file; yields its URL."""
    folder = Path(tempfile.mkdtemp(prefix="roq-sim-"))
    server = EmbeddedServer(folder)
    try:
        server.start()
        client = connect(server.url)
        client.config_set("appendonly", "no")
        client.close()
        yield server.url
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


_url: str | None = None  # of this worker process's server


def _begin(urls: SimpleQueue[str | None]) -> None:
    global _url  # noqa: PLW0603 - how an initializer hands things to a pool's tasks
    _url = urls.get()


def _work(case: Case) -> Outcome:
    return simulate(case.scenario, case.policy, case.seed, _url)


def run_cases(
    cases: Sequence[Case], processes: int, on_outcome: Callable[[Case], None] = lambda _: None
) -> list[Outcome]:
    """Simulate all cases; the outcomes in their order.

    Args:
        cases: what to simulate.
        processes: how many at once.
        on_outcome: called when a case has ended.

    Raises:
        ConfigError: a case cannot work.
    """
    for scenario in dict.fromkeys(case.scenario for case in cases):
        scenario.checked().suits(scenario.workload(0))
    for case in cases:
        load_policy(case.policy).check(case.scenario)
    processes = min(processes, len(cases))
    needs_server = any(case.policy == "roq" for case in cases)
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        urls: SimpleQueue[str | None] = context.SimpleQueue()
        for _ in range(processes):
            urls.put(stack.enter_context(scratch_server()) if needs_server else None)
        pool = stack.enter_context(
            ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(urls,))
        )
        # the longest first: those that talk to a server, then by length
        order = sorted(cases, key=lambda case: (case.policy != "roq", -case.scenario.batches))
        futures = {pool.submit(_work, case): case for case in order}
        found: dict[Case, Outcome] = {}
        try:
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                on_outcome(futures[future])
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)  # running simulations need their server
            raise
    return [found[case] for case in cases]
