"""`rcir verify`: certify a verifier behind the shortlists of a retriever of vectors."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from calibration.vectors import distinct_rows
from rcir.api import load
from rcir.data.relevance import WithinRadius
from rcir.data.tables import missing_column
from rcir.data.vector_files import read_all_vectors, write_pairs
from rcir.errors import InvalidConfig
from rcir.files import write_json
from rcir.options import ALPHA, DELTA
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.verification import (
    MAX_VERIFIED,
    WRONG,
    CertifiedVerifier,
    NamedQueries,
    certify_verifier,
    pairs_to_verify,
)
from rcir.retrieval.verifiers import LocalFeatures, TableVerifier, Verifier
from rcir.terminal import console, working

TUNING_SHARE = 0.3  # of the queries, unless more of them tuned the retriever


@dataclass(frozen=True)
class VerificationConfig:
    """A verifier to certify.

    Args:
        retriever: folder of a calibrated retriever of vectors, see `rcir certify`.
        queries: file of labelled vectors with ids, of which some may have no match. Those that
            tuned the retriever choose the thresholds to test, with others up to three tenths of
            all; the rest certify them.
        scores: table of verification scores, .csv or .parquet, with columns query, item and score.
        images: folder of pictures that the ids name, whose local features (OpenCV) verify.
        query_images: folder of the queries' pictures, if it is another one.
        pairs: file for all pairs to score, a line "query item" each; without a verifier, nothing
            else is done.
        kept: SQLite file that keeps the scores of local features, so that a second call continues.
        output: JSON file for the certificate.
        alpha: largest share of queries with a match that end without it.
        wrong: largest share of queries that end with a wrong item.
        delta: probability of misleading calibration queries.
        depth: candidates of a query that are verified at most.
    """

    retriever: str
    queries: str
    scores: str | None = None
    images: str | None = None
    query_images: str | None = None
    pairs: str | None = None
    kept: str | None = None
    output: str | None = None
    alpha: float = ALPHA
    wrong: float = WRONG
    delta: float = DELTA
    depth: int = MAX_VERIFIED

    def __post_init__(self) -> None:
        verifiers = [self.scores, self.images]
        if None not in verifiers or (verifiers == [None, None] and self.pairs is None):
            raise InvalidConfig("pass either --scores or --images, or --pairs alone")


@working("certifying the verifier", logged=True)
def verify(config: VerificationConfig) -> CertifiedVerifier | None:
    """Certify a verifier, print the certificate, and write it; None if only pairs are written.

    Raises:
        DataUnavailable: there is no such file.
        InvalidConfig: the retriever searches images, or no verifier is named.
        InvalidData, RiskUnattainable, StaleCalibration: see `certify_verifier`.
    """
    retriever = load(config.retriever)
    tuning, calibration = splits = _splits(retriever, Path(config.queries))
    if config.pairs is not None:
        pairs = [pair for each in splits for pair in pairs_to_verify(retriever, each, config.depth)]
        write_pairs(Path(config.pairs), pairs)
        console.print(f"{len(pairs)} pairs to score: {config.pairs}", soft_wrap=True)
    verifier: Verifier
    if config.scores is not None:
        verifier = TableVerifier(config.scores)
    elif config.images is not None:
        verifier = LocalFeatures(config.images, config.query_images)
    else:
        return None
    certified = certify_verifier(
        retriever,
        verifier,
        tuning,
        calibration,
        alpha=config.alpha,
        wrong=config.wrong,
        delta=config.delta,
        depth=config.depth,
        scores=config.kept,
    )
    certificate, fixed = certified.certificate, certified.fixed
    console.print(str(certificate), soft_wrap=True)
    size = "no size is certified" if fixed is None else f"{fixed.mean_verified:.3g} verifications"
    console.print(f"shortlists of one size, all verified, at the same levels: {size}")
    if config.output is not None:
        outcome = {"verifier": verifier.name, "version": verifier.version, **asdict(certificate)}
        outcome["pair"] = certificate.pair._asdict()
        outcome["fixed"] = None if fixed is None else fixed.mean_verified
        write_json(Path(config.output), outcome)
    return certified


def _splits(retriever: Retriever, file: Path) -> tuple[NamedQueries, NamedQueries]:
    """Return the queries in a file that tune, and those that certify."""
    if not retriever.searcher.takes_vectors:
        raise InvalidConfig(
            "this retriever searches images: embed gallery and queries (rcir embed), certify the "
            "vectors (rcir certify), and verify that retriever; or call `certify_verifier`"
        )
    searcher, calibration = retriever.searcher, retriever.require_calibration()
    if calibration.calibration_queries.pictures is not None:
        raise InvalidConfig(
            "this retriever was calibrated with encounters: call `certify_verifier` with the "
            "encounters that `search_labelled` found"
        )
    key = searcher.options.key if searcher.gallery.parts else None
    table, labels = read_all_vectors(file, key=key), None
    if table.places is not None and isinstance(retriever.relevance, WithinRadius):
        labels = WithinRadius(table.places, retriever.relevance.radius)
    if table.ids is None or (labels is None and table.labels is None):
        raise missing_column(table.file, "id, or label, labels, or x and y", table.columns)
    queries = retriever.labelled(
        table.vectors,
        table.labels if labels is None else labels,
        table.uncertainty,
        model=table.model,
        clusters=table.cluster,
        keys=table.key,
    )
    rows = distinct_rows(queries)
    queries, names = queries[rows], np.array(table.ids, object)[rows]
    tuned = np.isin(queries.digests, calibration.tuning_queries.digests)
    order = np.lexsort((queries.digests, ~tuned))
    n_tuning = max(int(tuned.sum()), math.ceil(TUNING_SHARE * len(order)))

    def named(rows: NDArray[np.int64]) -> NamedQueries:
        return retriever.search_labelled(queries[rows]), names[rows].tolist()

    return named(order[:n_tuning]), named(order[n_tuning:])
