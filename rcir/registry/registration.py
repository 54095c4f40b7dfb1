"""Versions of registered models, and whether a challenger replaces the champion.

To compare two retrievers on their calibration queries and keep the better one would be a choice
with the data that certifies, which the guarantee of neither survives (see `rcir.risk.corrected`).
They are therefore compared on the test queries alone: both are calibrated anew on one half and
measured on the other, then the other way round, with score functions fitted to the tuning split.
The comparison is independent of the calibration queries, so whichever retriever is kept keeps its
guarantee.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rcir import tracking
from rcir.errors import InvalidData, NoRetriever, PromotionRefused, StaleCalibration
from rcir.options import ALPHA, DELTA
from rcir.registry.logged_model import (
    card,
    example_of,
    log_calibration,
    read_results,
    require_measured,
)
from rcir.retrieval import storage
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.storage import MANIFEST
from rcir.risk import Certified, check_level, corrected, is_certified, mean_size
from rcir.risk.bootstrap import Estimate, bootstrap, interval, why_no_interval
from rcir.runs.compare import DRAWS
from rcir.runs.folder import FOLDER_TAG, RETRIEVER
from rcir.runs.results import RESULTS, TEST, RunResults


@dataclass(frozen=True)
class Contender:
    """A retriever that is compared.

    Attributes:
        name: as messages call it.
        measured: its results on its test queries.
        chosen_among: see `Calibration`.
        bound: that it was calibrated with.
    """

    name: str
    measured: RunResults
    chosen_among: int
    bound: str


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison.

    Attributes:
        accepted: whether the challenger's sets are smaller beyond noise.
        words: why, or why not, with both sizes.
    """

    accepted: bool
    words: str


def judge(challenger: Contender, champion: Contender, alpha: float, delta: float) -> Verdict:
    """Compare a challenger with the champion at one level, on the same test queries.

    Each is certified as it answers: at delta divided by what it was chosen among. The interval of
    the difference is the paired bootstrap's, see `rcir.risk.bootstrap.bootstrap`.

    Raises:
        InvalidRiskLevel: alpha or delta is out of range.
    """
    both = (challenger, champion)
    deltas = [corrected(delta, one.chosen_among) for one in both]
    if reason := _incomparable(challenger, champion):
        return Verdict(False, reason)
    folds = [halves(one.measured) for one in both]
    for one, parts, level in zip(both, folds, deltas, strict=True):
        if not is_certified(parts, alpha, level):
            return Verdict(
                False,
                f"halves of the test queries certify no sets of {one.name} at alpha {alpha:g}, "
                f"delta {level:g}: compare at a larger alpha, or on more test queries",
            )
        if reason := why_no_interval(parts, alpha, level):
            return Verdict(False, f"the sizes have {reason}")
    sizes = [mean_size(parts, alpha, level) for parts, level in zip(folds, deltas, strict=True)]
    # The same seed draws the same queries for both.
    new, old = (
        bootstrap([parts], alpha, level, DRAWS)[0]
        for parts, level in zip(folds, deltas, strict=True)
    )
    difference = Estimate(sizes[0] - sizes[1], *interval(new - old))
    n = len(folds[0][0].scores) + len(folds[0][1].scores)
    words = (
        f"mean set sizes at alpha {alpha:g}, delta {delta:g} on {n} test queries, of which each "
        f"half certifies the other's: {challenger.name} {sizes[0]:.4g}, {champion.name} "
        f"{sizes[1]:.4g}, difference {difference.value:+.4g} (95% interval {difference.low:+.4g} "
        f"to {difference.high:+.4g})"
    )
    return Verdict(difference.beyond_noise and difference.value < 0, words)


def halves(measured: RunResults) -> list[Certified]:
    """The two halves of the test queries, each certified by the other, alike for every retriever.

    Raises:
        InvalidData: it is not known which thresholds serve them.
    """
    scores = measured.measured_scores
    if scores is None:
        raise InvalidData("it is not known which thresholds serve the test queries")
    (part,) = measured.parts
    order = np.random.default_rng(0).permutation(len(scores))
    first, second = np.array_split(order, 2)
    return [
        Certified(scores[calibrating], part.candidate_scores[asking])
        for calibrating, asking in ((first, second), (second, first))
    ]


