import json

import numpy as np
import pytest

from rcir.retrieval import Guarantee, Retrieval

GUARANTEE = Guarantee(
    alpha=0.05,
    delta=0.1,
    risk="miss",
    distinct=None,
    group=None,
    abstain=False,
    simultaneous=False,
    kappa=12.5,
    bound="binomial",
    adapter="quantile",
    n_calibration=3000,
    risk_bound=0.0498,
)


def retrieval(labels=(4, 7)):
    distances = np.array([0.25, 1.5], np.float32)
    return Retrieval(("near", "far"), distances, 0.125, GUARANTEE, labels)


def test_the_statement_names_what_is_guaranteed_and_for_whom():
    statement = str(GUARANTEE)
    assert "With probability at least 0.9, " in statement
    assert "missing from at most 0.05 of the sets" in statement
    assert "3000 calibration queries (quantile sizes, binomial bound, kappa = 12.5)" in statement


def test_the_text_lists_the_items_in_order():
    lines = str(retrieval()).splitlines()
    assert lines[0] == "2 images, uncertainty 0.125"
    assert lines[2].split() == ["1", "0.2500", "near"]
    assert lines[3].split() == ["2", "1.5000", "far"]
    assert lines[4] == str(GUARANTEE)


@pytest.mark.parametrize("labels", [(4, 7), None])
def test_plain_values_survive_json(labels):
    values = json.loads(json.dumps(retrieval(labels).to_dict()))
    assert values["ids"] == ["near", "far"]
    assert values["distances"] == [0.25, 1.5]
    assert values["labels"] == (None if labels is None else [4, 7])
    assert (values["size"], values["uncertainty"]) == (2, 0.125)
    assert Guarantee(**values["guarantee"]) == GUARANTEE


@pytest.mark.parametrize(
    ("ids", "distances", "labels"), [(("a",), 2, None), (("a", "b"), 2, (1,)), ((), 1, None)]
)
def test_parts_of_different_length_are_refused(ids, distances, labels):
    with pytest.raises(ValueError, match=f"{len(ids)} ids"):
        Retrieval(ids, np.zeros(distances, np.float32), 0.1, GUARANTEE, labels)
