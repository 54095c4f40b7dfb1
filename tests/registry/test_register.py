"""`rcir register`: versions, aliases, and which version deserves an alias."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from mlflow import MlflowClient
from scipy.stats import binom

import rcir
from rcir.cli import main
from rcir.errors import InvalidConfig, InvalidData, PromotionRefused
from rcir.registry import register
from rcir.registry.registration import Contender, judge
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import current_version
from rcir.runs.results import TEST, RunResults
from tests.registry.conftest import certified, write

pytestmark = pytest.mark.usefixtures("no_figures")
ALPHA, DELTA = 0.1, 0.1


@pytest.fixture
def client():
    return MlflowClient()


@pytest.fixture
def name(request):
    """The name of a registered model that no other test uses."""
    return request.node.name.replace("[", "-").replace("]", "")


def ids_of(uri):
    return rcir.load(uri).ids.tolist()


def measured(one):
    return RunResults.read(one.folder / TEST)


def size_by_halves(results, delta=DELTA):
    """The mean size where each half of the test queries certifies the other, by SciPy alone."""
    (part,), scores = results.parts, results.measured_scores
    order = np.random.default_rng(0).permutation(len(scores))
    first, second = order[: (len(order) + 1) // 2], order[(len(order) + 1) // 2 :]
    sizes = []
    for calibration, test in ((first, second), (second, first)):
        n = len(calibration)
        allowed = np.count_nonzero(binom.cdf(np.arange(n), n, ALPHA) <= delta) - 1
        threshold = np.sort(scores[calibration])[::-1][allowed]
        # Candidates within the tolerance of the threshold are in the set.
        sizes += np.sum(part.candidate_scores[test] <= threshold * (1 + 1e-3), axis=1).tolist()
    return np.mean(sizes)


# Versions


def test_the_first_version_has_its_card_tags_and_alias(certifications, client, name, capsys):
    one = certifications["coarse"]
    assert main(["register", str(one.folder), "--name", name, "--alias", "champion"]) == 0
    assert f"models:/{name}@champion" in capsys.readouterr().out
    version = client.get_model_version_by_alias(name, "champion")
    assert (int(version.version), version.run_id, version.source) == (1, one.run, one.uri)
    results = json.loads((one.folder / "results.json").read_text())
    for row in results["rows"]:
        assert f"| {row['alpha']:g} | 0.1 | {row['mean_size']:.4g} |" in version.description
        tag = f"rcir.alpha-{row['alpha']:g}"
        assert float(version.tags[f"{tag}.mean_size"]) == pytest.approx(row["mean_size"])
        assert float(version.tags[f"{tag}.test_risk"]) == pytest.approx(row["test_risk"])
    assert version.tags["rcir.n_calibration"] == "800"
    assert ids_of(f"models:/{name}@champion") == ids_of(f"models:/{name}/1")
    assert ids_of(f"models:/{name}/1") == one.retriever.ids.tolist()
    register(str(one.folder), name, "champion")  # changes nothing
    assert len(client.search_model_versions(f"name = '{name}'")) == 1


def test_an_untracked_calibration_is_logged_first(name, client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    with monkeypatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI")
        outcome = certified(tmp_path, "fine")
    assert not (tmp_path / "mlflow.db").exists()
    assert "calibration" not in outcome.retriever.origin
    registered = register("fine", name, "champion")
    run = client.get_run(client.get_model_version(name, "1").run_id)
    assert run.info.status == "FINISHED"
    assert ids_of(registered.uri) == outcome.retriever.ids.tolist()


def test_a_retriever_that_was_marked_as_chosen_is_logged_again(pictured, client, name, tmp_path):
    folder = shutil.copytree(pictured.folder, tmp_path / "marked")
    marked = Retriever.load(folder / "retriever")
    marked.calibration = replace(marked.calibration, chosen_among=3)
    marked.save(folder / "retriever")
    registered = register(str(folder), name)
    version = client.get_model_version(name, "1")
    assert version.source != pictured.uri
    assert "delta / 3" in version.description
    assert version.tags["rcir.chosen_among"] == "3"
    assert rcir.load(registered.uri).calibration.chosen_among == 3
    assert rcir.load(pictured.uri).calibration.chosen_among == 1


# Promotion


def test_smaller_sets_take_the_alias_and_larger_ones_do_not(certifications, client, name, capsys):
    def champion():
        return int(client.get_model_version_by_alias(name, "champion").version)

    coarse, fine = (certifications[each] for each in ("coarse", "fine"))
    register(str(coarse.folder), name, "champion")
    sizes = {each: size_by_halves(measured(one)) for each, one in certifications.items()}
    assert sizes["fine"] < sizes["coarse"]
    words = register(fine.run, name, "champion").promotion
    for size in (sizes["fine"], sizes["coarse"]):
        assert f"{size:.4g}" in words
    assert f"difference {sizes['fine'] - sizes['coarse']:+.4g}" in words
    assert ids_of(f"models:/{name}@champion") == fine.retriever.ids.tolist()
    with pytest.raises(SystemExit) as stop:
        main(["register", str(coarse.folder), "--name", name, "--alias", "champion"])
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--force" in line
    assert len(client.search_model_versions(f"name = '{name}'")) == 2
    assert champion() == 2
    # Without an alias nothing is compared; with `force`, nothing has to be.
    assert register(str(coarse.folder), name).uri == f"models:/{name}/3"
    assert champion() == 2
    register(str(coarse.folder), name, "champion", force=True)
    assert champion() == 4


def contenders(certifications):
    return [
        Contender(f"the {name}", measured(certifications[name]), 1, "binomial")
        for name in ("fine", "coarse")
    ]


def test_the_decision_does_not_depend_on_the_calibration_queries(certifications):
    """Otherwise the guarantee of the winner would be one that was chosen after looking."""
    fine, coarse = contenders(certifications)
    verdict = judge(fine, coarse, ALPHA, DELTA)
    assert verdict.accepted
    assert not judge(coarse, fine, ALPHA, DELTA).accepted
    rng = np.random.default_rng(0)

    def calibrated_otherwise(one):
        (part,) = one.measured.parts
        scores = rng.exponential(size=77).astype(np.float32)
        parts = [replace(part, scores=scores)]
        return replace(one, measured=replace(one.measured, parts=parts, queries="others"))

    assert judge(calibrated_otherwise(fine), calibrated_otherwise(coarse), ALPHA, DELTA) == verdict


def test_one_that_was_chosen_before_is_compared_at_its_smaller_delta(certifications):
    fine, coarse = contenders(certifications)
    verdict = judge(replace(fine, chosen_among=4), coarse, ALPHA, DELTA)
    size = size_by_halves(fine.measured, DELTA / 4)
    assert size > size_by_halves(fine.measured)
    assert f"the fine {size:.4g}, the coarse {size_by_halves(coarse.measured):.4g}" in verdict.words


def test_a_difference_within_noise_does_not_take_the_alias(certifications):
    fine, _ = contenders(certifications)
    (part,) = fine.measured.parts
    candidates = part.candidate_scores.copy()
    # Two queries of 400 get one more image.
    candidates[:2] = np.sort(np.c_[candidates[:2, :1], candidates[:2, :-1]], axis=1)
    worse = replace(fine.measured, parts=[replace(part, candidate_scores=candidates)])
    verdict = judge(fine, replace(fine, name="other", measured=worse), ALPHA, DELTA)
    assert "difference -0.005 " in verdict.words
    assert not verdict.accepted


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"measured_on": "others"}, "same test queries"),
        ({"parts": [], "measured_scores": None}, "clusters"),
        ({"measured_scores": None}, "earlier version"),
    ],
)
def test_measurements_that_cannot_be_compared_do_not_take_the_alias(certifications, change, word):
    fine, coarse = contenders(certifications)
    changed = replace(fine, measured=replace(fine.measured, **change))
    for pair in ((changed, coarse), (coarse, changed)):
        verdict = judge(*pair, ALPHA, DELTA)
        assert not verdict.accepted
        assert word in verdict.words


@pytest.mark.parametrize(("alpha", "word"), [(0.005, "certify no sets"), (0.03, "no interval")])
def test_levels_that_few_queries_certify_do_not_take_the_alias(certifications, alpha, word):
    verdict = judge(*contenders(certifications), alpha, DELTA)
    assert not verdict.accepted
    assert word in verdict.words


def test_other_queries_do_not_take_the_alias(certifications, name, tmp_path, monkeypatch):
    """In another split, the test queries of one calibrated the other."""
    register(str(certifications["coarse"].folder), name, "champion")
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    certified(tmp_path, "fine", seed=1)
    with pytest.raises(PromotionRefused, match="same"):
        register("fine", name, "champion")


def test_a_champion_of_something_else_cannot_be_compared(certifications, client, name):
    one = certifications["fine"]
    client.create_registered_model(name)
    version = client.create_model_version(name, f"runs:/{one.run}/figures")
    client.set_registered_model_alias(name, "champion", version.version)
    with pytest.raises(PromotionRefused, match="no model of rcir"):
        register(str(one.folder), name, "champion")


# Refusals


def recalibrate(folder):
    """Calibrate a retriever anew, beside what was measured of it before."""
    retriever = Retriever.load(folder / "retriever")
    rng = np.random.default_rng(3)
    labels = rng.choice([*retriever.label_names.values()], size=600)
    retriever.calibrate(rng.standard_normal((600, 8)), labels, "constant")
    retriever.save(folder / "retriever")


def make_stale(folder):
    retriever = Retriever.load(folder / "retriever")
    retriever.remove(["gallery 7"])
    retriever.save(folder / "retriever")


def tamper(folder):
    ids = current_version(folder / "retriever") / "gallery.json"
    ids.write_text(ids.read_text().replace("gallery 7", "gallery 8"))


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (recalibrate, InvalidData),
        (make_stale, rcir.StaleCalibration),
        (lambda folder: (folder / "results.json").unlink(), InvalidData),
        (lambda folder: (folder / TEST).unlink(), InvalidData),
        (tamper, rcir.CorruptRetriever),
    ],
    ids=["recalibrated", "stale", "no results", "no measurements", "tampered"],
)
def test_an_incomplete_calibration_is_not_registered(
    certifications, client, name, tmp_path, spoil, error
):
    folder = shutil.copytree(certifications["fine"].folder, tmp_path / "spoiled")
    spoil(folder)
    with pytest.raises(error):
        register(str(folder), name)
    assert client.search_registered_models(f"name = '{name}'") == []


def test_invalid_names_and_references_are_refused(certifications, tmp_path):
    folder = str(certifications["fine"].folder)
    with pytest.raises(InvalidConfig, match="name"):
        register(folder, "a/b")
    for alias in ("v1", "latest", "a b"):
        with pytest.raises(InvalidConfig, match="alias"):
            register(folder, "never", alias)
    with pytest.raises(InvalidData, match="no folder"):
        register("0123456789abcdef0123456789abcdef", "never")
    with pytest.raises(rcir.NoRetriever):
        register(str(tmp_path), "never")
    with pytest.raises(rcir.NoRetriever, match="never@champion"):
        rcir.load("models:/never@champion")
