"""The level of a simultaneous band, by a sum over the first crossing."""

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln, xlogy
from scipy.stats import beta


def naive_crossing(n, level):
    """The probability that some number of misses certifies less than the true risk when each is
    tested at `level`.

    The sum runs over the first m at which at most m of n uniform variables are below their bound.
    """
    m = np.arange(n)
    bounds, factorial = beta.isf(level, m + 1, n - m), gammaln(np.arange(n + 1) + 1)
    first = np.zeros(n)
    for k in m:
        # Below its bound are exactly k: for the first time, or since it was so at an earlier bound.
        start, before = np.append(0, m[:k]), np.append(0, bounds[:k])
        share = (bounds[k] - before) / (1 - before)
        log = factorial[n - start] - factorial[k - start] - factorial[n - k]
        back = np.exp(log + xlogy(k - start, share) + xlogy(n - k, 1 - share))
        first[k] = back[0] - first[:k] @ back[1:]
    return first.sum()


def naive_local_level(n, delta):
    """The level at which that probability is delta."""
    return brentq(lambda x: naive_crossing(n, x) - delta, delta / n, delta, xtol=1e-13)
