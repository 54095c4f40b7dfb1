"""The usual levels of guarantees: alphas that are shown and compared, and delta."""

ALPHAS = (0.05, 0.1, 0.2)
DELTA = 0.1
