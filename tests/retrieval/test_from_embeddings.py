"""Retrievers of vectors that another model embedded."""

import warnings

import numpy as np
import pytest
from scipy.spatial.distance import cdist

import rcir
from rcir.data.relevance import WithinRadius
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable, StaleCalibration
from rcir.index import find_index, one_minus_cosine

DIM, CLASSES = 6, 10
CENTRES = np.random.default_rng(0).standard_normal((CLASSES, DIM))
KINDS = np.array([f"kind {number}" for number in range(CLASSES)])


def draw(n, seed, spread=0.5):
    """Vectors of any length around the centres, with the number of each one's."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=n)
    vectors = CENTRES[labels] + spread * rng.standard_normal((n, DIM))
    return (vectors * rng.uniform(0.1, 10, (n, 1))).astype(np.float32), labels


def named(n, prefix="item"):
    return [f"{prefix} {row}" for row in range(n)]


GALLERY, LABELS = draw(300, 1)
QUERIES, QUERY_LABELS = draw(500, 2)


@pytest.fixture
def built():
    return rcir.Retriever.from_embeddings(GALLERY, named(300), KINDS[LABELS])


@pytest.fixture
def calibrated(built):
    built.calibrate(QUERIES, KINDS[QUERY_LABELS], "minmax")
    return built


# Distances


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_the_nearest_candidates_are_those_of_scipy(metric):
    own = rcir.Retriever.from_embeddings(GALLERY, labels=LABELS, metric=metric)
    found = own.search(QUERIES)
    apart = cdist(QUERIES, GALLERY, metric)
    if metric == "cosine":
        apart = np.sqrt(2 * apart)
    nearest = apart[np.arange(500), found.positions[:, 0]]
    np.testing.assert_allclose(nearest, apart.min(1), atol=1e-3)
    np.testing.assert_allclose(found.distances[:, 0], apart.min(1), rtol=1e-3, atol=1e-3)
    # Without uncertainties of their own, queries have one minus the cosine to the nearest item.
    cosine = cdist(QUERIES, GALLERY, "cosine")[np.arange(500), found.positions[:, 0]]
    np.testing.assert_allclose(found.uncertainty, cosine, atol=1e-4)
    assert own.ids[:2].tolist() == ["0", "1"]


def test_the_length_of_a_query_does_not_matter_under_cosine(calibrated):
    for query in np.eye(DIM):
        first, second = (calibrated.retrieve(scale * query, 0.2, 0.1) for scale in (1, 64))
        assert first.ids == second.ids


def test_a_vector_of_length_zero_is_at_a_right_angle_to_every_other():
    assert one_minus_cosine(np.array([2.0, 0.0]), [0.0, 0.0], [2.0, 0.0]).tolist() == [1.0, 1.0]


# Calibration


def test_sizes_are_certified_on_queries_that_did_not_calibrate(built):
    report = built.calibrate(QUERIES, KINDS[QUERY_LABELS], alphas=(0.001, 0.2))
    assert (report.n_tuning, report.n_calibration) == (300, 500)
    text = str(report)
    for part in (
        "at least 0.9",
        "500 calibration queries",
        "300 ",
        "not certified; the smallest",
    ):
        assert part in text
    further, labels = draw(2000, 9)
    answers = built.retrieve(further, 0.2, 0.1)
    missed = [
        name not in answer.labels for name, answer in zip(KINDS[labels], answers, strict=True)
    ]
    assert np.mean(missed) < 0.25
    assert np.mean([answer.size for answer in answers]) < 3


def test_seven_queries_certify_nothing(built):
    report = built.calibrate(QUERIES[:7], KINDS[QUERY_LABELS[:7]])
    assert [row.mean_size for row in report.rows] == [None] * 3
    with pytest.raises(RiskUnattainable) as caught:
        built.retrieve(QUERIES[9], 0.1, 0.1)
    assert caught.value.required_calibration == 22


# Uncertainties


def test_uncertainties_that_calibrated_are_required_of_every_query(built, tmp_path):
    stated = np.arange(500.0)
    options = {"uncertainty": stated, "query_uncertainty": "encoder"}
    built.calibrate(QUERIES, KINDS[QUERY_LABELS], "minmax", **options)
    kept = (
        built.calibration.tuning_queries.uncertainty,
        built.calibration.calibration_queries.uncertainty,
    )
    assert np.sort(np.concatenate(kept)).tolist() == stated.tolist()
    for own in (built, rcir.load(built.save(tmp_path / "own"))):
        assert own.retrieve(QUERIES[0], 0.3, 0.1, uncertainty=0.5).uncertainty == 0.5
        answers = own.retrieve(QUERIES[:2], 0.3, 0.1, uncertainty=[0.5, 0.7])
        assert [answer.uncertainty for answer in answers] == [0.5, 0.7]
        with pytest.raises(InvalidData, match="with uncertainties"):
            own.retrieve(QUERIES[0], 0.3, 0.1)


def test_an_uncertainty_that_did_not_calibrate_is_refused(calibrated):
    with pytest.raises(InvalidData, match="without uncertainties"):
        calibrated.retrieve(QUERIES[0], 0.3, 0.1, uncertainty=0.5)
    with pytest.raises(InvalidData, match="1 uncertainties"):
        calibrated.retrieve(QUERIES[:2], 0.3, 0.1, uncertainty=0.5)


def test_queries_with_and_without_uncertainties_are_not_mixed(built):
    stated, labels = np.linspace(0, 1, 200), KINDS[QUERY_LABELS]
    having = built.search_labelled(built.labelled(QUERIES[:200], labels[:200], stated))
    lacking = built.search_labelled(built.labelled(QUERIES[200:], labels[200:]))
    for parts in ((having, lacking), (lacking, having)):
        with pytest.raises(InvalidData, match="uncertainties"):
            built.calibrate_splits(*parts)
    built.calibrate(QUERIES[200:], labels[200:], "constant")
    for call in (built.extend_calibration, built.check):
        with pytest.raises(InvalidData, match="without uncertainties"):
            call(having)


# What items match by


def test_items_match_that_share_a_label(tmp_path):
    lists = [[KINDS[label], "all" if row % 7 == 0 else "odd"] for row, label in enumerate(LABELS)]
    own = rcir.Retriever.from_embeddings(GALLERY, labels=lists)
    labels = [[KINDS[label], "unheard of"] for label in QUERY_LABELS]
    found = own.search_labelled(own.labelled(QUERIES, labels))
    expected = LABELS[found.results.positions] == QUERY_LABELS[:, None]
    np.testing.assert_array_equal(found.relevant, expected)
    own.calibrate(QUERIES, labels, "quantile")
    loaded = rcir.load(own.save(tmp_path / "own"))
    assert loaded.retrieve(QUERIES[0], 0.3, 0.1).labels is None
    assert loaded.searcher.fingerprints() == own.searcher.fingerprints()
    assert str(loaded.recalibrate()) == str(own.recalibrate())


def test_labels_new_to_queries_and_labels_new_to_the_gallery_do_not_match(built):
    queries = built.labelled(GALLERY[:5], ["seen in queries alone"] * 5)
    built.add(GALLERY[:5], named(5, "new"), ["seen in the gallery alone"] * 5)
    assert not built.search_labelled(queries).relevant.any()


def test_places_match_within_a_radius(tmp_path):
    rng = np.random.default_rng(3)
    # On a grid; no two are exactly as far apart as the radius.
    places, asked = rng.integers(0, 30, (300, 2)), rng.integers(0, 30, (500, 2))
    vectors, queries = (
        np.concatenate([each, rng.standard_normal((len(each), 5))], axis=1)
        for each in (places, asked)
    )
    own = rcir.Retriever.from_embeddings(
        vectors, labels=WithinRadius(places.astype(float), 5.5), metric="euclidean", depth=60
    )
    asked_at = WithinRadius(asked.astype(float), 5.5)
    own.calibrate(queries, asked_at, "quantile")
    found = own.search_labelled(own.labelled(queries, asked_at))
    expected = np.take_along_axis(cdist(asked, places), found.results.positions, axis=1) <= 5.5
    np.testing.assert_array_equal(found.relevant, expected)
    loaded = rcir.load(own.save(tmp_path / "places"))
    assert str(loaded.recalibrate()) == str(own.recalibrate())


# Ids of the true matches of each query.
TABLE = [[f"item {row}" for row in np.flatnonzero(label == LABELS)] for label in QUERY_LABELS]


def test_a_table_of_matches_counts_as_the_labels_do(tmp_path):
    by_label = rcir.Retriever.from_embeddings(GALLERY, named(300), KINDS[LABELS])
    own = rcir.Retriever.from_embeddings(GALLERY, named(300))
    found, expected = (
        one.search_labelled(one.labelled(QUERIES, labels))
        for one, labels in ((own, TABLE), (by_label, KINDS[QUERY_LABELS]))
    )
    np.testing.assert_array_equal(found.relevant, expected.relevant)
    np.testing.assert_array_equal(found.n_relevant, expected.n_relevant)
    own.calibrate(QUERIES, TABLE, "quantile")
    loaded = rcir.load(own.save(tmp_path / "table"))
    assert str(loaded.recalibrate()) == str(own.recalibrate())
    assert loaded.retrieve(QUERIES[0], 0.3, 0.1).labels is None


def test_a_table_of_matches_does_not_know_new_items():
    own = rcir.Retriever.from_embeddings(GALLERY, named(300))
    own.calibrate(QUERIES, TABLE, "constant")
    own.remove(named(20))
    own.recalibrate()
    own.add(draw(10, 5)[0], named(10, "new"))
    with pytest.raises(InvalidData, match="10 gallery items"):
        own.recalibrate()
    with pytest.raises(StaleCalibration, match="gallery, index"):
        own.retrieve(QUERIES[0], 0.3, 0.1)
    with pytest.raises(InvalidData, match="item 999"):
        own.calibrate(QUERIES[:1], [["item 999"]])


# Arguments that are refused


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"vectors": GALLERY[0]}, "shape"),
        ({"vectors": GALLERY[:0], "ids": [], "labels": []}, "empty"),
        ({"vectors": GALLERY[[7] * 300], "leave_one_out": True}, "no candidates"),
        ({"ids": named(299)}, "299"),
        ({"ids": ["twice"] * 2 + named(298)}, "twice"),
        ({"ids": list(range(300))}, "strings"),
        ({"ids": ["caf\udce9", *named(299)]}, r"udce9.*UTF-8"),
        ({"labels": np.where(LABELS == 1, "caf\udce9", "tea")}, r"udce9.*UTF-8"),
        ({"labels": LABELS[:7]}, "7 labels for"),
        ({"labels": LABELS / 2}, "whole numbers"),
        ({"labels": [*KINDS[LABELS[:299]], 5]}, "whole numbers"),
        ({"labels": np.eye(CLASSES, dtype=int)[LABELS]}, r"one-hot.*argmax\(axis=1\)"),
        ({"labels": np.eye(CLASSES)[LABELS].tolist()}, "one-hot"),
        ({"labels": np.arange(600).reshape(300, 2)}, r"labels are \[\[ *0 "),
        ({"labels": "kind"}, "str"),
        ({"uncertainty": ["high"] * 300}, "number"),
        ({"uncertainty": np.ones(5)}, "5 uncertainties"),
        ({"uncertainty": np.full(300, np.inf)}, "infinite"),
    ],
)
def test_an_invalid_gallery_is_refused(change, word):
    arguments = {"vectors": GALLERY, "ids": named(300), "labels": LABELS} | change
    with pytest.raises(InvalidData, match=word):
        rcir.Retriever.from_embeddings(**arguments)


@pytest.mark.parametrize(
    ("option", "word"),
    [
        ({"metric": "dot"}, "cosine"),
        ({"index": "hnsw"}, "IndexConfig"),
        ({"depth": 0}, "at least"),
        ({"depth": "x"}, "whole number"),
        ({"model": 3}, "model is 3; it must be a text"),
        ({"leave_one_out": True, "clusters": LABELS, "cluster": 3}, "cluster is 3"),
    ],
    ids=["metric", "index", "depth 0", "depth of a text", "model", "cluster"],
)
def test_an_invalid_option_is_refused(option, word):
    with pytest.raises(InvalidConfig, match=word):
        rcir.Retriever.from_embeddings(GALLERY, labels=LABELS, **option)


def test_options_may_be_texts_of_numpy(tmp_path):
    options = {"metric": np.str_("euclidean"), "model": np.str_("clip-1")}
    own = rcir.Retriever.from_embeddings(GALLERY, labels=LABELS, **options)
    assert rcir.load(own.save(tmp_path / "r")).searcher.options == own.searcher.options


def test_the_word_for_a_cluster_must_be_a_text(built):
    with pytest.raises(InvalidConfig, match="cluster is 3"):
        built.calibrate(QUERIES, KINDS[QUERY_LABELS], clusters=np.arange(500), cluster=3)


def test_the_names_of_labels_cannot_be_changed(built):
    with pytest.raises(TypeError):
        built.label_names[0] = "another"


REPEATED = np.r_[np.arange(500), np.arange(300)]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"queries": np.full_like(QUERIES, np.nan)}, "NaN"),
        ({"labels": KINDS[QUERY_LABELS][:9]}, r"labels.*\(9,\)"),
        ({"labels": None}, "no labels"),
        ({"labels": QUERY_LABELS / 3}, "whole numbers"),
        ({"labels": QUERY_LABELS}, "type int64"),
        ({"labels": [["kind 1"]] * 500}, "lists"),
        ({"labels": WithinRadius(np.zeros((500, 2)), 1.0)}, "places"),
        ({"uncertainty": ["high"] * 500}, "number"),
        ({"uncertainty": [1.0]}, "1 uncertainties"),
        ({"uncertainty": np.full(500, np.nan)}, "NaN"),
        ({"groups": ["a"]}, r"groups.*\(1,\)"),
        ({"labels": ["unheard of"] * 500, "groups": ["a"]}, r"groups.*\(1,\)"),
        ({"labels": ["unheard of"] * 500}, "none of the"),
        ({"groups": "a"}, "type"),
        ({"groups": ["a"] * 499 + [None]}, "missing"),
        ({"clusters": np.r_[np.nan, np.arange(499)]}, "missing"),
        (
            {
                "queries": np.concatenate([GALLERY[:9], QUERIES]),
                "labels": KINDS[np.r_[LABELS[:9], QUERY_LABELS]],
            },
            "gallery",
        ),
        ({"queries": QUERIES[:1], "labels": KINDS[:1], "tuning": "queries"}, "more"),
        ({"queries": QUERIES[REPEATED], "labels": KINDS[QUERY_LABELS[REPEATED]]}, "before"),
    ],
)
def test_queries_that_cannot_calibrate_are_refused(built, change, word):
    arguments = {"queries": QUERIES, "labels": KINDS[QUERY_LABELS]} | change
    names = dict(built.label_names)
    with pytest.raises(InvalidData, match=word):
        built.calibrate(**arguments)
    assert built.label_names == names
    with pytest.raises(StaleCalibration, match="not calibrated"):
        built.guarantee(0.5, 0.1)


@pytest.mark.filterwarnings("ignore:.*labels that no gallery item has")
def test_a_label_that_the_gallery_lacks_is_numbered_once_and_by_accepted_calls_only(built):
    names = dict(built.label_names)
    labels = np.where(np.arange(500) < 9, "unheard of", KINDS[QUERY_LABELS])
    with pytest.raises(InvalidData, match="more"):
        built.calibrate(QUERIES[:1], labels[:1], tuning="queries")
    with pytest.raises(InvalidConfig, match="there is no option loudness"):
        built.calibrate(QUERIES, labels, loudness=3)
    assert built.label_names == names
    first, second = (built.labelled(QUERIES[rows], labels[rows]) for rows in ([0, 20], [30, 1]))
    number = first.population.labels[0]
    assert number not in names
    assert second.population.labels[1] == number
    assert built.label_names == names | {number: "unheard of"}


def test_the_seed_divides_the_queries(built):
    tuned = []
    for seed in (0, 1, 0):
        built.calibrate(QUERIES, KINDS[QUERY_LABELS], "constant", seed=seed)
        tuned.append(built.calibration.tuning_queries.vectors.tolist())
    assert tuned[0] == tuned[2] != tuned[1]
    for seed in (-1, "a"):
        with pytest.raises(InvalidConfig, match="seed"):
            built.calibrate(QUERIES, KINDS[QUERY_LABELS], seed=seed)


def test_places_of_another_radius_or_dimension_are_refused():
    own = rcir.Retriever.from_embeddings(GALLERY, labels=WithinRadius(GALLERY[:, :2], 1.0))
    for places in (WithinRadius(QUERIES[:, :2], 50.0), WithinRadius(QUERIES[:, :3], 1.0)):
        with pytest.raises(InvalidData, match="radius"):
            own.calibrate(QUERIES, places)


def test_vectors_of_another_model_are_refused(tmp_path):
    own = rcir.Retriever.from_embeddings(GALLERY, labels=LABELS, model="clip-1")
    with pytest.raises(InvalidData, match="clip-1"):
        own.calibrate(QUERIES, QUERY_LABELS, model="clip-2")
    own.calibrate(QUERIES, QUERY_LABELS, "constant", model="clip-1")
    own = rcir.load(own.save(tmp_path / "own"))
    with pytest.raises(InvalidData, match="clip-1"):
        own.retrieve(QUERIES[0], 0.2, 0.1, model="clip-2")
    assert own.retrieve(QUERIES[0], 0.2, 0.1, model="clip-1").size >= 1


@pytest.mark.parametrize(
    "wrong",
    [{"labels": [1, 2]}, {"ids": ["a"] * 300}, {"uncertainty": np.full(300, np.inf)}, {"depth": 0}],
    ids=str,
)
def test_an_index_is_built_only_after_all_other_arguments_are_checked(wrong, monkeypatch):
    """It may be a table on a server, which would be left behind."""
    calls, flat = [], find_index("flat")
    build = flat.build.__func__
    monkeypatch.setattr(
        flat, "build", classmethod(lambda kind, *parts: calls.append(1) or build(kind, *parts))
    )
    with pytest.raises((InvalidData, InvalidConfig)):
        rcir.Retriever.from_embeddings(GALLERY, **({"labels": LABELS} | wrong))
    assert not calls
    rcir.Retriever.from_embeddings(GALLERY, labels=LABELS)
    assert calls


def test_an_index_with_another_number_of_items_is_refused(monkeypatch):
    flat = find_index("flat")
    build = flat.build.__func__
    less = classmethod(lambda kind, vectors, options: build(kind, vectors[1:], options))
    monkeypatch.setattr(flat, "build", less)
    with pytest.raises(InvalidData, match="299"):
        rcir.Retriever.from_embeddings(GALLERY, labels=LABELS)


# Queries that are gallery items


def on_a_grid(n, seed):
    """Different items on a grid, with labels by their place."""
    rng = np.random.default_rng(seed)
    points = rng.choice(12**3, n, replace=False)
    vectors = np.stack(np.unravel_index(points, (12, 12, 12)), axis=1)
    return vectors.astype(np.float32), (vectors // 4) @ [9, 3, 1] + 30 * (points % 5 == 0)


def leaving_out(vectors, labels, **options):
    return rcir.Retriever.from_embeddings(
        vectors, labels=labels, metric="euclidean", leave_one_out=True, **options
    )


def test_an_item_finds_neither_itself_nor_its_copies():
    vectors, labels = on_a_grid(150, 1)
    copies = np.r_[np.arange(150), np.arange(30), np.arange(10)]
    own = leaving_out(vectors[copies], labels[copies], depth=20)
    found = own.search_labelled(own.labelled(vectors, labels))
    apart = cdist(vectors, vectors[copies])
    itself = apart == 0
    assert itself.sum(1).tolist() == [3] * 10 + [2] * 20 + [1] * 120
    nearest = np.sort(np.where(itself, np.inf, apart), axis=1)[:, :20]
    np.testing.assert_allclose(found.results.distances, nearest, rtol=1e-5)
    reached = np.take_along_axis(apart, found.results.positions, axis=1)
    np.testing.assert_allclose(reached, nearest, rtol=1e-9)
    matches = (labels[:, None] == labels[copies]) & ~itself
    np.testing.assert_array_equal(found.n_relevant, matches.sum(1))


def test_an_item_is_not_a_match_of_itself():
    vectors, labels = on_a_grid(150, 1)
    own = leaving_out(vectors, labels)
    assert own.depth == 149
    found = own.search_labelled(own.labelled(vectors, labels))
    expected = (labels[:, None] == labels).sum(1) - 1
    np.testing.assert_array_equal(found.n_relevant, expected)
    np.testing.assert_array_equal(found.relevant.sum(1), expected)  # all items were searched


def test_a_query_outside_the_gallery_is_searched_as_usual():
    vectors, labels = on_a_grid(150, 1)
    found = leaving_out(vectors, labels, depth=20).search(vectors + 0.5)
    apart = cdist(vectors + 0.5, vectors)
    expected = np.sort(apart, axis=1)[:, :20]
    np.testing.assert_allclose(found.distances, expected, rtol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(apart, found.positions, axis=1), expected)


def test_gallery_items_calibrate_only_where_they_are_left_out(tmp_path):
    vectors, labels = on_a_grid(600, 1)
    plain = rcir.Retriever.from_embeddings(vectors, labels=labels, metric="euclidean")
    with pytest.raises(InvalidData, match="gallery"):
        plain.calibrate(vectors, labels)
    own = leaving_out(vectors, labels)
    own.calibrate(vectors, labels, "quantile")
    loaded = rcir.load(own.save(tmp_path / "own"))
    for one in (own, loaded):
        answers = one.retrieve(vectors[:50], 0.5, 0.1)
        assert all(str(row) not in answer.ids for row, answer in enumerate(answers))
    assert str(loaded.recalibrate()) == str(own.recalibrate())


@pytest.mark.parametrize("clusters", ["auto", None])
@pytest.mark.parametrize("bursts", [0.0, 0.1, 1.0])
def test_bursts_in_the_gallery_cause_a_warning_unless_they_are_left_out(bursts, clusters):
    """A new picture finds no frame of its own burst."""
    rng = np.random.default_rng(0)
    sizes = np.where(rng.uniform(size=400) < bursts, 5, 1)
    labels = rng.integers(8, size=400)
    frames = np.repeat(CENTRES[labels] + 0.9 * rng.standard_normal((400, DIM)), sizes, axis=0)
    frames += 0.05 * rng.standard_normal(frames.shape)
    labels = np.repeat(labels, sizes)
    own = leaving_out(frames, labels, clusters=clusters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own.calibrate(frames, labels, "constant")
    warned = any("burst" in str(one.message) for one in caught)
    assert warned == (bursts > 0 and clusters is None)


@pytest.mark.statistical
def test_the_risk_of_gallery_items_is_controlled_only_if_each_is_left_out(request):
    """Some items calibrate; the others, each searching all but itself, are the test."""
    alpha, delta, divisions = 0.2, 0.1, 200 if request.config.getoption("full") else 50
    rng = np.random.default_rng(5)
    labels = rng.integers(8, size=700)
    vectors = CENTRES[labels] + 0.9 * rng.standard_normal((700, DIM))
    own = leaving_out(vectors, labels)
    with_itself = rcir.Retriever.from_embeddings(vectors, labels=labels, metric="euclidean")
    whole = own.search_labelled(own.labelled(vectors, labels))
    cheating = with_itself.search_labelled(with_itself.labelled(vectors, labels))
    assert (cheating.ranks == 1).all()
    violated, constant = {"left out": 0, "itself": 0}, rcir.risk.Constant()
    for _ in range(divisions):
        rows = rng.permutation(700)
        for name, results in (("left out", whole), ("itself", cheating)):
            calibration = rcir.risk.score(constant, results[rows[100:400]])
            threshold = rcir.risk.order_statistic(alpha, delta, calibration).threshold
            sizes = constant.sizes(whole.results[rows[400:]], threshold)
            violated[name] += (whole.ranks[rows[400:]] > sizes).mean() > alpha
    # The 300 test items are as noisy as the calibration.
    assert violated["left out"] <= 0.25 * divisions
    assert violated["itself"] == divisions
