"""Functions that several training tests share."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import ray.train
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file
from scipy.stats import binom

from rcir.data import DataConfig, Preprocessing, load_splits
from rcir.encoders import build_encoder
from rcir.terminal import Work
from training.checkpoint import last_epoch
from training.trainer import Trainer
from training.workers import Workers

ON_RAY = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's own processes
]
CPU = torch.device("cpu")
ALONE = Workers(0, 1, CPU)
# Enough images for an encoder to learn something in seconds.
LEARNABLE = DataConfig(
    "digits", options={"train": 900, "validation": 100, "gallery": 400, "test": 600}
)


class Stop(ray.train.UserCallback):
    """A callback that stops a training after an epoch, and records reports and checkpoints."""

    def __init__(self, epoch=None, folder=None):
        self.epoch, self.folder, self.reports, self.checkpoints = epoch, folder, [], []

    def after_report(self, run_context, metrics, checkpoint):
        self.reports.append(metrics[0])
        if self.folder is not None:
            self.checkpoints.append(last_epoch(self.folder))
        if metrics[0]["epoch"] == self.epoch:
            raise SystemExit(0)

    @property
    def epochs(self):
        return [report["epoch"] for report in self.reports]


def equal(first, second):
    """Return whether two state dicts hold the same tensors, bit by bit."""
    assert first.keys() == second.keys()
    return all(torch.equal(values, second[name]) for name, values in first.items())


def same_weights(first, second, file="encoder.safetensors"):
    """Return whether a file of weights is equal in two runs."""
    return equal(load_file(first.path / file), load_file(second.path / file))


def unfinish(path):
    """Turn a finished run into one that stopped just before it chose its weights."""
    (path / "encoder.safetensors").unlink()
    stored = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(stored | {"finished": False}))


def logged(run, name="loss"):
    """A metric of a run in MLflow, by epoch."""
    history = MlflowClient(run.tracking_uri).get_metric_history(run.mlflow_run, name)
    assert len({metric.step for metric in history}) == len(history)
    return {metric.step: metric.value for metric in sorted(history, key=lambda each: each.step)}


def steps(run):
    """The epochs of a run in MLflow, each of which was logged once."""
    return [*logged(run)]


def processes_on(cluster, name):
    """Process ids of the workers of a Ray cluster: children of its raylets, with this name."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may be gone by now
            parent = (folder / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[1]
            raylet = Path("/proc", parent, "cmdline").read_text(errors="replace")
            if name in (folder / "cmdline").read_text(errors="replace") and cluster in raylet:
                processes.append(int(folder.name))
    return processes


def untrained(config):
    """The encoder that a training starts with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        preprocessing = config.preprocessing
        return build_encoder(config.encoder, preprocessing.channels, preprocessing.size)


def recall(encoder, splits):
    """Recall at 1 on classes that training never saw, by brute force."""
    preprocessing = Preprocessing()
    gallery, test = (
        encoder.embed(preprocessing(part.images)).vectors.double().numpy()
        for part in (splits.gallery, splits.test)
    )
    nearest = (test @ gallery.T).argmax(axis=1)
    return np.mean(splits.gallery.labels[nearest] == splits.test.labels)


def trainer_of(config, images=None, device=CPU):
    """A trainer in this process, without a run around it."""
    torch.manual_seed(config.seed)
    encoder = untrained(config).to(device, memory_format=torch.channels_last)
    # Adam divides gradients that are all rounding by themselves: an eps above these.
    optimizer = torch.optim.Adam(encoder.parameters(), config.optimizer.lr, eps=1e-5, fused=True)
    images = load_splits(config.data).train if images is None else images
    return Trainer(config, encoder, encoder, optimizer, images, Workers(0, 1, device))


def epochs(trainer, first=1, last=1):
    """Train some epochs and return the metrics of each."""
    return [trainer.epoch(number, Work("epoch")) for number in range(first, last + 1)]


def assert_close(actual, expected, rtol=1e-3):
    """Compare tensors by their norms: single numbers may be all rounding."""
    assert (actual - expected).norm() <= rtol * expected.norm() + 1e-9


def match_rank_bounds(distances, match, tolerance):
    """The lowest and highest rank that rounding may give the first match, in one search.

    Both are infinite where nothing matches.
    """
    if not match.any():
        return np.inf, np.inf
    first = distances[match].min()
    nearer = np.sum(distances[~match] < first - tolerance)
    return 1 + nearer, 1 + np.sum(distances[~match] <= first + tolerance)


def certified_size(parts, alpha, delta):
    """The mean set size that (scores, candidate scores) of folds certify, counted one by one.

    None if nothing can be certified.
    """
    sizes = []
    for scores, candidate_scores in parts:
        for threshold in np.sort(scores[np.isfinite(scores)]):
            if binom.cdf(np.sum(scores > threshold), len(scores), alpha) <= delta:
                limit = np.float32(float(threshold) * 1.001)  # a tie counts
                sizes += [sum(score <= limit for score in row) for row in candidate_scores]
                break
        else:
            return None
    return np.mean(sizes)
