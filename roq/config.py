"""The configuration of a job: one strict TOML file.

``[protocol]`` holds the rules that the scheduler enforces (:class:`RunConfig`); the other sections
configure workers and the trainer. ``roq init`` stores all of it with the run in Redis, so a worker needs
only the server's URL and the run's name. An unknown key is an error that names the nearest valid one.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from roq.errors import ConfigError

__all__ = [
    "CHANGEABLE",
    "Data",
    "Job",
    "Logging",
    "Model",
    "Reward",
    "Rollout",
    "Run",
    "RunConfig",
    "Server",
    "Training",
    "Wandb",
    "load_job",
]

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Fraction = Annotated[float, Meta(ge=0, le=1)]

FUNCTION = r"\A[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z"
"""An importable ``module:function``."""
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules that the scheduler enforces for a run; fixed when the run is created.

    Attributes:
        eta: maximum staleness: a group is trained in a buffer ``b <= v_traj + eta``.
        batch_size: groups in a training batch (B).
        group_size: trajectories of one prompt in a group (G); 1 is plain trajectories.
        buffer_slots: slots of a buffer (S >= B), more for over-sampling; default: ``batch_size``.
        group_candidates: candidates generated for a group (G' >= G), more for over-sampling; default:
            ``group_size``.
        prompts: prompts in the data set; ``roq init`` counts them. In Python, unlimited by default.
        epochs: passes over the data set; None (in Python) repeats it forever.
        total_steps: end the run after this many updates; default: when the prompts are used up.
        lease_s: a worker that is silent for this long loses its claims.
        max_attempts: failed attempts at one member (its reward or engine failed, or its worker died; a
            release does not count) before its prompt is dead-lettered; also the limit of drops of one prompt.
        pause_after_failures: pause the run, and issue nothing more, when this many attempts have failed and
            none has succeeded: the prompts are not the cause then. ``roq up`` stops with an error.
        on_drop: what happens to a dropped prompt.
        filter_zero_variance: drop finished groups whose rewards are all equal (dynamic sampling).
        post_process: ``module:function`` that a worker runs over every finished group before it is placed
            (roq/postprocess.py defines its signature); default: none, groups are placed at once.
        stuck_timeout_s: drop the nearest buffer's unfinished groups once the trainer has waited this long for
            only them; default: never.
        max_inflight: most trajectories in flight, over all workers.
        max_payload_bytes: admission stops while this much trajectory data is in Redis.
        max_trajectory_bytes: a larger trajectory or prefix is refused.
        event_log: events to keep in the run's stream; ``roq audit`` needs the complete history.
    """

    eta: Annotated[int, Meta(ge=0, le=100)]
    batch_size: Annotated[int, Meta(ge=1, le=4096)]
    group_size: Annotated[int, Meta(ge=1, le=256)] = 1
    buffer_slots: Annotated[int, Meta(ge=1, le=8192)] | None = None
    group_candidates: Annotated[int, Meta(ge=1, le=512)] | None = None
    prompts: Positive | None = None
    epochs: Positive | None = 1
    total_steps: Positive | None = None
    lease_s: Annotated[float, Meta(ge=0.05, le=86400)] = 30.0
    max_attempts: Positive = 8
    pause_after_failures: Positive | None = 32
    on_drop: Literal["requeue", "discard"] = "requeue"
    filter_zero_variance: bool = False
    post_process: Annotated[str, Meta(pattern=FUNCTION)] | None = None
    stuck_timeout_s: Seconds | None = None
    max_inflight: Positive | None = None
    max_payload_bytes: Positive | None = None
    max_trajectory_bytes: Annotated[int, Meta(ge=1024, le=512 << 20)] = 64 << 20
    event_log: Annotated[int, Meta(ge=100)] = 100_000

    def __post_init__(self) -> None:
        if self.buffer_slots is not None and self.buffer_slots < self.batch_size:
            raise ValueError(
                f"buffer_slots = {self.buffer_slots} must be at least batch_size = {self.batch_size}"
            )
        if self.group_candidates is not None and self.group_candidates < self.group_size:
            raise ValueError(
                f"group_candidates = {self.group_candidates} must be at least group_size = {self.group_size}"
            )
        if self.filter_zero_variance and self.group_size == 1:
            raise ValueError("filter_zero_variance needs group_size >= 2: one trajectory has no variance")

    def checked(self) -> RunConfig:
        """This configuration with every value checked, which Python's constructor does not do.

        Raises:
            ConfigError: a value is invalid; the message names it.
        """
        try:
            return msgspec.convert(msgspec.structs.asdict(self), RunConfig)
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(_plain(str(error))) from None

    @property
    def slots(self) -> int:
        """Slots of a buffer (S)."""
        return self.batch_size if self.buffer_slots is None else self.buffer_slots

    @property
    def candidates(self) -> int:
        """Candidates of a group (G')."""
        return self.group_size if self.group_candidates is None else self.group_candidates


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[run]``: the run itself.

    Attributes:
        name: letters, digits, ".", "_" or "-", at most 64; part of every key in Redis.
        dir: folder of weights, checkpoints, logs and the embedded server's data.
        seed: seed of the prompt order, of sampling and of the trainer.
        weights: location of published weights, if not in ``dir``: another folder that all workers can read,
            or the URL of an object store, such as ``s3://bucket/prefix`` (docs/deploy.md).
        transfer: how workers get new weights: "files" reads them from their location; "nccl" (between GPUs)
            and "gloo" (between CPUs) receive them from the trainer's host, and read files if that fails.
    """

    name: str
    dir: str
    seed: int = 0
    weights: str | None = None
    transfer: Literal["files", "nccl", "gloo"] = "files"

    def __post_init__(self) -> None:
        if not self.dir or "\0" in self.dir:
            raise ValueError("dir must name the run's folder")
        if not RUN_NAME.fullmatch(self.name):
            raise ValueError(f"name = {self.name!r} must be letters, digits, '.', '_' or '-', at most 64")
        if self.weights is not None and (not self.weights.strip("/") or "\0" in self.weights):
            raise ValueError("weights must name a folder or an object store")
        if self.weights is not None and re.match(r"\w[\w.+-]*://([^/]*@|.*\?)", self.weights):
            raise ValueError(
                "weights must not contain a user, password or query: all users can read the job in Redis; "
                "the store's driver takes credentials from its environment"
            )


class Server(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[redis]``: the server.

    Attributes:
        url: its URL; default: ``roq up`` starts an embedded server in the run's folder.
    """

    url: str | None = None


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[model]``: the model to train.

    Attributes:
        path: a Hugging Face folder or hub name.
        dtype: data type of the weights, in the trainer and in vLLM.
    """

    path: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[data]``: prompts from a file or from a reasoning-gym data set.

    Attributes:
        file: JSONL or parquet with a prompt and an answer per row; give this or ``dataset``.
        dataset: the name of a reasoning-gym data set.
        size: number of generated items of ``dataset``.
        seed: generator seed of ``dataset``.
        settings: further settings of ``dataset``, passed to reasoning-gym.
        prompt_field: the field of ``file`` that holds the question.
        answer_field: the field that holds the answer.
        template: the prompt text; must contain ``{prompt}``, which stands for the question.
        chat: apply the tokenizer's chat template to the prompt text, as one user turn.
        shuffle: shuffle every epoch by (run seed, epoch).
        max_prompt_tokens: longer prompts are refused before the run is created, and by workers.
    """

    file: str | None = None
    dataset: str | None = None
    size: Positive = 1000
    seed: int = 0
    settings: dict[str, Any] = {}
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    template: str = "{prompt}"
    chat: bool = False
    shuffle: bool = True
    max_prompt_tokens: Positive = 1024

    def __post_init__(self) -> None:
        if (self.file is None) == (self.dataset is None):
            raise ValueError('give either file = "…jsonl" or dataset = "…" (a reasoning-gym name)')
        if "{prompt}" not in self.template:
            raise ValueError(f"template = {self.template!r} must contain {{prompt}}")


