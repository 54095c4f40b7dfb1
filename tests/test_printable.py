"""Any name that a file system allows is shown as text: on a terminal, in JSON, a page, a figure."""

import base64
import json
import os
import re
import sys
import warnings
from io import BytesIO, TextIOWrapper
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

import rcir
from calibration import CalibrationConfig, calibrate
from rcir.data import DataConfig
from rcir.encoders import EncoderConfig
from rcir.errors import InvalidImage, printable, reporting_errors
from rcir.risk import Certificate, Guarantee, make_request
from training import train

# A formula that cannot be parsed; markup of rich and of HTML; a hidden label of a
# legend; a control sequence of terminals; two lines; a letter that is not ASCII.
NOT_UTF8 = os.fsdecode(b"p\xffr")
NAMES = [
    *(r"$\frac{", r"\$a$b", "[/bold]x", "<b>&amp;", "_hidden"),
    *("\x1b[31mred", "two\nlines", "pear é"),
]


@pytest.mark.slow
def test_report_shows_names_of_classes_as_text(tiny, tmp_path):
    rng = np.random.default_rng(0)
    for number, name in enumerate(NAMES):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for each in range(14):
            pixels = rng.integers(0, 60, (8, 16), dtype=np.uint8) + np.uint8(20 * number)
            file = f"{each}-{name.replace('/', '-')}.png"
            Image.fromarray(pixels).save(tmp_path / "photos" / name / file)
    data = DataConfig("folder", str(tmp_path), options={"path": "photos", "train": NAMES[-3:]})
    config = tiny("names", epochs=1, batch=8, data=data, encoder=EncoderConfig("deterministic"))
    run = train(config)
    outcome = calibrate(CalibrationConfig(str(run.path.absolute()), alphas=(0.5,), delta=0.5))
    page = outcome.report.read_text(encoding="utf-8")
    cells = set(re.findall(r'<td class="left">(.*?)</td>', page))
    for name in outcome.splits.data.test.label_names.values():
        text = printable(name)
        for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            text = text.replace(character, entity)
        assert text in cells
    figures = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    assert len(figures) > 4
    for figure in figures:
        ElementTree.fromstring(base64.b64decode(figure))


def test_answer_shows_labels_as_text_and_json_keeps_them():
    rng = np.random.default_rng(0)
    centres, labels = 100 * np.eye(len(NAMES)), np.repeat(NAMES, 20)
    gallery, queries = np.repeat(centres, 20, axis=0) + rng.random((2, len(labels), len(NAMES)))
    retriever = rcir.Retriever.from_embeddings(gallery, labels=labels)
    retriever.calibrate(queries, labels)
    for query, name in zip(centres, NAMES, strict=True):
        answer = retriever.retrieve(query, 0.5, 0.5)
        assert set(answer.labels) == {name}
        assert json.loads(json.dumps(answer.to_dict()))["labels"] == list(answer.labels)
        rows = str(answer).splitlines()[2 : 2 + answer.size]
        assert all(row.endswith(f"  {printable(name)}") for row in rows)
        assert "\x1b" not in str(answer)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (NOT_UTF8, r"p\udcffr"),
        ("\x1b[31m", r"\x1b[31m"),
        ("a\nb", r"a\nb"),
        ("a\u202egnp.exe", r"a\u202egnp.exe"),
        ("Photo 9.41\u202fam 猫", "Photo 9.41\u202fam 猫"),
        (r"$\frac{[/x]<b>", r"$\frac{[/x]<b>"),
    ],
)
def test_only_unprintable_characters_are_escaped(name, text):
    assert printable(name) == text
    text.encode("utf-8")


def test_commands_errors_warnings_and_guarantees_show_names_as_text(capsys, monkeypatch):
    with monkeypatch.context() as patch, TextIOWrapper(BytesIO(), encoding="utf-8") as screen:
        patch.setattr(sys, "stdout", screen)
        with reporting_errors():
            print(NOT_UTF8)
        screen.flush()
        assert screen.buffer.getvalue() == rb"p\udcffr" + os.linesep.encode()
    with pytest.raises(SystemExit), reporting_errors():
        raise InvalidImage("\x1b[31mred\n.png cannot be read")
    assert capsys.readouterr().err == "error: \\x1b[31mred\\n.png cannot be read\n"
    with reporting_errors():
        warnings.warn("\x1b[31mred\n.png", stacklevel=1)
    assert capsys.readouterr().err == "warning: \\x1b[31mred\\n.png\n"
    request = make_request(0.1, 0.1, mix={"\x1b[31mred": 0.4, "b": 0.6})
    guarantee = Guarantee(request, Certificate(1.0, "binomial", 0.1), "constant", 100)
    assert r"\x1b[31mred 0.4, b 0.6" in str(guarantee)
