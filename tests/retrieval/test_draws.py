"""Uncertainty from several draws of a query: members of an ensemble, or draws from a variance."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as save_arrays

import rcir
from rcir.data import ImageSet, Preprocessing
from rcir.data.within_radius import WithinRadius
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.deterministic import Deterministic
from rcir.errors import CorruptRetriever, InvalidConfig, InvalidData
from rcir.index import IndexConfig
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage.manifest import write_manifest
from tests.methods import config_of

PREPROCESSING = Preprocessing((8, 8), 1)
METHODS = {
    "btl": {},
    "mc-dropout": {"passes": 4},
    "deep-ensemble": {"members": 3},
    "aligned": {"members": 3, "combination": "aligned"},
}


def images(n, seed, kinds=6):
    """Pictures of some kinds with noise."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(kinds, size=n)
    means = np.random.default_rng(99).uniform(60, 190, (kinds, 8, 8))
    pixels = np.clip(means[kind] + 45 * rng.standard_normal((n, 8, 8)), 0, 255).astype(np.uint8)
    return ImageSet(pixels, kind, [f"{seed}-{row}" for row in range(n)])


def built(method, gallery):
    name = "deep-ensemble" if method == "aligned" else method
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = EncoderConfig(name, dim=6, options=METHODS[method])
        encoder = build_encoder(config, 1, (8, 8))
    if method == "btl":  # a variance that matters
        torch.nn.init.constant_(encoder.variance_head.layers[-1].bias, -4.0)
    return Retriever.build(encoder, PREPROCESSING, gallery)


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
    gallery, asked = images(80, 0), images(25, 1).images
    retriever = built(method, gallery)
    assert {"agreement", "overlap"} <= set(retriever.uncertainties)
    ranked = ranked_by_draws(retriever, asked)
    labels = np.asarray(gallery.labels)[ranked[:, :, 0]]
    most = [np.bincount(row).max() / len(row) for row in labels]
    shared = [
        np.mean([len(set(a[:10]) & set(b[:10])) / 10 for a, b in combinations(row, 2)])
        for row in ranked.tolist()
    ]
    found = retriever.search(asked)
    agreement = retriever.judged(found, "agreement").uncertainty
    overlap = retriever.judged(found, "overlap").uncertainty
    assert np.ptp(most) > 0
    np.testing.assert_allclose(agreement, 1 - np.array(most), atol=1e-9)
    np.testing.assert_allclose(overlap, 1 - np.array(shared), atol=1e-9)


def test_without_a_variance_or_labels_there_is_less_to_choose_from():
    gallery = images(40, 0)
    certain = Retriever.build(
        build_encoder(EncoderConfig("deterministic", dim=6), 1, (8, 8)), PREPROCESSING, gallery
    )
    assert certain.uncertainties == ("own", "cosine", "gap", "vote")
    with pytest.raises(InvalidConfig, match="'overlap' cannot be had"):
        certain.judged(certain.search(gallery.images[:2]), "overlap")
    places = WithinRadius(np.random.default_rng(0).uniform(size=(40, 2)), 0.3)
    drawing = Retriever.build(
        built("btl", gallery).encoder,
        PREPROCESSING,
        ImageSet(gallery.images, None, gallery.ids, relevance=places),
    )
    assert drawing.uncertainties == ("own", "cosine", "gap", "vote", "spread", "overlap")


def test_an_index_that_gives_no_vectors_back_has_no_draws():
    gallery = images(40, 0)
    config = IndexConfig("tests.index.brute:BruteIndex")
    encoder = built("btl", gallery).encoder
    retriever = Retriever.build(encoder, PREPROCESSING, gallery, index=config)
    assert retriever.uncertainties == ("own", "cosine", "gap", "vote")


@pytest.mark.parametrize("method", ["btl", "deep-ensemble"])
@pytest.mark.parametrize("kind", ["agreement", "overlap"])
def test_answers_by_draws_are_stored_loaded_and_recalibrated(method, kind, tmp_path):
    gallery, asked = images(80, 0), images(500, 1)
    retriever = built(method, gallery)
    halves = [asked.subset(np.arange(500)[part::2]) for part in (0, 1)]
    tuning, calibration = map(retriever.search_labelled, halves)
    retriever.calibrate(tuning, calibration, "quantile", judged_by=kind)
    new = images(5, 2)
    before = retriever.retrieve(list(new.images), 0.3, 0.1)
    loaded = rcir.load(retriever.save(tmp_path / "kept"))
    after = loaded.retrieve(list(new.images), 0.3, 0.1)
    assert [one.size for one in before] == [one.size for one in after]
    expected = retriever.judged(retriever.search(new.images), kind).uncertainty
    np.testing.assert_allclose([one.uncertainty for one in after], expected, atol=1e-9)
    loaded.add(list(new.images), list(new.ids), new.labels)
    report = loaded.recalibrate()
    assert report.n_calibration == 250
    assert loaded.uncertainty == kind


