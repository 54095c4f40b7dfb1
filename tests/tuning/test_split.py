"""A sweep sees training and validation images alone: the others are for what comes afterwards."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from rcir.data import DataConfig, Preprocessing, load_splits
from rcir.errors import InvalidImage
from rcir.runs.results import VALIDATION, RunResults
from tuning import TuningConfig, sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.usefixtures("one_cpu", "store"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray's own processes
]

PARTS = {"train": 600, "gallery": 100, "query": 200}  # a third of the first validates
HELD_BACK = ("gallery", "tuning", "calibration", "test")


@pytest.fixture
def data(tmp_path):
    """Handwritten digits as files, in the layout of a set that is published with its parts."""
    digits = load_digits()
    order = iter(np.random.default_rng(0).permutation(len(digits.target)))
    for part, number in PARTS.items():
        for row in (next(order) for _ in range(number)):
            path = tmp_path / "pictures" / part / str(digits.target[row]) / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((digits.images[row] * 15).astype(np.uint8)).save(path)
    options = {"path": "pictures", "validation": 200}
    return DataConfig("folder", str(tmp_path), options=options)


def test_what_is_kept_for_calibration_and_test_may_be_anything(data, small, tmp_path):
    common = {"data": data, "preprocessing": Preprocessing((8, 8)), "storage": str(tmp_path)}
    space = {"optimizer.lr": {"grid": [1e-3, 3e-3]}}
    config = TuningConfig(small("before", **common), space, trials=1)
    before = sweep(config)

    splits = load_splits(data)
    held_back = [path for name in HELD_BACK for path in getattr(splits, name).images]
    assert len(held_back) == PARTS["gallery"] + PARTS["query"]
    for path in held_back:
        path.write_text("no picture")
    # Whoever looks at one of them is told.
    for name in HELD_BACK:
        with pytest.raises(InvalidImage, match="is not an image"):
            config.training.preprocessing(getattr(splits, name).images[:1])

    after = sweep(replace(config, training=small("after", **common)))
    assert [trial.state for trial in after.trials.values()] == ["finished", "finished"]
    assert [trial.metrics for trial in after.trials.values()] == [
        trial.metrics for trial in before.trials.values()
    ]
    for trial in after.trials.values():
        found, expected = (
            RunResults.read(records.folder / trial.name / VALIDATION) for records in (after, before)
        )
        assert found.queries == expected.queries
        for ours, theirs in zip(found.parts, expected.parts, strict=True):
            np.testing.assert_array_equal(ours.candidate_scores, theirs.candidate_scores)
            np.testing.assert_array_equal(ours.scores, theirs.scores)