def _incomparable(challenger: Contender, champion: Contender) -> str | None:
    """Why two cannot be compared; None if they can be."""
    for one in (challenger, champion):
        if one.bound != "binomial":
            return (
                f"{one.name} was calibrated with the {one.bound} bound, and sizes are compared at "
                "the binomial one: calibrate with --bound binomial"
            )
        if not one.measured.parts:
            return (
                f"the calibration queries of {one.name} come in clusters: sizes are compared of "
                "independent queries"
            )
        if one.measured.measured_scores is None or len(one.measured.measured_scores) < 2:
            return f"{one.name} was measured by an earlier version of rcir: calibrate it again"
    if challenger.measured.measured_on != champion.measured.measured_on:
        return (
            f"{challenger.name} and {champion.name} were not measured on the same test queries, "
            "gallery and matches, so that their sizes cannot be told apart from these"
        )
    return None


PROMOTION = "rcir.promotion"  # tag of a version: why it got its alias


@dataclass(frozen=True)
class Registered:
    """A version that was registered.

    Attributes:
        version: as it is in MLflow.
        alias: the alias that names it now, if one was asked for.
        promotion: why it got that.
    """

    version: tracking.RegisteredVersion
    alias: str | None
    promotion: str | None

    @property
    def uri(self) -> str:
        """Return the URI for `rcir.load` and MLflow: by alias, if there is one."""
        return (
            self.version.uri if self.alias is None else f"models:/{self.version.name}@{self.alias}"
        )


@dataclass(frozen=True)
class Calibration:
    """A calibration as it was found: in its folder, or in MLflow.

    Attributes:
        folder: with `retriever`, `results.json` and `test.safetensors`.
        retriever: the one in it.
        results: of its evaluation.
        measured: on its test queries.
        run: in MLflow; None if it was not tracked in this store.
        model: id of its model there, if that holds this very retriever.
    """

    folder: Path
    retriever: Retriever
    results: Mapping[str, Any]
    measured: RunResults
    run: tracking.TrackedRun | None
    model: str | None


def register(
    reference: str,
    name: str,
    alias: str | None = None,
    alpha: float = ALPHA,
    delta: float = DELTA,
    force: bool = False,
) -> Registered:
    """Register a calibration as the next version of a name; give it an alias if it deserves it.

    Where another version has the alias, this one gets it if its certified sets are smaller beyond
    noise, see `rcir.registry.registration.judge`. What is that version already is left as it is.

    Args:
        reference: folder of a calibration, or the id of its MLflow run.
        name: of the registered model, which is made if there is none.
        alias: such as "champion"; None: none is given.
        alpha, delta: levels at which sizes are compared.
        force: give the alias without a comparison.

    Raises:
        InvalidData: there is no such calibration, or what was measured is not of its retriever.
        NoRetriever, CorruptRetriever, StaleCalibration: of its retriever.
        PromotionRefused: its sets are not smaller, or cannot be compared: nothing was registered;
            or the alias was moved meanwhile.
        InvalidConfig: MLflow takes no such name or alias.
        InvalidRiskLevel: alpha or delta is out of range.
        TrackingUnavailable: of MLflow.
    """
    check_level("alpha", alpha)
    check_level("delta", delta)
    with _opened_calibration(reference) as calibration:
        require_measured(calibration.retriever, calibration.measured, calibration.results)
        text = card(calibration.retriever, calibration.results)
        champion = tracking.find_version(name, alias) if alias else None
        if champion is not None and champion.model == calibration.model:
            return Registered(champion, alias, f"it is version {champion.version} already")
        promotion = _promotion(calibration, champion, alpha, delta, force) if alias else None
        run, model = calibration.run, calibration.model
        example = {} if model else example_of(calibration.retriever)
        if run is None:
            tags = {
                FOLDER_TAG: str(calibration.folder.absolute()),
                tracking.KIND_TAG: "registration",
            }
            run = tracking.start_run(f"{calibration.folder.resolve().name} (registration)", tags)
            with run.active():
                model = log_calibration(run, calibration.folder, calibration.retriever, example)
        elif model is None:
            model = log_calibration(run, calibration.folder, calibration.retriever, example)
        if alias and not force and tracking.find_version(name, alias) != champion:
            raise PromotionRefused(
                f"the alias {alias} of {name} was moved meanwhile, and nothing was registered: "
                "register again, to be compared with the version that has it now"
            )
        tags = _tags(calibration) | ({PROMOTION: promotion} if promotion else {})
        version = tracking.create_version(name, run, str(model), text, tags)
    if alias:
        tracking.set_alias(version, alias)
    return Registered(version, alias, promotion)


