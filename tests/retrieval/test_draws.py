"""Uncertainty from several draws of a query: members of an ensemble, or draws from a variance."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

import rcir
from rcir.data import ImageSet, Preprocessing
from rcir.data.relevance import WithinRadius
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.deterministic import Deterministic
from rcir.errors import InvalidConfig, InvalidData
from rcir.retrieval.query_uncertainty import available_uncertainties, with_uncertainty
from rcir.retrieval.retriever import Retriever
from tests.methods import config_of

PREPROCESSING = Preprocessing((8, 8), 1)
METHODS = {
    "btl": {},
    "mc-dropout": {"passes": 4},
    "deep-ensemble": {"members": 3},
    "aligned": {"members": 3, "combination": "aligned"},
}


def images(n, seed, kinds=6):
    """Images of some kinds with noise."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(kinds, size=n)
    means = np.random.default_rng(99).uniform(60, 190, (kinds, 8, 8))
    pixels = np.clip(means[kind] + 45 * rng.standard_normal((n, 8, 8)), 0, 255).astype(np.uint8)
    return ImageSet(pixels, kind, [f"{seed}-{row}" for row in range(n)])


GALLERY, QUERIES = images(80, 0), images(300, 1)


def encoder_of(method):
    name = "deep-ensemble" if method == "aligned" else method
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = build_encoder(EncoderConfig(name, dim=6, options=METHODS[method]), 1, (8, 8))
    if method == "btl":  # a variance that matters
        torch.nn.init.constant_(encoder.variance_head.layers[-1].bias, -4.0)
    return encoder


def built(method="btl"):
    return Retriever.build(encoder_of(method), PREPROCESSING, GALLERY)


def calibrate(retriever, kind, queries=QUERIES):
    halves = [queries.subset(np.arange(len(queries))[part::2]) for part in (0, 1)]
    searched = map(retriever.search_labelled, halves)
    retriever.calibrate_splits(*searched, "quantile", query_uncertainty=kind)
    return retriever


def ranked_by_draws(retriever, queries):
    """(n, t, 30) the first 30 candidates of the retriever, in the order of each draw."""
    found = retriever.search(queries)
    embedding = retriever.embed(queries)
    vectors = embedding.vectors.double().numpy()
    items = retriever.index.vectors_at(np.arange(len(retriever.ids))).astype(np.float64)
    rows = []
    for row, near in enumerate(found.positions[:, :30]):
        if retriever.encoder.config.options.get("combination") == "distance":
            parts = zip(np.split(vectors[row], 3), np.split(items[near], 3, axis=1), strict=True)
        else:
            noise = torch.randn(20, 1, 6, generator=torch.Generator().manual_seed(0))
            spread = embedding.variance[row].sqrt().double().numpy()
            parts = ((vectors[row] + spread * one, items[near]) for one in noise[:, 0].numpy())
        rows.append([near[np.argsort(((q - g) ** 2).sum(1), kind="stable")] for q, g in parts])
    return np.array(rows)


@pytest.mark.parametrize("method", METHODS)
def test_agreement_and_overlap_are_those_by_hand(method):
    retriever, asked = built(method), QUERIES.images[:25]
    ranked = ranked_by_draws(retriever, asked)
    labels = np.asarray(GALLERY.labels)[ranked[:, :, 0]]
    most = np.array([np.bincount(row).max() / len(row) for row in labels])
    shared = [
        np.mean([len(set(a[:10]) & set(b[:10])) / 10 for a, b in combinations(row, 2)])
        for row in ranked.tolist()
    ]
    assert np.ptp(most) > 0
    found = retriever.search(asked)
    for kind, expected in (("agreement", 1 - most), ("overlap", 1 - np.array(shared))):
        uncertainty = with_uncertainty(retriever.searcher, found, kind).uncertainty
        # Single precision may order two candidates differently that are equally near.
        assert np.isclose(uncertainty, expected, atol=1e-9).mean() > 0.9


def test_draws_need_a_variance_and_agreement_needs_labels():
    places = WithinRadius(np.random.default_rng(0).uniform(size=(80, 2)), 0.3)
    placed = ImageSet(GALLERY.images, None, GALLERY.ids, relevance=places)
    for gallery, more in ((GALLERY, "agreement"), (placed, "spread")):
        one = Retriever.build(encoder_of("btl"), PREPROCESSING, gallery)
        assert available_uncertainties(one.searcher) == (
            *("encoder", "cosine", "gap", "vote", more, "overlap"),
        )
    encoder = build_encoder(EncoderConfig("deterministic", dim=6), 1, (8, 8))
    certain = Retriever.build(encoder, PREPROCESSING, GALLERY)
    assert available_uncertainties(certain.searcher) == ("encoder", "cosine", "gap", "vote")
    with pytest.raises(InvalidConfig, match="overlap"):
        with_uncertainty(certain.searcher, certain.search(GALLERY.images[:2]), "overlap")


