"""Vectors, labels, ids and uncertainties as other libraries hold them."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import rcir
from rcir.errors import InvalidData

RNG = np.random.default_rng(0)
KINDS = np.array(["pear", "fig", "plum", "quince", "medlar"])
LABELS = KINDS[RNG.integers(5, size=600)]
VECTORS = ((LABELS[:, None] == KINDS) + 0.3 * RNG.standard_normal((600, 5))).astype(np.float32)
UNCERTAINTY = RNG.uniform(size=600)
CONTAINERS = {
    "list": (np.ndarray.tolist, np.ndarray.tolist),
    "torch": (lambda x: torch.tensor(x, requires_grad=True), tuple),
    "pandas": (pd.DataFrame, pd.Series),
    "pandas categories": (lambda x: pd.Series(list(x)), lambda x: pd.Series(x, dtype="category")),
    "arrow table": (
        lambda x: pa.table({f"x{place}": column for place, column in enumerate(x.T)}),
        pa.array,
    ),
    "arrow chunks": (
        lambda x: pa.chunked_array([pa.array(x.tolist())]),
        lambda x: pa.array(list(x)),
    ),
}


def answers(vectors, column):
    """Build, calibrate and query a retriever whose inputs went through both functions."""
    retriever = rcir.Retriever.from_embeddings(
        vectors(VECTORS[:200]),
        ids=column(np.array([f"item {row}" for row in range(200)])),
        labels=column(LABELS[:200]),
        uncertainty=column(UNCERTAINTY[:200]),
    )
    retriever.calibrate(
        vectors(VECTORS[200:590]),
        column(LABELS[200:590]),
        "quantile",
        uncertainty=column(UNCERTAINTY[200:590]),
        groups=column(np.where(UNCERTAINTY[200:590] < 0.5, "sharp", "blurred")),
    )
    uncertainty = column(UNCERTAINTY[590:])
    many = retriever.retrieve(vectors(VECTORS[590:]), 0.1, 0.1, uncertainty=uncertainty)
    one = retriever.retrieve(VECTORS[590], 0.1, 0.1, uncertainty=UNCERTAINTY[590])
    retriever.add(vectors(VECTORS[:1] + 1), column(np.array(["new"])), column(LABELS[:1]), [0.5])
    return [answer.to_dict() for answer in (*many, one)], retriever.ids.tolist()


@pytest.fixture(scope="module")
def expected():
    """The answers for arrays."""
    return answers(np.asarray, np.asarray)


@pytest.mark.parametrize("name", CONTAINERS)
def test_answers_do_not_depend_on_the_container_of_the_inputs(expected, name):
    assert len(expected[0]) == 11
    assert answers(*CONTAINERS[name]) == expected


@pytest.mark.parametrize("numbers", [torch.tensor, pd.Series, pa.array, list])
def test_labels_may_be_whole_numbers(numbers):
    codes = np.arange(200) % 5
    retriever = rcir.Retriever.from_embeddings(VECTORS[:200], labels=numbers(codes))
    assert retriever.labels.tolist() == codes.tolist()
    nullable = pd.Series(codes, dtype="Int64")
    again = rcir.Retriever.from_embeddings(VECTORS[:200], labels=nullable)
    assert again.labels.tolist() == codes.tolist()


@pytest.mark.parametrize(
    "options",
    [{}, {"distinct": "label"}, {"distinct": "label", "risk": "recall"}],
    ids=["items", "labels", "all labels"],
)
def test_negative_labels_are_labels_as_others(options):
    codes = np.searchsorted(np.sort(KINDS), LABELS)

    def retrieve(labels):
        retriever = rcir.Retriever.from_embeddings(VECTORS[:200], labels=labels[:200])
        retriever.calibrate(VECTORS[200:590], labels[200:590])
        return [
            (answer.ids, answer.size)
            for answer in retriever.retrieve(VECTORS[590:], 0.3, 0.1, **options)
        ]

    assert retrieve(codes - 1) == retrieve(codes - 5) == retrieve(codes)


@pytest.mark.parametrize(
    "column", [np.asarray, lambda x: list(np.array(x))], ids=["array", "list of np.str_"]
)
def test_ids_of_numpy_can_be_saved(column, tmp_path):
    retriever = rcir.Retriever.from_embeddings(VECTORS[:2], ids=column(["a", "b"]))
    retriever.add(VECTORS[2:3], column(["c"]))
    assert rcir.load(retriever.save(tmp_path / "r")).ids.tolist() == ["a", "b", "c"]


def test_the_depth_may_be_an_integer_of_numpy():
    depth = np.int64(50)
    retriever = rcir.Retriever.from_embeddings(VECTORS[:200], labels=LABELS[:200], depth=depth)
    retriever.calibrate(VECTORS[200:590], LABELS[200:590], "constant")
    assert retriever.retrieve(VECTORS[590], 0.1, 0.1).size >= 1


def test_labels_may_be_an_arrow_column_of_lists():
    lists = [["red", "small"], ["red"], ["blue"], []]
    retriever = rcir.Retriever.from_embeddings(VECTORS[:4], labels=pa.array(lists))
    queries = retriever.labelled(VECTORS[:1], pa.array([["red"]]))
    assert queries.relevance.totals(retriever.relevance).tolist() == [2]


@pytest.mark.parametrize(
    "vector", [VECTORS[0].tolist(), torch.tensor(VECTORS[0]), pd.Series(VECTORS[0])], ids=type
)
def test_one_vector_gives_one_answer(vector):
    retriever = rcir.Retriever.from_embeddings(VECTORS[:200], labels=LABELS[:200])
    retriever.calibrate(VECTORS[200:590], LABELS[200:590], "constant")
    assert retriever.retrieve(vector, 0.1, 0.1).size >= 1
    (answer,) = retriever.retrieve([vector], 0.1, 0.1)
    assert answer.to_dict() == retriever.retrieve(VECTORS[0], 0.1, 0.1).to_dict()


@pytest.mark.parametrize(
    ("labels", "word"),
    [
        (pd.Series([1.5, 2.5, 3.5]), "labels"),
        (pd.Series(["pear", None, "fig"]), "labels"),
        (pa.array(["pear", None, "fig"]), "labels"),
        (torch.tensor([0.5, 1.0, 2.0]), "labels"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_columns_that_are_no_labels_are_refused(labels, word):
    with pytest.raises(InvalidData, match=word):
        rcir.Retriever.from_embeddings(VECTORS[:3], labels=labels)
