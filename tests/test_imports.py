"""What an import costs, in a process of its own."""

import json
import subprocess
import sys

HEAVY = ("torch", "torchvision", "faiss", "ray", "mlflow", "sklearn", "matplotlib")


def loaded(statement):
    """Which heavy packages a statement loads."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return {name for name in HEAVY if name in json.loads(process.stdout)}


def test_risk_control_alone_needs_none_of_the_others():
    assert loaded("import rcir, rcir.risk; rcir.RiskUnattainable; dir(rcir)") == set()


CERTIFY = """
import numpy as np
from rcir.risk import *
rng = np.random.default_rng(0)
queries, relevant = Rankings(rng.uniform(size=300), depth=4), rng.uniform(size=(300, 4)) < 0.5
adapter, _ = fit_adapter("quantile", queries, np.full(300, 2))
known = Outcomes.of(adapter, queries, relevant, relevant.sum(axis=1))
control = RiskController(adapter, known, known)
for risk in ("miss", "recall", "false-discovery"):
    control.decide(Request(0.9, 0.1, risk))
control.decide(Request(0.9, 0.1, abstain=True))
RiskMonitor(0.1).update([1, 0])
check_exchangeability(known, known)
"""


def test_a_guarantee_is_had_without_any_of_the_others():
    assert loaded(CERTIFY) == set()


def test_metrics_alone_need_none_of_the_others():
    assert loaded("import rcir.metrics") == set()


def test_retrieval_needs_neither_the_cluster_nor_the_tracking():
    assert loaded("import rcir, rcir.cli; rcir.load").isdisjoint({"ray", "mlflow", "matplotlib"})
