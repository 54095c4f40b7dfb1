"""What an import costs, in a process of its own."""

import json
import subprocess
import sys

HEAVY = ("torch", "torchvision", "faiss", "ray", "mlflow", "sklearn", "matplotlib")


def loaded(statement):
    """Which heavy packages a statement loads."""
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return {name for name in HEAVY if name in json.loads(process.stdout)}


def test_risk_control_alone_needs_none_of_the_others():
    assert loaded("import rcir, rcir.risk; rcir.RiskUnattainable; dir(rcir)") == set()


def test_metrics_alone_need_none_of_the_others():
    assert loaded("import rcir.metrics") == set()


def test_retrieval_needs_neither_the_cluster_nor_the_tracking():
    assert loaded("import rcir, rcir.cli; rcir.load").isdisjoint({"ray", "mlflow", "matplotlib"})