class Reward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[reward]``: how a response is scored; the function is called with the data row and the response text.

    Attributes:
        function: ``module:function``, called as ``function(item, response)``; returns a float.
        timeout_s: a call that raises or takes longer fails the attempt; it is not a reward of 0. Also applies
            to ``protocol.post_process``.
        processes: processes per worker that run the function; as many more run ``protocol.post_process``.
    """

    function: str = "roq.rewards:reasoning_gym"
    timeout_s: Seconds = 10.0
    processes: Positive = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(FUNCTION, self.function):
            raise ValueError(f"function = {self.function!r} must look like module:function")


class Rollout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[rollout]``: the vLLM workers.

    Attributes:
        workers: worker processes that ``roq up`` starts.
        max_concurrency: trajectories that one engine generates at once.
        max_tokens: longest response, in tokens.
        temperature: sampling temperature; log-probs are taken after it is applied.
        top_p, top_k: keep at 1.0 and 0; other values bias the log-probs.
        allow_truncated_sampling: permit other values of ``top_p`` and ``top_k`` anyway.
        stop: strings that end a response, in addition to the tokenizer's end token.
        partial_rollout: load new weights during generation; responses in flight continue with them. False
            finishes them first: no response mixes versions, but a worker idles until its longest one is done.
        kv_on_swap: with new weights, "recompute" the KV cache of responses in flight, or "keep" it.
        save_prefix_every_s: how often long responses save their tokens so far; default: only when released.
        shutdown_s: how long a worker may take to release its work after SIGTERM.
        engine: further vLLM engine arguments, passed on unchanged.
    """

    workers: Positive = 1
    max_concurrency: Positive = 64
    max_tokens: Positive = 1024
    temperature: Annotated[float, Meta(gt=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    allow_truncated_sampling: bool = False
    stop: list[str] = []
    partial_rollout: bool = True
    kv_on_swap: Literal["recompute", "keep"] = "recompute"
    save_prefix_every_s: Seconds | None = None
    shutdown_s: Seconds = 10.0
    engine: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if (self.top_p != 1.0 or self.top_k != 0) and not self.allow_truncated_sampling:
            raise ValueError(
                "top_p and top_k renormalise the log-probs, so importance ratios are wrong; "
                "set allow_truncated_sampling = true if you want that"
            )


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[trainer]``: the Megatron training process.

    Attributes:
        tensor_parallel: ranks that share each layer; torchrun starts the product of these three.
        pipeline_parallel: stages of layers.
        data_parallel: replicas.
        lr: Adam's learning rate.
        weight_decay: decoupled, as in AdamW.
        adam_beta1, adam_beta2: Adam's decay rates.
        grad_clip: largest norm of the gradient; 0 does not clip.
        clip_low, clip_high: PPO ratio clip, ``1 - clip_low`` to ``1 + clip_high``.
        importance_cap: upper bound of the trainer/engine importance weight (truncated importance sampling).
        normalize_advantage: divide a group's advantages by the standard deviation of its rewards.
        micro_batch_size: sequences in one forward pass.
        max_seq_tokens: longest prompt + response that the trainer accepts.
        checkpoint_every: updates between checkpoints.
        keep_checkpoints: complete checkpoints kept on disk. Redis keeps the batches since the oldest of them,
            so the run can resume from any; docs/operations.md has the memory that this takes.
        keep_weights: newest published weights to keep even if no worker needs them.
        worker_timeout_s: exit with an error if no worker is alive for this long.
        progress_timeout_s: exit with an error if the awaited batch makes no progress for this long.
    """

    tensor_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    data_parallel: Positive = 1
    lr: Annotated[float, Meta(gt=0, le=10)] = 1e-6
    weight_decay: Annotated[float, Meta(ge=0, le=10)] = 0.0
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.95
    grad_clip: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    clip_low: Fraction = 0.2
    clip_high: Annotated[float, Meta(ge=0, le=1e9)] = 0.28
    importance_cap: Annotated[float, Meta(gt=0, le=1e9)] = 2.0
    normalize_advantage: bool = True
    micro_batch_size: Positive = 8
    max_seq_tokens: Positive = 2048
    checkpoint_every: Positive = 10
    keep_checkpoints: Positive = 2
    keep_weights: Positive = 2
    worker_timeout_s: Seconds = 300.0
    progress_timeout_s: Seconds = 1800.0

    @property
    def ranks(self) -> int:
        """The total number of training processes."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


class Wandb(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[logging] wandb``: the run in Weights & Biases; see :class:`Logging`."""

    project: str
    mode: Literal["online", "offline"] = "online"
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: list[str] = []


class Logging(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[logging]``: where the trainer's metrics go, in addition to ``metrics.jsonl`` in the run's folder.

    Attributes:
        tensorboard: write event files into ``tensorboard/`` of the run's folder.
        wandb: log to Weights & Biases: a table with ``project`` and, optionally, ``mode`` ("offline" writes
            into ``wandb/`` of the run's folder, for ``wandb sync``), ``entity``, ``group``, ``name``
            (default: the run's) and ``tags``. The wandb library finds the login (``WANDB_API_KEY``).
    """

    tensorboard: bool = False
    wandb: Wandb | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. Paths in it are relative to the file; :func:`load_job` makes them absolute."""

    run: Run
    protocol: RunConfig
    model: Model
    data: Data
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    trainer: Training = Training()
    redis: Server = Server()
    logging: Logging = Logging()


CHANGEABLE = frozenset(
    [
        *(f"protocol.{key}" for key in ("epochs", "total_steps")),  # only up
        *(f"protocol.{key}" for key in ("stuck_timeout_s", "max_inflight", "max_payload_bytes", "event_log")),
        "protocol.pause_after_failures",
        *(f"reward.{key}" for key in ("timeout_s", "processes")),
        *(f"rollout.{key}" for key in ("workers", "max_concurrency", "partial_rollout", "kv_on_swap")),
        *(f"rollout.{key}" for key in ("save_prefix_every_s", "shutdown_s", "engine")),
        *(f"trainer.{key}" for key in Training.__struct_fields__),
        *(f"logging.{key}" for key in Logging.__struct_fields__),
    ]
)
"""The keys that may differ between two starts of a run: each concerns one process alone, or is a limit that
the library looks up in every call. All others define the run's data or protocol. ``redis.url`` is not part of
the run."""

_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "run": Run,
    "protocol": RunConfig,
    "model": Model,
    "data": Data,
    "reward": Reward,
    "rollout": Rollout,
    "trainer": Training,
    "redis": Server,
    "logging": Logging,
}


def _refuse_unknown(path: Path, table: Iterable[object], valid: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in valid:
            near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else f"; valid keys are {', '.join(valid)}"
            raise ConfigError(f"{path}: unknown key {key!r} in {where}{hint}")


def _absolute(base: Path, value: str, name: str) -> str:
    if not value or "\0" in value:
        raise ConfigError(f"{name} = {value!r} is not a valid path")
    try:
        path = Path(value).expanduser()
        return str(path if path.is_absolute() else (base / path).resolve())
    except (OSError, RuntimeError) as error:  # a symlink loop; the home of an unknown user
        raise ConfigError(f"{name} = {value!r}: {error}") from None


def load_job(path: str | Path) -> Job:
    """Read and check a job file.

    Raises:
        ConfigError: the file is missing or not TOML, or a key or value in it is invalid.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except (OSError, ValueError) as error:  # missing, not text, or an invalid path
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    _refuse_unknown(path, table, tuple(_SECTIONS), "the file")
    for name, section in _SECTIONS.items():
        part: object = table.get(name, {})
        if not isinstance(part, dict):
            raise ConfigError(f"{path}: [{name}] must be a table")
        _refuse_unknown(path, cast("Iterable[object]", part), section.__struct_fields__, f"[{name}]")
    try:
        job = msgspec.convert(table, Job)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_plain(str(error))}") from None
    base = path.resolve().parent
    model = job.model.path
    looks_local = model.startswith((".", "/", "~")) or "\0" in model or (base / model).exists()
    return msgspec.structs.replace(
        job,
        run=msgspec.structs.replace(
            job.run,
            dir=_absolute(base, job.run.dir, "run.dir"),
            weights=job.run.weights
            if job.run.weights is None or "://" in job.run.weights
            else _absolute(base, job.run.weights, "run.weights"),
        ),
        model=msgspec.structs.replace(
            job.model, path=_absolute(base, model, "model.path") if looks_local else model
        ),
        data=job.data
        if job.data.file is None
        else msgspec.structs.replace(job.data, file=_absolute(base, job.data.file, "data.file")),
    )


def _plain(message: str) -> str:
    """msgspec's message with its JSON path written as a TOML key, and the choices if there are any."""
    match = re.fullmatch(r"(.*) - at `\$\.?(.*)`", message)
    if not match or not match[2]:
        return message.removesuffix(" - at `$`")
    what = match[1]
    if what.startswith("Invalid enum value"):
        what += f"; one of {', '.join(map(repr, _choices(match[2])))}"
    return f"{match[2]}: {what}"


def _choices(key: str) -> tuple[str, ...]:
    """The legal values of ``section.key``, or of a key of :class:`RunConfig`."""
    kind: Any = Job if "." in key else RunConfig
    for name in key.split("."):
        kind = get_type_hints(kind)[name]
    return next((get_args(part) for part in (kind, *get_args(kind)) if get_origin(part) is Literal), ())
