"""The usual levels of guarantees: alphas that are shown and compared, the one of them that decides
where one has to, and delta.
"""

ALPHA = 0.1
ALPHAS = (0.05, 0.1, 0.2)
DELTA = 0.1
