"""Any name that a file system allows is shown as text: on a terminal, in JSON, a page, a figure."""

import base64
import json
import os
import re
import sys
from io import BytesIO, TextIOWrapper
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from calibration import CalibrationConfig, calibrate
from rcir.cli.main import main
from rcir.data import DataConfig
from rcir.encoders import EncoderConfig
from rcir.errors import InvalidImage, reporting_errors
from rcir.printable import printable
from rcir.risk import Guarantee
from training import train

# No UTF-8; a formula that cannot be parsed; markup of rich, of HTML; a legend's hidden label;
# what turns a terminal red; two lines; a letter that is not ASCII.
NAMES = [
    *(os.fsdecode(b"p\xffr"), r"$\frac{", r"\$a$b", "[/bold]x", "<b>&amp;", "_hidden"),
    *("\x1b[31mred", "two\nlines", "pear é"),
]


def folder(tmp_path):
    """Pictures of each class, whose files have such a name too."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(NAMES):
        for each in range(14):
            place = tmp_path / "own" / name / f"{each}-{name.replace('/', '-')}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            noise = rng.integers(0, 60, (8, 16), dtype=np.uint8)
            Image.fromarray(noise + np.uint8(20 * number)).save(place)


@pytest.fixture(scope="module")
def outcome(tiny, tracking_uri, tmp_path_factory):
    """A training and a calibration on that folder."""
    place = tmp_path_factory.mktemp("names")
    folder(place)
    # Most names evaluate, and so are shown.
    data = DataConfig("folder", str(place), options={"path": "own", "train": NAMES[-3:]})
    config = tiny("names", epochs=1, batch=8, data=data, encoder=EncoderConfig("deterministic"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        run = train(config)
        return calibrate(CalibrationConfig(str(run.path.absolute()), alphas=(0.5,), delta=0.5))


def test_the_page_shows_names_as_text(outcome):
    page = outcome.report.read_text(encoding="utf-8")
    shown = set(re.findall(r'<td class="left">(.*?)</td>', page))
    for name in outcome.splits.test.label_names.values():
        text = printable(name)
        for sign, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            text = text.replace(sign, entity)
        assert text in shown
    pictures = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    assert len(pictures) > 4
    for picture in pictures:
        ElementTree.fromstring(base64.b64decode(picture))


def test_json_and_terminal_show_names(outcome, monkeypatch):
    query = outcome.splits.test.images[0]
    answer = outcome.retriever.retrieve(query, 0.5, 0.5)
    assert set(answer.labels) <= set(NAMES)
    assert set(json.loads(json.dumps(answer.to_dict()))["labels"]) == set(answer.labels)
    # Strict, as that of a process is.
    monkeypatch.setattr(sys, "stdout", screen := TextIOWrapper(BytesIO(), encoding="utf-8"))
    command = ["retrieve", os.fspath(query), "--retriever", str(outcome.folder)]
    assert main([*command, "--alpha", "0.5", "--delta", "0.5"]) == 0
    screen.flush()
    shown = screen.buffer.getvalue().decode("utf-8")
    rows = shown.splitlines()[2 : 2 + answer.size]
    for row, label in zip(rows, answer.labels, strict=True):
        assert row.endswith(f"  {printable(label)}")
    assert "\x1b" not in shown


def test_what_cannot_be_encoded_does_not_end_a_command(monkeypatch):
    monkeypatch.setattr(sys, "stdout", screen := TextIOWrapper(BytesIO(), encoding="utf-8"))
    with reporting_errors():
        print(NAMES[0])
    screen.flush()
    assert screen.buffer.getvalue() == rb"p\udcffr" + os.linesep.encode()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (os.fsdecode(b"p\xffr"), r"p\udcffr"),
        ("\x1b[31m", r"\x1b[31m"),
        ("a\nb", r"a\nb"),
        ("a\u202egnp.exe", r"a\u202egnp.exe"),
        ("Photo 9.41\u202fam 猫", "Photo 9.41\u202fam 猫"),
        (r"$\frac{[/x]<b>", r"$\frac{[/x]<b>"),
    ],
)
def test_only_what_cannot_be_printed_is_escaped(name, text):
    assert printable(name) == text
    printable(name).encode("utf-8")


def test_errors_show_names_as_text(capsys):
    with pytest.raises(SystemExit), reporting_errors():
        raise InvalidImage("\x1b[31mred\n.png cannot be read")
    assert capsys.readouterr().err == "error: \\x1b[31mred\\n.png cannot be read\n"


def test_a_guarantee_shows_the_names_of_groups_as_text():
    plain = (0.1, 0.1, "miss", None, None, False, False, 1.0, "binomial", "constant", 100, 0.1)
    guarantee = Guarantee(*plain, n_groups=2, mix={"\x1b[31mred": 0.4, "b": 0.6})
    assert r"\x1b[31mred 0.4, b 0.6" in str(guarantee)
