"""A retriever's folder, whenever the process that saves is killed."""

import numpy as np
import pytest

from rcir.data import ImageSet
from rcir.errors import NoRetriever
from rcir.index import build_index
from rcir.retrieval.retriever import Retriever


def part(n, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(5, size=n)
    vectors = np.eye(5)[labels] + 0.4 * rng.standard_normal((n, 5))
    return ImageSet(vectors.astype(np.float32), labels, [f"{seed}-{row}" for row in range(n)])


@pytest.fixture(scope="module")
def pair():
    """Two calibrated retrievers of vectors: the one that is there, and the one that replaces it."""
    made = []
    for seed in (1, 2):
        gallery = part(60, seed)
        index = build_index(gallery.images)
        one = Retriever(None, None, index, gallery.ids, gallery.labels, depth=20)
        one.calibrate(one.search_labelled(part(40, 3)), one.search_labelled(part(80, 4)), "minmax")
        made.append(one)
    return made


def test_a_retriever_survives_a_kill_at_every_step_of_saving(pair, tmp_path, kill):
    first, second = pair
    known = {one.ids[0]: one.fingerprints() for one in pair}
    folder, steps, died, seen = tmp_path / "retriever", 0, True, []
    while died:
        first.save(folder)
        died = kill(steps, lambda: second.save(folder))
        loaded = Retriever.load(folder)
        assert loaded.fingerprints() == known[loaded.ids[0]], steps
        assert [path.name for path in tmp_path.iterdir()] == ["retriever"], steps
        seen.append(loaded.ids[0])
        steps += 1
    assert steps > 15
    # Once it is the new one, it stays that.
    assert seen == sorted(seen)
    assert set(seen) == {"1-0", "2-0"}


def test_a_first_save_that_was_killed_leaves_nothing_or_all(pair, tmp_path, kill):
    steps, died = 0, True
    while died:
        folder = tmp_path / str(steps) / "retriever"
        folder.parent.mkdir()
        died = kill(steps, lambda folder=folder: pair[0].save(folder))
        try:
            assert Retriever.load(folder).fingerprints() == pair[0].fingerprints()
            left = ["retriever"]
        except NoRetriever:
            left = []
        assert [path.name for path in folder.parent.iterdir()] == left, steps
        steps += 1
