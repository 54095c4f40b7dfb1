"""`rcir register`: versions, their alias, and who deserves it."""

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
from rcir.registry.promotion import Contender, judge
from rcir.registry.register import register
from rcir.retrieval.storage import load, save
from rcir.runs.results import TEST, RunResults
from tests.registry.conftest import certified, write

pytestmark = pytest.mark.usefixtures("undrawn")
ALPHA, DELTA = 0.1, 0.1


@pytest.fixture
def client():
    return MlflowClient()


@pytest.fixture
def name(request):
    """Of a registered model that no other test uses."""
    return request.node.name.replace("[", "-").replace("]", "")


def measured(one):
    return RunResults.read(one.folder / TEST)


def size_by_halves(results, delta=DELTA):
    """The mean size where each half of the test queries certifies the other, by SciPy alone."""
    (part,), scores = results.parts, results.measured_scores
    order = np.random.default_rng(0).permutation(len(scores))
    first, second = order[: (len(order) + 1) // 2], order[(len(order) + 1) // 2 :]
    sizes = []
    for calibrating, asking in ((first, second), (second, first)):
        n = len(calibrating)
        allowed = np.count_nonzero(binom.cdf(np.arange(n), n, ALPHA) <= delta) - 1
        threshold = np.sort(scores[calibrating])[::-1][allowed]
        # The tolerance counts as paid.
        sizes += np.sum(part.candidate_scores[asking] <= threshold * (1 + 1e-3), axis=1).tolist()
    return np.mean(sizes)


def test_the_first_version_has_card_figures_and_alias(certifications, client, name, capsys):
    one = certifications["coarse"]
    assert main(["register", str(one.folder), "--name", name, "--alias", "champion"]) == 0
    assert capsys.readouterr().out == (
        f"{name} version 1: models:/{name}@champion\nchampion: no version had the alias\n"
    )
    version = client.get_model_version_by_alias(name, "champion")
    assert (int(version.version), version.run_id, version.source) == (1, one.run, one.uri)
    results = json.loads((one.folder / "results.json").read_text())
    assert version.description.startswith("# Retriever with a guarantee\n")
    for row in results["rows"]:
        assert f"| {row['alpha']:g} | 0.1 | {row['mean_size']:.4g} |" in version.description
        place = f"rcir.alpha-{row['alpha']:g}"
        assert float(version.tags[f"{place}.mean_size"]) == pytest.approx(row["mean_size"])
        assert float(version.tags[f"{place}.test_risk"]) == pytest.approx(row["test_risk"])
    assert version.tags["rcir.n_calibration"] == "800"
    assert version.tags["rcir.promotion"] == "no version had the alias"
    loaded = rcir.load(f"models:/{name}@champion")
    assert [answer.ids for answer in loaded.retrieve(one.queries, 0.2, 0.1)] == [
        answer.ids for answer in one.retriever.retrieve(one.queries, 0.2, 0.1)
    ]
    assert rcir.load(f"models:/{name}/1").ids.tolist() == loaded.ids.tolist()
    # Once more changes nothing.
    assert register(str(one.folder), name, "champion").promotion == "it is version 1 already"
    assert len(client.search_model_versions(f"name = '{name}'")) == 1


def test_smaller_sets_take_the_alias_and_larger_ones_do_not(certifications, client, name, capsys):
    coarse, fine = (certifications[each] for each in ("coarse", "fine"))
    register(str(coarse.folder), name, "champion")
    sizes = {each: size_by_halves(measured(one)) for each, one in certifications.items()}
    assert sizes["fine"] < sizes["coarse"]
    found = register(fine.run, name, "champion")
    assert found.promotion.startswith(
        f"smaller sets than version 1: mean set sizes at alpha 0.1, delta 0.1 on 400 test queries, "
        f"of which each half certifies the other's: this one {sizes['fine']:.4g}, version 1 "
        f"{sizes['coarse']:.4g}, difference {sizes['fine'] - sizes['coarse']:+.4g} (95% interval -"
    )
    assert rcir.load(f"models:/{name}@champion").ids.tolist() == fine.retriever.ids.tolist()
    with pytest.raises(SystemExit) as stop:
        main(["register", str(coarse.folder), "--name", name, "--alias", "champion"])
    assert stop.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: version 2 of {name} keeps the alias: mean set sizes at")
    assert f"this one {sizes['coarse']:.4g}, version 2 {sizes['fine']:.4g}" in line
    assert "--force" in line
    assert len(client.search_model_versions(f"name = '{name}'")) == 2
    assert int(client.get_model_version_by_alias(name, "champion").version) == 2
    # Without an alias, no comparison is asked for; with force, none is made.
    assert register(str(coarse.folder), name).uri == f"models:/{name}/3"
    forced = register(str(coarse.folder), name, "champion", force=True)
    assert forced.promotion == "forced in the place of version 2, without a comparison"
    assert int(client.get_model_version_by_alias(name, "champion").version) == 4


def contenders(certifications):
    return [
        Contender(f"the {name}", measured(certifications[name]), 1, "binomial")
        for name in ("fine", "coarse")
    ]


def test_what_decides_knows_nothing_of_the_calibration_queries(certifications):
    """Else the guarantee of whichever is kept would be one that was chosen by looking."""
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


def test_one_that_was_chosen_before_is_compared_as_it_answers(certifications):
    fine, coarse = contenders(certifications)
    verdict = judge(replace(fine, chosen_among=4), coarse, ALPHA, DELTA)
    size = size_by_halves(fine.measured, DELTA / 4)
    assert size > size_by_halves(fine.measured)
    assert f"the fine {size:.4g}, the coarse {size_by_halves(coarse.measured):.4g}" in verdict.words


def test_differences_within_noise_do_not_take_the_alias(certifications):
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
    ("change", "words"),
    [
        ({"measured_on": "others"}, "not measured on the same test queries, gallery and matches"),
        ({"parts": [], "measured_scores": None}, "the fine come in clusters"),
        ({"measured_scores": None}, "by an earlier version of rcir"),
    ],
)
def test_what_cannot_be_compared_does_not_take_the_alias(certifications, change, words):
    fine, coarse = contenders(certifications)
    changed = replace(fine, measured=replace(fine.measured, **change))
    for pair in ((changed, coarse), (coarse, changed)):
        verdict = judge(*pair, ALPHA, DELTA)
        assert not verdict.accepted
        assert words in verdict.words