@contextmanager
def _opened_calibration(reference: str) -> Iterator[Calibration]:
    """The calibration of a folder or, where that is not on this machine, of an MLflow run."""
    if Path(reference).is_dir():
        folder = Path(reference)
        retriever = _calibrated(Retriever.load(folder / RETRIEVER), reference)
        run = tracking.find_tracked_run(retriever.origin.get("calibration", ""))
        model = tracking.find_model(run) if run else None
        if run is not None and model is not None:
            manifest = f"runs:/{run.id}/{tracking.INSIDE_RUN}/{MANIFEST}"
            values = tracking.with_downloaded(manifest, Path.read_bytes)
            if values != storage.read_manifest(folder / RETRIEVER):
                model = None  # it was changed since
        yield Calibration(folder, retriever, *_numbers(folder), run, model)
        return
    run = tracking.find_tracked_run(reference)
    model = tracking.find_model(run) if run else None
    if run is None or model is None:
        where = "MLflow has no such id" if run is None else "that run has no model"
        raise InvalidData(
            f"{reference} is no folder, and {where}: give what `python -m calibration` or `rcir "
            "certify` wrote to, or the id of its run"
        )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        # What lies beside the retriever comes with it.
        tracking.with_downloaded(f"models:/{model}", lambda local: _laid_out(local, folder))
        retriever = _calibrated(Retriever.load(folder / RETRIEVER), reference)
        yield Calibration(folder, retriever, *_numbers(folder), run, model)


def _calibrated(retriever: Retriever, reference: str) -> Retriever:
    if retriever.calibration is None or retriever.calibration.sequential:
        raise InvalidData(
            f"{reference} was not calibrated at once: nothing was measured of it; calibrate it"
        )
    if retriever.changes():
        raise StaleCalibration(f"{reference} has changed since calibration: calibrate again")
    return retriever


def _numbers(folder: Path) -> tuple[dict[str, Any], RunResults]:
    if not (folder / TEST).is_file():
        raise InvalidData(f"{folder} holds no {TEST}: calibrate again")
    return read_results(folder), RunResults.read(folder / TEST)


def _laid_out(local: Path, folder: Path) -> None:
    """Move a downloaded retriever, and what was measured of it, to where a calibration has them."""
    shutil.move(local, folder / RETRIEVER)
    for file in (RESULTS, TEST):
        shutil.move(local.parents[1] / file, folder / file)


def _promotion(
    calibration: Calibration,
    champion: tracking.RegisteredVersion | None,
    alpha: float,
    delta: float,
    force: bool,
) -> str:
    """Why a calibration gets an alias that a version may have.

    Raises:
        PromotionRefused: it does not.
    """
    if champion is None:
        return "no version had the alias"
    if force:
        return f"forced in the place of version {champion.version}, without a comparison"
    own_calibration = calibration.retriever.require_calibration()
    bound = own_calibration.main.bound
    challenger = Contender("this one", calibration.measured, own_calibration.chosen_among, bound)
    champion_name = f"version {champion.version}"
    place = f"{champion.uri}/{tracking.INSIDE}/retriever.json"
    try:
        champion_results = tracking.with_downloaded(f"{champion.uri}/{TEST}", RunResults.read)
        described = tracking.with_downloaded(place, lambda file: json.loads(file.read_text()))
    except NoRetriever as error:
        raise PromotionRefused(
            f"{champion_name} of {champion.name} keeps the alias: it is no model of rcir, and "
            f"cannot be compared ({error}); --force gives it the alias all the same"
        ) from error
    bound = described["controllers"][0]["bound"]  # the first is of sets of items
    holder = Contender(champion_name, champion_results, described["chosen_among"], bound)
    verdict = judge(challenger, holder, alpha, delta)
    if not verdict.accepted:
        raise PromotionRefused(
            f"{champion_name} of {champion.name} keeps the alias: {verdict.words}. Nothing was "
            "registered; --force gives it the alias all the same"
        )
    return f"smaller sets than {champion_name}: {verdict.words}"


def _tags(calibration: Calibration) -> dict[str, str]:
    """The tags of a version, which the list of versions shows."""
    tags = {
        "rcir.dataset": calibration.results["dataset"],
        "rcir.n_calibration": calibration.results["n_calibration"],
        "rcir.chosen_among": calibration.retriever.require_calibration().chosen_among,
    }
    for row in calibration.results["rows"]:
        if row["mean_size"] is not None:
            place = f"rcir.alpha-{row['alpha']:g}"
            for figure in ("mean_size", "test_risk"):
                tags[f"{place}.{figure}"] = f"{row[figure]:.6g}"
    return {name: str(value) for name, value in tags.items()}
