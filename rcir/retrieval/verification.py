"""A verifier behind a retriever: scored once, certified with the shortlist, and used."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rcir.data.repeats import require_no_repeats
from rcir.embedding import as_vectors
from rcir.errors import InvalidConfig, InvalidData, RiskUnattainable, StaleCalibration, printable
from rcir.index import check_depth
from rcir.options import ALPHA, DELTA
from rcir.retrieval.answer import State, items_of
from rcir.retrieval.calibration import Calibration
from rcir.retrieval.queries import queries_of, require_alike
from rcir.retrieval.query_checks import check_searched
from rcir.retrieval.retriever import Retriever
from rcir.retrieval.search import Searcher
from rcir.retrieval.verifiers import Verifier
from rcir.risk import LabelledResults, SearchResults, make_request, score
from rcir.risk.probability import cells_of
from rcir.risk.results import set_sizes
from rcir.risk.verification import VerifiedResults, VerifierCertificate, certify_verification
from rcir.terminal import working

WRONG = 0.05  # of all queries that end with a wrong item
MAX_VERIFIED = 50  # candidates of a query
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS scores (verifier TEXT, version TEXT, query TEXT, item TEXT, "
    "pictures BLOB, score REAL, PRIMARY KEY (verifier, version, query, item, pictures)) "
    "WITHOUT ROWID"
)
# Labelled queries as `Retriever.search_labelled` found them, and the names that a verifier sees.
NamedQueries: TypeAlias = tuple[LabelledResults, Sequence[str]]


@dataclass(frozen=True)
class Verified:
    """The answer to one query: one item, or none.

    Attributes:
        id: name of the item; None if none was accepted.
        label: of the item, if the gallery has labels.
        score: of the verifier for the item; None without one.
        n_verified: number of candidates that were verified.
        certificate: what is guaranteed.
    """

    id: str | None
    label: int | str | None
    score: float | None
    n_verified: int
    certificate: VerifierCertificate

    def __str__(self) -> str:
        answer = "no match" if self.id is None else f"{printable(self.id)}, score {self.score:.4g}"
        return f"{answer}, after {self.n_verified} verifications\n{self.certificate}"


@dataclass(frozen=True, eq=False)
class CertifiedVerifier:
    """A retriever and a verifier that answer together, see `certify_verifier`.

    Attributes:
        retriever, verifier: of which it consists.
        certificate: what is guaranteed of its answers; `str` states it.
        tuning, calibration: the verified queries that chose and that certified the thresholds.
        certified: the calibration of the retriever, and name and version of the verifier; after a
            change of any, nothing is answered.
    """

    retriever: Retriever
    verifier: Verifier
    certificate: VerifierCertificate
    tuning: VerifiedResults
    calibration: VerifiedResults
    certified: tuple[Calibration, str, str]

    def __repr__(self) -> str:
        return f"CertifiedVerifier({self.verifier.name}: {self.certificate})"

    @cached_property
    def fixed(self) -> VerifierCertificate | None:
        """The same levels with shortlists of one size, all verified; None if not certified."""
        splits = self.tuning.of_constant_size, self.calibration.of_constant_size
        levels = self.certificate.alpha, self.certificate.wrong, self.certificate.delta
        try:
            return certify_verification(*splits, *levels, policies=("best",))
        except RiskUnattainable:
            return None

    def retrieve(
        self,
        query: Any,
        name: str | None = None,
        *,
        key: str | None = None,
        together: bool = False,
        **described: Any,
    ) -> Verified:
        """Answer one query.

        Args:
            query: an image or a vector, as for `Retriever.retrieve`.
            name: what the verifier knows the query by; by default the query itself, if it is a
                path.
            key, together: of the query, see `rcir.risk.options`; with together, it is a list of
                images, or vectors (n, d).
            described: uncertainty, model and probabilities of a vector.

        Raises:
            StaleCalibration: retriever or verifier have changed since.
            InvalidData: the query is unsuitable, or its scores are.
        """
        state = State(self.retriever.searcher, self.retriever.calibration)
        calibration, searcher = state.valid_calibration(), state.searcher
        made, *version = self.certified
        if calibration is not made or [self.verifier.name, self.verifier.version] != version:
            raise StaleCalibration(
                "the retriever was calibrated again, or the verifier is another one or has another "
                "version: certify it again, which only verifies pairs without a score"
            )
        if name is None:
            if not isinstance(query, str | os.PathLike):
                raise InvalidData("the query is not a path: pass its name for the verifier")
            name = os.fspath(query)
        queries: Any = query if together else [query]
        if searcher.are_vectors(query):
            queries = np.atleast_2d(as_vectors(query))
        request = make_request(key=key, together=together)
        prepared = searcher.as_requested(searcher.prepare(queries, **described), request)
        if len(prepared) != 1:
            raise InvalidData(f"got {len(prepared)} queries: pass one, or its pictures (together)")
        searcher.require_keys(prepared)
        calibration.require_known_parts(searcher, prepared)
        require_alike(prepared, calibration.calibration_queries)
        pair, depth = self.certificate.pair, self.certificate.depth
        results = calibration.arrange(
            searcher, searcher.candidates(prepared), calibration.miss_rule
        )
        candidate_scores, sizes, positions = _candidates(searcher, calibration, results, depth)
        (size,) = np.minimum(set_sizes(candidate_scores, pair.shortlist), sizes)
        positions = positions[:size]
        ids = searcher.gallery.ids[positions].tolist()
        scores = np.empty(0)
        for batch in [ids] if pair.policy == "best" else [[item] for item in ids]:
            scores = np.append(scores, _scores(self.verifier, name, batch))
            if scores.max() >= pair.acceptance:
                break
        column = int(scores.argmax()) if len(scores) else 0
        if not len(scores) or scores[column] < pair.acceptance:
            return Verified(None, None, None, len(scores), self.certificate)
        labels = searcher.named_labels(positions[column : column + 1])
        return Verified(
            ids[column],
            None if labels is None else labels[0],
            float(scores[column]),
            len(scores),
            self.certificate,
        )


def certify_verifier(
    retriever: Retriever,
    verifier: Verifier,
    tuning: NamedQueries,
    calibration: NamedQueries,
    *,
    alpha: float = ALPHA,
    wrong: float = WRONG,
    delta: float = DELTA,
    depth: int = MAX_VERIFIED,
    scores: str | os.PathLike[str] | None = None,
) -> CertifiedVerifier:
    """Verify the candidates of labelled queries, and certify the cheapest pair of thresholds.

    Args:
        retriever: calibrated; its score function sizes shortlists.
        verifier: see `Verifier`.
        tuning: labelled queries, of which some may have no match, as `search_labelled` returns
            them, and their names; they choose what is tested. Queries that tuned the retriever
            will do.
        calibration: others, which certify. Queries that calibrated the retriever will do, those
            that tuned it will not.
        alpha, wrong, delta: see `rcir.risk.verification.certify_verification`.
        depth: candidates that are verified at most; all of these of each labelled query are.
        scores: an SQLite file that keeps each score as soon as a query is verified, so that an
            interrupted call continues. A score is used again for the same verifier, version, query
            and item, if neither picture, or vector, has changed.

    Raises:
        StaleCalibration: the retriever is not calibrated, or changed since, or since the search.
        InvalidConfig: queries come in clusters, or are items that are left out of their search; or
            calibration queries were added one by one, or chose the retriever among others.
        InvalidData: queries are in both splits or tuned the retriever, or scores are unsuitable.
        InvalidRiskLevel, RiskUnattainable: see `certify_verification`.
    """
    check_depth(depth)
    state = State(retriever.searcher, retriever.calibration)
    made, searcher = state.valid_calibration(), state.searcher
    if searcher.options.leave_one_out:
        raise InvalidConfig(
            "queries that are gallery items cannot certify a verifier: an item that is the only "
            "one of its kind has no match here, and would have one in use. Query with others"
        )
    if made.sequential or max(made.chosen_among, made.attempts) > 1:
        raise InvalidConfig(
            "calibration queries were added one by one, or chose the retriever or its calibration "
            "among others, so that they cannot certify at this delta: calibrate on other queries"
        )
    if (word := made.calibration_queries.population.cluster_word) is not None:
        raise InvalidConfig(
            f"the retriever was calibrated on queries in clusters ({word}), and a verifier is "
            "certified on independent ones: calibrate and verify one query of each"
        )
    for split, _ in (tuning, calibration):
        require_alike(queries_of(split), made.calibration_queries)
    require_no_repeats(
        searcher.foreign_digests,
        np.union1d(queries_of(tuning[0]).digests, made.tuning_queries.digests),
        queries_of(calibration[0]).digests,
        made.options.recurring,
    )
    tuned, verified = (
        _verify(searcher, made, verifier, split, depth, scores) for split in (tuning, calibration)
    )
    certificate = certify_verification(tuned, verified, alpha, wrong, delta)
    certified = made, verifier.name, verifier.version
    return CertifiedVerifier(retriever, verifier, certificate, tuned, verified, certified)


def _candidates(
    searcher: Searcher, calibration: Calibration, arranged: SearchResults, depth: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """Return the first candidates of n queries, arranged for the miss rule.

    Their scores (n, k), the sizes (n,) of the longest shortlists, and the positions (m,) in these.
    """
    ranking = calibration.miss_rule.score_function.rank(arranged)
    sizes = np.count_nonzero(np.isfinite(ranking.scores[:, :depth]), axis=1)
    return ranking.scores, sizes, items_of(searcher, arranged, ranking, sizes)[0]


def pairs_to_verify(
    retriever: Retriever, queries: NamedQueries, depth: int = MAX_VERIFIED
) -> list[tuple[str, str]]:
    """Return names of queries and ids of items of all pairs that `certify_verifier` needs."""
    state = State(retriever.searcher, retriever.calibration)
    made, searcher = state.valid_calibration(), state.searcher
    results = made.arrange(searcher, queries[0].results, made.miss_rule)
    _, sizes, positions = _candidates(searcher, made, results, depth)
    names = np.repeat(np.array(queries[1], object), sizes)
    return list(zip(names, searcher.gallery.ids[positions], strict=True))


def _verify(
    searcher: Searcher,
    calibration: Calibration,
    verifier: Verifier,
    queries: NamedQueries,
    depth: int,
    path: str | os.PathLike[str] | None,
) -> VerifiedResults:
    """Return labelled queries with all their verification scores."""
    labelled, names = queries
    check_searched(searcher, labelled)
    if len(names) != len(labelled):
        raise InvalidData(f"got {len(names)} names for {len(labelled)} queries: name each")
    rule = calibration.miss_rule
    arranged = calibration.arrange(searcher, labelled, rule)
    _, sizes, positions = _candidates(searcher, calibration, arranged.results, depth)
    scored = score(rule.score_function, arranged).cut(depth)
    verification = np.full((len(scored), scored.depth), -np.inf)
    row, column = cells_of(sizes)
    pictures, digests = [b""] * len(row), searcher.gallery.digests
    if digests is not None:
        theirs = digests[positions].reshape(len(row), -1)
        ours = queries_of(labelled).digests[row]
        pictures = [
            blake2b(b"".join([query, *items]), digest_size=16).digest()
            for query, items in zip(ours.tolist(), theirs.tolist(), strict=True)
        ]
    ids = searcher.gallery.ids[positions].tolist()
    keys = list(zip(ids, pictures, strict=True))
    starts = np.cumsum(sizes) - sizes
    parts = [keys[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    verification[row, column] = _scores_once(verifier, names, parts, path)
    return VerifiedResults(scored, verification)


def _scores_once(
    verifier: Verifier,
    names: Sequence[str],
    keys: Sequence[Sequence[tuple[str, bytes]]],
    path: str | os.PathLike[str] | None,
) -> NDArray[np.float64]:
    """Return the scores (m,) of the items of queries, and keep them in a file, query by query.

    A key is the id of an item, and a digest of its picture and that of the query.
    """
    values: list[float] = []
    made_by = verifier.name, verifier.version
    try:
        title = f"verify with {verifier.name}"
        with (
            closing(sqlite3.connect(path or ":memory:")) as store,
            working(title, len(names)) as work,
        ):
            store.execute(SCHEMA)
            for name, of_query in zip(names, keys, strict=True):
                rows = store.execute(
                    "SELECT item, pictures, score FROM scores "
                    "WHERE verifier = ? AND version = ? AND query = ?",
                    (*made_by, name),
                )
                known = {(item, pictures): value for item, pictures, value in rows}
                new = [key for key in of_query if key not in known]
                if new:
                    scores = _scores(verifier, name, [item for item, _ in new]).tolist()
                    known |= dict(zip(new, scores, strict=True))
                    with store:  # on disk before the next query
                        store.executemany(
                            "INSERT INTO scores VALUES (?, ?, ?, ?, ?, ?)",
                            [(*made_by, name, *key, known[key]) for key in new],
                        )
                values += [known[key] for key in of_query]
                work.advance()
    except sqlite3.Error as error:
        raise InvalidData(
            f"{path} cannot keep verification scores ({error}): name a new file"
        ) from error
    return np.array(values, np.float64)


def _scores(verifier: Verifier, query: str, ids: Sequence[str]) -> NDArray[np.float64]:
    """Return the scores (n,) of n items, or raise `InvalidData` if they are no such numbers."""
    scores = np.asarray(verifier.score(query, ids), np.float64)
    if scores.shape != (len(ids),) or np.isnan(scores).any():
        raise InvalidData(
            f"verifier {verifier.name} gave scores of shape {scores.shape}, or NaN, for "
            f"{len(ids)} candidates of {printable(query)}: return one number for each"
        )
    return scores
