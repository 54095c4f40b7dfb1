"""Configurations from command lines, files and plain values, and their errors."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from rcir.cli import main
from rcir.config import flatten, from_plain, parse
from rcir.encoders import EncoderConfig
from rcir.errors import InvalidConfig, reporting_errors
from training import Change, OptimizerConfig, TrainingConfig

FILE = """
name: from-file
epochs: 2
batch: 32
data:
  options: {train: 300}
encoder:
  dim: 8
mining:
  num_negatives: 1
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    return str(path)


def parsed(*arguments):
    return parse(TrainingConfig, arguments, "prog")


def status_and_error(capsys, *arguments):
    """Run a command that fails without a traceback; return its status and its error stream."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return stop.value.code, error


def test_options_override_the_file_and_the_file_overrides_defaults(file):
    config = parsed("--config", file)
    assert (config.name, config.batch, config.encoder.dim) == ("from-file", 32, 8)
    assert config.data.options == {"train": 300}
    assert config.mining.num_negatives == 1
    assert config.mining.pool == TrainingConfig("other").mining.pool
    options = ("--encoder.dim", "4", "--name=mine", "--encoder.options.variance_hidden", "7")
    config = parsed("--config", file, *options, "--use_gpu")
    assert (config.encoder.dim, config.name, config.use_gpu) == (4, "mine", True)
    assert config.encoder.options["variance_hidden"] == 7
    assert config.batch == 32


def test_printed_configuration_is_a_file_of_the_same_configuration(file, tmp_path, capsys):
    arguments = ("--config", file, "--encoder.dim", "4", "--preprocessing.size", "[16, 8]")
    with pytest.raises(SystemExit) as stop:
        parsed(*arguments, "--print_config")
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["encoder"]["dim"] == 4
    (tmp_path / "printed.yaml").write_text(printed)
    assert parsed("--config", str(tmp_path / "printed.yaml")) == parsed(*arguments)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--epochs", "many"], "epochs"),
        (["--preprocessing.size", "[8]"], "preprocessing.size"),
        (["--data.options", "5"], "data.options"),
        (["--unknown", "3"], "--unknown"),
        (["--encoder.unknown", "3"], "--encoder.unknown"),
        (["--config", "missing.yaml"], "missing.yaml"),
        *[(["--config", f"{number}.yaml"], "") for number in range(3)],
    ],
)
def test_option_or_file_of_another_type_or_name_has_status_2(file, capsys, arguments, word):
    for number, content in enumerate(["name: [", "name: x\nepoch: 3\n", "encoder: {d: 1}"]):
        Path(f"{number}.yaml").write_text(content)
    status, error = status_and_error(capsys, "train", "--config", file, *arguments)
    assert status == 2
    assert word in error.partition("error:")[2]


@pytest.mark.parametrize(
    ("job", "arguments", "word"),
    [
        ("train", ["--encoder.method", "magic"], "method"),
        ("train", ["--encoder.backbone", "magic"], "backbone"),
        ("train", ["--encoder.options.variance_hidden", "0"], "variance_hidden"),
        ("train", ["--encoder.options.members", "5"], "members"),
        ("train", ["--loss.form", "5"], "form"),
        ("train", ["--data.name", "nothing"], "name"),
        ("train", ["--data.options.train", "-5"], "train"),
        ("train", ["--data.options.trian", "5"], "trian"),
        ("train", ["--storage", "config.yaml"], "config.yaml"),
        ("train", ["--loss.margin", "-1"], "margin"),
        ("train", ["--optimizer.lr", "0"], "lr"),
        ("calibrate", ["--run", "nothing"], "nothing"),
        ("calibrate", ["--run", "x", "--alphas", "[0.1, 0]"], "alpha"),
        ("calibrate", ["--run", "x", "--alphas", "[]"], "alphas"),
        ("calibrate", ["--run", "x", "--alpha", "0.1", "0", "--delta=0.2"], "alpha is 0.0"),
        ("calibrate", ["--run", "x", "--delta", "1"], "delta"),
        ("calibrate", ["--run", "x", "--depth", "0"], "depth"),
    ],
)
def test_invalid_job_is_one_line_with_status_1(file, capsys, job, arguments, word):
    if job == "train":
        arguments = ["--config", file, "--storage", "runs", *arguments]
    status, error = status_and_error(capsys, job, *arguments)
    assert status == 1
    (line,) = error.splitlines()
    assert line.startswith("error: ")
    assert word in line


def test_interrupt_has_the_status_of_shells_and_a_bug_keeps_its_traceback(capsys):
    with pytest.raises(SystemExit) as stop, reporting_errors():
        raise KeyboardInterrupt
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
    with pytest.raises(ZeroDivisionError), reporting_errors():
        _ = 1 / 0


def test_flattened_names_are_dotted_and_empty_groups_remain():
    nested = {"a": {"b": 1, "c": {"d": [1, {"e": 2}]}}, "f": {}, "g": None}
    assert flatten(nested) == {"a.b": 1, "a.c.d": [1, {"e": 2}], "f": {}, "g": None}


def test_configuration_survives_json_which_has_no_tuples():
    changes = ({"optimizer.lr": 0.1}, {"mining.negatives": "margin-violating"})
    config = TrainingConfig(
        "run",
        num_workers=(1, 2),
        encoder=EncoderConfig("btl", dim=4),
        changes=tuple(Change(epoch, options) for epoch, options in enumerate(changes, start=2)),
    )
    again = from_plain(TrainingConfig, json.loads(json.dumps(asdict(config))))
    assert again == config
    assert isinstance(again.changes[0], Change)
    assert type(from_plain(OptimizerConfig, {"lr": 1}).lr) is float
    assert from_plain(TrainingConfig, {"name": "n", "encoder": {"dim": 4}}).encoder.dim == 4


@pytest.mark.parametrize(
    ("kind", "values", "word"),
    [
        (OptimizerConfig, {"lr": "fast"}, "lr"),
        (OptimizerConfig, {"rate": 1.0}, "rate"),
        (OptimizerConfig, {"schedule": "linear"}, "schedule"),
        (TrainingConfig, {}, "name"),
        (TrainingConfig, {"name": "n", "epochs": 0}, "epochs"),
        (TrainingConfig, {"name": "n", "epochs": 1.5}, "epochs"),
        (TrainingConfig, {"name": "n", "encoder": {"dims": 4}}, "dims"),
        (TrainingConfig, {"name": "n", "encoder": 4}, "TrainingConfig"),
        (TrainingConfig, {"name": "n", "changes": [{"epoch": 1, "options": {}}]}, "epoch"),
    ],
)
def test_invalid_plain_values_raise_an_error_that_names_them(kind, values, word, capsys):
    with pytest.raises(InvalidConfig, match=word):
        from_plain(kind, values)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("command", "option"),
    [("train", "--encoder.dim"), ("calibrate", "--alphas"), ("tune", "--trials")],
)
def test_jobs_are_commands_of_rcir_and_list_their_options(command, option, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    output = capsys.readouterr().out
    assert f"rcir {command} [--config FILE]" in output
    assert option in output


def test_options_are_spelled_with_hyphens_or_underscores(file):
    spellings = ("--micro_batches", "--micro-batches")
    one, other = (parsed("--config", file, option, "2") for option in spellings)
    assert one == other
    assert one.micro_batches == 2


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a: " + b"[" * 2000 + b"]" * 2000])
def test_a_file_that_is_not_a_configuration_is_refused(content, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises(InvalidConfig, match="YAML"):
        parse(TrainingConfig, ["--config", str(file)], "train")
