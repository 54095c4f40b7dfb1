"""Each query is searched in the part of the gallery that its key names."""

import numpy as np
import pytest

import rcir
from rcir.errors import InvalidData
from rcir.index import IndexConfig
from rcir.retrieval.label_ranking import rank_labels

LABELS, DIM, SITES = 12, 6, np.array(["north", "south", "west"])
CENTRES = np.random.default_rng(5).normal(size=(LABELS, DIM))


def draw(n, seed, shares=(0.5, 0.3, 0.2)):
    rng = np.random.default_rng(seed)
    labels = rng.integers(LABELS, size=n)
    vectors = CENTRES[labels] + 0.6 * rng.normal(size=(n, DIM))
    return vectors.astype(np.float32), labels, rng.choice(SITES, size=n, p=shares)


GALLERY, QUERIES = draw(150, 0), draw(200, 1)


def build(**options):
    vectors, labels, sites = GALLERY
    options = {"labels": labels, "metric": "euclidean", "clusters": None} | options
    return rcir.Retriever.from_embeddings(vectors, keys=sites, key="site", **options)


def lists(labels):
    return [[str(label)] for label in labels]


@pytest.mark.parametrize("index", ["flat", "hnsw"])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_candidates_are_the_nearest_of_the_part_by_numpy(index, leave_one_out):
    items, labels, sites = GALLERY
    vectors, query_labels, keys = GALLERY if leave_one_out else QUERIES
    retriever = build(leave_one_out=leave_one_out, index=IndexConfig(index), depth=40)
    found = retriever.search_labelled(retriever.labelled(vectors, query_labels, keys=keys))
    squared = ((vectors[:, None] - items) ** 2).sum(axis=2)
    squared[keys[:, None] != sites] = np.inf
    if leave_one_out:
        np.fill_diagonal(squared, np.inf)
    order = np.argsort(squared, axis=1, kind="stable")[:, : retriever.depth]
    expected = np.where(np.isinf(np.take_along_axis(squared, order, axis=1)), -1, order)
    np.testing.assert_array_equal(found.results.positions, expected)
    is_match = np.isfinite(squared) & (labels == query_labels[:, None])
    np.testing.assert_array_equal(found.n_relevant, is_match.sum(axis=1))


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_labels_of_other_parts_have_no_probability(leave_one_out):
    items, labels, sites = GALLERY
    rows = (labels != 3) | (sites != "south")  # the south lacks label 3
    retriever = rcir.Retriever.from_embeddings(
        items[rows],
        labels=labels[rows],
        keys=sites[rows],
        leave_one_out=leave_one_out,
        clusters=None,
    )
    own = (items[rows], labels[rows], sites[rows])
    vectors, query_labels, keys = own if leave_one_out else QUERIES
    retriever.calibrate(vectors, query_labels, keys=keys)
    results = retriever.search_labelled(retriever.labelled(vectors, query_labels, keys=keys))
    model = retriever.require_calibration().label_model
    ranked = rank_labels(retriever.searcher, model, results.results)
    for row, key in enumerate(keys):
        present = set(labels[rows][sites[rows] == key].tolist())
        if leave_one_out:
            others = (sites[rows] == key) & (np.arange(rows.sum()) != row)
            present = set(labels[rows][others].tolist())
        ranked_labels = ranked.labels[row][np.isfinite(ranked.log_probabilities[row])]
        assert set(ranked_labels.tolist()) == present
    total = np.exp(ranked.log_probabilities).sum(axis=1)
    np.testing.assert_allclose(total, 1, atol=1e-9)


@pytest.mark.parametrize(
    ("labelled", "options"),
    [
        (True, {}),
        (True, {"distinct": "label"}),
        (True, {"risk": "recall"}),
        (False, {}),
        (False, {"risk": "recall"}),
    ],
)
def test_sets_hold_items_of_the_own_part(labelled, options):
    _, labels, sites = GALLERY
    vectors, query_labels, keys = QUERIES
    retriever = build() if labelled else build(labels=lists(labels))
    retriever.calibrate(vectors, query_labels if labelled else lists(query_labels), keys=keys)
    new, new_labels, new_keys = draw(60, 2)
    answers = retriever.retrieve(new, 0.2, 0.1, key=new_keys.tolist(), **options)
    rows = [np.array(answer.ids, int) for answer in answers]
    assert all((sites[items] == key).all() for items, key in zip(rows, new_keys, strict=True))
    if options.get("risk") != "recall":
        missed = [label not in labels[items] for items, label in zip(rows, new_labels, strict=True)]
        assert np.mean(missed) < 0.35
    (single,) = retriever.retrieve(new[:1], 0.2, 0.1, key=new_keys[0], **options)
    assert single.ids == answers[0].ids


