"""A Docker engine for the compose test: the one that runs here, or one of our own with images to match.

Where no image registry can be reached, Debian roots made by debootstrap stand in for the official images:
the same software under the same names, from Debian's packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Kept between runs: base images, wheels, an engine's own images. Delete it to begin afresh.
KEPT = Path(os.environ.get("ROQ_DOCKER_DIR") or Path(tempfile.gettempdir()) / "roq-docker")
STAND_INS = {
    "python:3.11-slim-bookworm": ("bookworm", "python3,python3-venv,libnuma1", ["CMD python3"]),
    "redis:8.2.1-bookworm": ("trixie", "redis-server", ["WORKDIR /data", "CMD redis-server"]),
}


class Docker:
    """Runs docker and compose against one engine.

    Attributes:
        env: the environment that reaches it.
        offline: no image registry could be reached, so builds need wheels.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self.offline = False

    def __call__(
        self, *arguments: str, timeout: float = 120, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """``docker ARGUMENTS``; a failure shows what it printed."""
        done = subprocess.run(
            ["docker", *arguments], env=self.env, text=True, capture_output=True, timeout=timeout, check=False
        )
        assert done.returncode == 0 or not check, f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done

    @property
    def answers(self) -> bool:
        """Whether an engine is there."""
        return self("version", check=False).returncode == 0

    @property
    def compose(self) -> list[str]:
        """The compose command: the plugin, or the program of its own."""
        if self("compose", "version", check=False).returncode == 0:
            return ["docker", "compose"]
        assert shutil.which("docker-compose"), "no compose: install docker-compose (Debian) or the plugin"
        return ["docker-compose"]

    def provide(self, image: str) -> None:
        """Have an image: as it is here, from its registry, or a stand-in."""
        if self("image", "inspect", image, check=False).returncode == 0:
            self.offline = self.offline or "roq stand-in" in self("image", "inspect", image).stdout
        elif self("pull", "-q", image, check=False, timeout=300).returncode != 0:
            self.offline = True
            self._stand_in(image, *STAND_INS[image])

    def _stand_in(self, image: str, suite: str, packages: str, changes: Sequence[str]) -> None:
        root = KEPT / suite
        if not (root / "etc/debian_version").exists() or (root / "debootstrap").exists():
            shutil.rmtree(root, ignore_errors=True)
            command = ["debootstrap", "--variant=minbase", f"--include=ca-certificates,{packages}", suite]
            subprocess.run([*command, str(root)], check=True, stdout=sys.stderr, timeout=600)
        if (root / "var/lib/redis").exists():  # the official image's volume belongs to the same user
            (root / "data").mkdir(exist_ok=True)
            owner = (root / "var/lib/redis").stat()
            os.chown(root / "data", owner.st_uid, owner.st_gid)
        options = [part for change in changes for part in ("--change", change)]
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
            subprocess.run(
                ["docker", "import", "--message", "roq stand-in", *options, "-", image],
                stdin=tar.stdout, env=self.env, check=True, stdout=sys.stderr, timeout=300,
            )  # fmt: skip


@contextmanager
def docker_engine() -> Iterator[Docker]:
    """The engine that runs here, or one started for the test and stopped after it (as root)."""
    docker = Docker({**os.environ, "DOCKER_BUILDKIT": "0"} if not _has_buildx() else dict(os.environ))
    if docker.answers:
        yield docker
        return
    KEPT.mkdir(parents=True, exist_ok=True)
    docker.env["DOCKER_HOST"] = f"unix://{KEPT}/socket"
    command = ["dockerd", "--data-root", f"{KEPT}/data", "--exec-root", f"{KEPT}/exec"]
    command += ["--pidfile", f"{KEPT}/pid", "--host", docker.env["DOCKER_HOST"]]
    with (KEPT / "dockerd.log").open("w") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not docker.answers:
            assert daemon.poll() is None, f"dockerd ended; see {KEPT}/dockerd.log"
            assert time.monotonic() < deadline, f"dockerd does not answer; see {KEPT}/dockerd.log"
            time.sleep(0.5)
        yield docker
    finally:
        daemon.terminate()
        daemon.wait(60)


def _has_buildx() -> bool:
    return subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode == 0


def wheels() -> Path:
    """Every package of the lock as a wheel, made once."""
    folder = KEPT / "wheels"
    lock = [ROOT / "requirements" / "torch-cpu.txt", ROOT / "requirements" / "cpu.txt"]
    stamp = folder / "lock"
    text = "".join(file.read_text(encoding="utf-8") for file in lock)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != text:
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder)]
        for file in lock:
            command += ["-r", str(file)]
        subprocess.run(command, check=True, stdout=sys.stderr, timeout=900)
        stamp.write_text(text, encoding="utf-8")
    return folder
