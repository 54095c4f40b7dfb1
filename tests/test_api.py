"""`rcir.load`, `rcir.use` and `rcir.retrieve`: the calls most users need."""

import numpy as np
import pytest

import rcir
from rcir import api
from rcir.errors import InvalidConfig


@pytest.fixture(autouse=True)
def _no_default_retriever(monkeypatch):
    monkeypatch.setattr(api, "chosen", None)


@pytest.fixture
def query(splits):
    return splits.test.images[0]


def same(answer, expected):
    return answer.ids == expected.ids and answer.guarantee == expected.guarantee


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_loaded_retriever_answers_like_the_saved_one(folder, retriever, query, kind):
    answer = rcir.load(kind(folder)).retrieve(query, 0.3, 0.1)
    expected = retriever.retrieve(query, 0.3, 0.1)
    assert same(answer, expected)
    np.testing.assert_allclose(answer.distances, expected.distances, rtol=1e-4)


def test_use_accepts_a_retriever_or_its_folder(folder, retriever, query):
    assert rcir.use(retriever) is retriever
    assert same(rcir.retrieve(query, 0.3, 0.1), retriever.retrieve(query, 0.3, 0.1))
    loaded = rcir.use(folder)
    assert loaded is not retriever
    assert api.default_retriever() is loaded


def test_environment_names_the_retriever_until_use_does(folder, retriever, query, monkeypatch):
    monkeypatch.setenv("RCIR_RETRIEVER", str(folder))
    assert same(rcir.retrieve(query, 0.3, 0.1), retriever.retrieve(query, 0.3, 0.1))
    monkeypatch.setenv("RCIR_RETRIEVER", "nowhere")
    rcir.retrieve(query, 0.3, 0.1)  # loaded once
    rcir.use(retriever)
    assert api.default_retriever() is retriever


def test_missing_retriever_is_an_error_that_names_the_variable_or_the_folder(query, monkeypatch):
    with pytest.raises(rcir.NoRetriever, match="RCIR_RETRIEVER"):
        rcir.retrieve(query, 0.3, 0.1)
    monkeypatch.setenv("RCIR_RETRIEVER", "nowhere")
    with pytest.raises(rcir.NoRetriever, match="nowhere"):
        rcir.retrieve(query, 0.3, 0.1)


@pytest.mark.parametrize(
    "source",
    ["nowhere", "runs:/nonsense/retriever", "models:/none/1", "foo://bar"],
)
def test_failed_use_names_the_source_and_keeps_the_retriever(retriever, source):
    rcir.use(retriever)
    with pytest.raises(rcir.NoRetriever, match=source):
        rcir.use(source)
    assert api.default_retriever() is retriever


@pytest.mark.parametrize(
    ("alpha", "delta", "options"),
    [
        (0.6, None, {}),
        ({"miss": 0.8, "false-discovery": 0.95}, 0.1, {}),
        (0.9, 0.1, {"risk": "recall"}),
        (0.6, 0.1, {"distinct": "label", "group": "True"}),
        (0.9, 0.1, {"abstain": True}),
    ],
    ids=str,
)
def test_retrieve_passes_its_options_on(retriever, query, alpha, delta, options):
    rcir.use(retriever)
    answer = rcir.retrieve(query, alpha, delta, **options)
    assert same(answer, retriever.retrieve(query, alpha, delta, **options))
    assert answer.guarantee != retriever.retrieve(query, 0.6, 0.1).guarantee
    assert all(answer.guarantee.to_dict()[name] == value for name, value in options.items())
    with pytest.raises(InvalidConfig, match="no option loud; there are risk, distinct"):
        rcir.retrieve(query, alpha, delta, loud=True)


def test_every_public_name_can_be_imported():
    assert all(getattr(rcir, name).__name__ == name for name in rcir.__all__)
    assert {*rcir.__all__} <= {*dir(rcir)}
    with pytest.raises(AttributeError, match="retreive"):
        _ = rcir.retreive
