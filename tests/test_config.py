"""Command lines and files as configurations, and what is shown when they are wrong."""

import json
from dataclasses import asdict

import pytest
import yaml

from calibration.__main__ import main as calibration
from rcir.config import flatten, from_plain, parse
from rcir.encoders import EncoderConfig
from rcir.errors import InvalidConfig, reporting_errors
from training import Change, OptimizerConfig, TrainingConfig
from training.__main__ import main as training

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
    return parse(TrainingConfig, arguments, "prog", "A description.")


def shown(capsys, main, *arguments):
    """Exit status and last line on the error stream; there is no traceback."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert len(error.splitlines()) <= 6
    return stop.value.code, error


def test_a_file_fills_what_it_names(file):
    config = parsed("--config", file)
    assert (config.name, config.batch, config.encoder.dim) == ("from-file", 32, 8)
    assert config.data.options == {"train": 300}
    assert config.mining.num_negatives == 1
    assert config.mining.pool == TrainingConfig("other").mining.pool


def test_dotted_options_override_the_file(file):
    config = parsed(
        "--config", file, "--encoder.dim", "4", "--name=mine", "--encoder.options.passes", "7"
    )
    assert (config.encoder.dim, config.encoder.options["passes"], config.name) == (4, 7, "mine")
    assert config.batch == 32


def test_what_is_printed_can_be_fed_back(file, tmp_path, capsys):
    arguments = ("--config", file, "--encoder.dim", "4", "--preprocessing.size", "[16, 8]")
    with pytest.raises(SystemExit) as stop:
        parsed(*arguments, "--print_config")
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["encoder"]["dim"] == 4
    (tmp_path / "printed.yaml").write_text(printed)
    assert parsed("--config", str(tmp_path / "printed.yaml")) == parsed(*arguments)


@pytest.mark.parametrize("main", [training, calibration])
def test_help_explains_every_option(main, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "--config" in out
    assert "--encoder.dim" in out if main is training else "--alphas" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--epochs", "many"], "epochs"),
        (["--preprocessing.size", "[8]"], "preprocessing.size"),
        (["--data.options", "5"], "data.options"),
        (["--unknown", "3"], "--unknown"),
        (["--encoder.unknown", "3"], "--encoder.unknown"),
        (["--config", "missing.yaml"], "missing.yaml"),
    ],
)
def test_what_cannot_be_parsed_is_named_with_status_2(file, capsys, arguments, named):
    status, error = shown(capsys, training, "--config", file, *arguments)
    assert status == 2
    assert named in error.partition("error:")[2]


@pytest.mark.parametrize("content", ["name: [", "name: x\nepoch: 3\n", "name: x\nencoder: {d: 1}"])
def test_a_file_that_is_none_or_has_a_typing_error_is_refused(tmp_path, capsys, content):
    (tmp_path / "bad.yaml").write_text(content)
    status, error = shown(capsys, training, "--config", str(tmp_path / "bad.yaml"))
    assert status == 2
    assert "error:" in error


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("seed", -1), ("epochs", 0), ("batch", 0), ("num_workers", -2), ("name", "a/b")],
        *[
            ("encoder.dim", 1),
            ("encoder.options.variance_hidden", 0),
            ("encoder.backbone", "magic"),
        ],
        *[("loss.margin", -1.0), ("mining.num_negatives", 0), ("augmentation.occlusion", 2.0)],
        *[("preprocessing.channels", 2), ("optimizer.lr", -1.0), ("optimizer.lr", 0.0)],
        *[("data.seed", -1), ("data.name", "nothing"), ("data.options.train", -5)],
        *[("data.options.occlusion", 3), ("data.options.trian", 5)],
        *[("encoder.method", "magic"), ("encoder.options.members", 5), ("loss.form", 5)],
    ],
)
def test_what_makes_no_sense_is_named_with_status_1(file, capsys, option, value):
    arguments = ("--config", file, "--storage", "runs", f"--{option}", str(value))
    status, error = shown(capsys, training, *arguments)
    assert status == 1
    (line,) = error.splitlines()
    assert line.startswith("error: ")
    assert option.rpartition(".")[2] in line
    assert str(value) in line or value == 5


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--run", "nothing"], "nothing is no folder of a training run"),
        (["--run", "x", "--alphas", "[0.1, 0]"], "alpha is 0"),
        (["--run", "x", "--delta", "1"], "delta is 1"),
        (["--run", "x", "--depth", "0"], "depth is 0"),
        (["--run", "x", "--alphas", "[]"], "alphas is empty"),
    ],
)
def test_a_calibration_that_makes_no_sense_is_one_line(capsys, arguments, named):
    status, error = shown(capsys, calibration, *arguments)
    assert status == 1
    assert len(error.splitlines()) == 1
    assert named in error


def test_storage_that_cannot_be_written_is_one_line(file, capsys):
    status, error = shown(capsys, training, "--config", file, "--storage", file)
    assert status == 1
    assert error.startswith("error: ")
    assert "config.yaml" in error


def test_ctrl_c_ends_with_the_status_shells_expect(capsys):
    with pytest.raises(SystemExit) as stop, reporting_errors():
        raise KeyboardInterrupt
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_what_is_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), reporting_errors():
        _ = 1 / 0


def test_flattened_names_are_dotted_and_empty_groups_stay():
    nested = {"a": {"b": 1, "c": {"d": [1, {"e": 2}]}}, "f": {}, "g": None}
    assert flatten(nested) == {"a.b": 1, "a.c.d": [1, {"e": 2}], "f": {}, "g": None}


def test_an_invalid_configuration_reaches_python_callers_as_such():
    with pytest.raises(InvalidConfig, match="epochs is 0"):
        parsed("--name", "x", "--epochs", "0")


def test_plain_values_become_the_configuration_that_they_were():
    """Through JSON, which has lists for tuples."""
    config = TrainingConfig(
        "run",
        num_workers=(1, 2),
        encoder=EncoderConfig("btl", dim=4),
        changes=(
            Change(2, {"optimizer.lr": 0.1}),
            Change(3, {"mining.negatives": "margin-violating"}),
        ),
    )
    again = from_plain(TrainingConfig, json.loads(json.dumps(asdict(config))))
    assert again == config
    assert isinstance(again.changes[0], Change)


def test_of_plain_values_those_that_are_named_differ_from_the_defaults():
    assert from_plain(OptimizerConfig, {"lr": 1}) == OptimizerConfig(lr=1.0)
    assert type(from_plain(OptimizerConfig, {"lr": 1}).lr) is float
    assert from_plain(TrainingConfig, {"name": "n", "encoder": {"dim": 4}}).encoder.dim == 4


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (OptimizerConfig, {"lr": "fast"}, "lr"),
        (OptimizerConfig, {"rate": 1.0}, "rate"),
        (OptimizerConfig, {"schedule": "linear"}, "schedule"),
        (TrainingConfig, {}, "name"),
        (TrainingConfig, {"name": "n", "epochs": 1.5}, "epochs"),
        (TrainingConfig, {"name": "n", "encoder": {"dims": 4}}, "dims"),
        (TrainingConfig, {"name": "n", "encoder": 4}, "TrainingConfig cannot be made of"),
        (TrainingConfig, {"name": "n", "changes": [{"epoch": 1, "options": {}}]}, "epoch 1"),
    ],
)
def test_plain_values_that_are_no_configuration_are_named(kind, values, named, capsys):
    with pytest.raises(InvalidConfig, match=named):
        from_plain(kind, values)
    assert capsys.readouterr().err == ""
