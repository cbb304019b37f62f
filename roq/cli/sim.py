"""Commands that simulate: sim staleness, sim compare, sim plan, sim calibrate."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
import msgspec

from roq.cli.common import as_json, echo_json, notice
from roq.client import Scheduler
from roq.errors import ConfigError
from roq.events.archive import read_archive
from roq.events.follow import read_events

if TYPE_CHECKING:  # the simulator's packages are an extra
    from rich.console import RenderableType

    from roq.sim.runs import Case
    from roq.sim.scenario import Scenario

__all__ = ["COMMANDS"]

F = TypeVar("F", bound=Callable[..., Any])

NEEDED = ("numpy", "simpy", "rich", "matplotlib")


@click.group()
def sim() -> None:
    """Simulate runs before any GPU is rented: η, concurrency, and what a staleness mechanism costs."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the simulator needs {', '.join(missing)}: pip install '.[sim]'")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)


def _end(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM: leave as Ctrl-C does, so that the servers end with us."""
    sys.exit(143)


def scenario_options(command: F) -> F:
    """Give a command the options that make a scenario, and pass it that scenario."""

    @click.option("--cost", default="qwen3-8b-h20", show_default=True, help="Cost model: name or TOML file.")
    @click.option("--trace", help="Lengths: a JSONL trace or a run's event log, instead of the lognormal.")
    @click.option("--batch-size", default=16, show_default=True, help="Groups in a batch.")
    @click.option("--group-size", default=8, show_default=True, help="Trajectories of a prompt.")
    @click.option("--instances", default=2, show_default=True, help="Rollout instances.")
    @click.option("--places", default=40, show_default=True, help="Trajectories at once per instance.")
    @click.option("--trainer-gpus", default=6, show_default=True, help="GPUs that train.")
    @click.option("--reprefill/--no-reprefill", default=True, help="New weights void the KV cache in flight.")
    @click.option(
        "--set",
        "changes",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change a coefficient: rollout.KEY, trainer.KEY or lengths.KEY.",
    )
    @click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Seeds to run.")
    @click.option("--jobs", type=click.IntRange(1), help="Processes at once; default: all cores.")
    @functools.wraps(command)
    def wrapped(
        cost: str,
        trace: str | None,
        batch_size: int,
        group_size: int,
        instances: int,
        places: int,
        trainer_gpus: int,
        reprefill: bool,
        changes: tuple[str, ...],
        jobs: int | None,
        **rest: Any,
    ) -> Any:
        from roq.sim.cost import load_cost
        from roq.sim.scenario import Scenario, changed
        from roq.sim.workload import Lognormal

        scenario = Scenario(
            cost=load_cost(cost), lengths=trace or Lognormal(), batch_size=batch_size, group_size=group_size,
            instances=instances, places=places, trainer_gpus=trainer_gpus, reprefill=reprefill,
        )  # fmt: skip
        return command(
            scenario=changed(scenario, changes).checked(), jobs=jobs or os.cpu_count() or 1, **rest
        )

    return cast("F", wrapped)


def numbers(_ctx: click.Context, _param: click.Parameter, text: str) -> list[int]:
    """``1,2,3`` as whole numbers."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} must be whole numbers with commas between") from None
    if len(set(found)) != len(found) or min(found) < 0:
        raise click.BadParameter(f"{text!r} must be different numbers from 0 on")
    return found


def outcome_options(command: F) -> F:
    """``--figure`` and ``--json``."""
    figure = click.option(
        "--figure", type=click.Path(path_type=Path), help="Draw it: FIGURE.png and FIGURE.svg."
    )
    return figure(as_json(command))


@sim.command()
@click.option("--eta", "etas", default="0,1,2,3,4,5", show_default=True, callback=numbers)
@click.option("--batches", default=100, show_default=True, type=click.IntRange(1), help="Of each η and seed.")
@scenario_options
@outcome_options
def staleness(
    scenario: Scenario, jobs: int, etas: list[int], batches: int, seeds: int, figure: Path | None, json_: bool
) -> None:
    """Experiment 1: every batch's trajectories by staleness, under roq."""
    from roq.sim.charts import draw_staleness
    from roq.sim.experiments import staleness as experiment
    from roq.sim.tables import staleness_table

    scenario = msgspec.structs.replace(scenario, batches=batches)
    with progress(len(etas) * seeds * batches) as tick:
        found = experiment(scenario, etas, seeds, jobs, tick)
    if json_:
        echo_json(found)
    else:
        show(staleness_table(found))
    if figure is not None:
        drawn(draw_staleness(found, figure))