def test_keys_are_the_groups_of_the_queries():
    retriever = build()
    vectors, labels, keys = QUERIES
    retriever.calibrate(vectors, labels, keys=keys, tuning="gallery")
    guarantee = retriever.guarantee(0.2, 0.1, group="south")
    assert guarantee.n_calibration == np.count_nonzero(keys == "south")
    assert "own site" in str(guarantee)
    with pytest.raises(InvalidData, match="south"):
        retriever.retrieve(vectors[0], 0.2, 0.1, group="south", key="north")
    assert retriever.retrieve(vectors[0], 0.2, 0.1, group="south", key="south").size > 0
    many = retriever.retrieve(vectors[:4], 0.2, 0.1, key=keys[:4])  # an array, as in calibration
    assert len(many) == 4


def test_a_part_without_calibration_queries_is_refused_unless_parts_are_clusters():
    vectors, labels, keys = QUERIES
    known = keys != "west"
    retriever = build()
    retriever.calibrate(vectors[known], labels[known], keys=keys[known])
    with pytest.raises(InvalidData, match="west"):
        retriever.retrieve(vectors[0], 0.2, 0.1, key="west")
    sites = np.array([f"site {n}" for n in range(60)])
    rng = np.random.default_rng(3)
    items, item_labels, _ = draw(3000, 4)
    retriever = rcir.Retriever.from_embeddings(
        items, labels=item_labels, keys=rng.choice(sites, 3000), key="site"
    )
    known = rng.choice(sites[:-1], len(vectors))
    retriever.calibrate(vectors, labels, keys=known, clusters=known, cluster="site")
    assert retriever.retrieve(vectors[0], 0.5, 0.1, key=sites[-1]).size > 0


def test_missing_unknown_and_superfluous_keys_are_refused():
    vectors, labels, keys = QUERIES
    retriever = build()
    with pytest.raises(InvalidData, match="site"):
        retriever.calibrate(vectors, labels)
    retriever.calibrate(vectors, labels, keys=keys)
    with pytest.raises(InvalidData, match="site"):
        retriever.retrieve(vectors[0], 0.2, 0.1)
    with pytest.raises(InvalidData, match="east"):
        retriever.retrieve(vectors[0], 0.2, 0.1, key="east")
    with pytest.raises(InvalidData, match="2 keys for 3"):
        retriever.retrieve(vectors[:3], 0.2, 0.1, key=["north", "west"])
    plain = rcir.Retriever.from_embeddings(GALLERY[0], labels=GALLERY[1])
    plain.calibrate(vectors, labels)
    with pytest.raises(InvalidData, match="without keys"):
        plain.retrieve(vectors[0], 0.2, 0.1, key="north")
    with pytest.raises(InvalidData, match="without keys"):
        plain.add(vectors[:1], ["new"], labels[:1], keys=keys[:1])


def test_a_query_alone_in_its_part_is_refused():
    keys = np.where(np.arange(150) == 0, "island", GALLERY[2])
    retriever = rcir.Retriever.from_embeddings(
        GALLERY[0], labels=GALLERY[1], keys=keys, leave_one_out=True, clusters=None
    )
    with pytest.raises(InvalidData, match="no candidate"):
        retriever.search_labelled(retriever.labelled(GALLERY[0], GALLERY[1], keys=keys))


def test_keys_are_stored_and_items_added_to_a_part(tmp_path):
    vectors, labels, keys = QUERIES
    retriever = build()
    retriever.calibrate(vectors, labels, keys=keys)
    new, new_labels, new_keys = draw(20, 6)
    before = retriever.retrieve(new, 0.2, 0.1, key=new_keys.tolist())
    loaded = rcir.load(retriever.save(tmp_path / "retriever"))
    after = loaded.retrieve(new, 0.2, 0.1, key=new_keys.tolist())
    assert [answer.ids for answer in after] == [answer.ids for answer in before]
    with pytest.raises(InvalidData, match="site"):
        loaded.add(new, [f"new {n}" for n in range(20)], new_labels)
    loaded.add(new, [f"new {n}" for n in range(20)], new_labels, keys=new_keys)
    assert "gallery" in loaded.changes()
    loaded.recalibrate()
    (answer,) = loaded.retrieve(new[:1], 0.2, 0.1, key=new_keys[:1].tolist(), risk="recall")
    assert "new 0" in answer.ids
    other = "north" if new_keys[0] != "north" else "south"
    assert "new 0" not in loaded.retrieve(new[0], 0.2, 0.1, key=other, risk="recall").ids
