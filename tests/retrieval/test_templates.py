"""Gallery entries that stand for several pictures of one thing."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from rcir.data import ImageSet, Preprocessing
from rcir.data.relevance import SharedLabel
from rcir.data.within_radius import WithinRadius
from rcir.embedding import Embedding
from rcir.encoders import EncoderConfig, build_encoder
from rcir.encoders.batches import embed
from rcir.encoders.fusion import fuse
from rcir.errors import InvalidData
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import load, save

ROWS = np.array([0, 1, 0, 2, 1, 0])


def build(method="btl", **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = build_encoder(EncoderConfig(method, dim=8, options=options), 1, (8, 16)).eval()
        if method == "btl":
            torch.nn.init.normal_(encoder.variance_head.layers[-1].weight, std=1.0)
    return encoder


def set_of(images, names, labels=None, relevance=None):
    ids = [f"picture-{number}" for number in range(len(images))]
    return ImageSet(images, labels, ids, {"thing": np.array(names)}, relevance)


@pytest.fixture(scope="module")
def things(splits):
    """Two thirds of the gallery: pictures of one label, up to three of which are one thing."""
    rows = np.argsort(splits.gallery.labels, kind="stable")
    labels = splits.gallery.labels[rows]
    place = np.arange(len(rows)) - np.searchsorted(labels, labels)
    names = [f"{label}-{number // 3}" for label, number in zip(labels, place, strict=True)]
    return set_of(splits.gallery.images[rows], names, labels)


@pytest.fixture(scope="module")
def templates(things):
    return Retriever.build(build(), Preprocessing(), things, depth=60, templates="thing")


def random_embedding(dim):
    generator = torch.Generator().manual_seed(0)
    vectors = F.normalize(torch.randn(6, 5, generator=generator))
    return Embedding(vectors, 0.1 + torch.rand(6, dim, generator=generator))


@pytest.mark.parametrize("dim", [1, 5])
def test_fused_entries_are_the_products_of_gaussians(dim):
    given = random_embedding(dim)
    fused = fuse(given, torch.from_numpy(ROWS), 3)
    for number in range(3):
        own = np.flatnonzero(number == ROWS)
        mean, variance = given.vectors[own].double(), given.variance[own].double()
        product = 1 / (1 / variance).sum(0)
        direction = product * (mean / variance).sum(0)
        torch.testing.assert_close(fused.variance[number].double(), product)
        torch.testing.assert_close(
            fused.vectors[number].double(), direction / direction.norm(), atol=1e-6, rtol=0
        )


def test_the_fused_uncertainty_is_that_of_the_fused_gaussian():
    given = random_embedding(5)
    harmonic = 1 / given.variance.reciprocal().mean(dim=1)
    fused = fuse(Embedding(given.vectors, given.variance, harmonic), torch.from_numpy(ROWS), 3)
    torch.testing.assert_close(fused.uncertainty, 1 / fused.variance.reciprocal().mean(dim=1))


def test_without_a_variance_entries_are_the_mean():
    vectors = random_embedding(1).vectors * torch.tensor([1.0, 2, 3, 4, 5, 6])[:, None]
    fused = fuse(Embedding(vectors, uncertainty=torch.arange(6.0)), torch.from_numpy(ROWS), 3)
    torch.testing.assert_close(fused.vectors[0], vectors[[0, 2, 5]].mean(0))
    unit = fuse(Embedding(F.normalize(vectors)), torch.from_numpy(ROWS), 3).vectors[0]
    expected = F.normalize(F.normalize(vectors)[[0, 2, 5]].sum(0), dim=0)
    torch.testing.assert_close(unit, expected)
    torch.testing.assert_close(fused.vectors[2], vectors[3])
    torch.testing.assert_close(fused.uncertainty, torch.tensor([7 / 3, 2.5, 3.0]))


def test_what_is_fused_by_no_rule_is_refused():
    vectors = random_embedding(1).vectors
    with pytest.raises(InvalidData, match="hold draws too, which cannot be fused"):
        fuse(Embedding(vectors, extra={"draws": vectors}), torch.from_numpy(ROWS), 3)
    with pytest.raises(InvalidData, match="has 2 dimensions and its vectors 5"):
        fuse(Embedding(vectors, vectors[:, :2].square()), torch.from_numpy(ROWS), 3)


def test_entries_have_the_names_and_labels_of_their_templates(templates, things):
    names = things.attributes["thing"]
    assert len(templates.ids) == len(set(names)) < 200
    label = dict(zip(names.tolist(), things.labels.tolist(), strict=True))
    assert [label[name] for name in templates.ids] == templates.labels.tolist()
    embedded = embed(build(), Preprocessing(), things.images)
    for position in (0, 7, 30):
        own = np.flatnonzero(names == templates.ids[position])
        weights = 1 / embedded.variance[own]
        expected = F.normalize((weights * embedded.vectors[own]).sum(0), dim=0)
        found = templates.search(Embedding(expected[None], torch.ones(1, 1), torch.ones(1)))
        assert found.positions[0, 0] == position
        assert found.distances[0, 0] < 1e-3
        assert templates.item_uncertainty[position] == pytest.approx(
            1 / weights.sum().item(), rel=1e-5
        )


def test_retrieval_over_templates_certifies_and_keeps_it(things, splits):
    retriever = Retriever.build(build(), Preprocessing(), things, depth=60, templates="thing")
    retriever.calibrate(
        retriever.search_labelled(splits.tuning), retriever.search_labelled(splits.calibration)
    )
    answers = retriever.retrieve(list(splits.test.images), alpha=0.4, delta=0.1)
    true = [
        label in (answer.labels or ())
        for answer, label in zip(answers, splits.test.labels, strict=True)
    ]
    assert np.mean(true) > 0.5  # certified is 0.6, of 100 queries
    assert max(answer.size for answer in answers) < 60


def test_templates_survive_storage_with_the_digests_of_all_pictures(things, splits, tmp_path):
    encoder = build("pfe", distance="mls")
    built = Retriever.build(encoder, Preprocessing(), things, depth=60, templates="thing")
    loaded = load(save(built, tmp_path / "retriever"))
    assert loaded.fingerprints() == built.fingerprints()
    assert len(loaded.items) == len(loaded.ids)
    some = splits.test.images[:10]
    assert np.array_equal(loaded.search(some).positions, built.search(some).positions)
    assert len(loaded.digests) == len(things)
    rows = np.flatnonzero(np.char.endswith(things.attributes["thing"], "-0"))[1:4]
    queries = loaded.search_labelled(things.subset(rows))
    with pytest.raises(InvalidData, match=r"3 of 3 queries of the tuning split are pictures of"):
        loaded.calibrate(queries, loaded.search_labelled(splits.calibration), "constant")


def test_pictures_that_are_added_and_removed_leave_the_other_digests(templates, things, tmp_path):
    retriever = load(save(templates, tmp_path / "retriever"))
    retriever.add(things.images[:1] + 1, ["new"], things.labels[:1])
    assert len(retriever.digests) == len(things) + 1
    retriever.remove([templates.ids[0]])
    gone = np.count_nonzero(things.attributes["thing"] == templates.ids[0])
    assert len(load(save(retriever, tmp_path / "again")).digests) == len(things) + 1 - gone


@pytest.mark.parametrize("kind", ["labels", "lists", "places"])
def test_pictures_of_one_template_match_the_same_things(splits, kind):
    images, names = splits.gallery.images[:3], ["Ann", "Bo", "Ann"]
    relevance = {
        "labels": None,
        "lists": SharedLabel.of_lists([[0], [1], [0, 1]], 2),
        "places": WithinRadius(np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 9.0]]), 10.0),
    }[kind]
    labels = np.array([4, 4, 5]) if relevance is None else None
    gallery = set_of(images, names, labels, relevance)
    said = r"picture-2 and picture-0 are pictures of one template \(thing Ann\), and match diff"
    with pytest.raises(InvalidData, match=said):
        Retriever.build(build(), Preprocessing(), gallery, templates="thing")
    alike = gallery.subset(np.array([0, 1, 0]))
    built = Retriever.build(build(), Preprocessing(), alike, templates="thing")
    assert built.ids.tolist() == ["Ann", "Bo"]


def test_templates_are_named_by_an_attribute(things):
    with pytest.raises(InvalidData, match="has no attribute 'person'; it has thing"):
        Retriever.build(build(), Preprocessing(), things, templates="person")


def test_vectors_of_any_length_are_fused_to_their_mean():
    vectors = torch.tensor([[3.0, 0.1], [-2.9, 0.0], [5.0, 5.0]])
    fused = fuse(Embedding(vectors, torch.ones(3, 2)), torch.tensor([0, 0, 1]), 2)
    torch.testing.assert_close(fused.vectors, torch.tensor([[0.05, 0.05], [5.0, 5.0]]))


def test_what_a_method_does_not_draw_from_weighs_no_picture(splits):
    images = splits.gallery.images[:4]
    retriever = Retriever.build(
        build("tripreg"),
        Preprocessing(),
        set_of(images, ["a", "a", "b", "b"], np.zeros(4, np.int64)),
        templates="thing",
    )
    vectors = retriever.embed(images).vectors
    expected = vectors.unflatten(0, (2, 2)).mean(dim=1)
    found = retriever.index.vectors_at(np.arange(2))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("missing", ["", None, float("nan")])
def test_pictures_without_a_template_are_refused(splits, missing):
    given = set_of(splits.gallery.images[:3], ["a", "a", missing], np.zeros(3, np.int64))
    with pytest.raises(InvalidData, match="1 images of the gallery have no thing"):
        Retriever.build(build(), Preprocessing(), given, templates="thing")
