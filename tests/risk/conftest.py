"""Random search results, and naive versions of the p-values and features."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from rcir.metrics.labels import NO_CANDIDATE
from rcir.risk import Constant, LabelledResults, SearchResults, score


def naive_loss(risk, included, relevant, total):
    """The loss of one query by the definition of the risk."""
    hits = int(relevant[included].sum())
    if risk == "miss":
        return float(hits == 0)
    if risk == "recall":
        return 1 - hits / total if total else 1.0
    return 1 - hits / int(included.sum())


def naive_allowed_misses(n, alpha, delta=0.1):
    """The largest number of misses that the binomial distribution certifies, or -1."""
    return max(m for m in range(-1, n) if binom.cdf(m, n, alpha) <= delta)


def with_shared_keys(uncertainty, depth):
    """Queries whose candidates share keys two by two."""
    keys = np.tile(np.arange(depth) // 2, (len(uncertainty), 1))
    return SearchResults(np.asarray(uncertainty, float), depth, labels=keys)


def _p_value(total, n, alpha, bound):
    if bound == "binomial":
        return float(binom.cdf(total, n, alpha))
    if total >= n * alpha:
        return 1.0
    mean = total / n
    hoeffding = math.exp(-2 * n * (alpha - mean) ** 2)
    bentkus = min(1.0, math.e * float(binom.cdf(math.ceil(total), n, alpha)))
    log_ratio = (n - total) * math.log((1 - alpha) / (1 - mean))
    if total > 0:
        log_ratio += total * math.log(alpha / mean)
    chernoff = math.exp(log_ratio)
    return {
        "hoeffding": hoeffding,
        "bentkus": bentkus,
        "hoeffding-bentkus": min(chernoff, bentkus),
        "betting": chernoff,
    }[bound]


def _queries(n, seed, depth=12, matches=0.25):
    rng = np.random.default_rng(seed)
    uncertainty = rng.uniform(size=n)
    relevant = rng.uniform(size=(n, depth)) < matches
    relevant[:, 0] = rng.uniform(size=n) < 1 - uncertainty / 2
    distances = np.sort(rng.uniform(size=(n, depth)), axis=1)
    ends = np.where(rng.uniform(size=n) < 0.2, rng.integers(1, depth, n), depth)
    padding = np.arange(depth) >= ends[:, None]
    distances[padding], relevant[padding] = np.inf, False
    totals = relevant.sum(axis=1) + rng.integers(0, 2, n) * (rng.uniform(size=n) < 0.1)
    return SearchResults(uncertainty, depth, distances), relevant, totals


def _labelled(n, seed, depth=12, matches=0.25, score_function=None):
    results, relevant, totals = _queries(n, seed, depth, matches)
    return score(score_function or Constant(), LabelledResults(results, relevant, totals))


def _describe(results, i, k, split):
    uncertainty = results.uncertainty[i] * (1 + 1e-3)  # a query of the split counts itself
    place = sum(u <= uncertainty for u in split.uncertainty)
    normal = norm.ppf((place + 0.5) / (len(split) + 1))
    values = [math.log(k + 1), normal, math.log(k + 1) * normal]
    if results.distances is not None:
        row = results.distances[i].tolist()
        row = [min(distance, max(d for d in row if d < math.inf)) for distance in row]
        values += [row[k], row[0], row[k] - row[0]]
        profile = [rank for rank in (2, 5, 20, 50) if rank <= results.depth]
        values += [math.log(max(row[rank - 1] - row[0], 1e-3)) for rank in profile]
    if results.labels is not None:
        row = results.labels[i].tolist()
        values += [row[:30].count(row[k]), math.log(len(set(row[: k + 1])))]
        values.append(math.log1p(row[:k].count(row[k])))
    if results.candidate_uncertainty is not None:
        values.append(results.candidate_uncertainty[i, k])
    return values


def _one_key(n, seed, depth=9, labels=6):
    rng = np.random.default_rng(seed)
    uncertainty = rng.uniform(size=n)
    right = rng.integers(labels, size=(n, 1))
    keys = rng.integers(labels, size=(n, depth))
    near = rng.uniform(size=(n, depth)) < 0.6 * (1 - uncertainty)[:, None]
    keys = np.where(near, right, keys)
    relevant = keys == right
    distances = np.cumsum(rng.exponential(0.1 + uncertainty[:, None], (n, depth)), axis=1)
    candidates = rng.normal(size=(n, depth)) - relevant
    ends = np.where(rng.uniform(size=n) < 0.2, rng.integers(1, max(depth, 2), n), depth)
    padding = np.arange(depth) >= ends[:, None]
    distances[padding], keys[padding], relevant[padding] = np.inf, NO_CANDIDATE, False
    results = SearchResults(uncertainty, depth, distances, keys, candidates)
    return results, relevant, relevant.sum(axis=1) + rng.integers(0, 2, n)


def _first_ranks(relevant):
    return np.array([1.0 + row.index(True) if True in row else np.inf for row in relevant.tolist()])


@pytest.fixture(scope="session")
def naive_p_value():
    """`p_value` from SciPy's binomial distribution and the formulas in its documentation."""
    return _p_value


@pytest.fixture(scope="session")
def queries():
    """Results, relevance and totals: `queries(n, seed, depth, matches)`.

    Uncertain queries match later; some queries have no match or fewer candidates.
    """
    return _queries


@pytest.fixture(scope="session")
def labelled():
    """ScoredResults: `labelled(n, seed, depth, matches, score_function)`."""
    return _labelled


@pytest.fixture(scope="session")
def one_key():
    """Results, relevance and totals: `one_key(n, seed, depth, labels)`.

    All matches of a query have one key, and are near for certain queries; some have none.
    """
    return _one_key


@pytest.fixture(scope="session")
def describe():
    """Features of one candidate as documented: `describe(results, i, k, split)`."""
    return _describe


@pytest.fixture(scope="session")
def first_ranks():
    """Ranks of the first matches: `first_ranks(relevant)`."""
    return _first_ranks