def test_what_draws_need_is_kept_with_the_queries_where_it_is_used_only(tmp_path):
    retriever = built("btl", images(80, 0))
    asked = images(300, 1)
    tuning = retriever.search_labelled(asked.subset(np.arange(150)))
    calibration = retriever.search_labelled(asked.subset(np.arange(150, 300)))
    retriever.calibrate(tuning, calibration, "quantile", judged_by="own")
    assert retriever.calibration_queries.embedding is None
    retriever.calibrate(tuning, calibration, "quantile", judged_by="overlap")
    assert set(retriever.calibration_queries.embedding.tensors) == {
        *("vectors", "variance", "uncertainty")
    }


def test_draws_of_the_sphere_have_the_mean_and_the_length_of_its_distributions():
    encoder = build_encoder(config_of("vmf", dim=400), 1, (8, 8))
    queries = encoder.embed(torch.rand(3, 1, 8, 8))
    origin = torch.zeros(3, 1, 400)
    squared = encoder.draw_distances(queries, origin).square().mean(dim=0)
    torch.testing.assert_close(squared, torch.ones(3, 1), atol=0.02, rtol=0)
    # All encoders start at a mean resultant length of 0.9.
    near = encoder.draw_distances(queries, queries.vectors[:, None]).square().mean(dim=0)
    torch.testing.assert_close(near, torch.full((3, 1), 2 - 2 * 0.9), atol=0.03, rtol=0)


@pytest.mark.parametrize("method", ["hib", "pfe"])
def test_every_method_with_a_variance_draws_from_it(method):
    gallery = images(40, 0)
    encoder = build_encoder(config_of(method, dim=6), 1, (8, 8))
    retriever = Retriever.build(encoder, PREPROCESSING, gallery)
    found = retriever.search(gallery.images[:10])
    for kind in ("agreement", "overlap"):
        assert kind in retriever.uncertainties
    spread = retriever.judged(found, "overlap").uncertainty
    sure = replace(found.queries.embedding, variance=found.queries.embedding.variance * 1e-12)
    found = replace(found, queries=replace(found.queries, embedding=sure))
    assert retriever.judged(found, "overlap").uncertainty.mean() < 0.1 < spread.mean()


def test_a_point_and_what_is_not_fitted_do_not_draw():
    for method, options in (("hib", {"components": 0}), ("lam", {}), ("tripreg", {})):
        assert not build_encoder(config_of(method, options=options), 1, (8, 8)).draws


def test_queries_that_were_kept_without_what_draws_need_are_refused_in_words():
    retriever = built("btl", images(80, 0))
    asked = images(300, 1)
    halves = [asked.subset(np.arange(300)[part::2]) for part in (0, 1)]
    retriever.calibrate(*map(retriever.search_labelled, halves), "quantile", judged_by="own")
    kept = retriever.tuning_queries, retriever.calibration_queries
    again = [retriever.search_labelled(queries) for queries in kept]
    with pytest.raises(InvalidData, match="kept without what draws of them need"):
        retriever.judged(again[0], "agreement")
    report = retriever.calibrate(*again, "quantile", judged_by="auto")
    assert set(report.uncertainties) == {"own", "cosine", "gap", "vote"}


class Boastful(Deterministic):
    """Says that it draws, and states no variance."""

    draws = True


class Single(Boastful):
    """Has one draw only."""

    def draw_distances(self, queries, candidates):
        return (queries.vectors[:, None] - candidates).norm(dim=2)[None]


@pytest.mark.parametrize(
    ("kind", "said"), [(Boastful, "states no variance"), (Single, "at least 2 draws")]
)
def test_an_encoder_that_cannot_draw_is_told_so(kind, said):
    encoder = kind(EncoderConfig("deterministic", dim=6), 1, (8, 8))
    retriever = Retriever.build(encoder, PREPROCESSING, images(40, 0))
    with pytest.raises(InvalidConfig, match=said):
        retriever.judged(retriever.search(images(3, 1).images), "overlap")


@pytest.mark.parametrize(
    "harm",
    [
        lambda arrays: {k: v for k, v in arrays.items() if "embedding" not in k},
        lambda arrays: {
            k: v * np.nan if k.endswith("embedding.variance") else v for k, v in arrays.items()
        },
        lambda arrays: {
            k: v + 1 if k.endswith("embedding.vectors") else v for k, v in arrays.items()
        },
    ],
    ids=["removed", "not numbers", "of others"],
)
def test_kept_embeddings_that_are_not_those_of_the_queries_are_refused(harm, tmp_path):
    retriever = built("btl", images(80, 0))
    asked = images(300, 1)
    halves = [asked.subset(np.arange(300)[part::2]) for part in (0, 1)]
    retriever.calibrate(*map(retriever.search_labelled, halves), "quantile", judged_by="overlap")
    folder = retriever.save(tmp_path / "kept")
    path = folder / "queries.safetensors"
    path.write_bytes(save_arrays(harm(load_arrays(path))))
    (folder / "manifest.json").unlink()
    write_manifest(folder)
    with pytest.raises(CorruptRetriever, match="of the queries"):
        rcir.load(folder)
