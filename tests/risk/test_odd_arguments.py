"""Arguments of another type are refused in words, never by a foreign error."""

import numpy as np
import pytest

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel
from rcir.risk import (
    LabelledResults,
    MonotoneController,
    Request,
    SearchResults,
    fit_score_function,
)
from rcir.risk.choice import KNOWN

N, DEPTH = 60, 4


@pytest.fixture(scope="module")
def given():
    relevant = np.random.default_rng(0).uniform(size=(N, DEPTH)) < 0.5
    return SearchResults(np.linspace(0, 1, N), DEPTH), relevant, relevant.sum(axis=1)


@pytest.mark.parametrize("name", ["relevant", "totals", "groups", "clusters"])
@pytest.mark.parametrize("odd", [[True] * N, "many", 3, {"a": 1}, (1, 2)], ids=repr)
def test_labels_that_are_no_arrays_are_refused_by_name(given, name, odd):
    results, relevant, totals = given
    known = {"relevant": relevant, "totals": totals, "cluster": "video" * (name == "clusters")}
    known["cluster"] = known["cluster"] or None
    with pytest.raises(InvalidData, match=f"{name} is a .*: give an array"):
        LabelledResults.of(results, **(known | {name: odd}))


@pytest.mark.parametrize("name", ["distances", "keys", "candidate_uncertainty", "positions"])
def test_what_is_known_of_candidates_comes_in_arrays(name):
    with pytest.raises(InvalidData, match=f"{name} is a list: give an array"):
        SearchResults(np.zeros(2), 1, **{name: [[0], [1]]})


@pytest.mark.parametrize("name", [*KNOWN, "auto"])
@pytest.mark.parametrize("odd", [[1.0] * N, "first", None, np.array(["a"] * N)], ids=repr)
def test_a_truth_that_is_none_is_refused_by_every_score_function(given, name, odd):
    with pytest.raises(InvalidData):
        fit_score_function(name, given[0], odd)


@pytest.mark.parametrize("odd", ["precision", "", 3, None, ["miss"], ("miss", "recall")], ids=repr)
def test_an_unknown_risk_is_refused_with_those_there_are(given, odd):
    results, relevant, totals = given
    labelled = LabelledResults.of(results, relevant, totals)
    for call in (
        lambda: Request(0.1, 0.1, odd),
        lambda: fit_score_function("auto", results, relevant, risk=odd),
        lambda: MonotoneController(labelled, labelled, odd),
    ):
        with pytest.raises(InvalidConfig, match="choose one of miss, recall, false-discovery"):
            call()


@pytest.mark.parametrize("odd", ["0.1", None, [0.1], np.array([0.1]), True, 1j])
def test_levels_that_are_no_numbers_are_refused(odd):
    with pytest.raises(InvalidRiskLevel, match="alpha is"):
        Request(odd, 0.1)
