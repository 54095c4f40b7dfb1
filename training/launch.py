"""Running the training loop: in this process, or on Ray workers that may be lost on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray
import ray.train
from ray.exceptions import RayTaskError
from ray.train.torch import TorchTrainer

from rcir.cluster import join_cluster, quiet
from rcir.data import data_root
from rcir.errors import RcirError, WorkersLost
from rcir.runs import RunFolder
from training import checkpoint
from training.config import TrainingConfig
from training.loop import Job, training_loop
from training.progress import console

Done = TypeVar("Done")


def launch(config: TrainingConfig, run: RunFolder) -> None:
    """Train until the run's checkpoints hold all epochs.

    Workers that are lost are replaced, as many of them as there then may be, and go on from the
    last checkpoint.

    Raises:
        WorkersLost: `config.max_failures` times in a row without a new checkpoint.
        RcirError: what a worker raised on purpose; that is not tried again.
    """
    data = replace(config.data, root=str(data_root(config.data)))  # workers run elsewhere
    job = Job(replace(config, data=data), str(run.path), (run.mlflow_run, run.tracking_uri))
    if config.most_workers:
        join_cluster(shown=True)
    failures = 0
    while True:
        before = checkpoint.last_epoch(run.path)
        trainer = TorchTrainer(
            training_loop,
            train_loop_config={"job": job},
            scaling_config=ray.train.ScalingConfig(
                num_workers=config.num_workers,  # type: ignore[arg-type]
                use_gpu=config.use_gpu,
            ),
            run_config=ray.train.RunConfig(name="ray", storage_path=str(run.path)),
        )
        try:
            with quiet("ray.train"):
                trainer.fit()
            return
        except ray.train.WorkerGroupError as error:
            for failure in error.worker_failures.values():
                if isinstance(failure, RcirError):
                    raise failure from error
            reached = checkpoint.last_epoch(run.path)
            failures = 1 if reached > before else failures + 1
            reasons = {type(each).__name__ for each in error.worker_failures.values()}
            what = f"workers failed after epoch {reached} ({', '.join(sorted(reasons))})"
            if failures > config.max_failures:
                first = str(next(iter(error.worker_failures.values()))).strip().splitlines()[0]
                raise WorkersLost(
                    f"{what}, {failures} times in a row, at last by: {first}: see Ray's log, and "
                    f"give the same command again; it continues {run.path} from there"
                ) from error
            console.print(f"{what}: training continues from there", soft_wrap=True)


def side_by_side(jobs: Sequence[Callable[[], Done]], on_ray: bool) -> list[Done]:
    """What each of some jobs returns: on Ray all at once, else one after the other in this process.

    The jobs only wait for workers of their own, which Ray starts as far as there are CPUs and GPUs.
    When one fails the others are finished first.
    """
    if not on_ray:
        return [job() for job in jobs]
    join_cluster(shown=True)
    task: Any = ray.remote(num_cpus=0)(_call)
    results = [task.remote(job) for job in jobs]
    done, failed = [], []
    for result in results:
        try:
            done.append(ray.get(result))
        except RayTaskError as error:
            failed.append(error)
    if failed:
        cause = failed[0].cause
        raise cause if isinstance(cause, RcirError) else failed[0]
    return done


def _call(job: Callable[[], Done]) -> Done:
    return job()
