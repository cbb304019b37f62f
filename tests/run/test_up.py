"""``roq up`` around its processes: restart, attach, stop, resume; with light stand-ins for the engines."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import roq_trainer.__main__
import roq_worker.__main__
from roq import Scheduler
from roq.processes import ProcessRecord, finish, read_records, start_mark
from roq.run.embedded_server import EmbeddedServer
from roq.run.supervisor import running_supervisor
from roq.run.up import trainer_command, worker_command
from tests.waiting import eventually

Job = Callable[..., Path]
Start = Callable[..., "subprocess.Popen[str]"]


def pids(folder: Path) -> dict[str, int]:
    return {
        name: record.pid
        for name, record in read_records(folder / "run" / "pids.json").items()
        if record.alive
    }


def steps(folder: Path) -> int:
    file = folder / "run" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def end(child: "subprocess.Popen[str]", within: float = 30.0) -> tuple[int, str]:
    output, _ = child.communicate(timeout=within)
    return child.returncode, output


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "summary.json").read_text())


def whole(folder: Path, total: int) -> dict[str, Any]:
    """The summary of a run that ended well."""
    found = summary(folder)
    assert (found["steps"], found["ended"], found["verify"]) == (total, True, [])
    assert found["batches_full"] == total
    assert found["ledger"]["trained"] == 2 * total
    assert found["max_staleness"] <= 1
    assert not EmbeddedServer(folder / "run").alive
    assert pids(folder) == {}
    return found


def test_a_folder_deleted_under_the_run(job: Job, folder: Path, start_up: Start) -> None:
    """Everything that was started is stopped, and the user is told."""
    up = start_up(job(protocol__total_steps=1000, protocol__epochs=9999), "--pace", "0.05")
    records: list[ProcessRecord] = []
    server: ProcessRecord | None = None
    try:
        eventually(lambda: steps(folder) > 3)
        records = list(read_records(folder / "run" / "pids.json").values())
        server = EmbeddedServer(folder / "run").record
        assert server is not None
        shutil.rmtree(folder / "run", ignore_errors=True)  # workers may write while it goes
        shutil.rmtree(folder / "run", ignore_errors=True)
        code, output = end(up, 60)
        assert code != 0
        assert f"{folder / 'run'} was deleted" in output
        assert "Traceback" not in output
        assert not [record.name for record in (*records, server) if record.alive]
    finally:
        for record in (*records, server):
            if record is not None:
                finish(record)


def test_the_password_of_a_server_is_in_no_command_line() -> None:
    url = "redis://me:sesame@host:6379"
    commands = [worker_command(url, "demo"), trainer_command(url, "demo", 1), trainer_command(url, "demo", 2)]
    assert "sesame" not in str(commands)
    assert "redis://host" in worker_command("redis://host", "demo")
    for program in (roq_worker.__main__.main, roq_trainer.__main__.main):  # they find it in their environment
        (option,) = [option for option in program.params if option.name == "url"]
        assert option.envvar == "ROQ_REDIS"


def test_a_whole_run(job: Job, folder: Path, start_up: Start, roq: Callable[..., Any]) -> None:
    code, output = end(start_up(job()))
    assert code == 0, output
    waited = summary(folder)["waiting"]
    report = roq("report", job(), "--out", folder / "report.html").stdout
    assert f"the trainer waited {waited['trainer']:.0%} of the time" in report, "report and summary agree"
    assert f"the workers were idle {waited['workers']:.0%} of the time" in report
    for number in range(1, 7):
        assert f"step {number}/6  reward " in output
    found = whole(folder, 6)
    assert found["eta"] == 1
    assert found["worker_processes"] == 2
    assert (folder / "run" / "summary.png").stat().st_size > 10_000

    (folder / "run" / "summary.json").unlink()
    code, output = end(start_up(job()))
    assert code == 0, output
    assert "worker-1 started" not in output, "a run that has ended is only summed up again"
    assert whole(folder, 6) == found | {"rss_bytes": summary(folder)["rss_bytes"]}


def test_dead_processes_are_started_again(job: Job, folder: Path, start_up: Start) -> None:
    up = start_up(job(protocol__total_steps=20))
    eventually(lambda: steps(folder) >= 3)
    before = pids(folder)
    os.kill(before["worker-1"], signal.SIGKILL)
    os.kill(before["trainer"], signal.SIGKILL)
    EmbeddedServer(folder / "run").kill()
    eventually(
        lambda: (
            {"worker-1", "trainer"} <= pids(folder).keys() and pids(folder)["trainer"] != before["trainer"]
        )
    )
    assert pids(folder)["worker-2"] == before["worker-2"]
    code, output = end(up)
    assert code == 0, output
    assert "worker-1 was killed by SIGKILL" in output
    assert "trainer was killed by SIGKILL" in output
    assert "the server has exited" in output
    assert whole(folder, 20)["worker_processes"] == 3


def test_a_trainer_that_fails_for_good_ends_the_run(job: Job, folder: Path, start_up: Start) -> None:
    code, output = end(start_up(job(), "--die-at", 2))
    last = output.splitlines()[-1]
    assert code == 1
    assert "trainer ended with exit code 1 3 times in a row" in last
    assert last.endswith("ends: RuntimeError: the gradient exploded")
    assert output.count("restarting it in") == 2
    assert "    RuntimeError: the gradient exploded" in output
    assert pids(folder) == {}
    assert not EmbeddedServer(folder / "run").alive


def test_a_trainer_with_a_configuration_error_is_not_started_again(
    job: Job, folder: Path, start_up: Start
) -> None:
    code, output = end(start_up(job(), "--die-at", 1, "--exit", 2))
    assert code == 1  # the driver's; `roq up` gives 2
    assert "ConfigError: trainer ended with exit code 2" in output
    assert "restarting it" not in output


def test_killed_supervisor_leaves_all_running_and_the_next_one_attaches(
    job: Job, folder: Path, start_up: Start
) -> None:
    first = start_up(job(protocol__total_steps=25), "--hold-at", 20)  # so that the second finds it running
    eventually(lambda: steps(folder) >= 2)
    first.kill()
    first.wait()
    before, reached = pids(folder), steps(folder)
    assert len(before) == 3
    eventually(lambda: steps(folder) >= min(reached + 3, 20))
    record = folder / "run" / "pids.json"
    written = record.stat().st_mtime_ns
    second = start_up(job(protocol__total_steps=25))
    eventually(lambda: record.stat().st_mtime_ns != written)  # it has attached
    (folder / "go").touch()
    code, output = end(second)
    assert code == 0, output
    assert output.count(": attached") == 3
    assert "resuming after step" in output
    assert "step 1/25" not in output, "what was told before is not told again"
    found = whole(folder, 25)
    assert found["trainer_processes"] == 1
    assert found["worker_processes"] == 2


def test_without_a_supervisor_the_run_goes_to_its_end(job: Job, folder: Path, start_up: Start) -> None:
    first = start_up(job(protocol__total_steps=12))
    eventually(lambda: steps(folder) >= 1)
    first.kill()
    first.wait()
    eventually(lambda: pids(folder) == {})
    assert steps(folder) == 12
    assert EmbeddedServer(folder / "run").alive, "the data stays readable"
    with Scheduler(EmbeddedServer(folder / "run").url, "demo") as sched:
        assert sched.status().ended


def test_stop_and_continue(job: Job, folder: Path, start_up: Start) -> None:
    first = start_up(job(protocol__total_steps=15))
    eventually(lambda: steps(folder) >= 2)
    first.send_signal(signal.SIGTERM)
    code, output = end(first)
    assert code == 143
    assert "to resume" in output.splitlines()[-1]
    assert "killed" not in output.splitlines()[-1]
    assert pids(folder) == {}
    assert not EmbeddedServer(folder / "run").alive
    reached = steps(folder)
    assert reached < 15
    code, output = end(start_up(job(protocol__total_steps=15)))
    assert code == 0, output
    found = whole(folder, 15)
    assert found["trainer_processes"] == 2
    assert found["wall_s"] < 30


def test_a_process_that_does_not_leave_is_killed(job: Job, folder: Path, start_up: Start) -> None:
    up = start_up(job(protocol__total_steps=1000))
    eventually(lambda: steps(folder) >= 1)
    os.kill(pids(folder)["worker-1"], signal.SIGSTOP)
    up.send_signal(signal.SIGINT)
    eventually(lambda: pids(folder).keys() == {"worker-1"})
    up.send_signal(signal.SIGINT)  # in a hurry
    code, output = end(up, within=10)
    assert code == 130
    assert "(worker-1 had to be killed)" in output


def test_down(job: Job, folder: Path, start_up: Start, roq: Callable[..., Any]) -> None:
    file = job(protocol__total_steps=1000)
    first = start_up(file)
    eventually(lambda: steps(folder) >= 1)
    first.kill()
    first.wait()
    assert len(pids(folder)) == 3
    done = roq("down", file)
    assert done.returncode == 0
    assert "stopping trainer" in done.stdout
    assert pids(folder) == {}
    assert not EmbeddedServer(folder / "run").alive
    assert roq("down", file).returncode == 0, "nothing to stop is fine"


def test_down_ends_a_running_up_first(
    job: Job, folder: Path, start_up: Start, roq: Callable[..., Any]
) -> None:
    file = job(protocol__total_steps=1000)
    up = start_up(file)
    eventually(lambda: steps(folder) >= 1)
    assert roq("down", file).returncode == 0
    code, output = end(up)
    assert code == 143
    assert "restarting it" not in output
    assert pids(folder) == {}


def test_one_supervisor_at_a_time(job: Job, folder: Path, start_up: Start) -> None:
    file = job(protocol__total_steps=1000)
    first = start_up(file)
    eventually(lambda: len(pids(folder)) == 3)
    code, output = end(start_up(file))
    assert code == 1
    assert f"another roq up (pid {first.pid})" in output
    assert first.poll() is None
    assert running_supervisor(folder / "run").pid == first.pid


def test_a_reused_pid_is_never_killed(
    job: Job, folder: Path, start_up: Start, roq: Callable[..., Any]
) -> None:
    """The record names a pid that now belongs to an innocent process."""
    file = job(protocol__total_steps=3)
    end(start_up(file))
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as innocent:
        record = {"name": "worker-1", "pid": innocent.pid, "mark": "00000000-1"}
        (folder / "run" / "pids.json").write_text(json.dumps([record]))
        assert roq("down", file).returncode == 0
        finish(read_records(folder / "run" / "pids.json")["worker-1"])
        assert start_mark(innocent.pid) is not None
        innocent.kill()


def test_on_a_server_of_ones_own(job: Job, folder: Path, url: str, start_up: Start) -> None:
    code, output = end(start_up(job(redis__url=url)))
    assert code == 0, output
    assert summary(folder)["steps"] == 6
    assert EmbeddedServer(folder / "server").alive, "a server that up did not start is not stopped"
    assert not (folder / "run" / "server").exists()


def test_too_few_prompts_for_one_batch_are_refused(job: Job, folder: Path, start_up: Start) -> None:
    code, output = end(start_up(job(protocol__batch_size=9, protocol__epochs=1)))
    assert code == 1  # the driver's; `roq up` gives 2
    assert "ConfigError" in output
    assert "batch_size = 9" in output
    assert not (folder / "run").exists()


def test_a_run_that_only_fails_is_paused_and_continues_when_the_cause_is_fixed(
    job: Job, folder: Path, start_up: Start
) -> None:
    (folder / "failing").touch()
    file = job(protocol__pause_after_failures=12)
    code, output = end(start_up(file))
    assert (code, output.splitlines()[-1].partition(":")[0]) == (1, "RunIncomplete"), output
    assert "attempts failed, latest: TypeError: the reward is a dict; `roq dead`" in output, "as it happens"
    found = summary(folder)
    assert (found["ended"], found["steps"]) == (False, 0)
    assert "TypeError: the reward is a dict" in found["shortfall"]
    assert found["ledger"]["dead"] <= 2, "not all prompts are used up"
    assert pids(folder) == {}
    (folder / "failing").unlink()
    code, output = end(start_up(file))
    assert code == 0, output
    assert whole(folder, 6)["shortfall"] is None


def test_a_run_that_ended_with_dead_prompts_continues_with_them(
    job: Job, folder: Path, start_up: Start, roq: Callable[..., Any]
) -> None:
    """8 prompts for 3 steps of 2: they all die, are put back, and suffice."""
    (folder / "failing").touch()
    file = job(protocol__epochs=1, protocol__total_steps=3, protocol__max_attempts=1)
    code, output = end(start_up(file))
    assert (code, output.splitlines()[-1].partition(":")[0]) == (1, "RunIncomplete"), output
    found = summary(folder)
    assert (found["ended"], found["ledger"]["dead"]) == (True, 8)
    assert "8 dead" in found["shortfall"]
    assert "8 dead" in roq("status", file).stdout
    (folder / "failing").unlink()
    assert roq("dead", file, "--revive-all").returncode == 0
    code, output = end(start_up(file))
    assert code == 0, output
    assert whole(folder, 3)["ledger"]["dead"] == 0


def test_a_run_that_must_end_early_says_so_first(job: Job, folder: Path, start_up: Start) -> None:
    code, output = end(start_up(job(protocol__epochs=1, protocol__total_steps=5)))
    assert "warning: 8 prompts in batches of 2 are enough for 4 steps" in output
    assert (code, output.splitlines()[-1].partition(":")[0]) == (1, "RunIncomplete"), output
    assert summary(folder)["steps"] == 4


def test_a_run_that_has_ended_continues_with_more_steps(
    job: Job, folder: Path, start_up: Start, roq: Callable[..., Any]
) -> None:
    code, output = end(start_up(job()))
    assert code == 0, output
    file = job(protocol__total_steps=8, rollout__workers=1)
    code, output = end(start_up(file))
    assert code == 0, output
    assert "protocol.total_steps (run: 6, now: 8)" in output
    assert "rollout.workers (run: 2, now: 1)" in output
    whole(folder, 8)
    assert "total_steps: 6 -> 8" in roq("events", file).stdout
