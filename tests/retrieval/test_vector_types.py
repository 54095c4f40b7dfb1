"""Vectors of every type, container and length, in every call that takes vectors."""

import tempfile
from collections import deque
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import torch

import rcir
from rcir.embedding import Embedding, as_vectors
from rcir.errors import InvalidConfig, InvalidData
from rcir.index import check_vectors, lengths
from rcir.retrieval.queries import VectorOptions

RNG = np.random.default_rng(0)
CENTRES = RNG.integers(-60, 60, (12, 8))
LABELS = RNG.integers(12, size=640)
# Whole numbers from -100 to 100, all different: the same in all types but those of 8-bit floats.
VECTORS = CENTRES[LABELS] + RNG.integers(-40, 41, (640, 8))
GALLERY, QUERIES, NEW, ADDED = (
    slice(*each) for each in ((0, 200), (200, 600), (600, 630), (630, 640))
)


def answers(form, metric="cosine", options=None):
    """Pass vectors in a form to every call that takes some, and return what comes out."""
    build = rcir.Retriever.from_embeddings
    retriever = build(form(VECTORS[GALLERY]), labels=LABELS[GALLERY], metric=metric)
    retriever.calibrate(form(VECTORS[QUERIES]), LABELS[QUERIES], "constant")
    many = retriever.retrieve(form(VECTORS[NEW]), 0.2, 0.1)
    levels = retriever.at_levels(form(VECTORS[NEW]), [0.2, 0.3], 0.1)
    found = retriever.search(form(VECTORS[NEW]))
    labelled = retriever.search_labelled(retriever.labelled(form(VECTORS[NEW]), LABELS[NEW]))
    retriever.extend_calibration(form(VECTORS[NEW]), LABELS[NEW])
    with retriever.update() as version:
        version.add(form(VECTORS[ADDED]), [f"new {row}" for row in range(10)], LABELS[ADDED])
        version.calibration = None
    return (
        [answer.ids for answer in many],
        [each.sizes.tolist() for each in levels],
        found.positions.tolist(),
        labelled.relevant.tolist(),
        retriever.search(form(VECTORS[NEW])).positions.tolist(),
    )


def memory_mapped(dtype, order="C"):
    def form(vectors):
        with tempfile.TemporaryFile() as file:  # the mapping keeps it
            stored = np.memmap(file, dtype, "w+", shape=vectors.shape, order=order)
        stored[:] = vectors
        return stored

    return form


FORMS = {
    **{name: lambda x, name=name: x.astype(name) for name in ("int8", "int16", "int64", ">i4")},
    **{name: lambda x, name=name: x.astype(name) for name in ("float16", ">f4", "longdouble")},
    "uint8": lambda x: (x + 128).astype(np.uint8),
    "uint64": lambda x: (x + 128).astype(np.uint64),
    "Fortran order": lambda x: np.asfortranarray(x, np.float32),
    "strides": lambda x: np.repeat(np.repeat(x.astype(np.float32), 2, 0), 3, 1)[::2, ::3],
    "read-only": lambda x: np.frombuffer(x.astype(np.float32).tobytes(), np.float32).reshape(
        x.shape
    ),
    "objects": lambda x: x.astype(object),
    "masked, nothing missing": lambda x: np.ma.masked_array(x, np.zeros(x.shape, bool)),
    "memmap >f8": memory_mapped(">f8"),
    "memmap, Fortran order": memory_mapped("f4", "F"),
    "list": lambda x: x.tolist(),
    "tuple of arrays": lambda x: tuple(x),
    "deque": lambda x: deque(x),
    "Decimal": lambda x: [[Decimal(int(number)) for number in row] for row in x],
    "list of tensors": lambda x: list(torch.tensor(x)),
    "torch int8": lambda x: torch.tensor(x, dtype=torch.int8),
    "torch bfloat16": lambda x: torch.tensor(x, dtype=torch.bfloat16),
    "torch, autograd": lambda x: 1 * torch.tensor(x, dtype=torch.float32, requires_grad=True),
    "torch, transposed": lambda x: torch.tensor(x.T.copy()).T,
    "pandas": lambda x: pd.DataFrame(x),
    **{
        f"pandas {name}": lambda x, name=name: pd.DataFrame(x).astype(name)
        for name in ("Int8", "Float64", "double[pyarrow]", "object")
    },
    "pandas, two types": lambda x: pd.DataFrame(x).astype({0: "Int64", 1: "float32"}),
    "column of lists": lambda x: pd.Series(list(x)),
    "column of Arrow lists": lambda x: pd.Series(
        pa.array(x.tolist()), dtype=pd.ArrowDtype(pa.list_(pa.int64()))
    ),
    "Arrow table": lambda x: pa.table({str(place): column for place, column in enumerate(x.T)}),
    "Arrow lists": lambda x: pa.array(x.tolist(), pa.large_list(pa.float32())),
    "Arrow lists of one length": lambda x: pa.FixedSizeListArray.from_arrays(x.ravel(), 8),
}


