"""The compose file, the images and the Kubernetes manifests, read without an engine or a cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from roq.config import Rollout, load_job

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
DOCKERFILES = [ROOT / "workers/Dockerfile", ROOT / "trainer/Dockerfile", ROOT / "deploy/Dockerfile"]

RUN = {"secrets", "redis"}
SERVICES = {
    "cpu": RUN | {"base-model", "init", "worker", "trainer"},
    "gpu": RUN | {"init-gpu", "worker-gpu", "trainer-gpu"},
    "cpu,observe": RUN
    | {"base-model", "init", "worker", "trainer", "metrics", "board", "prometheus", "grafana"},
}
ROLE = {"init": "admin", "worker": "worker", "trainer": "trainer", "metrics": "board", "board": "board"}


def compose(profiles: str | None) -> dict[str, Any]:
    """The compose file as compose understands it."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False) if (
        shutil.which("docker")
    ) else None  # fmt: skip
    if plugin is not None and plugin.returncode == 0:
        command = ["docker", "compose"]
    elif shutil.which("docker-compose"):
        command = ["docker-compose"]
    elif os.environ.get("ROQ_CI"):
        pytest.fail("no docker compose here; scripts/setup --tests installs it on Debian")
    else:
        pytest.skip("no docker compose here")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ROQ_", "COMPOSE_"))}
    env |= {"DOCKER_HOST": "unix:///nonexistent"}  # the file alone
    if profiles is not None:
        env["COMPOSE_PROFILES"] = profiles
    done = subprocess.run(
        [*command, "config"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    file = yaml.safe_load(done.stdout)
    default = re.search(r"^COMPOSE_PROFILES=(.*)$", (ROOT / ".env").read_text(encoding="utf-8"), re.MULTILINE)
    assert default is not None
    chosen = set((profiles or default[1]).split(","))
    file["services"] = {  # the older compose prints those of other profiles too
        name: service
        for name, service in file["services"].items()
        if not service.get("profiles") or chosen & set(service["profiles"])
    }
    return file


@pytest.fixture(scope="module", params=list(SERVICES))
def project(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The profiles, and what they make of the file."""
    return request.param, compose(request.param)


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """{path in the container: what is mounted there}."""
    found = {}
    for mount in service.get("volumes", []):
        if isinstance(mount, str):  # compose v1
            source, target = mount.split(":")[:2]
        else:
            source, target = mount.get("source", ""), mount["target"]
        found[target] = source
    return found


def test_compose_runs_the_demo_job_by_default() -> None:
    services = compose(None)["services"]
    assert set(services) == SERVICES["cpu"]
    assert services["init"]["command"] == ["init", "jobs/gcd.toml", "--weights", "weights/gcd"]
    job = load_job(ROOT / "examples" / "gcd.toml")
    assert services["worker"]["environment"]["ROQ_RUN"] == job.run.name
    # relative to the job's folder, jobs/
    assert job.run.dir == str(ROOT / "runs" / "gcd")
    assert mounts(services["trainer"])["/srv/roq/runs"] == "runs"


def test_compose_profiles(project: tuple[str, dict[str, Any]]) -> None:
    profiles, file = project
    assert set(file["services"]) == SERVICES[profiles]
    assert file["networks"]["redis"]["internal"] is True


def test_compose_is_locked_down(project: tuple[str, dict[str, Any]]) -> None:
    for name, service in project[1]["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        assert re.search(r":v?\d+\.\d+\.\d+(-\w+)?$", service["image"]), f"{name}: pin the version"
        for port in service.get("ports", []):
            host = port if isinstance(port, str) else port["host_ip"] + ":"
            assert host.startswith("127.0.0.1:"), name
        for key, value in service.get("environment", {}).items():
            assert "password" not in str(value).replace("password_file=", "").replace("/password", ""), key
    redis = project[1]["services"]["redis"]
    assert "ports" not in redis
    assert list(redis["networks"]) == ["redis"]
    assert redis["user"] == "redis"


def test_compose_gives_a_service_its_own_password_only(project: tuple[str, dict[str, Any]]) -> None:
    for name, service in project[1]["services"].items():
        secrets = {source for source in mounts(service).values() if source.startswith("secret-")}
        role = ROLE.get(name.removesuffix("-gpu"))
        if role is not None:
            assert secrets == {f"secret-{role}"}, name
            assert f"username=roq-{role}&" in service["environment"]["ROQ_REDIS"], name
        elif name not in ("secrets", "redis"):
            assert not secrets, name


def writable(service: dict[str, Any]) -> dict[str, str]:
    """{volume: path} of what a service may write."""
    found: dict[str, str] = {}
    for mount in service.get("volumes", []):
        if isinstance(mount, str):  # compose v1
            source, target, *mode = mount.split(":")
            read_only = "ro" in mode[0].split(",") if mode else False
        else:
            source, target, read_only = (
                mount.get("source", ""),
                mount["target"],
                mount.get("read_only", False),
            )
        if not read_only:
            found[source] = target
    return found


def test_compose_lets_nobody_but_the_trainer_write_weights_or_see_checkpoints(
    project: tuple[str, dict[str, Any]],
) -> None:
    """Checkpoints are pickles: whoever writes them runs code in the trainer."""
    everyone = compose("cpu,gpu,observe,cli")["services"] | project[1]["services"]
    trainers = {name for name in everyone if name.startswith("trainer")}
    assert trainers
    caches: dict[str, set[str]] = {}
    for name, service in everyone.items():
        role = name.removesuffix("-gpu")
        for volume in writable(service):
            caches.setdefault(volume, set()).add(role)
        if name in trainers:
            assert writable(service)["runs"] == "/srv/roq/runs"
            assert writable(service)["weights"] == "/srv/roq/weights"
        else:
            assert "runs" not in mounts(service).values(), f"{name} has the trainer's checkpoints"
            assert "weights" not in writable(service), name
    for volume in ("worker-cache", "trainer-cache", "worker-logs"):
        assert caches[volume] == {volume.partition("-")[0]}, volume
    shared = {v for v, roles in caches.items() if len(roles) > 1 and not v.startswith("secret-")}
    assert not shared, "written by several roles"
    for worker in (everyone[name] for name in everyone if name.startswith("worker")):
        assert mounts(worker)["/srv/roq/weights"] == "weights"


def test_compose_restarts_failures_and_lets_work_be_handed_back(project: tuple[str, dict[str, Any]]) -> None:
    for name, service in project[1]["services"].items():
        expected = {"redis": "unless-stopped"} | dict.fromkeys(
            ("secrets", "init", "init-gpu", "base-model"), "no"
        )
        assert service["restart"] == expected.get(name, "on-failure"), name
        if name.startswith("worker"):
            assert seconds(service["stop_grace_period"]) >= Rollout().shutdown_s + 10


def seconds(text: str) -> float:
    parts = re.findall(r"(\d+)([hms])", text)
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts)


def test_mounted_files_exist() -> None:
    services = compose("cpu,observe")["services"]
    for name, service in services.items():
        for source in mounts(service).values():
            if source.startswith("/"):
                assert Path(source).exists(), f"{name} mounts {source}"
    for script in ("make-secrets", "redis-healthy", "install"):
        assert os.access(ROOT / "deploy" / script, os.X_OK), script


def test_redis_keeps_what_it_acknowledged() -> None:
    lines = (ROOT / "deploy" / "redis.conf").read_text(encoding="utf-8").splitlines()
    settings = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    assert (settings["appendonly"], settings["appendfsync"]) == ("yes", "always")
    assert settings["maxmemory-policy"] == "noeviction"
    assert "aclfile" in settings


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_images_run_as_an_ordinary_user_and_copy_what_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    for stage in stages[1:]:  # the first one is for building
        assert re.findall(r"^USER (.*)$", stage, re.MULTILINE)[-1] == "10001:10001"
        assert re.search(r"^ENTRYPOINT \[", stage, re.MULTILINE)
    for arg in re.findall(r"^ARG \w+_IMAGE=(\S+)$", text, re.MULTILINE):
        assert re.search(r":v?\d[\w.-]+$", arg), f"{arg}: pin the version"
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for source in sources.replace("${WHEELS}", "deploy/wheels").split():
            assert (ROOT / source).exists(), source
            assert any(pattern == source or pattern.startswith(f"{source}/") for pattern in allowed), (
                f".dockerignore keeps {source} out"
            )


# ---- Kubernetes ----------------------------------------------------------------------------------


def documents() -> list[dict[str, Any]]:
    """Every object of the manifests."""
    return [
        document
        for file in sorted(KUBERNETES.glob("*.yaml"))
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8"))
    ]


OBJECTS = documents()
PODS = [o for o in OBJECTS if o["kind"] in ("Job", "Deployment", "StatefulSet")]


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = [o for o in OBJECTS if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def test_kubernetes_objects_are_of_known_kinds_and_in_the_namespace() -> None:
    versions = {
        "Namespace": "v1", "PersistentVolumeClaim": "v1", "ConfigMap": "v1", "Service": "v1",
        "NetworkPolicy": "networking.k8s.io/v1", "StatefulSet": "apps/v1", "Deployment": "apps/v1",
        "Job": "batch/v1",
    }  # fmt: skip
    for o in OBJECTS:
        assert o["apiVersion"] == versions[o["kind"]]
        assert o["kind"] == "Namespace" or o["metadata"]["namespace"] == "roq"
    names = [(o["kind"], o["metadata"]["name"]) for o in OBJECTS]
    assert len(set(names)) == len(names)


def test_kubernetes_selectors_find_their_pods() -> None:
    labels = {o["metadata"]["name"]: o["spec"]["template"]["metadata"]["labels"] for o in PODS}
    for o in PODS:
        if o["kind"] != "Job":
            assert o["spec"]["selector"]["matchLabels"].items() <= labels[o["metadata"]["name"]].items()
    for service in [o for o in OBJECTS if o["kind"] == "Service"]:
        selector = service["spec"]["selector"].items()
        (pod,) = [o for o in PODS if selector <= labels[o["metadata"]["name"]].items()]
        ports = {p["containerPort"] for c in containers(pod) for p in c.get("ports", [])}
        assert {port["port"] for port in service["spec"]["ports"]} <= ports
    policy = named("NetworkPolicy", "redis")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels["redis"].items()
    (allowed,) = policy["ingress"][0]["from"]
    for name in set(labels) - {"redis"}:
        assert allowed["podSelector"]["matchLabels"].items() <= labels[name].items(), name


def containers(o: dict[str, Any]) -> list[dict[str, Any]]:
    return o["spec"]["template"]["spec"]["containers"]


@pytest.mark.parametrize("o", PODS, ids=lambda o: o["metadata"]["name"])
def test_kubernetes_pods_are_locked_down_and_whole(o: dict[str, Any]) -> None:
    pod = o["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    claims = {c["metadata"]["name"] for c in o["spec"].get("volumeClaimTemplates", [])}
    images = set(re.findall(r"image: (\S+)", (ROOT / "docker-compose.yml").read_text(encoding="utf-8")))
    for container in containers(o):
        assert container["image"] in images
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"requests", "limits"} <= container["resources"].keys()
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == volumes.keys() | claims
        env = {entry["name"]: entry["value"] for entry in container.get("env", [])}
        secret = volumes["secrets"]["secret"]
        assert secret["defaultMode"] == 0o440
        if "ROQ_REDIS" in env:
            role = re.search(r"username=roq-(\w+)&password_file=/run/secrets/password$", env["ROQ_REDIS"])
            assert role is not None
            assert secret["secretName"] == f"roq-{role[1]}"
    for volume in volumes.values():
        if "configMap" in volume:
            named("ConfigMap", volume["configMap"]["name"])
        if "persistentVolumeClaim" in volume:
            named("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])


def test_kubernetes_lets_nobody_but_the_trainer_write_weights_or_see_checkpoints() -> None:
    job = tomllib.loads(named("ConfigMap", "roq-job")["data"]["job.toml"])
    assert job["run"]["dir"].startswith("/runs/")
    assert job["run"]["weights"].startswith("/weights/")
    for o in PODS:
        name = o["metadata"]["name"]
        volumes = {volume["name"]: volume for volume in o["spec"]["template"]["spec"].get("volumes", [])}
        for container in containers(o):
            for mount in container["volumeMounts"]:
                claim = volumes.get(mount["name"], {}).get("persistentVolumeClaim")
                if claim is None:
                    continue  # an emptyDir or a secret: the pod's own
                if claim["claimName"] == "roq-runs":
                    assert name == "roq-trainer", f"{name} has the trainer's checkpoints"
                elif name != "roq-trainer":
                    assert mount.get("readOnly") is True, name
                    assert claim.get("readOnly") is True, name
    (worker,) = containers(named("Deployment", "roq-worker"))
    paths = {mount["mountPath"]: mount["name"] for mount in worker["volumeMounts"]}
    assert (paths["/weights"], paths["/runs"]) == ("weights", "logs")


def test_kubernetes_redis_is_the_compose_file_s() -> None:
    data = named("ConfigMap", "roq-redis")["data"]
    for name in ("redis.conf", "redis-healthy"):
        assert data[name].strip() == (ROOT / "deploy" / name).read_text(encoding="utf-8").strip()
    (container,) = containers(named("StatefulSet", "redis"))
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()


def test_kubernetes_job_is_one(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(named("ConfigMap", "roq-job")["data"]["job.toml"], encoding="utf-8")
    job = load_job(file)
    for o in PODS:
        for container in containers(o):
            for entry in container.get("env", []):
                assert entry["name"] != "ROQ_RUN" or entry["value"] == job.run.name
    pod = named("Deployment", "roq-worker")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= job.rollout.shutdown_s + 10
    assert job.run.dir.startswith("/runs/")
    trainer = named("Job", "roq-trainer")["spec"]
    gpus = trainer["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == job.trainer.ranks
