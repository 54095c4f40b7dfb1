"""The rules of a calibration, each fitted when a request needs it first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Literal

from rcir.errors import InvalidData
from rcir.retrieval.tuning import CalibrationOptions
from rcir.risk import (
    RISKS,
    LabelledResults,
    LabelScore,
    Population,
    ScoreFunction,
    SetRule,
    fit_score_function,
    score,
)
from rcir.risk.losses import MISS, RECALL, find_risk
from rcir.risk.options import Distinct
from rcir.risk.own import fit_own
from rcir.risk.selection import ComparedSizes, Fits
from rcir.store.codec import NOT_STORED

_FITTING = RLock()  # held while a rule is fitted, so that each is fitted once

TunedOn = Literal["queries", "gallery"]


@dataclass(frozen=True)
class RuleKind:
    """The sets that rules size, and the queries that tuned them.

    Attributes:
        distinct: None for sets of items, "label" for sets with one item of each label.
        tuned_on: whether queries or the gallery's items tuned them.
    """

    distinct: Distinct = None
    tuned_on: TunedOn = "queries"


@dataclass(frozen=True, eq=False)
class RankedLabels:
    """Two splits whose candidates are labels in the order of their probability.

    `listed` returns the same with all items of each label; None if they cannot be listed.
    """

    score_function: LabelScore
    tuning: LabelledResults | None
    calibration: LabelledResults
    listed: Callable[[], RankedLabels] | None = None

    def first_of_each_label(self) -> RankedLabels:
        """Return the queries as they certify sets of labels."""
        tuning = None if self.tuning is None else self.tuning.first_of_each_label()
        return RankedLabels(self.score_function, tuning, self.calibration.first_of_each_label())


@dataclass(frozen=True, eq=False)
class RuleSource:
    """What the rules of one kind are fitted on; they depend on nothing else.

    Attributes:
        fits: of the tuning split; None if nothing tunes.
        labels: the splits by the probabilities of labels, which size sets for misses; None if
            these are unknown.
        calibration: the calibration queries, which are only scored.
        tuned_on: what the tuning split consists of.
        options: how to calibrate.
        uncertainty: name of the uncertainty that both have.
        score_functions: names of the score functions by risk, if they were chosen before; the
            options decide for the others.
        risks: names of the risks registered when it was made; later ones get the rule of the miss
            risk or, if they count matches, of recall.
    """

    fits: Fits | None
    labels: RankedLabels | None
    calibration: LabelledResults
    tuned_on: TunedOn
    options: CalibrationOptions
    uncertainty: str
    score_functions: Mapping[str, str]
    risks: tuple[str, ...] = field(default_factory=lambda: tuple(RISKS))  # registered by now

    def first_of_each_label(self, score_functions: Mapping[str, str]) -> RuleSource:
        """Return the source of the rules that size sets of labels."""
        return replace(
            self,
            fits=None if self.fits is None else Fits(self.fits.split.first_of_each_label()),
            labels=None if self.labels is None else self.labels.first_of_each_label(),
            calibration=self.calibration.first_of_each_label(),
            score_functions=score_functions,
        )

    def has_own_rule(self, risk: str) -> bool:
        """Return True if a risk may have another rule than the miss risk."""
        if self.fits is None or self.options.own is not None or risk not in self.risks:
            return False
        split = self.fits.split
        itself = self.tuned_on == "gallery" and not split.results.one_per_label
        return RISKS[risk].fits_own_scores(split.n_relevant + itself)  # queries match it, too

    def fit(self, risk: str, fitted: Sequence[SetRule]) -> tuple[SetRule, ComparedSizes]:
        """Return the rule of a risk, one of `fitted` if it is the same, and what was compared."""
        names, labels = self.score_functions, self.labels
        compared: ComparedSizes = {}
        score_function: ScoreFunction
        if labels is not None and labels.listed is not None and not find_risk(risk).first_match:
            labels = labels.listed()
        elif not find_risk(risk).first_match:
            labels = None
        if labels is not None:
            score_function, calibration = labels.score_function, labels.calibration
            tuning = labels.tuning
        else:
            if self.fits is None:
                raise InvalidData("no queries tune the sizes: calibrate with tuning queries")
            tuning, calibration = self.fits.split, self.calibration
            if self.options.own is not None:
                score_function = fit_own(self.options.own, tuning.results, tuning.relevant)
            else:
                name = names.get(risk, names.get(MISS.name, LabelScore.name))
                score_function, compared = fit_score_function(
                    self.options.score_function if name == LabelScore.name else name,
                    tuning.results,
                    tuning.relevant,
                    self.options.alphas,
                    self.options.delta,
                    risk=risk,
                    n_relevant=tuning.n_relevant,
                    fits=self.fits,
                )
        for rule in fitted:
            if rule.score_function.name == score_function.name:
                return rule, compared
        tuned = None if tuning is None else score(score_function, tuning)
        evidence, bound = score(score_function, calibration), self.options.bound
        return SetRule(score_function, tuned, evidence, bound, self.uncertainty), compared


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules of one kind by the name of the risk, each fitted when it is needed first.

    Attributes:
        fitted: the rules that are fitted; other threads may add some while it is read.
        source: what the others are fitted on; None if all are fitted.
    """

    fitted: dict[str, SetRule] = field(default_factory=dict)
    source: RuleSource | None = field(default=None, metadata=NOT_STORED)
    _compared: dict[str, ComparedSizes] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.source is None and MISS.name not in self.fitted:
            raise InvalidData("there is no rule for the miss risk")

    def __getitem__(self, risk: str) -> SetRule:
        """Return the rule of a risk, or that of the miss risk or recall if it has none."""
        rule = self.fitted.get(risk)
        if rule is not None:
            return rule
        source = self.source
        if source is None or not (risk == MISS.name or source.has_own_rule(risk)):
            counts = risk != RECALL.name and not RISKS[risk].first_match
            return self[RECALL.name if counts else MISS.name]
        with _FITTING:
            if risk not in self.fitted:
                rule, self._compared[risk] = source.fit(risk, list(self.fitted.values()))
                self.fitted[risk] = rule
        return self.fitted[risk]

    @property
    def compared(self) -> ComparedSizes:
        """The mean sizes that were compared for the miss risk; none if its rule is loaded."""
        _ = self[MISS.name]
        return self._compared.get(MISS.name, {})

    def fit_all(self) -> dict[str, SetRule]:
        """Return all different rules by the name of the risk."""
        risks = list(self.fitted) if self.source is None else self.source.risks
        main = self[MISS.name]
        rules = {risk: self[risk] for risk in risks}
        return {MISS.name: main} | {risk: rule for risk, rule in rules.items() if rule is not main}

    def with_queries(
        self, population: Population, arrange: Callable[[SetRule], LabelledResults]
    ) -> Rules:
        """Return the rules, all fitted, with further calibration queries of a population.

        `arrange` returns their search results as a rule scores them.
        """
        before = self[MISS.name].evidence.population
        if before.clusters is not None or population.clusters is not None:
            raise InvalidData("no queries can be added if they come in clusters: calibrate again")
        if new := set(population.group_names).difference(before.group_names):
            raise InvalidData(
                f"queries of new groups ({', '.join(sorted(new))}) cannot be added, because delta "
                "is divided by the number of groups: calibrate again"
            )
        extended = {}
        for risk, rule in self.fit_all().items():
            added = score(rule.score_function, arrange(rule))
            extended[risk] = replace(rule, evidence=rule.evidence.joined(added))
        return Rules(extended)
