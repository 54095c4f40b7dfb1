"""The image of a server: it is built of the files that it copies, and runs a command."""

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from rcir.cli import serve

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def words(instruction):
    (found,) = re.findall(rf"^{instruction} (\[.*\])$", TEXT, re.MULTILINE)
    return json.loads(found)


def test_what_it_runs_is_a_command_of_this_version():
    assert words("ENTRYPOINT") == ["rcir", "serve"]
    parser = ArgumentParser()
    serve.add_arguments(parser)
    options = parser.parse_args(words("CMD"))
    assert (options.retriever, options.host, options.port) == ("/retriever", "0.0.0.0", 8000)


@pytest.mark.slow
def test_what_it_copies_is_all_that_it_is_built_of(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for line in re.findall(r"^COPY (?!--)(.*) \S+$", TEXT, re.MULTILINE):
        for name in line.split():
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, source / name)
    uv = Path(sys.executable).with_name("uv")
    install = (uv, "pip", "install", "--python", sys.executable, "--no-deps", "--target", target)
    subprocess.run([*install, source], check=True, capture_output=True)
    page = target / "rcir" / "serving" / "page"
    assert {path.name for path in page.iterdir()} >= {"index.html", "explorer.js", "explorer.css"}
    shown = subprocess.run(
        [sys.executable, "-m", "rcir.cli", "serve", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "models:/NAME@ALIAS" in shown.stdout


def builder():
    """Whether an image can be built here."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not builder(), reason="no engine builds images here")
def test_it_is_built_and_says_what_it_does():
    subprocess.run(["docker", "build", "-t", "rcir-test", str(ROOT)], check=True)
    shown = subprocess.run(
        ["docker", "run", "--rm", "rcir-test", "--help"], capture_output=True, text=True, check=True
    )
    assert "models:/NAME@ALIAS" in shown.stdout
