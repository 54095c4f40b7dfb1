"""A verifier behind a retriever: answers, kept scores, changes, tables and pictures."""

import numpy as np
import pytest
from PIL import Image, ImageFilter

from rcir.errors import InvalidConfig, InvalidData, StaleCalibration
from rcir.retrieval.queries import queries_of
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.verification import certify_verifier, pairs_to_verify
from rcir.retrieval.verifiers import LocalFeatures, TableVerifier

KINDS, ITEMS, LEVELS = 40, 80, {"alpha": 0.2, "wrong": 0.1, "delta": 0.1, "depth": 12}


class Expert:
    """Scores pairs by whether the label in both names agrees, with noise that the pair fixes."""

    name, version = "expert", "1"

    def __init__(self, patience=10**9):
        self.asked, self.patience = [], patience

    def score(self, query, candidate_ids):
        if len(self.asked) >= self.patience:
            raise KeyboardInterrupt
        self.asked.append((query, tuple(candidate_ids)))
        return [self.of_pair(query, item) for item in candidate_ids]

    @staticmethod
    def of_pair(query, item):
        noise = np.random.default_rng([*query.encode(), *item.encode()]).standard_normal()
        return 4.0 * (query.split("-")[0] == item.split("-")[0]) + noise


def names_of(labels, kind):
    return [f"{label}-{kind}{row}" for row, label in enumerate(labels)]


