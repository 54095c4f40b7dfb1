"""What `rcir certify` measures on photographs of birds: the table of docs/getting-started.md.

All 50 kinds of the copy of CUB-200-2011, embedded by EfficientNet-Lite0 as ImageNet left it. Each
photograph is left out of its own search. Vectors in `--runs` are used again. The figures are those
of the table that the command prints. Other benchmarks of photographs import this module.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Container
from pathlib import Path

from common import parser, report, sized

from calibration import CertificationConfig, certify

MODEL = "timm:tf_efficientnet_lite0"
KINDS = sized(range(26, 51), range(26, 31))  # on which nothing here was ever trained
ALL_KINDS = sized(range(1, 51), range(26, 31))


def weights() -> Path:
    """Return the file with the weights of `MODEL`."""
    return Path(os.environ["RCIR_DATA"], "models", "tf_efficientnet_lite0.safetensors").absolute()


def class_folders(folder: Path, kinds: Container[int]) -> Path:
    """Write the photographs of some kinds into class folders, once."""
    archive = Path(os.environ["RCIR_DATA"], "cub200-50", "CUB_200_2011.tar")
    images = folder / "CUB_200_2011" / "images"
    if not images.exists():
        with tarfile.open(archive) as members:
            wanted = [
                member
                for member in members
                if member.name.endswith(".jpg") and int(member.name.split("/")[-2][:3]) in kinds
            ]
            members.extractall(folder / "begun", wanted, filter="data")
        (folder / "begun" / "CUB_200_2011").rename(images.parent)
    return images


def embedded(folder: Path) -> Path:
    """Return the file of vectors; embed the photographs if it does not exist."""
    output = folder / sized("birds.parquet", "birds-short.parquet")
    if not output.is_file():
        with tempfile.TemporaryDirectory() as images:
            photographs = class_folders(Path(images), ALL_KINDS)
            command = ["embed", str(photographs), "--output", str(output)]
            command += ["--model", MODEL, "--checkpoint", str(weights())]
            subprocess.run([sys.executable, "-m", "rcir.cli", *command], check=True)
    return output


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--runs", type=Path, help="where vectors are, or go to")
    options = command.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        vectors = embedded(options.runs or Path(temporary))
        outcome = certify(CertificationConfig(str(vectors), output=f"{temporary}/certified"))
    figures: dict[str, float] = {}
    for row in outcome.evaluation.rows:
        values = {
            "measured risk": row.test_risk,
            "lower end": row.risk_low,
            "upper end": row.risk_high,
            "mean size": row.mean_size,
            "one size": row.constant_size,
            "logistic": row.logistic_size,
        }
        for name, value in values.items():
            if row.certified and value is not None:
                figures[f"{row.alpha:g}/{name}"] = float(value)
    rows = [(name, f"{value:.4f}") for name, value in figures.items()]
    report("Certified sets of photographs of birds", ["what", "value"], rows, figures, options.json)


if __name__ == "__main__":
    main()