def test_levels_that_few_queries_certify_do_not_take_the_alias(certifications):
    fine, coarse = contenders(certifications)
    verdict = judge(fine, coarse, 0.005, DELTA)
    assert not verdict.accepted
    assert "certify no sets of the fine at alpha 0.005, delta 0.1" in verdict.words
    verdict = judge(fine, coarse, 0.03, DELTA)
    assert not verdict.accepted
    assert "no interval: 200 calibration queries of a part allow" in verdict.words


def test_other_queries_are_no_challenge(certifications, name, tmp_path, monkeypatch):
    """Divided otherwise, the test queries of one calibrated the other."""
    register(str(certifications["coarse"].folder), name, "champion")
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    certified(tmp_path, "fine", seed=1)
    with pytest.raises(PromotionRefused, match="this one and version 1 were not measured on the"):
        register("fine", name, "champion")


def test_a_model_of_something_else_is_no_champion_to_compare_with(certifications, client, name):
    one = certifications["fine"]
    client.create_registered_model(name)
    version = client.create_model_version(name, f"runs:/{one.run}/figures")
    client.set_registered_model_alias(name, "champion", version.version)
    with pytest.raises(PromotionRefused, match=r"version 1 .* is no model of rcir"):
        register(str(one.folder), name, "champion")


def test_a_calibration_that_is_not_in_mlflow_is_logged_first(name, client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    with monkeypatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI")
        outcome = certified(tmp_path, "fine")
    assert not (tmp_path / "mlflow.db").exists()
    assert "calibration" not in outcome.retriever.origin
    found = register("fine", name, "champion")
    run = client.get_run(client.get_model_version(name, "1").run_id)
    assert run.info.run_name == "fine (registration)"
    assert run.info.status == "FINISHED"
    assert rcir.load(found.uri).ids.tolist() == outcome.retriever.ids.tolist()


def test_pictures_are_registered_with_one_of_their_data_set(pictured, client, name, tmp_path):
    """Where the retriever was marked since, its model is logged anew."""
    folder = shutil.copytree(pictured.folder, tmp_path / "marked")
    marked = load(folder / "retriever")
    marked.chosen_among = 3
    save(marked, folder / "retriever")
    found = register(str(folder), name)
    version = client.get_model_version(name, "1")
    assert version.source != pictured.uri
    assert "answers at delta / 3; measured was at delta." in version.description
    assert version.tags["rcir.chosen_among"] == "3"
    assert rcir.load(found.uri).chosen_among == 3
    assert rcir.load(pictured.uri).chosen_among == 1


def changed(folder):
    """A retriever that was calibrated anew, beside what was measured of it before."""
    retriever = load(folder / "retriever")
    rng = np.random.default_rng(3)
    labels = rng.choice([*retriever.label_names.values()], size=600)
    retriever.calibrate(rng.standard_normal((600, 8)), labels, "constant")
    save(retriever, folder / "retriever")


def stale(folder):
    retriever = load(folder / "retriever")
    retriever.remove(["gallery 7"])
    save(retriever, folder / "retriever")


def no_results(folder):
    (folder / "results.json").unlink()


def no_measures(folder):
    (folder / TEST).unlink()


def tampered(folder):
    ids = folder / "retriever" / "gallery.json"
    ids.write_text(ids.read_text().replace("gallery 7", "gallery 8"))


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (changed, InvalidData, "what was measured is not of this retriever"),
        (stale, rcir.StaleCalibration, "has changed since calibration"),
        (no_results, InvalidData, "no results of a calibration"),
        (no_measures, InvalidData, "holds no test.safetensors"),
        (tampered, rcir.CorruptRetriever, "gallery.json"),
    ],
)
def test_what_is_not_whole_is_not_registered(
    certifications, client, name, tmp_path, spoil, error, words
):
    folder = shutil.copytree(certifications["fine"].folder, tmp_path / "spoiled")
    spoil(folder)
    with pytest.raises(error, match=words):
        register(str(folder), name)
    assert client.search_registered_models(f"name = '{name}'") == []


def test_names_and_references_that_there_are_not_are_refused(certifications, tmp_path):
    folder = str(certifications["fine"].folder)
    with pytest.raises(InvalidConfig, match="'a/b' is no name"):
        register(folder, "a/b")
    for alias in ("v1", "latest", "a b"):
        with pytest.raises(InvalidConfig, match="is no alias"):
            register(folder, "never", alias)
    with pytest.raises(InvalidData, match="no folder, and MLflow has no such id"):
        register("0123456789abcdef0123456789abcdef", "never")
    with pytest.raises(rcir.NoRetriever):
        register(str(tmp_path), "never")
    with pytest.raises(rcir.NoRetriever, match="models:/never@champion"):
        rcir.load("models:/never@champion")
