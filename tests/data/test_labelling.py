"""The rule by which labels, groups and ids are compared, in Python."""

import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from rcir.data.labelling import (
    added_relevance,
    gallery_relevance,
    query_relevance,
    reported_relevance,
)
from rcir.data.names import as_ids, as_label_lists, as_labels, as_texts
from rcir.errors import InvalidData

IDS = ["a", "b", "c"]


@pytest.mark.parametrize(
    "labels",
    [
        [1, 2, 1],
        [1.0, 2.0, 1.0],
        [1, 2.0, Decimal(1)],
        np.array([1, 2, 1], np.uint8),
        np.array([1, 2, 1], ">i2"),
        np.array([1, 2, 1], np.float16),
        np.array([1, 2, 1], object),
        [np.int32(1), np.uint64(2), np.float32(1)],
        [torch.tensor(1), torch.tensor(2), torch.tensor(1)],
        torch.tensor([1, 2, 1], dtype=torch.int8),
        torch.tensor([1.0, 2.0, 1.0], requires_grad=True),
        pd.Series([1, 2, 1], dtype="UInt8"),
        pd.Series([1, 2, 1], dtype="int64[pyarrow]"),
        pd.Series([1, 2, 1], dtype="Float32"),
        pa.array([1, 2, 1], pa.uint64()),
        pa.chunked_array([[1.0], [2.0, 1.0]]),
    ],
    ids=lambda labels: type(labels).__name__,
)
def test_whole_numbers_are_the_same_labels_in_every_type(labels):
    relevance, names = gallery_relevance(labels, IDS)
    assert (relevance.labels.tolist(), names) == ([1, 2, 1], {})


@pytest.mark.parametrize(
    "labels",
    [
        ["pear", " pear", "fig "],
        np.array(["pear", "pear\t", "fig"]),
        pd.Series(["pear", "pear", "fig"], dtype="string"),
        pd.Categorical(["pear", "pear", "fig"]),
        pa.array(["pear", "pear", "fig"]).dictionary_encode(),
    ],
    ids=lambda labels: type(labels).__name__,
)
def test_texts_are_the_same_labels_whatever_the_blanks_around_them(labels):
    relevance, names = gallery_relevance(labels, IDS)
    assert (relevance.labels.tolist(), names) == ([1, 1, 0], {0: "fig", 1: "pear"})
    queries, names = query_relevance(["fig ", "\npear", "plum"], relevance, names)
    assert queries.totals(relevance).tolist() == [1, 2, 0]
    assert names == {0: "fig", 1: "pear", 2: "plum"}


def test_names_that_were_stored_otherwise_are_found():
    relevance, _ = gallery_relevance(["b", "a", "b"], IDS)
    names = {0: "caf\u0065\u0301 ", 1: "fig"}  # as another version stored them
    queries, names = query_relevance(["caf\u00e9", "fig"], relevance, names)
    assert queries.totals(relevance).tolist() == [1, 2]
    assert len(names) == 2


MISSING = [None, "", " ", "nan", "NaN", "None", "NA", "<NA>", "null", np.nan, pd.NA, pd.NaT]


@pytest.mark.parametrize("missing", MISSING, ids=repr)
def test_missing_labels_are_refused_with_their_rows_in_all_calls(missing):
    gallery, names = gallery_relevance(["x", "y", "x"], IDS)
    for refused in (
        lambda labels: gallery_relevance(labels, [*IDS, "d"]),
        lambda labels: query_relevance(labels, gallery, names),
        lambda labels: added_relevance(labels, 4, gallery, names),
        lambda labels: as_texts(labels, "groups"),
    ):
        with pytest.raises(InvalidData, match=r"2 of 4 .*missing.*row 1 .*row 3"):
            refused(["x", missing, "y", missing])
    if not isinstance(missing, str):
        with pytest.raises(InvalidData, match="missing"):
            gallery_relevance(np.array([1, missing, 2], object), IDS)
        reported, _ = reported_relevance([None, "x"], gallery, names)  # here it means no match
        assert reported.totals(gallery).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("labels", "word"),
    [
        ([1, 2, 2**64 - 1], "64 bits.*row 2"),
        (np.array([1, 2, 2**63], np.uint64), "64 bits.*row 2"),
        ([1, 2, 10**30], "64 bits.*row 2"),
        ([1, 2, -(2**63)], "64 bits.*row 2"),  # rcir uses it for "matches nothing"
        ([1.0, 2.5, 3.0], "whole.*row 1"),
        ([1.0, np.inf, 3.0], "whole.*row 1"),
        ([1.0, 1e17, 3.0], "whole.*row 1"),  # floats have gaps there
        ([Fraction(1, 2), 1, 1], "whole.*row 0"),
        ([True, False, True], "bool"),
        ([True, 2, 1], "bool"),
        ([1, "1", 2], "int, str"),
        ([b"a", b"b", b"c"], "bytes"),
        (np.array(["2024-01-01"] * 3, "datetime64[ns]"), "datetime"),
        ([[0, 1], [1, 0], [0, 1]], "labels"),
        ([["a"], None, ["b"]], "labels"),
        (["a", "\udcff", "b"], "UTF-8"),
        ([{"a": 1}, {"a": 2}, {"a": 1}], "dict"),
        (np.array([[1], [2], [3]]), "labels"),
        ({"a": 1}, "dict"),
    ],
)
def test_values_that_are_not_labels_are_refused(labels, word):
    with pytest.raises(InvalidData, match=word):
        gallery_relevance(labels, IDS)