@pytest.fixture(scope="module")
def expected():
    """The answers to vectors of 64 bits; Euclidean, so that a shift of all vectors is none."""
    return answers(lambda vectors: vectors.astype(np.float64), "euclidean")


@pytest.mark.parametrize("name", FORMS)
def test_every_type_and_container_gives_the_same_answers_in_every_call(expected, name):
    assert answers(FORMS[name], "euclidean") == expected


def test_floats_of_8_bits_are_read_by_value():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = torch.tensor([[0.5, -2.0], [16.0, 0.25]]).to(dtype)
        assert as_vectors(tensor).tolist() == [[0.5, -2.0], [16.0, 0.25]]


def test_an_embedding_of_another_type_is_searched(expected):
    vectors = torch.tensor(VECTORS, dtype=torch.bfloat16, requires_grad=True)
    built = rcir.Retriever.from_embeddings(
        VECTORS[GALLERY], labels=LABELS[GALLERY], metric="euclidean"
    )
    assert built.search(Embedding(vectors[NEW])).positions.tolist() == expected[2]


CALLS = {
    "from_embeddings": lambda _, x: rcir.Retriever.from_embeddings(x),
    "calibrate": lambda retriever, x: retriever.calibrate(x, LABELS[QUERIES][: len(x)]),
    "retrieve": lambda retriever, x: retriever.retrieve(x, 0.2, 0.1),
    "search": lambda retriever, x: retriever.search(x),
    "add": lambda retriever, x: retriever.add(
        x, [f"n{row}" for row in range(len(x))], LABELS[: len(x)]
    ),
    "extend": lambda retriever, x: retriever.extend_calibration(x, LABELS[: len(x)]),
}


@pytest.fixture(scope="module")
def retriever():
    """A calibrated retriever of the gallery."""
    built = rcir.Retriever.from_embeddings(VECTORS[GALLERY], labels=LABELS[GALLERY])
    built.calibrate(VECTORS[QUERIES], LABELS[QUERIES], "constant")
    return built


def changed(value, dtype=np.float64):
    vectors = VECTORS[QUERIES].astype(dtype)
    vectors[7] = value
    return vectors


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (changed(np.nan), "NaN.* row 7"),
        (changed(np.inf, np.float32), "infinite.* row 7"),
        (changed(0), "zero.* row 7"),
        (changed(0, np.int16), "zero.* row 7"),
        (np.ma.masked_equal(VECTORS[QUERIES], VECTORS[QUERIES][7, 0]), "row"),
        (pd.DataFrame(VECTORS[QUERIES]).astype("Float64").replace({VECTORS[207, 0]: pd.NA}), "row"),
        ([*VECTORS[QUERIES][:7].tolist(), None], "row 7.* missing"),
        ([*VECTORS[QUERIES][:7].tolist(), [1.0]], "row 7.* 1 numbers"),
        ([*VECTORS[QUERIES][:7].tolist(), [None] * 8], "row 7"),
        (VECTORS[QUERIES] > 0, "bool"),
        (VECTORS[QUERIES] * 1j, "complex"),
        (VECTORS[QUERIES].astype(str), "str"),
        (VECTORS[QUERIES].astype(str).astype(object), "str"),
        (VECTORS[QUERIES].astype("datetime64[s]"), "datetime"),
        (pd.DataFrame(VECTORS[QUERIES].astype(str)), "str"),
        (["photo.png"], "str|encoder"),
        (torch.tensor(VECTORS[QUERIES]).to_sparse(), "to_dense"),
        (torch.empty(400, 8, device="meta"), "tensor"),
        (VECTORS[QUERIES].reshape(400, 2, 4), "shape"),
        (VECTORS[QUERIES][:, :5], "5"),
    ],
    ids=range(20),
)
def test_what_are_no_vectors_is_refused_in_every_call(retriever, call, wrong, word):
    if call == "from_embeddings" and word == "5":
        pytest.skip("any dimension can be built")
    with pytest.raises((InvalidData, InvalidConfig), match=word):
        CALLS[call](retriever, wrong)


