"""A custom risk: a loss with its words, registered, and everything else follows."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable
from rcir.risk import (
    RISKS,
    Constant,
    LabelledResults,
    Risk,
    SearchResults,
    SetRule,
    certify,
    fit_score_function,
    losses,
    make_request,
    register_risk,
    score,
)

DEPTH, POPULATION, N, DRAWS, DELTA = 8, 5000, 150, 2000, 0.1


def with_fewer_matches_than(number):
    """A risk whose loss is 1 if the set holds fewer matches."""

    def lacks(scored, thresholds):
        return (scored.n_within(thresholds, scored.relevant) < number).astype(float)

    clause = "fewer than two true {matches} are in at most {alpha} of the {sets}"
    return Risk(name="fewer-than-two", losses=lacks, clause=clause, binary=True)


@pytest.fixture
def register(monkeypatch):
    """A function that registers a risk for one test; fewer than two is registered already."""

    def register(risk):
        monkeypatch.delitem(losses._table, risk.key, raising=False)
        monkeypatch.setitem(losses._table, risk.key, risk)

    register(with_fewer_matches_than(2))
    return register


def draw(n, seed):
    """Queries whose candidates match with probability 0.7, independently."""
    relevant = np.random.default_rng(seed).uniform(size=(n, DEPTH)) < 0.7
    return LabelledResults(SearchResults(np.zeros(n), DEPTH), relevant, relevant.sum(axis=1))


@pytest.fixture
def calibration(register):
    return draw(400, 0)


@pytest.fixture
def rule(calibration):
    return SetRule(Constant(), score(Constant(), draw(100, 1)), score(Constant(), calibration))


@pytest.mark.parametrize("alpha", [0.1, 0.3])
def test_it_is_certified_at_the_smallest_size_with_few_enough_losses(alpha, rule, calibration):
    hits = np.cumsum(calibration.relevant, axis=1)
    guarantee = rule.guarantee(make_request(alpha, DELTA, risk="fewer-than-two"))
    lost = [(hits[:, k] < 2).sum() for k in range(DEPTH)]
    size = next(k for k in range(DEPTH) if binom.cdf(lost[k], 400, alpha) <= DELTA) + 1
    assert rule.sets(draw(3, 2).results, guarantee)[1].tolist() == [size] * 3
    assert guarantee.bound == "binomial"
    assert "fewer than two true matches" in str(guarantee)
    assert rule.guarantee(make_request(alpha, DELTA)).threshold < guarantee.threshold


def test_it_can_be_combined_with_other_risks_and_averages(rule):
    several = {"fewer-than-two": 0.3, "false-discovery": 0.5}
    both = rule.guarantee(make_request(several, DELTA))
    assert (
        both.threshold >= rule.guarantee(make_request(0.3, DELTA, risk="fewer-than-two")).threshold
    )
    assert both.risk == "fewer-than-two, false-discovery"
    assert "fewer than two" in str(both)
    assert rule.guarantee(make_request(0.3, None, risk="fewer-than-two")).bound == "conformal"
    for options in ({"simultaneous": True}, {"abstain": True}):
        with pytest.raises(InvalidConfig):
            make_request(0.3, DELTA, risk="fewer-than-two", **options)
    with pytest.raises(RiskUnattainable):
        rule.guarantee(make_request(0.001, DELTA, risk="fewer-than-two"))


def test_the_table_is_read_only_and_names_are_unique(register):
    with pytest.raises(TypeError):
        RISKS["other"] = with_fewer_matches_than(2)
    with pytest.raises(InvalidConfig, match="exists"):
        register_risk(with_fewer_matches_than(3))
    with pytest.raises(InvalidConfig, match="Risk"):
        register_risk("fewer-than-three")
    risk = with_fewer_matches_than(3)
    for changes in ({"name": "a.b"}, {"name": "other", "abstains": True}):
        with pytest.raises(InvalidConfig, match=r"name|abstain"):
            register_risk(replace(risk, **changes))


@pytest.mark.parametrize("loss", [0.5, 2.0, -1.0, np.nan])
def test_a_loss_outside_its_range_is_refused(register, loss):
    risk = with_fewer_matches_than(2)
    register(replace(risk, losses=lambda *of: np.full_like(risk.losses(*of), loss)))
    with pytest.raises(InvalidData, match="loss"):
        certify(make_request(0.5, DELTA, risk="fewer-than-two"), score(Constant(), draw(50, 0)))


@pytest.mark.parametrize(
    ("loss", "first_match", "word"),
    [(2.0, False, "0 or 1"), (0.0, False, "monotone"), (1.0, True, "first true match")],
)
def test_losses_are_checked_beyond_the_thresholds_that_are_tested(
    register, loss, first_match, word
):
    """Sets of one, which alpha is far too small for, have a loss that the risk does not allow."""
    risk = with_fewer_matches_than(2)

    def losses_of(scored, thresholds):
        return np.where(thresholds == 0, loss, risk.losses(scored, thresholds))

    register(replace(risk, losses=losses_of, first_match=first_match))
    with pytest.raises(InvalidData, match=word):
        certify(make_request(0.3, DELTA, risk="fewer-than-two"), score(Constant(), draw(200, 0)))


def test_its_score_function_can_be_chosen_automatically(register):
    split = draw(400, 3)
    chosen, compared = fit_score_function(
        "auto", split.results, split.relevant, risk="fewer-than-two"
    )
    assert chosen.name in compared
    assert set(compared["constant"]) <= {0.1, 0.2, 0.3, 0.5}


def test_a_calibrated_retriever_answers_requests_for_it(register, retriever, splits):
    calibration = retriever.calibration.miss_rule.evidence
    answer = retriever.retrieve(splits.test.images[0], 0.9, DELTA, risk="fewer-than-two")
    assert answer.to_dict()["guarantee"]["risk"] == "fewer-than-two"
    included = calibration.scores <= answer.guarantee.threshold
    assert np.mean((calibration.relevant & included).sum(axis=1) < 2) <= 0.9


@pytest.mark.statistical
@pytest.mark.parametrize(("number", "holds"), [(2, True), (1, False)])
def test_its_risk_exceeds_alpha_in_at_most_delta_of_the_calibrations(register, number, holds):
    """The simulation fails with the loss of another risk."""
    register(with_fewer_matches_than(number))
    population, alpha, rng = score(Constant(), draw(POPULATION, 4)), 0.2, np.random.default_rng(5)
    hits, failures = np.cumsum(population.relevant, axis=1), []
    request = make_request(alpha, DELTA, risk="fewer-than-two")
    for _ in range(DRAWS):
        calibration = population[rng.integers(POPULATION, size=N)]
        try:
            threshold = certify(request, calibration).threshold
        except RiskUnattainable:
            failures.append(False)
            continue
        failures.append(np.mean(hits[:, int(threshold)] < 2) > alpha)
    excess = (np.mean(failures) - DELTA) / np.sqrt(DELTA * (1 - DELTA) / DRAWS)
    assert (excess <= 3) == holds


@pytest.mark.statistical
def test_a_risk_that_is_not_monotone_would_exceed_alpha_too_often(register, monkeypatch):
    """Bisection tests several thresholds, at each of which the losses are independent."""
    rng, alpha = np.random.default_rng(6), 0.2
    lost = np.arange(POPULATION) < 1.005 * alpha * POPULATION
    table = rng.permuted(np.tile(lost, (DEPTH, 1)), axis=1)
    table[-1] = 0

    def losses_of(scored, thresholds):
        return table[thresholds.astype(int), scored.n_relevant[:, None]].astype(float)

    register(replace(with_fewer_matches_than(2), losses=losses_of))
    population = replace(score(Constant(), draw(POPULATION, 4)), n_relevant=np.arange(POPULATION))
    request = make_request(alpha, DELTA, risk="fewer-than-two")
    with pytest.raises(InvalidData, match="monotone"):
        certify(request, population[:N])
    monkeypatch.setattr(Risk, "check_losses", lambda *_: None)
    samples = (population[rng.integers(POPULATION, size=N)] for _ in range(DRAWS))
    failures = [certify(request, sample).threshold < DEPTH - 1 for sample in samples]
    assert (np.mean(failures) - DELTA) / np.sqrt(DELTA * (1 - DELTA) / DRAWS) > 3
