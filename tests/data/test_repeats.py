"""Pictures that are in two parts of a data set."""

import warnings

import numpy as np
import pytest
from PIL import Image

from rcir.data import ImageSet, Splits, without_repeats
from rcir.data.digests import digests
from rcir.data.repeats import require_new, require_no_repeats, warn_of_copies
from rcir.errors import InvalidData

PARTS = ("train", "validation", "gallery", "tuning", "calibration", "test")


def of(rows):
    """Pictures by number; the ids say which place each is at."""
    images = np.array(rows, np.uint8)[:, None, None] + np.zeros((4, 4), np.uint8)
    return ImageSet(images, np.array(rows), [f"{place}" for place in range(len(rows))])


def naively(parts):
    """The places of the queries that are kept, by a loop over all of them."""
    seen = {*parts["train"], *parts["validation"], *parts["gallery"]}
    kept = {"tuning": [i for i, n in enumerate(parts["tuning"]) if n not in seen]}
    seen |= set(parts["tuning"])
    for name in ("calibration", "test"):
        kept[name] = []
        for place, number in enumerate(parts[name]):
            if number not in seen:
                kept[name].append(place)
            seen.add(number)
    return kept


@pytest.mark.parametrize("seed", range(5))
def test_the_queries_that_remain_are_those_that_stand_nowhere_before(seed):
    rng = np.random.default_rng(seed)
    numbers = {name: rng.integers(0, 250, 40).tolist() for name in PARTS}
    splits = Splits(**{name: of(rows) for name, rows in numbers.items()})
    found, left_out = without_repeats(splits)
    kept = naively(numbers)
    for name in PARTS[:3]:
        assert getattr(found, name) is getattr(splits, name)
    for name in PARTS[3:]:
        queries = getattr(found, name)
        assert queries.ids == [str(place) for place in kept[name]]
        assert queries.labels.tolist() == [numbers[name][place] for place in kept[name]]
        assert left_out[name] == 40 - len(kept[name]) > 0


def test_files_are_known_by_their_content(tmp_path):
    def files(part, *numbers):
        paths = []
        for number in numbers:
            paths.append(tmp_path / f"{part}-{number}-{len(paths)}.png")
            Image.fromarray(np.full((4, 4), number, np.uint8)).save(paths[-1])
        return ImageSet(paths, np.array(numbers), [path.name for path in paths])

    numbers = {"train": [0], "validation": [1], "gallery": [2, 3], "tuning": [3, 4, 4]}
    numbers |= {"calibration": [4, 5, 6, 5], "test": [6, 7, 1, 0, 2]}
    splits = Splits(**{name: files(name, *rows) for name, rows in numbers.items()})
    found, left_out = without_repeats(splits)
    assert left_out == {"tuning": 1, "calibration": 2, "test": 4}
    assert found.calibration.ids == ["calibration-5-1.png", "calibration-6-2.png"]
    assert found.test.ids == ["test-7-1.png"]
    assert without_repeats(found) == (found, dict.fromkeys(PARTS[3:], 0))


def test_a_part_of_which_nothing_remains_is_refused():
    splits = Splits(of([0]), of([1]), of([2]), of([3]), of([3, 2, 1, 0]), of([5]))
    with pytest.raises(InvalidData, match="all 4 calibration queries are pictures that stand else"):
        without_repeats(splits)


def known(*numbers):
    return digests(of(list(numbers)).images)


def test_queries_of_the_gallery_are_refused_with_their_rows():
    searched = known(*range(10))
    with pytest.raises(InvalidData, match=r"^2 of 3 calibration queries are pictures of the gal.*"):
        require_no_repeats(searched, known(20, 21), known(3, 22, 9))
    with pytest.raises(InvalidData, match=r"\(rows 0, 2\), and each finds itself: leave them out"):
        require_no_repeats(searched, known(20, 21), known(3, 22, 9), recurring=True)
    with pytest.raises(InvalidData, match=r"1 of 2 queries of the tuning split .*\(row 1\)"):
        require_no_repeats(searched, known(20, 5), known(30, 31), recurring=True)
    with pytest.raises(InvalidData, match=r"9 of 10 .*rows 0, 1, 2, 3, 4, \.\.\.\)"):
        require_no_repeats(searched, known(20), known(*range(9), 50))


def test_queries_of_the_tuning_split_and_those_that_come_twice_are_refused_unless_they_recur():
    tuning = known(20, 21, 22, 20)
    with pytest.raises(InvalidData, match=r"2 of 4 .*in the tuning split too \(rows 1, 2\).*recur"):
        require_no_repeats(known(1), tuning, known(30, 21, 20, 31))
    with pytest.raises(InvalidData, match=r"2 of 4 .* came before among them \(rows 2, 3\)"):
        require_no_repeats(known(1), tuning, known(30, 31, 30, 30))
    require_no_repeats(known(1), tuning, known(30, 21, 20, 31), recurring=True)
    require_no_repeats(known(1), tuning, known(30, 31, 30, 30), recurring=True)
    require_no_repeats(known(1, 1), tuning, known(30, 31))
    require_no_repeats(None, tuning, known(30, 31))


def test_queries_to_add_are_new_or_recur():
    searched, before = known(*range(10)), known(20, 21, 22, 20)
    with pytest.raises(
        InvalidData, match=r"^2 of 3 queries to add are pictures of the gallery \(rows 0, 2\)"
    ):
        require_new(searched, before, known(3, 30, 9), recurring=True)
    with pytest.raises(
        InvalidData, match=r"1 of 3 queries to add were tuned or calibrated with before \(row 2\)"
    ):
        require_new(searched, before, known(30, 31, 22))
    with pytest.raises(
        InvalidData,
        match=r"2 of 4 queries to add came before among them \(rows 1, 3\), .*recurring=True",
    ):
        require_new(None, before, known(30, 30, 31, 30))
    require_new(searched, before, known(30, 30, 22), recurring=True)
    require_new(None, before, known(3, 30, 31))
    require_new(searched, known(), known(20))


def test_of_copies_that_only_their_distance_shows_it_warns():
    # The second nearest have a median of 1.
    distances = np.stack([np.linspace(0.4, 1.2, 101), np.linspace(0.5, 1.5, 101)], axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_copies("calibration queries", distances, known=True)
    distances[[4, 7], 0] = 0, 0.0199
    with pytest.warns(UserWarning, match=r"2 of 101 calibration queries \(rows 4, 7\) .*another"):
        warn_of_copies("calibration queries", distances, known=True)
    with pytest.warns(UserWarning, match="may be the same picture"):
        warn_of_copies("calibration queries", distances, known=False)
    distances[:, 0] = 0.01  # all of them
    with pytest.warns(UserWarning, match="101 of 101 calibration queries"):
        warn_of_copies("calibration queries", distances, known=True)
