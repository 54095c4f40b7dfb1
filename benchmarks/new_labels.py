"""Guarantees for queries of new labels, on photographs of birds of 50 kinds.

Half of the photographs of each kind are the gallery. Of the others, those of some kinds calibrate,
drawn anew for each split, and those of the other kinds are queries of new labels; the risk is the
mean over these kinds of the share of queries without a match in their set of distinct labels. The
rules are tuned on the gallery's items. The broken variant is the guarantee for the calibrated
labels, asked of new ones. Violations include the noise of the kinds that query. The digests of
queries, which draw one of each kind, are those of other queries in every split.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from common import parser, report, sized
from cub import birds, gallery_and_queries

import rcir
from rcir.errors import RiskUnattainable
from rcir.retrieval.tuning import RuleSet
from rcir.risk import GuaranteeRequest, ScoredResults, SetRule

DELTA, ALPHAS = 0.1, (0.1, 0.2, 0.3)
ALL_KINDS = sized(range(1, 51), range(26, 36))
GALLERIES, SPLITS = sized((8, 50), (1, 4))  # splits of each gallery
CALIBRATING = sized((25, 40), (5,))
N_FEW, FEWEST = 60, 22  # labelled queries of known labels


def rules_on_gallery(table: rcir.data.VectorTable, seed: int) -> SetRule:
    """The rule of sets of labels that the items of a gallery tuned, with the scored queries."""
    gallery, queries = gallery_and_queries(table, seed)
    retriever = rcir.Retriever.from_embeddings(gallery.vectors, gallery.ids, gallery.labels)
    retriever.calibrate(queries.vectors, queries.labels, tuning="gallery", recurring=True)
    rules: RuleSet = retriever.require_calibration().rules["label"]
    return rules.main


def measured(rule: SetRule, request: GuaranteeRequest, rows: np.ndarray) -> tuple[float, float]:
    """Mean size and risk, over kinds, of the queries that do not calibrate; NaN if refused."""
    everyone = rule.calibration
    others = everyone[np.setdiff1d(np.arange(len(everyone)), rows)].by_label()
    part = SetRule(rule.score_function, rule.tuning, everyone[rows], rule.bound)
    try:
        threshold = part.guarantee(request).threshold
    except RiskUnattainable:
        return np.nan, np.nan
    sizes = others.sizes(threshold)
    missed = others.require("match_rank") > sizes
    return float(sizes.mean()), float(others.unit_means(missed[:, None].astype(float)).mean())


def main() -> None:
    options = parser(__doc__).parse_args()
    table = birds(ALL_KINDS)
    results: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for gallery in range(GALLERIES):
        rule = rules_on_gallery(table, gallery)
        everyone: ScoredResults = rule.calibration
        keys = everyone.require("query_keys")
        labels = everyone.require("query_labels")
        kinds, rng = np.unique(labels), np.random.default_rng(gallery)
        for _ in range(SPLITS):
            rule = replace(rule, calibration=replace(everyone, query_keys=rng.permutation(keys)))
            for number in CALIBRATING:
                rows = np.flatnonzero(np.isin(labels, rng.permutation(kinds)[:number]))
                for query_labels in ("calibrated", "new", "any"):
                    for alpha in ALPHAS:
                        request = GuaranteeRequest(alpha, DELTA, query_labels=query_labels)
                        key = (f"{number} kinds calibrate, {query_labels}", alpha)
                        results.setdefault(key, []).append(measured(rule, request, rows))
            for number in (N_FEW, FEWEST):
                rows = rng.permutation(len(labels))[:number]
                for alpha in ALPHAS:
                    key = (f"{number} queries of the same kinds", alpha)
                    request = GuaranteeRequest(alpha, DELTA)
                    results.setdefault(key, []).append(measured(rule, request, rows))
    rows_shown, figures = [], {}
    for (case, alpha), values in results.items():
        size, risk = np.array(values).T
        certified = ~np.isnan(risk)
        shown = [float(certified.mean()), float(np.nanmean(size)) if certified.any() else np.nan]
        shown.append(float(np.mean(risk > alpha)))
        rows_shown.append([case, f"{alpha:g}", *(f"{value:.3f}" for value in shown)])
        name = case.replace(" kinds calibrate, ", "_kinds_").replace(
            " queries of the same", "_same"
        )
        for what, value in zip(("certified", "size", "violations"), shown, strict=True):
            if np.isfinite(value):  # a size of nothing that is certified is none
                figures[f"{name.replace(' ', '_')}_{alpha:g}_{what}"] = value
    named = {
        f"newlabels_size_{number}_{alpha:g}": f"{number}_kinds_new_{alpha:g}_size"
        for number in CALIBRATING
        for alpha in ALPHAS
    }
    named["cub50_size_60_queries"] = f"{N_FEW}_same_kinds_0.1_size"
    figures |= {short: figures[long] for short, long in named.items() if long in figures}
    figures["newlabels_violation_rate"] = max(
        figures[f"{CALIBRATING[0]}_kinds_new_{alpha:g}_violations"] for alpha in ALPHAS
    )
    columns = ["split", "alpha", "certified", "labels per set", "violations"]
    report("Queries of new labels, CUB-200-2011", columns, rows_shown, figures, options.json)


if __name__ == "__main__":
    main()
