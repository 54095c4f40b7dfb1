"""Gallery entries that stand for several images of one thing."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rcir.data import ImageSet, Preprocessing
from rcir.data.relevance import SharedLabel, WithinRadius
from rcir.embedding import Embedding
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.batches import fuse
from rcir.errors import InvalidData
from rcir.retrieval.retriever import Retriever

ROWS = torch.tensor([0, 1, 0, 2, 1, 0])


def build(gallery, method="btl", **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = build_encoder(EncoderConfig(method, dim=8, options=options), 1, (8, 16)).eval()
        if method == "btl":
            torch.nn.init.normal_(encoder.variance_head.layers[-1].weight, std=1.0)
    return Retriever.build(encoder, Preprocessing(), gallery, depth=60, templates="thing")


def set_of(images, names, labels=None, relevance=None):
    ids = [f"picture-{number}" for number in range(len(images))]
    return ImageSet(images, labels, ids, {"thing": np.array(names)}, relevance)


@pytest.fixture(scope="module")
def things(splits):
    """The gallery: up to three images of one label are one thing."""
    rows = np.argsort(splits.gallery.labels, kind="stable")
    labels = splits.gallery.labels[rows]
    place = np.arange(len(rows)) - np.searchsorted(labels, labels)
    names = [f"{label}-{number // 3}" for label, number in zip(labels, place, strict=True)]
    return set_of(splits.gallery.images[rows], names, labels)


@pytest.fixture(scope="module")
def templates(things):
    return build(things)


def random_embedding(dim):
    generator = torch.Generator().manual_seed(0)
    vectors = F.normalize(torch.randn(6, 5, generator=generator))
    return Embedding(vectors, 0.1 + torch.rand(6, dim, generator=generator))


@pytest.mark.parametrize("dim", [1, 5])
def test_fused_entries_are_products_of_gaussians(dim):
    given = random_embedding(dim)
    harmonic = 1 / given.variance.reciprocal().mean(dim=1)
    fused = fuse(Embedding(given.vectors, given.variance, harmonic), ROWS, 3)
    for number in range(3):
        own = number == ROWS
        mean, variance = given.vectors[own].double(), given.variance[own].double()
        product = 1 / (1 / variance).sum(0)
        direction = F.normalize(product * (mean / variance).sum(0), dim=0)
        torch.testing.assert_close(fused.variance[number].double(), product, rtol=1e-4, atol=0)
        torch.testing.assert_close(fused.vectors[number].double(), direction, rtol=0, atol=1e-4)
    torch.testing.assert_close(fused.uncertainty, 1 / fused.variance.reciprocal().mean(dim=1))


def test_without_a_variance_entries_are_means():
    vectors = random_embedding(1).vectors * torch.tensor([1.0, 2, 3, 4, 5, 6])[:, None]
    fused = fuse(Embedding(vectors, uncertainty=torch.arange(6.0)), ROWS, 3)
    torch.testing.assert_close(fused.vectors[0], vectors[[0, 2, 5]].mean(0))
    torch.testing.assert_close(fused.vectors[2], vectors[3])
    torch.testing.assert_close(fused.uncertainty, torch.tensor([7 / 3, 2.5, 3.0]))
    unit = fuse(Embedding(F.normalize(vectors)), ROWS, 3).vectors[0]
    torch.testing.assert_close(unit, F.normalize(F.normalize(vectors)[[0, 2, 5]].sum(0), dim=0))
    # Vectors that are not of unit length are fused to their mean.
    vectors = torch.tensor([[3.0, 0.25], [-2.5, 0.0], [5.0, 5.0]])
    fused = fuse(Embedding(vectors, torch.ones(3, 2)), torch.tensor([0, 0, 1]), 2)
    torch.testing.assert_close(fused.vectors, torch.tensor([[0.25, 0.125], [5.0, 5.0]]))


def test_an_embedding_that_no_rule_fuses_is_refused():
    vectors = random_embedding(1).vectors
    with pytest.raises(InvalidData, match="draws"):
        fuse(Embedding(vectors, extra={"draws": vectors}), ROWS, 3)
    with pytest.raises(InvalidData, match="dimensions"):
        fuse(Embedding(vectors, vectors[:, :2].square()), ROWS, 3)


def test_entries_have_the_names_labels_and_fused_vectors_of_their_templates(templates, things):
    names = things.attributes["thing"]
    assert len(templates.ids) == len(set(names)) < 200
    label = dict(zip(names.tolist(), things.labels.tolist(), strict=True))
    assert [label[name] for name in templates.ids] == templates.labels.tolist()
    embedded = templates.embed(things.images)
    for position in (0, 7, 30):
        own = np.flatnonzero(names == templates.ids[position])
        weights = 1 / embedded.variance[own]
        expected = F.normalize((weights * embedded.vectors[own]).sum(0), dim=0)
        found = templates.search(Embedding(expected[None], torch.ones(1, 1), torch.ones(1)))
        assert found.positions[0, 0] == position
        assert found.distances[0, 0] < 1e-2
        expected = pytest.approx(1 / weights.sum().item(), rel=1e-3)
        assert templates.searcher.gallery.uncertainty[position] == expected


def test_a_variance_that_is_not_drawn_from_weighs_no_image(splits):
    images = splits.gallery.images[:4]
    one = build(set_of(images, ["a", "a", "b", "b"], np.zeros(4, np.int64)), "tripreg")
    expected = one.embed(images).vectors.unflatten(0, (2, 2)).mean(dim=1)
    found = one.index.vectors_at(np.arange(2))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_retrieval_over_templates_keeps_the_guarantee(things, splits):
    retriever = build(things)
    parts = map(retriever.search_labelled, (splits.tuning, splits.calibration))
    retriever.calibrate_splits(*parts, "quantile")
    answers = retriever.retrieve(list(splits.test.images), alpha=0.4, delta=0.1)
    hits = [label in one.labels for one, label in zip(answers, splits.test.labels, strict=True)]
    assert np.mean(hits) > 0.45  # 0.6 is certified, measured on 100 queries
    assert max(answer.size for answer in answers) <= 60


def test_templates_survive_storage_with_the_digests_of_all_images(things, splits, tmp_path):
    built = build(things, "pfe", distance="mls")
    loaded = Retriever.load(built.save(tmp_path / "retriever"))
    assert loaded.searcher.fingerprints() == built.searcher.fingerprints()
    some = splits.test.images[:10]
    np.testing.assert_array_equal(loaded.search(some).positions, built.search(some).positions)
    assert len(loaded.searcher.digests) == len(things)
    rows = np.flatnonzero(np.char.endswith(things.attributes["thing"], "-0"))[1:4]
    queries = loaded.search_labelled(things.subset(rows))
    with pytest.raises(InvalidData, match="3 of 3"):
        loaded.calibrate_splits(queries, loaded.search_labelled(splits.calibration), "constant")


def test_adding_and_removing_entries_leaves_the_other_digests(templates, things, tmp_path):
    one = Retriever.load(templates.save(tmp_path / "retriever"))
    one.add(things.images[:1] + 1, ["new"], things.labels[:1])
    assert len(one.searcher.digests) == len(things) + 1
    one.remove([templates.ids[0]])
    gone = np.count_nonzero(things.attributes["thing"] == templates.ids[0])
    assert (
        len(Retriever.load(one.save(tmp_path / "again")).searcher.digests) == len(things) + 1 - gone
    )


@pytest.mark.parametrize("kind", ["labels", "lists", "places"])
def test_images_of_one_template_must_match_the_same_things(splits, kind):
    relevance = {
        "labels": None,
        "lists": SharedLabel.from_lists([[0], [1], [0, 1]], 2),
        "places": WithinRadius(np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 9.0]]), 10.0),
    }[kind]
    labels = np.array([4, 4, 5]) if relevance is None else None
    gallery = set_of(splits.gallery.images[:3], ["Ann", "Bo", "Ann"], labels, relevance)
    with pytest.raises(InvalidData, match=r"picture-2 .*Ann"):
        build(gallery)
    assert build(gallery.subset(np.array([0, 1, 0]))).ids.tolist() == ["Ann", "Bo"]


@pytest.mark.parametrize("missing", ["", None, float("nan")])
def test_images_without_a_template_are_refused(splits, missing):
    gallery = set_of(splits.gallery.images[:3], ["a", "a", missing], np.zeros(3, np.int64))
    with pytest.raises(InvalidData, match="1 gallery images"):
        build(gallery)


def test_templates_are_named_by_an_attribute_of_the_gallery(splits):
    with pytest.raises(InvalidData, match="thing"):
        build(splits.gallery)
