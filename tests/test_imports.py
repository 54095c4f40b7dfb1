"""Heavy libraries are imported only by what uses them.

The steps of a process run one after the other, and each imports what the test allows at most.
"""

import json
import subprocess
import sys
from itertools import pairwise

import pytest

from rcir.cli import COMMANDS

HEAVY = ("torch", "torchvision", "faiss", "ray", "mlflow", "sklearn", "matplotlib", "torch._dynamo")
SCIENTIFIC = ("numpy", "scipy", "scipy.stats", "scipy.optimize", "rich", "yaml")


def imports_of(steps):
    """The heavy and scientific libraries that each step of a new process adds."""
    code = ["import json, sys", f"watched, imported = {[*HEAVY, *SCIENTIFIC]!r}, []"]
    for step in steps:
        code += [step, "imported.append([name for name in watched if name in sys.modules])"]
    code.append("print('\\n' + json.dumps(imported))")
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    totals = [set(), *map(set, json.loads(process.stdout.splitlines()[-1]))]
    return [after - before for before, after in pairwise(totals)]


HELP = """
from contextlib import suppress
from rcir.cli import main
with suppress(SystemExit):
    main([{}"--help"])
"""
CERTIFY_SCORES = """
import numpy as np
from rcir.risk import *
rng = np.random.default_rng(0)
queries, relevant = SearchResults(rng.uniform(size=300), depth=4), rng.uniform(size=(300, 4)) < 0.5
score_function, _ = fit_score_function("quantile", queries, np.full(300, 2))
labelled = LabelledResults(queries, relevant, relevant.sum(axis=1))
scored = score(score_function, labelled)
for risk in ("miss", "recall", "false-discovery"):
    certify(make_request(0.9, 0.1, risk=risk), scored, scored)
certify(make_request(0.9, 0.1, abstain=True), scored, scored)
RiskMonitor(0.1).update([1, 0])
check_exchangeability(scored, scored, certified=(1.0, 0.1))
"""
PICKLE_RUN = """
import pickle
from rcir.tracking import TrackedRun
assert pickle.loads(pickle.dumps(TrackedRun("id", "sqlite:///mlflow.db"))).id == "id"
"""
RETRIEVE_VECTORS = """
import numpy as np, rcir
rng = np.random.default_rng(0)
labels = rng.integers(5, size=700)
vectors = np.eye(5)[labels] + 0.2 * rng.standard_normal((700, 5))
retriever = rcir.Retriever.from_embeddings(vectors[:300], labels=labels[:300])
retriever.calibrate(vectors[300:], labels[300:])
retriever.save("retriever")
loaded = rcir.load("retriever")
loaded.origin["pictures"] = "."
answer = loaded.retrieve(vectors[0] + 0.1, alpha=0.1, delta=0.1)
from PIL import Image
Image.new("RGB", (9, 9)).save(answer.ids[0], "JPEG")
assert "data:image" in answer._repr_html_()
"""


def test_risk_control_and_vectors_need_no_torch_and_help_needs_no_library():
    steps = {
        "help": HELP.format(""),
        **{f"help of {name}": HELP.format(f'"{name}", ') for name in COMMANDS},
        "query": "import rcir.cli.retrieval, rcir.api",
        "risk": "import rcir, rcir.risk; rcir.RiskUnattainable; dir(rcir)",
        "metrics": "import rcir.metrics",
        "certified scores": CERTIFY_SCORES,
        "pickled run": PICKLE_RUN,
        "vectors": RETRIEVE_VECTORS,
    }
    imported = dict(zip(steps, imports_of(steps.values()), strict=True))
    assert imported.pop("help") == set()
    assert imported["query"].isdisjoint({"scipy.stats", "scipy.optimize"})
    heavy = {name: added & {*HEAVY} for name, added in imported.items() if added & {*HEAVY}}
    assert heavy == {"vectors": {"faiss", "sklearn"}}


TRAINING_HELP = """
from contextlib import suppress
from rcir.cli import main
with suppress(SystemExit):
    main(["train", "--help"])
"""
EMBED = """
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
def test_workers_and_small_networks_need_neither_tracking_nor_torchvision():
    """Nor PyTorch's compiler, which torchvision and optimizers import: 3 of 7 seconds."""
    worker = "import training.loop, rcir.encoders.embedder, rcir.cluster"
    steps = imports_of([TRAINING_HELP, EMBED, worker])
    assert [added & {*HEAVY} for added in steps] == [{"torch"}, {"sklearn"}, {"ray"}]
