"""Simulator commands: sim staleness, sim compare, sim plan, sim calibrate."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
import msgspec

from roq.cli.common import as_json, echo_json, exit_on_sigterm, notice, redis_option, run_option
from roq.client import Scheduler
from roq.errors import ConfigError
from roq.events.archive import read_archive
from roq.events.follow import read_events

if TYPE_CHECKING:  # these need the sim extra
    from rich.console import RenderableType

    from roq.sim.runs import Case
    from roq.sim.scenario import Scenario

__all__ = ["COMMANDS"]

F = TypeVar("F", bound=Callable[..., Any])

NEEDED = ("numpy", "simpy", "rich", "matplotlib")


@click.group()
def sim() -> None:
    """Simulate runs, to choose settings before using GPUs."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the simulator needs {', '.join(missing)}: pip install '.[sim]'")
    if threading.current_thread() is threading.main_thread():
        exit_on_sigterm()  # so that the servers end too


def scenario_options(command: F) -> F:
    """Add the options that define a scenario to a command, and pass it the scenario."""

    @click.option(
        "--cost", default="qwen3-8b-h20", show_default=True, help="Cost model: a name or a TOML file."
    )
    @click.option("--trace", help="Response lengths: a JSONL trace or an archive. Default: lognormal.")
    @click.option("--batch-size", default=16, show_default=True, help="Groups per batch.")
    @click.option("--group-size", default=8, show_default=True, help="Trajectories per prompt.")
    @click.option("--instances", default=2, show_default=True, help="Rollout instances.")
    @click.option("--places", default=40, show_default=True, help="Concurrent trajectories per instance.")
    @click.option("--trainer-gpus", default=6, show_default=True, help="Training GPUs.")
    @click.option("--reprefill/--no-reprefill", default=True, help="Recompute the KV cache on new weights.")
    @click.option(
        "--set",
        "changes",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set a coefficient: rollout.KEY, trainer.KEY or lengths.KEY; repeatable.",
    )
    @click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Number of seeds.")
    @click.option("--jobs", type=click.IntRange(1), help="Parallel processes. Default: all cores.")
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
    """Parse ``1,2,3`` as integers."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} must be whole numbers separated by commas") from None
    if len(set(found)) != len(found) or min(found) < 0:
        raise click.BadParameter(f"{text!r} must be distinct, non-negative numbers")
    return found


def outcome_options(command: F) -> F:
    """Add ``--figure`` and ``--json``."""
    figure = click.option(
        "--figure", type=click.Path(path_type=Path), help="Draw a figure: FIGURE.png and FIGURE.svg."
    )
    return figure(as_json(command))


@sim.command()
@click.option("--eta", "etas", default="0,1,2,3,4,5", show_default=True, callback=numbers)
@click.option(
    "--batches", default=100, show_default=True, type=click.IntRange(1), help="Batches per η and seed."
)
@scenario_options
@outcome_options
def staleness(
    scenario: Scenario, jobs: int, etas: list[int], batches: int, seeds: int, figure: Path | None, json_: bool
) -> None:
    """Simulate the staleness of every batch under roq.

    The article's experiment 1.
    """
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
@click.option(
    "--batches", default=10, show_default=True, type=click.IntRange(1), help="Batches from a cold start."
)
@click.option(
    "--steady", default=60, show_default=True, help="Continue to this batch for the steady state; 0: skip it."
)
@click.option("--policy", "policies", multiple=True, help="Policy to compare; repeatable. Default: all.")
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
    """Compare policies' throughput at equal maximum staleness.

    The article's experiment 2, of effective throughput.
    """
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
    help="Concurrent trajectories per instance (--places is ignored).",
)
@click.option(
    "--split",
    "splits",
    multiple=True,
    metavar="N+M",
    help="Rollout instances + training GPUs; repeatable. Default: --instances and --trainer-gpus.",
)
@click.option(
    "--slots", default="0", show_default=True, callback=numbers, help="Slots beyond the batch size."
)
@click.option(
    "--candidates", default="0", show_default=True, callback=numbers, help="Candidates beyond the group size."
)
@click.option("--batches", default=40, show_default=True, type=click.IntRange(2), help="Batches per setting.")
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
    """Sweep settings under roq and recommend one.

    The settings are η, concurrency, GPU split and over-sampling.
    """
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
        raise click.BadParameter(f"--split {text!r} must look like 2+6: rollout instances + training GPUs")
    return int(instances), int(gpus)


@sim.command()
@click.argument("events", required=False, type=click.Path(path_type=Path))
@redis_option
@run_option
@click.option("--name", default="calibrated", show_default=True, help="Name of the cost model.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the cost model to this TOML file.")
@as_json
def calibrate(
    events: Path | None, url: str | None, run: str | None, name: str, out: Path | None, json_: bool
) -> None:
    """Fit a cost model to a real run.

    Reads an archive (EVENTS, written by `roq events --archive`; it should be complete) or the run itself
    (--redis and --run). Checks the model by simulating that run with it.
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
            scheduler.config()  # an unknown run is a usage error, not a run without events
            found, source = RealRun.replay(read_events(scheduler)), f"run {run}"
    else:
        raise ConfigError("no run given: pass an archive of its events, or --redis URL and --run NAME")
    with scratch_server() as server:
        fitted = fit(found, name, server)
    if out is not None:
        out.write_text(cost_toml(fitted.cost, f"Fitted by roq sim calibrate to {source}."), encoding="utf-8")
        notice(f"cost model: {out}")
    if json_:
        echo_json(fitted)
    else:
        show(fit_table(fitted))


# ---- helpers -----------------------------------------------------------------------------------


@contextmanager
def progress(batches: int) -> Generator[Callable[[Case], None]]:
    """Show a progress bar on a terminal's stderr, in simulated batches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("batches"))
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=batches)
        yield lambda case: bar.advance(task, case.scenario.batches)


def show(picture: RenderableType) -> None:
    """Print a table without cutting it off."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=200)
    console.print(picture)


def drawn(paths: list[Path]) -> None:
    """Print the paths of the figures."""
    for path in paths:
        notice(f"figure: {path}")


COMMANDS = (sim,)