@pytest.mark.parametrize("make", [scipy.sparse.csr_matrix, scipy.sparse.coo_array])
def test_sparse_matrices_of_scipy_are_refused_with_the_remedy(retriever, make):
    wrong = make(VECTORS[QUERIES])
    for refused in (
        lambda: rcir.Retriever.from_embeddings(wrong),
        lambda: retriever.calibrate(wrong, LABELS[QUERIES]),
        lambda: retriever.retrieve(wrong, 0.2, 0.1),
        lambda: retriever.search(wrong),
    ):
        with pytest.raises(InvalidData, match="toarray"):
            refused()


# Lengths


SCALES = (1e-320, 1e-300, 1e-45, 1e-30, 1e-22, 1e-15, 1e15, 1e18, 1e30, 1e300)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
def test_unit_vectors_are_those_of_numpy_in_double_precision(scale, dtype):
    directions = np.random.default_rng(1).standard_normal((50, 9))
    with np.errstate(over="ignore", under="ignore"):
        vectors = (directions * scale).astype(dtype)
    if not np.isfinite(vectors).all() or not vectors.any(axis=1).all():
        pytest.skip("no numbers of this type")
    exact = np.asarray(vectors, np.longdouble)
    exact /= np.abs(exact).max(axis=1, keepdims=True)
    exact /= np.sqrt((exact**2).sum(axis=1, keepdims=True))
    mixed = np.concatenate([directions.astype(dtype), vectors])
    for form in (lambda x: x, np.asfortranarray, memory_mapped(dtype)):
        unit = VectorOptions("cosine").prepare(form(mixed))
        assert unit.dtype == np.float32
        np.testing.assert_allclose(unit[50:], exact.astype(np.float64), rtol=3e-7, atol=1e-30)
        np.testing.assert_array_equal(
            unit[:50], VectorOptions("cosine").prepare(directions.astype(dtype))
        )


def test_numbers_of_very_different_sizes_in_one_vector_have_an_angle():
    vectors = np.array([[1e300, 1e-300, 0], [3e-310, 4e-310, 0], [1e20, 1e20, 1e-20]])
    unit = VectorOptions("cosine").prepare(vectors)
    np.testing.assert_allclose(unit, [[1, 0, 0], [0.6, 0.8, 0], [0.5**0.5, 0.5**0.5, 0]], atol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e20, 1e300])
def test_answers_do_not_depend_on_the_length_of_gallery_and_queries(retriever, scale):
    expected = [answer.ids for answer in retriever.retrieve(VECTORS[NEW], 0.2, 0.1)]
    scaled = [answer.ids for answer in retriever.retrieve(VECTORS[NEW] * scale, 0.2, 0.1)]
    assert scaled == expected
    built = rcir.Retriever.from_embeddings(VECTORS[GALLERY] * scale, labels=LABELS[GALLERY])
    built.calibrate(VECTORS[QUERIES] * scale, LABELS[QUERIES], "constant")
    assert [answer.ids for answer in built.retrieve(VECTORS[NEW], 0.2, 0.1)] == expected