@pytest.mark.parametrize("extreme", [2**63 - 1, 1 - 2**63])
def test_the_largest_whole_numbers_are_labels(extreme):
    relevance, names = gallery_relevance([extreme, 0, extreme], IDS)
    queries, _ = query_relevance([extreme, extreme - 1 if extreme > 0 else 1], relevance, names)
    assert queries.totals(relevance).tolist() == [2, 0]


def test_labels_that_differ_only_in_a_decimal_point_are_refused():
    for ours, theirs in (("2", "2.0"), ("2.0", "2")):
        for several in (False, True):
            form = (lambda labels: [[label] for label in labels]) if several else list
            gallery, names = gallery_relevance(form(["1", ours, "x"]), IDS)
            with pytest.raises(InvalidData, match=f"{theirs!r}.*{ours!r}"):
                query_relevance(form(["1", theirs]), gallery, names)
    gallery, names = gallery_relevance(["2", "2.0", "x"], IDS)  # versions, for instance
    queries, _ = query_relevance(["2.0", "3.0"], gallery, names)
    assert queries.totals(gallery).tolist() == [1, 0]


def test_lists_of_labels_lose_blanks_and_empty_texts():
    gallery, names = gallery_relevance([["red ", ""], ["red", "big"], []], IDS)
    assert sorted(names.values()) == ["big", "red"]
    queries, _ = query_relevance(pa.array([[" red"], ["new"], []]), gallery, names)
    assert queries.totals(gallery).tolist() == [2, 0, 0]
    with pytest.raises(InvalidData, match=r"row 1 .*'nan'"):
        gallery_relevance([["red"], ["nan"], ["red"]], IDS)


def test_ids_of_true_matches_are_compared_as_they_are():
    ids = ["a ", "nan", "e\u0301"]
    gallery, names = gallery_relevance(None, ids)
    queries, _ = query_relevance([["a "], ["nan", "e\u0301"]], gallery, names)
    assert queries.totals(gallery).tolist() == [1, 2]
    with pytest.raises(InvalidData, match="not in the gallery"):
        query_relevance([["a"]], gallery, names)


def test_texts_and_ids_are_written_alike_in_all_types():
    dates = pd.to_datetime(["2024-01-31", "2024-02-01"])
    assert [text[:10] for text in as_texts(dates.to_numpy(), "groups")] == [
        "2024-01-31",
        "2024-02-01",
    ]
    assert as_texts(np.array([1.0, 2.5]), "groups") == ["1", "2.5"]
    assert as_ids(pd.Series([7, 8], dtype="Int64").to_numpy(), "ids") == ["7", "8"]
    assert as_ids([10**30, 1], "ids") == [str(10**30), "1"]
    for wrong in (["a", None], ["a", " "], [1.0, np.nan]):
        with pytest.raises(InvalidData, match="row 1"):
            as_ids(wrong, "ids")
    with pytest.raises(InvalidData, match="list"):
        as_texts([["a"], ["b"]], "groups")
    assert as_labels([], "labels").tolist() == []
    assert as_label_lists([], "labels") == []


def test_fifty_thousand_names_of_labels_are_numbered_at_once():
    names = [f"class {number}" for number in range(50_000)]
    gallery, by_number = gallery_relevance(names, names)
    start = time.process_time()
    queries, all_names = query_relevance(
        [*names, *(f"new {name}" for name in names)], gallery, by_number
    )
    assert time.process_time() - start < 5  # one pass; a pass for each name takes minutes
    assert np.array_equal(queries.labels[:50_000], gallery.labels)
    assert len(all_names) == 100_000
    assert sorted(queries.labels.tolist()) == list(range(100_000))
