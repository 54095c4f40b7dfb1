"""The calls most users need."""

import numpy as np
import pytest

import rcir
from rcir import api


@pytest.fixture(autouse=True)
def _none_named(monkeypatch):
    monkeypatch.setattr(api, "_default", None)


@pytest.fixture
def query(splits):
    return splits.test.images[0]


def same(found, expected):
    return found.ids == expected.ids and found.guarantee == expected.guarantee


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_a_loaded_retriever_answers_as_the_one_that_was_saved(folder, retriever, query, kind):
    loaded = rcir.load(kind(folder))
    found, expected = (each.retrieve(query, 0.3, 0.1) for each in (loaded, retriever))
    assert same(found, expected)
    np.testing.assert_allclose(found.distances, expected.distances, rtol=1e-5)


def test_without_a_name_there_is_no_retriever_to_ask(query):
    with pytest.raises(rcir.NoRetriever, match="RCIR_RETRIEVER"):
        rcir.retrieve(query, 0.3, 0.1)


def test_a_retriever_is_named_by_its_folder_or_given(folder, retriever, query):
    assert rcir.use(retriever) is retriever
    assert same(rcir.retrieve(query, 0.3, 0.1), retriever.retrieve(query, 0.3, 0.1))
    named = rcir.use(folder)
    assert named is not retriever
    assert same(rcir.retrieve(query, 0.3, 0.1), named.retrieve(query, 0.3, 0.1))


def test_the_environment_names_one_until_the_program_does(folder, retriever, query, monkeypatch):
    monkeypatch.setenv("RCIR_RETRIEVER", str(folder))
    assert same(rcir.retrieve(query, 0.3, 0.1), retriever.retrieve(query, 0.3, 0.1))
    monkeypatch.setenv("RCIR_RETRIEVER", "nowhere")
    rcir.retrieve(query, 0.3, 0.1)  # loaded once
    rcir.use(retriever)
    assert api.default_retriever() is retriever


def test_a_wrong_name_in_the_environment_is_reported(query, monkeypatch):
    monkeypatch.setenv("RCIR_RETRIEVER", "nowhere")
    with pytest.raises(rcir.NoRetriever, match=r"nowhere holds no retriever"):
        rcir.retrieve(query, 0.3, 0.1)


def test_a_failed_use_keeps_the_retriever_that_was_named(retriever, query):
    rcir.use(retriever)
    with pytest.raises(rcir.NoRetriever):
        rcir.use("nowhere")
    assert same(rcir.retrieve(query, 0.3, 0.1), retriever.retrieve(query, 0.3, 0.1))


@pytest.mark.parametrize(
    ("alpha", "delta", "options"),
    [
        (0.6, 0.1, {"distinct": "label"}),
        (0.9, 0.1, {"risk": "recall"}),
        (0.6, 0.1, {"group": "True"}),
        (0.6, 0.1, {"simultaneous": True}),
        (0.9, 0.1, {"abstain": True}),
        (0.6, None, {}),
        ({"miss": 0.8, "false-discovery": 0.95}, 0.1, {}),
    ],
    ids=str,
)
def test_options_reach_the_retriever(retriever, query, alpha, delta, options):
    rcir.use(retriever)
    expected = retriever.retrieve(query, alpha, delta, **options)
    found = rcir.retrieve(query, alpha, delta, **options)
    assert same(found, expected)
    assert found.guarantee != retriever.retrieve(query, 0.6, 0.1).guarantee
    assert all(getattr(found.guarantee, name) == value for name, value in options.items())


def test_an_option_that_does_not_exist_is_refused(retriever, query):
    rcir.use(retriever)
    with pytest.raises(TypeError, match="loud"):
        rcir.retrieve(query, 0.3, 0.1, loud=True)


def test_a_list_gives_a_list(retriever, splits):
    rcir.use(retriever)
    queries = list(splits.test.images[:3])
    answers = rcir.retrieve(queries, 0.3, 0.1)
    assert [answer.ids for answer in answers] == [
        rcir.retrieve(each, 0.3, 0.1).ids for each in queries
    ]


@pytest.mark.parametrize(
    "source",
    ["nowhere", "runs:/nonsense/retriever", "models:/none/1", "foo://bar", "s3://none/retriever"],
)
def test_what_is_no_retriever_is_named_in_the_error(source):
    with pytest.raises(rcir.NoRetriever, match=source):
        rcir.load(source)


def test_every_public_name_resolves():
    for name in rcir.__all__:
        assert getattr(rcir, name).__name__ == name
    assert set(rcir.__all__) <= set(dir(rcir))
    with pytest.raises(AttributeError, match="no attribute 'retreive'"):
        _ = rcir.retreive
