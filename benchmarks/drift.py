"""Drift without labels: false alarms of `DriftMonitor`, and how soon it notices a change.

Streams of a normal feature are compared with 1,000 calibration queries at level 0.01:

- `false_alarms`: the share of streams of 3,000 queries without a change that raise an alarm;
  `false_alarm_errors` are the standard errors by which it exceeds the level.
- `delay_60`, `delay_67`, `delay_75`: the median number of queries until the alarm, after a change
  behind 300 queries with an AUROC of .60, .667 and .75 (a stream without an alarm counts as 1,500);
  `drift_delay`: the largest over the medians of a simple jumper without a reserve: 133, 64 and 40.
"""

from __future__ import annotations

import numpy as np
from common import parser, report, sized
from scipy.stats import norm

from rcir.risk import DriftMonitor

LEVEL, CALIBRATION, BEFORE, MOST = 0.01, 1_000, 300, 1_500
STREAMS, CHANGED, LENGTH = sized(2_000, 20), sized(400, 10), sized(3_000, 300)
MEDIANS = {0.60: 133, 0.667: 64, 0.75: 40}  # of the reference simulation


def false_alarm(rng: np.random.Generator) -> bool:
    """Return True if a stream without a change raises an alarm."""
    return DriftMonitor(rng.normal(size=CALIBRATION), LEVEL).update(rng.normal(size=LENGTH))


def delay(rng: np.random.Generator, shift: float) -> int:
    """Return the number of queries from a change of the mean to the alarm."""
    monitor = DriftMonitor(rng.normal(size=CALIBRATION), LEVEL)
    monitor.update(rng.normal(size=BEFORE))
    for number in range(1, MOST):
        if monitor.update(rng.normal(shift, size=1)):
            return number
    return MOST


def main() -> None:
    """Draw all streams."""
    options = parser(__doc__).parse_args()
    rng = np.random.default_rng(0)
    alarms = np.mean([false_alarm(rng) for _ in range(STREAMS)])
    error = np.sqrt(LEVEL * (1 - LEVEL) / STREAMS)
    figures = {"false_alarms": alarms, "false_alarm_errors": (alarms - LEVEL) / error}
    rows = [("no change", str(STREAMS), f"{alarms:.4f}", "", "")]
    ratios = []
    for auroc, reference in MEDIANS.items():
        shift = float(np.sqrt(2) * norm.ppf(auroc))
        median, late = np.quantile([delay(rng, shift) for _ in range(CHANGED)], [0.5, 0.9])
        ratios.append(median / reference)
        figures[f"delay_{100 * auroc:.0f}"] = median
        rows.append((f"AUROC {auroc:g}", str(CHANGED), "", f"{median:.0f}", f"{late:.0f}"))
    figures["drift_delay"] = max(ratios)
    columns = ["change", "streams", "false alarms", "median delay", "90% quantile"]
    report(f"drift without labels at level {LEVEL}", columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