@pytest.mark.parametrize("method", ["btl", "deep-ensemble"])
@pytest.mark.parametrize("kind", ["agreement", "overlap"])
def test_answers_by_draws_are_stored_loaded_and_recalibrated(method, kind, tmp_path):
    retriever, new = calibrate(built(method), kind), images(5, 2)
    loaded = rcir.load(retriever.save(tmp_path / "kept"))
    before, after = (one.retrieve(list(new.images), 0.4, 0.1) for one in (retriever, loaded))
    assert [one.to_dict() for one in before] == [one.to_dict() for one in after]
    expected = with_uncertainty(retriever.searcher, retriever.search(new.images), kind).uncertainty
    np.testing.assert_allclose([one.uncertainty for one in after], expected)
    loaded.add(list(new.images), list(new.ids), new.labels)
    assert loaded.recalibrate().n_calibration == 150
    assert loaded.calibration.uncertainty == kind


def test_queries_are_kept_with_their_variance_only_if_draws_calibrate():
    retriever = calibrate(built(), "encoder")
    kept = retriever.calibration.tuning_queries, retriever.calibration.calibration_queries
    assert kept[1].embedding is None
    again = [retriever.search_labelled(queries) for queries in kept]
    with pytest.raises(InvalidData, match="draws"):
        with_uncertainty(retriever.searcher, again[0], "agreement")
    report = retriever.calibrate_splits(*again, "quantile")
    assert set(report.chosen.sizes) == {"encoder", "cosine", "gap", "vote"}
    calibrate(retriever, "overlap")
    assert "variance" in retriever.calibration.calibration_queries.embedding.tensors


# Encoders


def test_draws_on_the_sphere_have_the_mean_and_the_length_of_its_distributions():
    encoder = build_encoder(config_of("vmf", dim=400), 1, (8, 8))
    queries = encoder.embed(torch.rand(3, 1, 8, 8))
    squared = encoder.draw_distances(queries, torch.zeros(3, 1, 400)).square().mean(dim=0)
    torch.testing.assert_close(squared, torch.ones(3, 1), atol=0.02, rtol=0)
    # All encoders start at a mean resultant length of 0.9.
    near = encoder.draw_distances(queries, queries.vectors[:, None]).square().mean(dim=0)
    torch.testing.assert_close(near, torch.full((3, 1), 2 - 2 * 0.9), atol=0.03, rtol=0)


@pytest.mark.parametrize("method", ["hib", "pfe"])
def test_every_method_with_a_variance_draws_from_it(method):
    encoder = build_encoder(config_of(method, dim=6), 1, (8, 8))
    retriever = Retriever.build(encoder, PREPROCESSING, GALLERY)
    assert {"agreement", "overlap"} <= set(available_uncertainties(retriever.searcher))
    found = retriever.search(GALLERY.images[:10])
    spread = with_uncertainty(retriever.searcher, found, "overlap").uncertainty
    sure = replace(found.queries.embedding, variance=found.queries.embedding.variance * 1e-12)
    found = replace(found, queries=replace(found.queries, embedding=sure))
    assert (
        with_uncertainty(retriever.searcher, found, "overlap").uncertainty.mean()
        < 0.1
        < spread.mean()
    )


@pytest.mark.parametrize(
    ("method", "options"), [("hib", {"components": 0}), ("lam", {}), ("tripreg", {})]
)
def test_points_and_encoders_that_are_not_fitted_do_not_draw(method, options):
    assert not build_encoder(config_of(method, options=options), 1, (8, 8)).draws


class Boastful(Deterministic):
    """Says that it draws, and states no variance."""

    draws = True


class Single(Boastful):
    """Has one draw only."""

    def draw_distances(self, queries, candidates):
        return (queries.vectors[:, None] - candidates).norm(dim=2)[None]


@pytest.mark.parametrize(("kind", "word"), [(Boastful, "variance"), (Single, "2 draws")])
def test_an_encoder_that_cannot_draw_is_refused(kind, word):
    encoder = kind(EncoderConfig("deterministic", dim=6), 1, (8, 8))
    retriever = Retriever.build(encoder, PREPROCESSING, GALLERY)
    with pytest.raises(InvalidConfig, match=word):
        with_uncertainty(retriever.searcher, retriever.search(QUERIES.images[:3]), "overlap")
