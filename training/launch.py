"""Running the training loop: in this process, or on Ray workers that may be lost on the way."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ray
import ray.train
from ray.exceptions import RayError
from ray.train.torch import TorchTrainer

from rcir.cluster import cpus_per_gpu, join_cluster, quiet
from rcir.data import data_root
from rcir.errors import RcirError, WorkersLost
from rcir.runs.folder import RunFolder
from training import checkpoint
from training.config import TrainingConfig
from training.loop import Job, train_here
from training.progress import LOG, add_line, followed

Done = TypeVar("Done")


def launch(
    config: TrainingConfig, run: RunFolder, callback: ray.train.UserCallback | None = None
) -> None:
    """Train until the run's checkpoints hold all epochs, on Ray or in this process and thread.

    Workers that are lost are replaced, as many of them as there then may be, and go on from the
    last checkpoint.

    Args:
        callback: called after every epoch, see `training.train`.

    Raises:
        InvalidConfig: a GPU is asked for and the cluster has none.
        WorkersLost: `config.max_failures` times in a row without a new checkpoint.
        RcirError: what a worker raised on purpose; that is not tried again.
    """
    data = replace(config.data, root=str(data_root(config.data)))  # workers run elsewhere
    job = Job(replace(config, data=data), str(run.path), (run.mlflow_run, run.tracking_uri))
    if not config.most_workers:
        train_here(job, callback)
        return
    with followed({run.path / LOG: ""}):
        _until_done(config, run, job, callback)


def _until_done(
    config: TrainingConfig, run: RunFolder, job: Job, callback: ray.train.UserCallback | None
) -> None:
    """Start workers until all epochs are trained."""
    scaling = scaling_config(config, partial(add_line, run.path / LOG))
    failures = 0
    while True:
        before = checkpoint.last_epoch(run.path)
        trainer = TorchTrainer(
            _packed(job),
            scaling_config=scaling,
            run_config=ray.train.RunConfig(
                name="ray",
                storage_path=str(run.path),
                callbacks=[callback] if callback else None,  # type: ignore[list-item]
                # What fails is said below, in a line.
                logging_config=ray.train.LoggingConfig("CRITICAL"),  # type: ignore[call-arg]
            ),
        )
        try:
            with quiet("ray.train"):
                trainer.fit()
            return
        except ray.train.TrainingFailedError as error:
            causes = list(getattr(error, "worker_failures", {}).values()) or [error]
            for cause in causes:
                if isinstance(cause, RcirError):
                    raise cause from error
            reached = checkpoint.last_epoch(run.path)
            failures = 1 if reached > before else failures + 1
            kinds = ", ".join(sorted({type(cause).__name__ for cause in causes}))
            what = f"workers failed after epoch {reached} ({kinds})"
            if failures > config.max_failures:
                first = str(causes[0]).strip().partition("\n")[0]
                raise WorkersLost(
                    f"{what}, {failures} times in a row, at last by: {first}: see Ray's log, and "
                    f"give the same command again; it continues {run.path} from there"
                ) from error
            add_line(run.path / LOG, f"{what}: training continues from there")


def _packed(job: Job) -> Callable[[], None]:
    """The loop as Ray sends it: processes that only pass it on need not import it."""
    content = pickle.dumps(job)

    def run() -> None:
        import pickle

        from training.loop import training_loop

        training_loop(pickle.loads(content))

    return run


def scaling_config(
    config: TrainingConfig, say: Callable[[str], None] = print
) -> ray.train.ScalingConfig:
    """The workers to start, in the cluster that this process joins.

    A worker with a GPU gets its share of the CPUs too, to read images.

    Args:
        config: of the training.
        say: called with a line if the cluster is too small as yet.

    Raises:
        InvalidConfig: a GPU is asked for and the cluster has none.
    """
    join_cluster()
    each = {"GPU": 1.0, "CPU": cpus_per_gpu() // 1} if config.use_gpu else {}
    kind = "GPU" if config.use_gpu else "CPU"
    least = config.num_workers if isinstance(config.num_workers, int) else config.num_workers[0]
    available = ray.cluster_resources().get(kind, 0)
    if available < least:
        say(f"waiting for {least} {kind}s: the cluster has {available:g}")
    return ray.train.ScalingConfig(
        num_workers=config.num_workers,  # type: ignore[arg-type]
        use_gpu=config.use_gpu,
        resources_per_worker=each or None,
    )


def side_by_side(jobs: Sequence[Callable[[], Done]], on_ray: bool) -> list[Done]:
    """Run jobs, on Ray all at once, else one after the other in this process; their results.

    The jobs only wait for workers of their own, which Ray starts where CPUs and GPUs are free.
    When one fails the others are finished first.
    """
    if not on_ray:
        return [job() for job in jobs]
    join_cluster()
    task: Any = ray.remote(num_cpus=0)(_call)
    results = [task.remote(job) for job in jobs]
    done, failed = [], []
    for result in results:
        try:
            done.append(ray.get(result))
        except RayError as error:
            failed.append(error)
    if failed:
        cause = getattr(failed[0], "cause", None)
        raise cause if isinstance(cause, RcirError) else failed[0]
    return done


def _call(job: Callable[[], Done]) -> Done:
    return job()
