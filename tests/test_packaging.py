"""The distributions and their metadata, documented installations, and a small environment."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml

import rcir
from rcir.config import parse
from rcir.errors import MissingPackage
from training import TrainingConfig, train

ROOT = Path(__file__).parents[1]
PACKAGES = {"rcir", "training", "calibration", "tuning"}
FAISS = {"cpu": "faiss-cpu", "gpu": "faiss-gpu-cuvs", "gpu-cuda12": "faiss-gpu"}
MAX_CORE_MIB = 700


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, **options)


def sources():
    """Return the modules of the packages, relative to the repository."""
    modules = (path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix() for path in modules}


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory):
    """The wheel, built from a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name)
    (source / "tests").mkdir()
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return next((source / "dist").glob("*.whl"))


@pytest.mark.slow
def test_distributions_contain_the_packages_and_their_metadata_is_valid(wheel_file, tmp_path):
    files = sources() | {"rcir/py.typed", "rcir/notebook.html", "calibration/report.html"}
    files |= {f"rcir/serving/page/{path.name}" for path in (ROOT / "rcir/serving/page").iterdir()}
    with zipfile.ZipFile(wheel_file) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "rcir = rcir.cli:main" in archive.read(entry_points).decode()
    assert files <= names
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == PACKAGES

    source = wheel_file.parents[1]  # to which a test is added, which is not distributed
    shutil.copy(ROOT / "MANIFEST.in", source)
    (source / "tests" / "test_something.py").touch()
    command = (sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path)
    process = run(*command, source)
    assert process.returncode == 0, process.stderr
    (source_archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source_archive) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if name.endswith(".py")}
    assert names == sources()

    process = run(sys.executable, "-m", "twine", "check", "--strict", wheel_file, source_archive)
    assert process.returncode == 0, process.stdout


def test_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [citation["version"], citation["license"]] == [project["version"], project["license"]]
    assert citation["authors"] == project["authors"]


def documented_extras():
    """The extras of each documented installation, for both devices where a file leaves it open."""
    documents = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
    texts = [path.read_text() for path in documents]
    for device in ("cpu", "gpu"):
        setup = run("make", "--dry-run", "--always-make", "setup", f"DEVICE={device}", cwd=ROOT)
        image = (ROOT / "Dockerfile").read_text().replace("$DEVICE", device)
        texts += [setup.stdout, image]
    found = [re.findall(r"""["']\.\[([\w,-]+)\]["']""", text) for text in texts]
    assert all(found[len(documents) :])
    return sorted({tuple(extras.split(",")) for lists in found for extras in lists})


def resolved(extras):
    """The names of all packages that an installation with these extras brings."""
    options = ("--quiet", "--python-platform", "x86_64-unknown-linux-gnu")
    options += ("--constraint", "constraints.txt", "--no-header", "--no-annotate")
    options += tuple(f"--extra={extra}" for extra in extras)
    uv = Path(sys.executable).with_name("uv")
    process = run(uv, "pip", "compile", "pyproject.toml", *options, cwd=ROOT)
    if "Failed to fetch" in process.stderr:
        pytest.skip("needs a package index")
    assert process.returncode == 0, process.stderr
    return {line.partition("==")[0] for line in process.stdout.splitlines()}


@pytest.mark.slow
def test_every_documented_installation_brings_one_faiss():
    """All packages of FAISS install the same folder: with two, the last one written wins."""
    installations = documented_extras()
    with ThreadPoolExecutor() as pool:
        packages = list(pool.map(resolved, installations))
    for extras, names in zip(installations, packages, strict=True):
        expected = {FAISS[extra] for extra in extras if extra in FAISS}
        assert {name for name in names if name.startswith("faiss")} == expected, extras
        assert len(expected) == 1, extras


