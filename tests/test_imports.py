"""What an import costs, in a process of its own."""

import json
import subprocess
import sys

import pytest

from rcir.cli.main import COMMANDS

HEAVY = ("torch", "torchvision", "faiss", "ray", "mlflow", "sklearn", "matplotlib", "torch._dynamo")


def loaded(statement, heavy=HEAVY):
    """Which heavy packages a statement loads."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    modules = json.loads(process.stdout.splitlines()[-1])
    return {name for name in heavy if name in modules}


def test_risk_control_alone_needs_none_of_the_others():
    assert loaded("import rcir, rcir.risk; rcir.RiskUnattainable; dir(rcir)") == set()


VECTORS = """
import numpy as np, rcir
rng = np.random.default_rng(0)
labels = rng.integers(5, size=700)
vectors = np.eye(5)[labels] + 0.2 * rng.standard_normal((700, 5))
retriever = rcir.Retriever.from_embeddings(vectors[:300], labels=labels[:300])
retriever.calibrate(vectors[300:], labels[300:])
retriever.save("retriever")
rcir.load("retriever").retrieve(vectors[0] + 0.1, alpha=0.1, delta=0.1)
"""


def test_vectors_need_neither_torch_nor_what_draws():
    assert loaded(VECTORS) == {"faiss", "sklearn"}


CERTIFY = """
import numpy as np
from rcir.risk import *
rng = np.random.default_rng(0)
queries, relevant = SearchResults(rng.uniform(size=300), depth=4), rng.uniform(size=(300, 4)) < 0.5
score_function, _ = fit_score_function("quantile", queries, np.full(300, 2))
known = LabelledResults.of(queries, relevant, relevant.sum(axis=1)).scored(score_function)
control = RiskController(score_function, known, known)
for risk in ("miss", "recall", "false-discovery"):
    control.decide(Request(0.9, 0.1, risk))
control.decide(Request(0.9, 0.1, abstain=True))
RiskMonitor(0.1).update([1, 0])
ChangeDetector(0.1, 100).update([1, 0])
check_exchangeability(known, known, certified=(1.0, 0.1))
"""


def test_a_guarantee_is_had_without_any_of_the_others():
    assert loaded(CERTIFY) == set()


def test_metrics_alone_need_none_of_the_others():
    assert loaded("import rcir.metrics") == set()


def test_retrieval_needs_neither_the_cluster_nor_the_tracking():
    assert loaded("import rcir, rcir.cli; rcir.load").isdisjoint({"ray", "mlflow", "matplotlib"})


CERTIFIED = """
import os
import numpy as np
from calibration import CertificationConfig, certify
os.environ.pop("MLFLOW_TRACKING_URI", None)
rng = np.random.default_rng(0)
labels = rng.integers(5, size=400)
np.savez("all.npz", vector=np.eye(5)[labels] + 0.2 * rng.standard_normal((400, 5)), label=labels)
certify(CertificationConfig("all.npz", score_function="constant", alphas=(0.2,)))
"""


@pytest.mark.slow
def test_vectors_are_certified_without_torch_where_no_store_is_named():
    assert loaded(CERTIFIED) == {"faiss", "sklearn", "matplotlib"}


HELP = """
from contextlib import suppress
from rcir.cli import main
with suppress(SystemExit):
    main(["--help"])
"""


def test_help_needs_no_library():
    assert loaded(HELP, (*HEAVY, "numpy", "scipy", "rich", "yaml")) == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_needs_nothing_heavy(command):
    assert loaded(HELP.replace('["--help"]', f'["{command}", "--help"]')) == set()


def test_a_query_needs_no_part_of_scipy_that_is_slow_to_import():
    asked = "import rcir.cli.retrieve, rcir.api"
    assert loaded(asked, (*HEAVY, "scipy.stats", "scipy.optimize")) == set()


@pytest.mark.slow
def test_a_worker_needs_neither_the_tracking_nor_torchvision():
    """Nor PyTorch's compiler, which torchvision and optimizers bring in: 3 of 7 seconds of CPU."""
    worker = "import training.loop, rcir.encoders.embedder, rcir.encoders.replicas"
    assert loaded(worker) == {"torch", "ray"}


CARRIED = """
import pickle
from rcir.tracking import TrackedRun
assert pickle.loads(pickle.dumps(TrackedRun("id", "sqlite:///mlflow.db"))).id == "id"
"""


def test_a_run_is_carried_to_a_worker_without_the_tracking():
    assert loaded(CARRIED) == set()


EMBEDDED = """
from rcir.data import DataConfig, Preprocessing, load_splits
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.batches import embed
parts = ("train", "validation", "gallery", "tuning", "calibration", "test")
images = load_splits(DataConfig("digits", options=dict.fromkeys(parts, 40))).test
preprocessing = Preprocessing(size=(20, 25))
encoder = build_encoder(EncoderConfig("btl", "cifar-cnn"), 1, preprocessing.size)
assert len(embed(encoder, preprocessing, images.images)) == 40
"""


@pytest.mark.slow
def test_small_networks_and_the_resizing_of_pixels_need_no_torchvision():
    assert loaded(EMBEDDED) == {"torch", "sklearn"}


SHOWN = """
from contextlib import suppress
from training.__main__ import main
with suppress(SystemExit):
    main(["--help"])
"""


@pytest.mark.slow
def test_options_are_shown_without_what_runs_a_training():
    assert loaded(SHOWN) == {"torch"}
