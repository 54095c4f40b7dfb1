"""A verifier behind the shortlist: verifications that are saved, and whether both risks are kept.

Queries, 30% of them without a match, and vectors are those of `openset.py`. The verifier is
simulated: scores of a match and of others are normal, with AUROC 0.95. Three tenths of the labelled
queries tune, the others calibrate at `ALPHA`, `WRONG` and delta 0.1; test queries measure.

- `verifications_over_fixed_k`: the verifications of a query on average, over the smallest k with
  which the same procedure certifies the same levels where the k nearest labels (the nearest item of
  each) are all verified and the best is accepted if it reaches a threshold;
  `verifications_over_least_k`: over the smallest k with which the k nearest labels are certified to
  hold a match, the errors of the verifier left aside, so that no fixed shortlist needs fewer;
  `verifications_over_one_size`: the same, with labels in the order of the shortlists;
  `verifications`: their number; `missed`, `wrong`: the shares of test queries.
- `certified`, `certified_fixed`: shares of splits in which the levels are certified.
- `violations`: the share of 20 calibrations of each split with a miss rate above alpha or a rate of
  wrong items above its level. Calibration queries are drawn with replacement from all that did not
  tune, and these have the exact rates.

`photographs`: 300 photographs of CUB-200-2011, queried by pictures of them from other angles, and
100 others; SIFT features and a homography (OpenCV) verify at most 20 candidates, at alpha = 0.1 and
wrong = 0.05. Other angles are simulated: 42% of the picture, tilted, in other light, with blur and
noise.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from birds import ALL_KINDS, MODEL, class_folders, weights
from common import parser, report, sized
from numpy.typing import NDArray
from openset import divide
from PIL import Image, ImageFilter
from recipes import Part
from scipy.stats import norm
from sizes import DELTA, DEPTH, Pool, load

from rcir.data.vector_files import read_vectors
from rcir.errors import RiskUnattainable
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.verification import NamedQueries, certify_verifier
from rcir.retrieval.verifiers import LocalFeatures
from rcir.risk import LabelledResults, ScoredResults, order_statistic
from rcir.risk.verification import (
    Grid,
    Pair,
    VerifiedResults,
    VerifierCertificate,
    certify_verification,
)

SETS = sized(("cub50", "omniglot", "digits"), ("digits",))
ALPHA, WRONG = sized((0.2, 0.3), (0.6, 0.6))
TUNING, DRAWS, MOST_VERIFIED, AUROC = 0.3, sized(20, 2), 20, 0.95
PICTURES, UNKNOWN = 300, 100


class Simulated:
    """Scores with a mean of 0, of items with the label of the query with a larger one."""

    name, version = "simulated", str(AUROC)

    def __init__(self, labels: NDArray[np.int64], gallery: NDArray[np.int64], seed: int) -> None:
        self.labels, self.gallery = labels, gallery
        self.noise = np.random.default_rng(seed).standard_normal((len(labels), len(gallery)))

    def score(self, query: str, candidate_ids: Sequence[str]) -> NDArray[np.float64]:
        row, columns = int(query), np.array(candidate_ids, np.int64)
        return self.of(np.array([row]), columns[None])[0]

    def of(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Scores (n, k) of items at columns (n, k) for queries at rows (n,)."""
        same = self.gallery[columns] == self.labels[rows][:, None]
        distance = np.sqrt(2) * norm.ppf(AUROC)
        return np.asarray(self.noise[rows[:, None], columns] + distance * same)


def nearest_labels(labelled: LabelledResults, rows: NDArray[np.int64], verifier: Simulated):
    """The nearest labels of queries, verified by their nearest item: fixed shortlists."""
    first = labelled.first_of_each_label()
    relevant, positions = first.relevant, first.results.require("positions")
    scores = np.where(positions < 0, np.inf, np.arange(relevant.shape[1]))
    scored = ScoredResults.from_scores(
        scores.astype(np.float32), relevant, n_relevant=first.n_relevant
    ).cut(MOST_VERIFIED)
    return VerifiedResults(scored, verifier.of(rows, positions[:, : scored.depth]))