def test_the_job_of_kuberay_is_a_training_on_the_ray_of_the_image():
    job = yaml.safe_load((ROOT / "examples" / "kuberay.yaml").read_text())["spec"]
    cluster = job["rayClusterSpec"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pins
    python, _, module, *arguments = shlex.split(job["entrypoint"])
    assert (python, module) == ("python", "training")
    (group,) = cluster["workerGroupSpecs"]
    for template in (cluster["headGroupSpec"]["template"], group["template"]):
        (node,), volumes = template["spec"]["containers"], template["spec"]["volumes"]
        assert {mount["name"] for mount in node["volumeMounts"]} == {
            each["name"] for each in volumes
        }
        (memory,) = (each for each in volumes if "emptyDir" in each)
        assert memory["emptyDir"]["medium"] == "Memory"
        environment = {each["name"]: each["value"] for each in node["env"]}
    arguments += ["--storage", environment["RCIR_RUNS"], "--data.root", environment["RCIR_DATA"]]
    files = [str(ROOT / each) if each.endswith(".yaml") else each for each in arguments]
    config = parse(TrainingConfig, files, "train")
    assert config.most_workers * node["resources"]["limits"]["nvidia.com/gpu"] == group["replicas"]
    assert config.use_gpu


def test_without_faiss_an_error_names_both_extras_that_bring_it(tmp_path, monkeypatch):
    vectors, folder, runs = np.eye(4), tmp_path / "retriever", tmp_path / "runs"
    rcir.Retriever.from_embeddings(vectors).save(folder)
    monkeypatch.setitem(sys.modules, "faiss", None)  # an import fails
    monkeypatch.delitem(sys.modules, "rcir.index.flat")
    uses = (
        lambda: rcir.Retriever.from_embeddings(vectors),
        lambda: rcir.load(folder),
        lambda: train(TrainingConfig("untrained", storage=str(runs))),
    )
    for use in uses:
        with pytest.raises(MissingPackage, match=r"\[cpu\].*\[gpu\]"):
            use()
    assert not runs.exists()  # nothing was trained before the error


@pytest.fixture(scope="module")
def core(wheel_file, tmp_path_factory):
    """An environment that contains the wheel and its requirements, and FAISS of the extra "cpu"."""
    environment = tmp_path_factory.mktemp("core") / "environment"
    uv, python = Path(sys.executable).with_name("uv"), environment / "bin" / "python"
    assert run(uv, "venv", "--python", sys.executable, environment).returncode == 0
    options = ("--python", python, "--constraint", ROOT / "constraints.txt")
    process = run(uv, "pip", "install", *options, f"{wheel_file}[cpu]")
    assert process.returncode == 0, process.stderr
    return environment


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """A folder with a gallery and queries of ten clusters, each as .npy beside .csv."""
    folder, rng = tmp_path_factory.mktemp("vectors"), np.random.default_rng(0)
    centres = rng.standard_normal((10, 8))
    for name, n in (("gallery", 300), ("queries", 400)):
        labels = rng.integers(10, size=n)
        noise = 1.2 * rng.standard_normal((n, 8))
        np.save(folder / f"{name}.npy", (centres[labels] + noise).astype(np.float32))
        rows = [f"{name}-{row},kind {label}" for row, label in enumerate(labels)]
        (folder / f"{name}.csv").write_text("\n".join(["id,label", *rows]))
    return folder


def run_apart(*command, cwd, **variables):
    """Run a command without a path to this environment's packages or to a tracking store."""
    own = ("PYTHON", "MLFLOW")
    environment = {name: text for name, text in os.environ.items() if not name.startswith(own)}
    return run(*command, cwd=cwd, env=environment | variables)


@pytest.mark.slow
def test_core_is_small_and_has_no_training_libraries(core):
    files = [path for path in core.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) / 2**20 <= MAX_CORE_MIB
    installed = {path.name for path in core.glob("lib/*/site-packages/*")}
    assert "faiss" in installed
    assert not installed & {"torch", "ray", "mlflow", "optuna"}


@pytest.mark.slow
def test_core_certifies_sets_from_npy_files(core, vectors, tmp_path):
    command = (core / "bin" / "rcir", "certify", vectors / "gallery.npy")
    options = ("--queries", vectors / "queries.npy", "--alpha", "0.2", "--output", tmp_path / "out")
    process = run_apart(*command, *options, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "certified" in process.stdout
    row = json.loads((tmp_path / "out" / "results.json").read_text())["rows"][0]
    assert row["alpha"] == 0.2
    assert row["mean_size"] < row["constant_size"]
    program = (
        "import numpy as np, rcir, sys\n"
        f"retriever = rcir.load({str(tmp_path / 'out' / 'retriever')!r})\n"
        f"query = np.load({str(vectors / 'queries.npy')!r})[0]\n"
        "print(retriever.retrieve(query, alpha=0.2, delta=0.1).size)\n"
        "assert 'torch' not in sys.modules"
    )
    process = run_apart(core / "bin" / "python", "-c", program, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) >= 1


@pytest.mark.slow
def test_core_names_the_extra_that_brings_a_missing_library(core, vectors, tmp_path):
    def last_line(command, *options, **variables):
        process = run_apart(core / "bin" / command, *options, cwd=tmp_path, **variables)
        assert process.returncode == 1
        return process.stderr.splitlines()[-1]

    for package in ("training", "tuning", "calibration"):
        line = last_line("python", "-m", package, "--help")
        assert line.startswith("error: ")
        assert "[train]" in line
    for program in ("import training; training.train", "from rcir.data import Preprocessing"):
        assert "[train]" in last_line("python", "-c", program)
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    gallery = vectors / "gallery.npy"
    line = last_line("rcir", "certify", gallery, MLFLOW_TRACKING_URI=store)
    assert re.search(r"mlflow.*\[train\]|\[train\].*mlflow", line)
    assert list(tmp_path.iterdir()) == []