@sim.command()
@click.option("--eta", "etas", default="1,2,3", show_default=True, callback=numbers)
@click.option("--batches", default=10, show_default=True, type=click.IntRange(1), help="From a cold start.")
@click.option(
    "--steady", default=60, show_default=True, help="Go on to this batch for the steady state; 0: do not."
)
@click.option("--policy", "policies", multiple=True, help="Only these (default: all); may be repeated.")
@scenario_options
@outcome_options
def compare(
    scenario: Scenario,
    jobs: int,
    etas: list[int],
    batches: int,
    steady: int,
    policies: tuple[str, ...],
    seeds: int,
    figure: Path | None,
    json_: bool,
) -> None:
    """Experiment 2: effective throughput of every mechanism at equal maximum staleness."""
    from roq.sim.charts import draw_comparison
    from roq.sim.cost import load_cost
    from roq.sim.experiments import compare as experiment
    from roq.sim.policies import load_policy, policy_names
    from roq.sim.scenario import Scenario
    from roq.sim.tables import comparison_tables

    names = list(policies) or policy_names()
    for name in names:
        load_policy(name)
    article = scenario == Scenario(cost=load_cost("qwen3-8b-h20")) and batches == 10
    scenario = msgspec.structs.replace(scenario, batches=batches)
    with progress(len(etas) * len(names) * seeds * max(batches, steady)) as tick:
        found = experiment(scenario, etas, seeds, steady, jobs, tick, names)
    if json_:
        echo_json(found)
    else:
        show(comparison_tables(found, with_article=article))
    if figure is not None:
        drawn(draw_comparison(found, figure))


@sim.command()
@click.option("--eta", "etas", default="1,2,3", show_default=True, callback=numbers)
@click.option(
    "--concurrency",
    default="24,40",
    show_default=True,
    callback=numbers,
    help="Trajectories at once per instance (--places is not looked at).",
)
@click.option(
    "--split",
    "splits",
    multiple=True,
    metavar="N+M",
    help="Rollout instances + GPUs that train; repeatable. Default: --instances and --trainer-gpus.",
)
@click.option(
    "--slots", default="0", show_default=True, callback=numbers, help="Slots beyond the batch size."
)
@click.option(
    "--candidates", default="0", show_default=True, callback=numbers, help="Candidates beyond the group size."
)
@click.option("--batches", default=40, show_default=True, type=click.IntRange(2), help="Of each setting.")
@scenario_options
@as_json
def plan(
    scenario: Scenario,
    jobs: int,
    etas: list[int],
    concurrency: list[int],
    splits: tuple[str, ...],
    slots: list[int],
    candidates: list[int],
    batches: int,
    seeds: int,
    json_: bool,
) -> None:
    """Sweep η, concurrency, GPU split and over-sampling under roq; recommend a setting."""
    from roq.sim.plan import Sweep
    from roq.sim.plan import plan as make
    from roq.sim.tables import plan_table

    sweep = Sweep(
        etas=etas,
        places=concurrency,
        slots=slots,
        candidates=candidates,
        splits=[_split(text) for text in splits] or [(scenario.instances, scenario.trainer_gpus)],
    )
    scenario = msgspec.structs.replace(scenario, batches=batches)
    with progress(len(sweep.scenarios(scenario)) * seeds * batches) as tick:
        found = make(scenario, sweep, seeds, jobs, tick)
    if json_:
        echo_json(found)
    else:
        show(plan_table(found))


def _split(text: str) -> tuple[int, int]:
    instances, _, gpus = text.partition("+")
    if not (instances.isdecimal() and gpus.isdecimal() and int(instances) and int(gpus)):
        raise click.BadParameter(f"--split {text!r} must look like 2+6: rollout instances + GPUs that train")
    return int(instances), int(gpus)


@sim.command()
@click.argument("events", required=False, type=click.Path(path_type=Path))
@click.option("--redis", "url", envvar="ROQ_REDIS", show_envvar=True, help="URL of a run's server.")
@click.option("--run", envvar="ROQ_RUN", show_envvar=True, help="Name of the run on it.")
@click.option("--name", default="calibrated", show_default=True, help="Name of the cost model.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the cost model to this TOML file.")
@as_json
def calibrate(
    events: Path | None, url: str | None, run: str | None, name: str, out: Path | None, json_: bool
) -> None:
    """Fit a cost model to a real run: its archive (EVENTS) or the run itself (--redis, --run).

    An archive is what `roq events --archive` writes; it should be whole. The model
    is checked by simulating that run with it.
    """
    from roq.sim.calibrate import calibrate as fit
    from roq.sim.calibrate import cost_toml
    from roq.sim.events import RealRun
    from roq.sim.runs import scratch_server
    from roq.sim.tables import fit_table

    if events is not None:
        found, source = RealRun.replay(read_archive(events)), f"the events in {events.name}"
    elif url is not None and run is not None:
        with Scheduler(url, run) as scheduler:
            scheduler.config()  # an unknown run is the caller's mistake, not one without events
            found, source = RealRun.replay(read_events(scheduler)), f"run {run}"
    else:
        raise ConfigError("which run? Give an archive of its events, or --redis URL and --run NAME")
    with scratch_server() as server:
        fitted = fit(found, name, server)
    if out is not None:
        out.write_text(cost_toml(fitted.cost, f"Fitted by roq sim calibrate to {source}."), encoding="utf-8")
        notice(f"cost model: {out}")
    if json_:
        echo_json(fitted)
    else:
        show(fit_table(fitted))


# ---- what the commands share -------------------------------------------------------------------


@contextmanager
def progress(batches: int) -> Generator[Callable[[Case], None]]:
    """A progress bar on a terminal's stderr, in simulated batches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("batches"))
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=batches)
        yield lambda case: bar.advance(task, case.scenario.batches)


def show(picture: RenderableType) -> None:
    """Print a table as wide as it needs to be."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=200)
    console.print(picture)


def drawn(paths: list[Path]) -> None:
    """Say where the pictures are."""
    for path in paths:
        notice(f"figure: {path}")


COMMANDS = (sim,)