def certified(*splits: VerifiedResults, fixed: bool = False) -> VerifierCertificate | None:
    """Certify both levels; None if they are refused."""
    try:
        return certify_verification(
            *splits, ALPHA, WRONG, DELTA, policies=("best",) if fixed else ("first", "best")
        )
    except RiskUnattainable:
        return None


def rates(queries: VerifiedResults, pair: Pair) -> tuple[float, float, float]:
    """Miss rate of queries with a match, rate of wrong items, and verifications of a query."""
    values = np.array([pair.shortlist], np.float32), np.array([pair.acceptance])
    missed, wrong, verified = np.concatenate(queries.counts(Grid((pair.policy,), *values)))
    return (
        missed / np.count_nonzero(queries.queries.matchable),
        wrong / len(queries),
        verified / len(queries),
    )


def named(retriever: Retriever, part: Part, first: int) -> NamedQueries:
    """Search queries, which are named by numbers from the first on."""
    queries = retriever.labelled(part.vectors, part.labels)
    return retriever.search_labelled(queries), [str(first + row) for row in range(len(part))]


def measured(pool: Pool, seed: int) -> Iterator[tuple[str, float]]:
    """Yield the figures of one split."""
    gallery, labelled, test = divide(pool, seed)
    n, n_calibration = round(TUNING * len(labelled)), len(labelled)
    every = Part(
        np.concatenate([labelled.vectors, test.vectors]),
        np.concatenate([labelled.labels, test.labels]),
    )
    retriever = Retriever.from_embeddings(gallery.vectors, labels=gallery.labels, depth=DEPTH)
    tuning, rest = named(retriever, every[:n], 0), named(retriever, every[n:], n)
    retriever.calibrate_splits(tuning[0], rest[0])
    verifier = Simulated(every.labels, gallery.labels, seed)
    loose = {"alpha": 0.99, "wrong": 0.99, "delta": DELTA, "depth": MOST_VERIFIED}
    both = certify_verifier(retriever, verifier, tuning, rest, **loose)
    tuned, others = both.tuning, both.calibration
    calibration, measuring = others[: n_calibration - n], others[n_calibration - n :]
    ours = certified(tuned, calibration)
    one_size = certified(tuned.of_constant_size, calibration.of_constant_size, fixed=True)
    rows = np.arange(len(every))
    splits = (
        nearest_labels(tuning[0], rows[:n], verifier),
        nearest_labels(rest[0][: n_calibration - n], rows[n:n_calibration], verifier),
    )
    fixed = certified(*splits, fixed=True)
    yield "certified", ours is not None
    yield "certified_fixed", fixed is not None
    if ours is not None:
        missed, wrong, verified = rates(measuring, ours.pair)
        yield from {"missed": missed, "wrong": wrong, "verifications": verified}.items()
        if fixed is not None:
            yield "verifications_over_fixed_k", verified / fixed.mean_verified
        matchable = splits[1].queries[splits[1].queries.matchable]
        with suppress(RiskUnattainable):
            least = order_statistic(ALPHA, DELTA, matchable).threshold + 1
            yield "verifications_over_least_k", verified / least
        if one_size is not None:
            yield "verifications_over_one_size", verified / one_size.mean_verified
    rng = np.random.default_rng(seed)
    violations = []
    for _ in range(DRAWS):
        drawn = certified(tuned, others[rng.integers(len(others), size=len(others) // 2)])
        exact = (0.0, 0.0) if drawn is None else rates(others, drawn.pair)[:2]
        violations.append(exact[0] > ALPHA or exact[1] > WRONG)
    yield "violations", np.mean(violations)


def from_another_angle(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A picture of a picture: tilted, cropped, darker or brighter, blurred and noisy."""
    import cv2

    pixels = np.asarray(picture.convert("RGB"), np.float32)
    height, width = pixels.shape[:2]
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    place = np.array([width, height]) * rng.uniform(0, 0.35, 2)  # of what is seen
    seen = corners * 0.65 + place + rng.uniform(-0.05, 0.05, (4, 2)) * [width, height]
    seen = seen.astype(np.float32)
    tilt = cv2.getPerspectiveTransform(seen, corners)
    pixels = cv2.warpPerspective(pixels, tilt, (width, height)) * rng.uniform(0.6, 1.3)
    pixels = np.clip(pixels + rng.normal(0, 5, pixels.shape), 0, 255)
    blurred = Image.fromarray(pixels.astype(np.uint8))
    return blurred.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.0)))


def photographs(folder: Path) -> Iterator[tuple[str, float]]:
    """Yield the figures of local features."""
    rng, photos = np.random.default_rng(0), class_folders(folder, ALL_KINDS)
    files = sorted(photos.rglob("*.jpg"))
    places = rng.permutation(len(files))[: PICTURES + UNKNOWN]
    for name in ("gallery", "queries"):
        for number, place in enumerate(places):
            kind = folder / name / f"{number:03}"
            if name == "queries" or number < PICTURES:
                kind.mkdir(parents=True)
                picture = Image.open(files[place]).convert("RGB")
                shown = picture if name == "gallery" else from_another_angle(picture, rng)
                shown.save(kind / f"{name}.png")
        command = ["embed", str(folder / name), "--output", str(folder / f"{name}.parquet")]
        command += ["--model", MODEL, "--checkpoint", str(weights())]
        subprocess.run([sys.executable, "-m", "rcir.cli", *command], check=True)
    gallery, queries = (read_vectors(folder / f"{name}.parquet") for name in ("gallery", "queries"))
    retriever = Retriever.from_embeddings(gallery.vectors, gallery.ids, gallery.labels, depth=50)
    order = rng.permutation(len(queries))
    ids, labels = np.array(queries.ids, object), np.asarray(queries.labels)
    tuning, calibration = (
        (
            retriever.search_labelled(retriever.labelled(queries.vectors[rows], labels[rows])),
            ids[rows].tolist(),
        )
        for rows in np.split(order, [round(TUNING * len(order))])
    )
    retriever.calibrate_splits(tuning[0], calibration[0])
    first = calibration[0].relevant[:, 0].sum() / np.count_nonzero(calibration[0].n_relevant)
    yield "photographs_first_is_right", first  # of queries with a match
    verifier = LocalFeatures(folder / "gallery", folder / "queries")
    verified = certify_verifier(
        retriever, verifier, tuning, calibration, alpha=0.1, wrong=0.05, depth=20
    )
    yield "photographs_verifications", verified.certificate.mean_verified
    if verified.fixed is not None:
        yield "photographs_fixed", verified.fixed.mean_verified


def main() -> None:
    """Measure and print."""
    command = parser(__doc__)
    command.add_argument("--embedded", type=Path, help="where vectors are, or go to")
    command.add_argument("--sets", nargs="*", choices=SETS, default=SETS)
    command.add_argument("--splits", type=int, default=sized(10, 1))
    options = command.parse_args()
    warnings.simplefilter("ignore")  # of queries without a match
    figures: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.sets:
            pool, values = load(name, options.embedded or Path(temporary)), defaultdict(list)
            for seed in range(options.splits):
                for figure, value in measured(pool, seed):
                    values[figure].append(float(value))
            for figure, numbers in values.items():
                figures[f"{name}_{figure}"] = float(np.mean(numbers))
                ends = f"{min(numbers):.3f} to {max(numbers):.3f}"
                rows.append(
                    [f"{name}, {figure}", f"{np.mean(numbers):.3f}", ends, str(len(numbers))]
                )
        if not sized(False, True):
            figures |= dict(photographs(Path(temporary, "photographs")))
    rows += [[name, f"{figures[name]:.3f}", "", "1"] for name in figures if "photo" in name]
    columns = ("figure", "mean", "range", "splits")
    title = f"alpha {ALPHA}, wrong {WRONG}, delta {DELTA}, a verifier of AUROC {AUROC}"
    report(title, columns, rows, figures, options.json)


if __name__ == "__main__":
    main()
