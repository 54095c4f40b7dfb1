"""`rcir recalibrate`, and `rcir retrieve` of vectors."""

from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

import rcir
from calibration import CalibrationConfig, calibrate, recalibrate
from rcir.cli import main
from rcir.errors import InvalidData
from tests.vectors import draw_vectors


@pytest.fixture
def folder():
    """A calibrated retriever in the folder `own`, and vectors that are to come."""
    vectors, labels = draw_vectors(300, 1)
    own = rcir.Retriever.from_embeddings(vectors, labels=labels, model="m")
    own.calibrate(*draw_vectors(500, 2), "quantile")
    new, labels = draw_vectors(60, 3)
    ids = np.array([f"new {row}" for row in range(60)])
    np.savez("new.npz", vector=new, label=labels, id=ids, model="m")
    return own.save("own")


def test_a_folder_is_brought_up_to_date(folder, capsys):
    (folder.parent / "gone.txt").write_text("3\n\n5\n\n")
    expected = rcir.load(folder)
    new, labels = draw_vectors(60, 3)
    expected.remove(["3", "5"])
    expected.add(new, [f"new {row}" for row in range(60)], labels)
    report = expected.recalibrate()
    main(["recalibrate", "own", "--add", "new.npz", "--remove", "gone.txt"])
    assert capsys.readouterr().out.startswith(f"{report}\nretriever: own\n")
    after = rcir.load(folder)
    assert len(after.ids) == 358
    asked = draw_vectors(20, 9)[0]
    assert [one.to_dict() for one in after.retrieve(asked, 0.2, 0.1)] == [
        one.to_dict() for one in expected.retrieve(asked, 0.2, 0.1)
    ]


def test_ids_to_remove_must_be_text(folder, capsys):
    (folder.parent / "gone.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(SystemExit) as stop:
        main(["recalibrate", "own", "--remove", "gone.txt"])
    assert stop.value.code == 1
    assert "gone.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"id": np.arange(60).astype(str)}, "already"),
        ({"id": None}, "no column id"),
        ({"vector": draw_vectors(500, 2)[0][:60]}, "pictures of the gallery"),
    ],
    ids=["ids of the gallery", "no ids", "queries"],
)
def test_invalid_additions_leave_the_folder_as_it_was(folder, columns, word):
    def contents():
        return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = contents()
    with np.load("new.npz") as file:
        arrays = {name: file[name] for name in file} | columns
    np.savez("new.npz", **{name: values for name, values in arrays.items() if values is not None})
    with pytest.raises(InvalidData, match=word):
        recalibrate(folder, folder.parent / "new.npz")
    assert contents() == before


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_a_tracked_calibration_is_followed_by_a_run_of_its_own(trained, tracking_uri):
    outcome = calibrate(CalibrationConfig(str(trained.path), "out", alphas=(0.3,)))
    first = outcome.retriever.origin["calibration"]
    gone = outcome.retriever.ids[:5].tolist()
    Path("gone.txt").write_text("\n".join(gone))
    main(["recalibrate", "out/retriever", "--remove", "gone.txt"])
    second = rcir.load("out/retriever").origin["calibration"]
    assert second != first
    client = MlflowClient(tracking_uri)
    assert client.get_run(second).data.tags["kind"] == "recalibration"
    tracked = rcir.load(f"runs:/{second}/retriever")
    assert len(tracked.ids) == len(outcome.retriever.ids) - 5
    image = outcome.splits.data.test.images[0]
    local = rcir.load("out/retriever").retrieve(image, 0.3, 0.1)
    assert tracked.retrieve(image, 0.3, 0.1).to_dict() == local.to_dict()
