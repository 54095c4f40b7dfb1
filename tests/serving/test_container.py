"""The image of a server: what it copies is there, what it runs is a command, and not as root."""

import json
import re
import shutil
import subprocess
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


def test_what_it_copies_is_there():
    copied = [
        name for line in re.findall(r"^COPY (?!--)(.*) \S+$", TEXT, re.M) for name in line.split()
    ]
    assert {"rcir", "training", "calibration", "tuning", "pyproject.toml"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_it_runs_as_a_user_without_rights():
    users = re.findall(r"^USER (\S+)$", TEXT, re.MULTILINE)
    assert users == ["10001"]
    assert "--uid 10001" in TEXT


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
