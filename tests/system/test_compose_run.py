"""The compose file with a real Docker engine: the main job, workers that come and go, Redis killed.

    ROQ_DOCKER=1 pytest tests/system/test_compose_run.py -s

Opt-in: it needs a Docker engine (one is started if none runs; then as root), a few GB of disk, and about ten
minutes the first time. Without an image registry it also needs debootstrap.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.docker_engine import STAND_INS, Docker, docker_engine, wheels
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(os.environ.get("ROQ_DOCKER") != "1", reason="set ROQ_DOCKER=1 to run it"),
]

STEPS = 90  # long enough that the run still goes on after all that is done to it
BASE_MODEL = ROOT / "models" / "base"


class Stack:
    """The compose project, in a copy of the tree."""

    def __init__(self, docker: Docker, folder: Path) -> None:
        self._docker = docker
        self._compose = [*docker.compose, "--project-name", "roqtest"]
        self.folder = folder
        self._env = docker.env | {"ROQ_JOBS": "./jobs", "COMPOSE_PROFILES": "cpu"}
        self.began = time.monotonic()

    def __call__(self, *arguments: str, timeout: float = 300, check: bool = True) -> str:
        """``docker compose ARGUMENTS``; returns its standard output."""
        done = subprocess.run(
            [*self._compose, *arguments],
            cwd=self.folder, env=self._env, text=True, capture_output=True, timeout=timeout, check=False,
        )  # fmt: skip
        if check and done.returncode != 0:
            pytest.fail(f"compose {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def roq(self, *arguments: str) -> Any:
        """A roq command's JSON."""
        return json.loads(self("run", "--rm", "-T", "roq", *arguments, "--json"))

    def say(self, what: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {what}", file=sys.stderr, flush=True)

    def until(self, what: str, holds: Callable[[], bool], seconds: float) -> None:
        until(holds, what, seconds, lambda: self("logs", "--tail", "40", check=False), every=1)
        self.say(what)

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What the engine says of a service's containers, those that have ended too."""
        label = "label=com.docker.compose.project=roqtest"
        which = f"label=com.docker.compose.service={service}"
        ids = self._docker("ps", "-aq", "--filter", label, "--filter", which).stdout.split()
        return json.loads(self._docker("inspect", *ids).stdout) if ids else []

    def version(self) -> int:
        return self.roq("status")["version"]

    def live(self) -> int:
        """Workers that are ready."""
        workers = self.roq("workers")
        return sum(worker["version"] is not None and worker["lease_left_s"] > 0 for worker in workers)


@pytest.fixture(scope="module")
def docker() -> Iterator[Docker]:
    with docker_engine() as docker:
        for image in STAND_INS:
            docker.provide(image)
        yield docker


@pytest.fixture
def stack(docker: Docker, tmp_path: Path) -> Iterator[Stack]:
    tree = tmp_path / "tree"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    if docker.offline:
        for wheel in wheels().glob("*.whl"):
            shutil.copy(wheel, tree / "deploy" / "wheels")
    job = (tree / "examples" / "gcd.toml").read_text(encoding="utf-8")
    (tree / "jobs").mkdir()
    job = re.sub(r"total_steps = \d+", f"total_steps = {STEPS}", job)
    job = re.sub(r"^size = \d+", f"size = {STEPS * 16 + 500}", job, flags=re.MULTILINE)
    (tree / "jobs" / "gcd.toml").write_text(job, encoding="utf-8")
    stack = Stack(docker, tree)
    stack("down", "--volumes", "--remove-orphans", check=False)
    try:
        yield stack
    finally:
        stack("down", "--volumes", "--timeout", "30", check=False)


def test_the_main_job_with_workers_that_come_and_go_and_redis_killed(stack: Stack) -> None:
    stack("build", timeout=1500)
    stack.say("images built")
    if (BASE_MODEL / "base_model.json").exists():  # made by an earlier `make demo`: spares a minute
        # copyfile: for another user to read
        made = shutil.copytree(BASE_MODEL, stack.folder / "made", copy_function=shutil.copyfile)
        copy = ["--volume", f"{made}:/made:ro", "--entrypoint", "cp", "base-model"]
        stack("run", "--rm", "-T", "--no-deps", *copy, "-rT", "/made", "models/base")
        stack.say("base model copied")
    stack("up", "-d", timeout=900)
    stack.say("up: there is a base model, the run is created")
    stack.until("three steps trained by one worker", lambda: stack.version() >= 3, 600)

    hardened(stack)

    stack("up", "-d", "--no-recreate", "--scale", "worker=3")
    stack.until("three workers at work", lambda: stack.live() == 3, 600)
    stack("kill", "redis")
    stack.say("Redis killed")
    time.sleep(5)
    stack("start", "redis")
    version = 0

    def back() -> bool:
        nonlocal version
        version = stack.version()
        return True

    stack.until("Redis is back", back, 300)
    assert version < STEPS, "the run ended too early to say anything"
    stack.until("two more steps", lambda: stack.version() >= min(STEPS, version + 2), 600)

    stack("up", "-d", "--no-recreate", "--scale", "worker=1")
    stack.until("one worker is left", lambda: len(stack.roq("workers")) == 1, 120)
    version = stack.version()
    assert version < STEPS, "the run ended too early to say anything"
    stack.until(f"all {STEPS} steps trained", lambda: stack.version() == STEPS, 1200)

    def over(service: str) -> bool:
        return all(not container["State"]["Running"] for container in stack.containers(service))

    stack.until("trainer and worker have left", lambda: over("trainer") and over("worker"), 120)
    for service in ("trainer", "worker", "init", "base-model"):
        for container in stack.containers(service):
            assert container["State"]["ExitCode"] == 0, stack("logs", service)
            assert container["RestartCount"] == 0, stack("logs", service)

    status = stack.roq("status")
    assert status["ended"]
    assert status["ledger"]["trained"] == STEPS * 16
    assert stack.roq("verify")["ok"]
    stack.say(stack("run", "--rm", "-T", "roq", "audit").strip())


def hardened(stack: Stack) -> None:
    """Users, roots and ports are what the file promises; the password is needed and does not do all."""
    for service in ("redis", "worker", "trainer"):
        (container, *_) = stack.containers(service)
        host = container["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["CapDrop"] == ["ALL"], service
        assert not container["NetworkSettings"]["Ports"].get("6379/tcp"), service
        assert stack("exec", "-T", service, "id", "-u").strip() != "0", service
    assert "NOAUTH" in stack("exec", "-T", "redis", "redis-cli", "get", "x")
    passwords = {
        role: stack("exec", "-T", role, "cat", "/run/secrets/password") for role in ("worker", "trainer")
    }
    assert len(set(passwords.values())) == 2
    for role, password in passwords.items():
        assert len(password) == 64
        assert password not in stack("logs")
        for forbidden in ("flushall", "eval 'return 1' 0", "config get dir", "set x 1", "keys *"):
            login = f"REDISCLI_AUTH={password} redis-cli --user roq-{role} {forbidden}"
            assert "NOPERM" in stack("exec", "-T", "redis", "sh", "-c", login), (role, forbidden)
    for path in ("/srv/roq/weights/x", "/srv/roq/weights/gcd/x", "/srv/roq/models/x"):
        tried = stack("exec", "-T", "worker", "sh", "-c", f"touch {path} 2>&1 || echo refused", check=False)
        assert "refused" in tried, path
    seen = stack(
        "exec", "-T", "worker", "sh", "-c", "find / -name 'step_*' -o -name checkpoints 2>/dev/null || true"
    )
    assert "checkpoints" not in seen, seen
    assert "step_" not in seen, seen
    stack.say("hardened: users, roots, ports, passwords, rights, weights, checkpoints")
