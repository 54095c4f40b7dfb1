"""Draw `promise.svg`, `threshold.svg` and `average.svg` for the page on concepts.

Run `.venv/bin/python docs/images/concepts.py`; it prints the numbers of the figures. A query is
missed at threshold t with probability exp(-t / difficulty), so that the true share of misses of a
threshold is known.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.stats import binom

from rcir.risk import allowed_misses

ALPHA, DELTA = 0.1, 0.1
WIDTH = 420
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1d1c1a }
.soft { fill: #5b5852 } .middle { text-anchor: middle }
.hit { fill: #12704a } .miss { fill: #a93a12 } .mark { fill: #2458a6 }
.rule { stroke: #5b5852 }
.cut { stroke: #1d1c1a; stroke-width: 1.5; stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) {
text { fill: #edebe7 } .soft { fill: #a9a6a0 } .hit { fill: #63cb9b } .miss { fill: #f59a70 }
.mark { fill: #86b1f2 } .rule { stroke: #a9a6a0 } .cut { stroke: #edebe7 } }
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{words}</text>'


def point(x: float, y: float, hit: bool) -> str:
    """Return a disc for a hit, or a square for a miss."""
    if hit:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="hit"/>'
    return f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" class="miss"/>'


def bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a filled rectangle."""
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{kind}"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def write(name: str, height: int, title: str, parts: list[str]) -> None:
    """Write a figure beside this file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img"><title>{title}</title><style>{STYLE}</style>'
    )
    Path(__file__).with_name(f"{name}.svg").write_text("\n".join([head, *parts, "</svg>\n"]))


def promise(rng: np.random.Generator) -> None:
    """Draw 100 queries of one calibration, and the risks of 20 calibrations."""
    n, calibrations = 1000, 20
    scores = np.sort(rng.exponential(size=(calibrations, n)), axis=1)
    risks = np.exp(-scores[:, -1 - allowed_misses(n, ALPHA, DELTA)])
    hits = rng.exponential(size=100) <= -np.log(risks[0])
    above = (risks > ALPHA).sum()
    print(f"promise: {100 - hits.sum()} of 100 missed; {above} of {calibrations} above {ALPHA}")
    parts = [text(0, 14, "alpha: how many queries may be missed")]
    for number, hit in enumerate(hits):
        parts.append(point(10 + 21 * (number % 20), 34 + 19 * (number // 20), hit))
    parts.append(text(0, 140, f"100 new queries, {100 - hits.sum()} missed (squares)", "soft"))
    parts.append(text(0, 180, "delta: how many calibrations may break that"))
    middle = 230
    for number, risk in enumerate(risks):
        parts.append(point(10 + 21 * number, middle - 2500 * (risk - ALPHA), risk <= ALPHA))
    parts.append(line(0, middle, WIDTH, middle, "cut"))
    parts.append(text(0, middle - 9, f"alpha = {ALPHA}", "soft"))
    label = f"true risk after each of {calibrations} calibrations; {above} above alpha"
    parts.append(text(0, 318, label, "soft"))
    write("promise", 326, "100 queries, and 20 calibrations", parts)


def threshold(rng: np.random.Generator) -> None:
    """Draw the sorted scores of 100 calibration queries, and the binomial distribution."""
    n = 100
    k = allowed_misses(n, ALPHA, DELTA)
    scores = np.sort(rng.exponential(size=n))
    cut = scores[-1 - k]
    print(f"threshold: {k} of {n} may be missed; P(at most {k}) {binom.cdf(k, n, ALPHA):.3f}")
    print(f"           P(at most {k + 1}) {binom.cdf(k + 1, n, ALPHA):.3f}")
    base, scale = 190, 155 / scores[-1]
    parts = [text(0, 14, "1. Sort the scores of the first true matches")]
    parts += [point(8 + 4.08 * i, base - scale * s, s <= cut) for i, s in enumerate(scores)]
    parts.append(line(0, base - scale * cut, WIDTH, base - scale * cut, "cut"))
    parts.append(text(0, base - scale * cut - 7, "threshold: sets end here"))
    parts.append(text(0, base + 24, f"{n} calibration queries; {k} above the threshold", "soft"))
    parts.append(text(0, 262, "2. Allow as many misses as chance would rarely give"))
    base, shown = 400, range(23)
    scale = 115 / binom.pmf(shown, n, ALPHA).max()
    for misses in shown:
        height = scale * binom.pmf(misses, n, ALPHA)
        kind = "miss" if misses <= k else "mark"
        parts.append(bar(4 + 18 * misses, base - height, 14, height, kind))
        if misses % 5 == 0:
            parts.append(text(11 + 18 * misses, base + 17, str(misses), "soft middle"))
    parts.append(line(0, base, WIDTH, base, "rule"))
    chance = f"{binom.cdf(k, n, ALPHA):.0%}"
    parts.append(text(0, base - 62, f"at most {k}:"))
    parts.append(text(0, base - 44, f"{chance} of draws"))
    parts.append(text(0, base + 36, f"misses among {n} queries if the risk were {ALPHA}", "soft"))
    write("threshold", 444, "Sorted scores with a threshold, and a binomial distribution", parts)


def average() -> None:
    """Draw the shares of misses of four equally frequent kinds of queries."""
    difficulty = np.array([0.4, 0.8, 1.2, 1.6])
    grid = np.linspace(0, 10, 100_001)[:, None]
    risks = np.exp(-grid / difficulty)
    shares = risks[np.argmax(risks.mean(axis=1) <= ALPHA)]
    print("average:", *(f"{share:.3f}" for share in shares), f"mean {shares.mean():.3f}")
    parts = []
    for row, (name, share) in enumerate(zip(("easy", "", "", "hard"), shares, strict=True)):
        y = 10 + 30 * row
        parts.append(text(0, y + 15, name, "soft"))
        parts.append(bar(44, y, 1500 * share, 20, "hit" if share <= ALPHA else "miss"))
        parts.append(text(52 + 1500 * share, y + 15, f"{share:.1%}"))
    parts.append(line(44 + 1500 * ALPHA, 2, 44 + 1500 * ALPHA, 132, "cut"))
    parts.append(text(44 + 1500 * ALPHA, 150, "alpha = 10%", "soft middle"))
    write("average", 158, "Shares of misses of four kinds of queries", parts)


if __name__ == "__main__":
    promise(np.random.default_rng(0))
    threshold(np.random.default_rng(0))
    average()
