import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from rcir.retrieval.answer import Guarantee, Retrieval

GUARANTEE = Guarantee(
    alpha=0.05,
    delta=0.1,
    risk="miss",
    distinct=None,
    group=None,
    abstain=False,
    simultaneous=False,
    threshold=12.5,
    bound="binomial",
    score_function="quantile",
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
    assert (
        "3000 calibration queries (quantile sizes, binomial bound, threshold = 12.5)" in statement
    )


END = "calibration queries (quantile sizes, binomial bound, threshold = 12.5)."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {},
            "With probability at least 0.9, a true match is missing from at most 0.05 of the sets "
            f"returned to queries like the 3000 {END}",
        ),
        (
            {"distinct": "label"},
            "With probability at least 0.9, a true match is missing from at most 0.05 of the sets "
            f"of distinct labels returned to queries like the 3000 {END}",
        ),
        (
            {"risk": "recall", "delta": 0.001},
            "With probability at least 0.999, at most 0.05 of a query's true matches, on average "
            f"over queries, are missing from the sets returned to queries like the 3000 {END}",
        ),
        (
            {"risk": "false-discovery"},
            "With probability at least 0.9, at most 0.05 of a set's items, on average over "
            f"queries, are wrong in the sets returned to queries like the 3000 {END}",
        ),
        (
            {
                "alpha": {"miss": 0.1, "recall": 0.25, "false-discovery": 0.5},
                "risk": "miss, recall, false-discovery",
                "risk_bound": None,
            },
            "With probability at least 0.9, a true match is missing from at most 0.1 of the sets "
            "and at most 0.25 of a query's true matches, on average over queries, are missing from "
            "the sets and at most 0.5 of a set's items, on average over queries, are wrong in the "
            f"sets returned to queries like the 3000 {END}",
        ),
        (
            {"abstain": True},
            "With probability at least 0.9, a true match is missing from at most 0.05 of the "
            f"answers returned to queries like the 3000 {END}",
        ),
        (
            {"group": "north", "n_calibration": 70},
            "With probability at least 0.9, a true match is missing from at most 0.05 of the sets "
            f"returned to queries of group 'north' like the 70 {END}",
        ),
        (
            {"simultaneous": True},
            "With probability at least 0.9, whatever alpha is chosen, a true match is missing from "
            f"at most 0.05 of the sets returned to queries like the 3000 {END}",
        ),
        (
            {"chosen_among": 12},
            "Chosen among 12 retrievers after looking: with probability at least 0.9, a true match "
            f"is missing from at most 0.05 of the sets returned to queries like the 3000 {END}",
        ),
        (
            {"delta": None},
            "On average over calibrations, of which one that certifies nothing counts as none "
            "wrong, a true match is missing from at most 0.05 of the sets returned to queries like "
            f"the 3000 {END}",
        ),
        (
            {"risk": "recall", "distinct": "label"},
            "With probability at least 0.9, at most 0.05 of a query's true labels, on average over "
            "queries, are missing from the sets of distinct labels returned to queries like the "
            f"3000 {END}",
        ),
        (
            {"risk": "false-discovery", "distinct": "label"},
            "With probability at least 0.9, at most 0.05 of a set's labels, on average over "
            "queries, are wrong in the sets of distinct labels returned to queries like the 3000 "
            f"{END}",
        ),
        (
            {"anytime": True},
            "With probability at least 0.9, at every moment since calibration began, a true match "
            f"is missing from at most 0.05 of the sets returned to queries like the 3000 {END}",
        ),
        (
            {"mix": "any", "n_groups": 5},
            "With probability at least 0.9, whatever the mix of the 5 groups, a true match is "
            f"missing from at most 0.05 of the sets returned to queries like the 3000 {END}",
        ),
        (
            {"mix": "any", "n_groups": 2, "anytime": True},
            "With probability at least 0.9, at every moment since calibration began, whatever the "
            "mix of the 2 groups, a true match is missing from at most 0.05 of the sets returned "
            f"to queries like the 3000 {END}",
        ),
        (
            {"mix": {"north": 0.7, "south": 0.3}},
            "With probability at least 0.9, where the groups come as north 0.7, south 0.3, a true "
            "match is missing from at most 0.05 of the sets returned to queries like the 3000 "
            f"{END}",
        ),
        (
            {"cluster": "drawer", "n_clusters": 60},
            "With probability at least 0.9, a true match is missing from at most 0.05 of the sets "
            "returned to queries of any further drawer like the 60 of the 3000 calibration "
            "queries, each drawer counted alike (quantile sizes, binomial bound, "
            "threshold = 12.5).",
        ),
        (
            {"cluster": "drawer", "n_clusters": 20, "group": "north", "n_calibration": 70},
            "With probability at least 0.9, a true match is missing from at most 0.05 of the sets "
            "returned to queries of group 'north' of any further drawer like the 20 of the 70 "
            "calibration queries, each drawer counted alike (quantile sizes, binomial bound, "
            "threshold = 12.5).",
        ),
    ],
    ids=str,
)
def test_the_sentence_says_what_was_asked_for(changes, sentence):
    assert str(replace(GUARANTEE, **changes)) == sentence
    values = json.loads(json.dumps(asdict(replace(GUARANTEE, **changes))))
    assert Guarantee(**values) == replace(GUARANTEE, **changes)


def test_no_answer_says_so_in_print_and_in_json():
    guarantee = replace(GUARANTEE, abstain=True)
    none = Retrieval((), np.zeros(0, np.float32), 3.5, guarantee, ())
    assert (none.size, none.abstained) == (0, True)
    assert str(none).splitlines() == ["no answer: too uncertain, uncertainty 3.5", str(guarantee)]
    values = json.loads(json.dumps(none.to_dict()))
    assert (values["ids"], values["labels"], values["distances"]) == ([], [], [])
    assert (values["size"], values["abstained"]) == (0, True)
    assert not retrieval().abstained
    assert retrieval().to_dict()["abstained"] is False


def test_one_image_is_not_several():
    one = Retrieval(("near",), np.zeros(1, np.float32), 0.125, GUARANTEE)
    assert str(one).splitlines()[0] == "1 image, uncertainty 0.125"


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


@pytest.mark.parametrize(
    ("delta", "said"), [(1e-5, "0.99999"), (1e-12, "0.999999999999"), (0.10004, "0.89996")]
)
def test_what_is_printed_is_never_rounded_up(delta, said):
    sentence = str(replace(GUARANTEE, delta=delta, alpha=0.12344))
    assert sentence.startswith(f"With probability at least {said}, ")
    assert "at most 0.12344 of the sets" in sentence


def test_an_abstaining_guarantee_names_its_threshold():
    sentence = str(replace(GUARANTEE, abstain=True, threshold=0.0, selection_threshold=0.25))
    assert "answered up to a selection score of 0.25" in sentence
    assert "threshold" not in sentence