def test_euclidean_vectors_whose_squares_are_no_floats_are_refused():
    build = rcir.Retriever.from_embeddings
    for scale in (1e-40, 1e-22, 1e18, 1e30, 1e300):
        with pytest.raises(InvalidData, match=r"multiply|divide"):
            build(VECTORS[GALLERY] * scale, metric="euclidean")
    long = VECTORS[GALLERY].astype(float)
    long[7, 3] = -1e19
    for form in (np.asarray, np.float32, memory_mapped("f8")):
        with pytest.raises(InvalidData, match="row 7"):
            build(form(long), metric="euclidean")
    with pytest.raises(InvalidData, match="row 7"):
        build(VECTORS[GALLERY], metric="euclidean").search(long)
    for scale in (2.0**-30, 2.0**40):  # far from the limits, and exact
        scaled = build(VECTORS[GALLERY] * scale, metric="euclidean").search(VECTORS[NEW] * scale)
        plain = build(VECTORS[GALLERY], metric="euclidean").search(VECTORS[NEW])
        np.testing.assert_array_equal(scaled.positions, plain.positions)
        np.testing.assert_allclose(scaled.distances, plain.distances * scale, rtol=1e-5)
        np.testing.assert_allclose(scaled.uncertainty, plain.uncertainty, atol=1e-5)


def test_lengths_of_short_and_long_vectors_keep_their_digits():
    for scale in (1e-30, 1e-22, 1.0, 1e18):
        vectors = np.float32(scale) * np.array([[3, 4], [0, 0], [5, 12]], np.float32)
        np.testing.assert_allclose(
            lengths(vectors), np.float32(scale) * np.float32([5, 0, 13]), rtol=1e-6
        )


def test_a_zero_vector_has_euclidean_distances():
    built = rcir.Retriever.from_embeddings(np.array([[0.0, 0], [3, 4]]), metric="euclidean")
    np.testing.assert_allclose(built.search(np.zeros((1, 2))).distances, [[0, 5]])


# No rows


@pytest.mark.parametrize(
    "none", [VECTORS[:0], torch.empty(0, 8), pd.DataFrame(VECTORS[:0])], ids=type
)
def test_no_queries_have_no_answers_and_cannot_calibrate(retriever, none):
    assert retriever.retrieve(none, 0.2, 0.1) == []
    assert retriever.at_levels(none, [0.2], 0.1) == []
    assert len(retriever.search(none)) == 0
    for refused in (
        lambda: retriever.calibrate(none, LABELS[:0]),
        lambda: retriever.extend_calibration(none, []),
        lambda: retriever.search_labelled(retriever.labelled(none, LABELS[:0])),
        lambda: rcir.Retriever.from_embeddings(none),
    ):
        with pytest.raises(InvalidData, match=r"no queries|empty"):
            refused()


def test_an_empty_list_has_no_answers(retriever):
    assert retriever.retrieve([], 0.2, 0.1) == []
    with pytest.raises(InvalidData, match=r"no queries|shape"):
        retriever.calibrate([], [])
    for number in (3.0, np.float64(3)):
        with pytest.raises(InvalidData, match=r"number|float"):
            retriever.retrieve(number, 0.2, 0.1)


def test_vectors_of_an_index_are_checked_by_the_same_rules():
    assert check_vectors(FORMS["pandas Float64"](VECTORS)).tolist() == VECTORS.tolist()
    with pytest.raises(InvalidData, match="row 207"):
        check_vectors(np.concatenate([VECTORS[GALLERY], changed(np.nan)]))


@pytest.mark.parametrize("form", [np.float64, np.longdouble])
def test_single_vectors_that_float32_rounds_to_zero_are_refused(form):
    vectors = VECTORS.astype(form)
    vectors[5] = 0
    assert not check_vectors(vectors)[5].any()
    vectors[7] *= 1e-60
    with pytest.raises(InvalidData, match="row 7"):
        check_vectors(vectors)
    assert check_vectors(vectors[:7]).shape == vectors[:7].shape
