"""The levels that are shown and compared at, unless others are asked for."""

ALPHAS = (0.05, 0.1, 0.2)
DELTA = 0.1
