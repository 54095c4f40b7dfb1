"""Risks: a loss, what certifies that its mean is at most alpha, and a clause that says so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rcir.risk.labelled import LabelledResults

if TYPE_CHECKING:
    from rcir.risk.controller import RiskController
    from rcir.risk.guarantee import Guarantee
    from rcir.risk.request import Request


class Risk(ABC):
    """The mean, over queries, of a loss of the set that a query gets.

    A subclass needs `name`, `clause` and `losses`; it is then certified as what the other
    attributes say of it, or as its own `certify` does.

    Attributes:
        name: as requests give it.
        clause: of the sentence of a guarantee, a format of {alpha}, {sets}, {matches} (true ones)
            and {items} (of a set).
        sets: the word for what is returned.
        lacking: what the sets lack where the loss is large, in words.
        falls: whether no loss rises as sets grow. Then the smallest certified sets are returned,
            otherwise the largest.
        binary: whether every loss is 0 or 1.
        first_match: whether the rank of the first true match alone decides the loss.
        exact: whether it can be asked for at all alpha at once, or at every moment.
        independent: whether it is for queries alone that do not come in clusters.
        abstains: whether it is of the queries that get an answer only.
        levels: alphas at which score functions are compared; None: those they are compared for.
    """

    name: ClassVar[str]
    clause: ClassVar[str]
    sets: ClassVar[str] = "sets"
    lacking: ClassVar[str] = "true matches"
    falls: ClassVar[bool] = True
    binary: ClassVar[bool] = False
    first_match: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    independent: ClassVar[bool] = False
    abstains: ClassVar[bool] = False
    levels: ClassVar[Sequence[float] | None] = (0.1, 0.2, 0.3, 0.5)

    @property
    def key(self) -> str:
        """The name, and whether it abstains."""
        return f"{self.name}, abstaining" if self.abstains else self.name

    @abstractmethod
    def losses(self, results: LabelledResults, thresholds: NDArray[Any]) -> NDArray[np.float64]:
        """(n, g) losses in [0, 1] of scored results at each of g increasing thresholds."""

    def unit_losses(
        self, results: LabelledResults, thresholds: NDArray[Any]
    ) -> NDArray[np.float64]:
        """(units, g) the loss of each query, or the mean loss of each cluster of queries."""
        return results.unit_means(self.losses(results, thresholds))

    def own_score_function(self, tuning: LabelledResults) -> bool:
        """Whether another score function than that of misses may suit it on such queries."""
        return True

    def certify(self, controller: RiskController, request: Request) -> Guarantee:
        """Certify a request for this risk alone.

        Raises:
            InvalidConfig: it cannot be asked for like that.
            RiskUnattainable: nothing certifies it.
        """
        if self.falls:
            return controller.certify_mean(self, request)
        return controller.certify_jointly(request)
