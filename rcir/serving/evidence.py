"""Evidence on the guarantees of one served retriever, from feedback on its answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rcir.errors import InvalidData, RcirError
from rcir.levels import ALPHA
from rcir.serving.guarantee_watch import GuaranteeWatch
from rcir.serving.served import Served
from rcir.serving.store import Asked, Loss, NoFeedback, Reported, Store, StoreUnavailable
from rcir.serving.terms import Feedback

FEW, RECENT = 30, 1000  # queries with feedback that are compared with those that calibrated
Row = TypeVar("Row", Asked, Loss)
_log = logging.getLogger("rcir.serving")


class Evidence:
    """Feedback on answers of one retriever, watched, and compared with its calibration queries.

    Queries that it was tuned or calibrated with, or that are items of its gallery, are no evidence.
    Nor is anything where calibration queries came in clusters: the guarantee is then for clusters,
    and which of them a query belongs to is not known.

    Args:
        served: the retriever.
        store: of answers and feedback; or None.
        wait: seconds after which a query without feedback counts as a miss.

    Attributes:
        watch: on its guarantees.
    """

    def __init__(self, served: Served, store: Store | None, wait: float) -> None:
        self._served, self._store = served, store
        self._compared: tuple[Any, dict[str, Any]] | None = None  # the last outcome, and of which
        retriever = served.retriever
        calibration = retriever.require_calibration()
        self._clustered = calibration.main.calibration.cluster is not None
        self._recurring = calibration.options.recurring
        self.watch = GuaranteeWatch(self._losses, self._asked, wait, self._recurring)

    def feed(self, feedback: Feedback) -> int | None:
        """Keep and watch feedback on an answer, also of an earlier version; see `Store.feed`.

        If the set held a match and only one label, that is the label of the query.

        Raises:
            NoFeedback: none is kept.
            InvalidData: it contradicts itself, or what was said before; or it names a label for an
                answer of another version, which cannot be checked.
            UnknownAnswer, StoreUnavailable: see `Store.feed`.
        """
        if self._store is None:
            raise NoFeedback("this server keeps no feedback: start it with --feedback FILE")
        answer = self._store.answer(feedback.answer)
        if not answer.items and feedback.match:
            raise InvalidData("match is true, and the answer held no item: say false")
        if feedback.label is not None:
            if answer.version != self._served.manifest:
                raise InvalidData(
                    f"answer {feedback.answer!r} is of another version than the one that is "
                    "served: say whether it held a match, without a label"
                )
            match = self._served.holds_match(answer.items, feedback.label)
            if match != feedback.match:
                raise InvalidData(
                    f"match is {str(feedback.match).lower()}, and with the label "
                    f"{feedback.label!r} the set {'held a' if match else 'held no'} true match: "
                    "check both"
                )
        elif feedback.match and answer.version == self._served.manifest:
            label = self._served.only_label(answer.items)
            feedback = feedback.model_copy(update={"label": label})
        number = self._store.feed(feedback)
        if number is not None:
            try:
                self.watch.refresh()
            except StoreUnavailable as error:  # it is kept, and counts at the next look
                _log.error("feedback is kept, but not watched yet: %s", error)
        return number

    def comparison(self) -> Callable[[], dict[str, Any]] | None:
        """The work of a comparison of the latest queries with feedback with those that calibrated,
        as plain values, for the thread of the model; None where there are too few.

        Raises:
            StoreUnavailable: they cannot be read.
        """
        recent = self._recent()
        return (
            None if recent is None or len(recent.labels) < FEW else partial(self._compare, recent)
        )

    def _compare(self, recent: Reported) -> dict[str, Any]:
        alpha = min((row.terms["alpha"] for row in self.watch.rows), default=ALPHA)
        asked = (recent.queries.identities.tobytes(), recent.n_unlabelled_hits, alpha)
        if self._compared is None or self._compared[0] != asked:  # searched once
            self._compared = asked, self._checked(recent, alpha)
        return self._compared[1]

    def _checked(self, recent: Reported, alpha: float) -> dict[str, Any]:
        try:
            recent.require_labels_of_hits()
            labelled = self._served.labelled(recent.queries, recent.labels)
            found = self._served.retriever.check(labelled, alpha)
        except RcirError as error:
            return {"p_value": None, "n_recent": len(recent.labels), "sentence": str(error)}
        return {"p_value": found.p_value, "n_recent": found.n_recent, "sentence": str(found)}

    def _recent(self) -> Reported | None:
        """The latest queries with feedback that are new to the retriever, each once."""
        if self._store is None or self._clustered:
            return None
        found = self._store.reported(self._served.manifest, most=RECENT)
        if found is None:
            return None
        rows = np.arange(len(found.labels)) if self._recurring else found.distinct
        return found[rows[self._served.new_queries(found.queries.identities[rows])]]

    def _losses(self, after: int) -> list[Loss]:
        if self._store is None or self._clustered:
            return []
        return self._new(self._store.losses(self._served.manifest, after))

    def _asked(self, terms: str, after: int, until: int) -> list[Asked]:
        assert self._store is not None  # there was feedback
        return self._new(self._store.asked(self._served.manifest, terms, after, until))

    def _new(self, rows: list[Row]) -> list[Row]:
        """Return the rows of queries that are new to the retriever."""
        new = self._served.new_queries(np.array([row.digest for row in rows], "S32"))
        return [row for row, counts in zip(rows, new, strict=True) if counts]