@pytest.fixture
def world():
    """A calibrated retriever, two splits with names, and further queries; some have no match."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((KINDS + 10, 8))
    labels = rng.integers(KINDS + 10, size=1500)
    labels[:ITEMS] = np.arange(ITEMS) % KINDS
    vectors = centres[labels] + 0.5 * rng.standard_normal((1500, 8))
    retriever = Retriever.from_embeddings(
        vectors[:ITEMS], names_of(labels[:ITEMS], "g"), labels[:ITEMS], depth=40
    )
    parts = [slice(ITEMS, 400), slice(400, 1100), slice(1100, None)]
    with pytest.warns(UserWarning, match="labels that no gallery item has"):
        retriever.calibrate_splits(
            *(
                retriever.search_labelled(retriever.labelled(vectors[p], labels[p]))
                for p in parts[:2]
            ),
            score_function="quantile",
        )
    tuning, calibration, test = (
        (
            retriever.search_labelled(retriever.labelled(vectors[part], labels[part])),
            names_of(labels[part], f"{number}q"),
        )
        for number, part in enumerate(parts)
    )
    return retriever, tuning, calibration, (vectors[parts[2]], labels[parts[2]], test[1])


def test_answers_are_those_of_both_thresholds_and_keep_both_levels(world):
    retriever, tuning, calibration, (vectors, labels, names) = world
    certified = certify_verifier(retriever, Expert(), tuning, calibration, **LEVELS)
    pair = certified.certificate.pair
    missed, wrong, verified = [], [], []
    for vector, label, name in zip(vectors, labels, names, strict=True):
        certified.verifier.asked.clear()
        answer = certified.retrieve(vector, name)
        candidates = [item for _, items in certified.verifier.asked for item in items]
        scores = [Expert.of_pair(name, item) for item in candidates]
        if pair.policy == "first":
            assert all(score < pair.acceptance for score in scores[:-1])
        assert answer.n_verified == len(candidates) <= 12
        assert (answer.id is not None) == (max(scores) >= pair.acceptance)
        if answer.id is not None:
            assert answer.score == pytest.approx(max(scores))
            assert answer.id == candidates[int(np.argmax(scores))]
            assert answer.id.startswith(f"{answer.label}-")
        right = answer.label == label
        wrong.append(answer.id is not None and not right)
        verified.append(answer.n_verified)
        if label < KINDS:
            missed.append(not right)
    assert np.mean(missed) < 0.25
    assert np.mean(wrong) < 0.14
    assert np.mean(verified) == pytest.approx(certified.certificate.mean_verified, rel=0.2)
    assert certified.fixed.mean_verified > certified.certificate.mean_verified


def test_scores_are_kept_and_used_again_unless_something_changed(world, tmp_path):
    retriever, tuning, calibration, _ = world
    kept, interrupted = tmp_path / "scores.sqlite", Expert(patience=500)
    with pytest.raises(KeyboardInterrupt):
        certify_verifier(retriever, interrupted, tuning, calibration, **LEVELS, scores=kept)
    resumed = Expert()
    certify_verifier(retriever, resumed, tuning, calibration, **LEVELS, scores=kept)
    n_queries = len(tuning[1]) + len(calibration[1])
    assert len(resumed.asked) == n_queries - 500
    again, newer = Expert(), Expert()
    certify_verifier(retriever, again, tuning, calibration, **LEVELS, scores=kept)
    newer.version = "2"
    certify_verifier(retriever, newer, tuning, calibration, **LEVELS, scores=kept)
    assert (len(again.asked), len(newer.asked)) == (0, n_queries)
    (item,) = retriever.ids[:1]
    vector, label = retriever.index.vectors_at(np.arange(1)) + 0.01, retriever.labels[:1]
    retriever.remove([item])
    retriever.add(vector, [item], label)  # another picture of this name
    retriever.recalibrate()
    splits = [
        (retriever.search_labelled(queries.results.queries), names)
        for queries, names in (tuning, calibration)
    ]
    changed = Expert()
    certify_verifier(retriever, changed, *splits, **LEVELS, scores=kept)
    assert {name for _, items in changed.asked for name in items} >= {item}
    assert sum(item in items for _, items in changed.asked) > len(changed.asked) / 2
    (tmp_path / "text").write_text("these are no scores, and not a database either" * 30)
    with pytest.raises(InvalidData, match="new file"):
        certify_verifier(retriever, Expert(), *splits, **LEVELS, scores=tmp_path / "text")


def test_nothing_is_answered_after_a_change(world):
    retriever, tuning, calibration, (vectors, _, names) = world
    certified = certify_verifier(retriever, Expert(), tuning, calibration, **LEVELS)
    certified.verifier.version = "2"
    with pytest.raises(StaleCalibration, match="verifier"):
        certified.retrieve(vectors[0], names[0])
    certified.verifier.version = "1"
    with pytest.raises(InvalidData, match="name"):
        certified.retrieve(vectors[0])
    retriever.remove(retriever.ids[:1].tolist())
    with pytest.raises(StaleCalibration, match="gallery"):
        certified.retrieve(vectors[0], names[0])
    retriever.recalibrate()
    with pytest.raises(StaleCalibration, match="certify it again"):
        certified.retrieve(vectors[0], names[0])
    with pytest.raises(StaleCalibration, match="search them again"):
        certify_verifier(retriever, Expert(), tuning, calibration, **LEVELS)


def test_queries_that_cannot_certify_are_refused(world):
    retriever, tuning, calibration, _ = world
    with pytest.raises(InvalidData, match="tuning split"):
        certify_verifier(retriever, Expert(), calibration, tuning, **LEVELS)
    with pytest.raises(InvalidData, match="names"):
        certify_verifier(retriever, Expert(), (tuning[0], ["a"]), calibration, **LEVELS)
    retriever.calibration = None
    with pytest.raises(StaleCalibration, match="not calibrated"):
        certify_verifier(retriever, Expert(), tuning, calibration, **LEVELS)
    rng = np.random.default_rng(1)
    vectors, labels = rng.standard_normal((300, 4)), rng.integers(5, size=300)
    alone = Retriever.from_embeddings(vectors, labels=labels, leave_one_out=True, clusters=None)
    alone.calibrate(vectors, labels)
    with pytest.raises(InvalidConfig, match="gallery items"):
        certify_verifier(alone, Expert(), tuning, calibration, **LEVELS)


def test_a_table_of_scores_certifies_as_what_computed_them(world, tmp_path):
    retriever, tuning, calibration, _ = world
    pairs = [*pairs_to_verify(retriever, tuning, 12), *pairs_to_verify(retriever, calibration, 12)]
    lines = [f"{query},{item},{Expert.of_pair(query, item)!r}" for query, item in pairs]
    path = tmp_path / "scores.csv"
    path.write_text("\n".join(["query,item,score", *lines]))
    by_table = certify_verifier(retriever, TableVerifier(path), tuning, calibration, **LEVELS)
    by_expert = certify_verifier(retriever, Expert(), tuning, calibration, **LEVELS)
    assert by_table.certificate == by_expert.certificate
    path.write_text("\n".join(["query,item,score", *lines[:-1]]))
    with pytest.raises(InvalidData, match="no score of 1 of"):
        certify_verifier(retriever, TableVerifier(path), tuning, calibration, **LEVELS)
    path.write_text("query,item,score\na,b,1\na,b,2\n")
    with pytest.raises(InvalidData, match="two scores"):
        TableVerifier(path)


def test_local_features_recognise_a_picture_from_another_angle(tmp_path):
    rng = np.random.default_rng(0)
    for name in "ab":
        noise = Image.fromarray(rng.integers(256, size=(60, 80), dtype=np.uint8))
        noise.resize((640, 480), Image.Resampling.BICUBIC).save(tmp_path / f"{name}.png")
    tilted = Image.open(tmp_path / "a.png").rotate(20).filter(ImageFilter.GaussianBlur(1))
    tilted.save(tmp_path / "query.png")
    Image.new("L", (64, 64)).save(tmp_path / "empty.png")
    features = LocalFeatures(tmp_path)
    same, other, empty = features.score("query.png", ["a.png", "b.png", "empty.png"])
    assert same > 200
    assert other < 20
    assert empty == 0
    assert features.score("query.png", ["a.png"]) == same


def test_queries_of_parts_are_verified_among_the_items_of_their_part():
    rng = np.random.default_rng(0)
    centres, labels = rng.standard_normal((KINDS, 8)), rng.integers(KINDS, size=1400)
    labels[:400] = np.resize(np.arange(KINDS), 400)
    vectors = centres[labels] + 0.5 * rng.standard_normal((1400, 8))
    sites, items = rng.choice(["north", "south"], 1400), slice(400)
    retriever = Retriever.from_embeddings(
        vectors[items], names_of(labels[items], "g"), labels[items], keys=sites[items], key="site"
    )
    splits = []
    for number, part in enumerate((slice(400, 800), slice(800, 1399))):
        queries = retriever.labelled(vectors[part], labels[part], keys=sites[part])
        names = names_of(labels[part], f"{number}q")
        splits.append((retriever.search_labelled(queries), names))
    retriever.calibrate_splits(*(split for split, _ in splits), score_function="quantile")
    certified = certify_verifier(retriever, Expert(), *splits, **LEVELS)
    name = names_of(labels[1399:], "new")[0]
    answer = certified.retrieve(vectors[1399], name, key=sites[1399])
    assert answer.label == labels[1399]
    site_of = dict(zip(retriever.ids.tolist(), sites[items], strict=True))
    assert site_of[answer.id] == sites[1399]
    with pytest.raises(InvalidData, match="site"):
        certified.retrieve(vectors[1399], name)
    with pytest.raises(InvalidData, match="together"):
        certified.retrieve(vectors[1398:], name, key="north")


@pytest.mark.filterwarnings("ignore")  # other choices with the same queries, labels without items
def test_a_calibration_in_clusters_or_one_of_several_cannot_be_verified(world):
    retriever, tuning, calibration, _ = world
    queries = queries_of(calibration[0])
    clusters = np.resize(np.arange(200).astype(str), len(queries))
    other = Retriever(retriever.searcher)
    other.calibrate(
        queries.vectors, queries.population.labels, clusters=clusters, score_function="constant"
    )
    with pytest.raises(InvalidConfig, match="clusters"):
        certify_verifier(other, Expert(), tuning, calibration, **LEVELS)
    retriever.calibrate_splits(tuning[0], calibration[0], score_function="constant")
    with pytest.raises(InvalidConfig, match="among others"):
        certify_verifier(retriever, Expert(), tuning, calibration, **LEVELS)
