"""Image retrieval with a guarantee.

    import rcir
    retriever = rcir.load("runs/demo/retriever")
    answer = retriever.retrieve("query.png", alpha=0.1, delta=0.1)
    print(answer)

Names other than errors are resolved on first use, so that `import rcir.risk` loads neither torch
nor faiss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rcir.errors import (
    CorruptRetriever,
    DataUnavailable,
    InvalidConfig,
    InvalidData,
    InvalidImage,
    InvalidRiskLevel,
    NoRetriever,
    RcirError,
    RiskUnattainable,
    SaveConflict,
    StaleCalibration,
    TrackingUnavailable,
    TrainingDiverged,
)
from rcir.imports import lazily

if TYPE_CHECKING:
    from rcir.api import load, retrieve, use
    from rcir.retrieval.answer import Retrieval
    from rcir.retrieval.attach import attach
    from rcir.retrieval.retriever import Retriever
    from rcir.risk.guarantee import Guarantee

__version__ = "0.1.0"

_HOMES = {
    "rcir.api": ("load", "retrieve", "use"),
    "rcir.retrieval.answer": ("Retrieval",),
    "rcir.retrieval.attach": ("attach",),
    "rcir.retrieval.retriever": ("Retriever",),
    "rcir.risk.guarantee": ("Guarantee",),
}

__all__ = [
    "CorruptRetriever",
    "DataUnavailable",
    "Guarantee",
    "InvalidConfig",
    "InvalidData",
    "InvalidImage",
    "InvalidRiskLevel",
    "NoRetriever",
    "RcirError",
    "Retrieval",
    "Retriever",
    "RiskUnattainable",
    "SaveConflict",
    "StaleCalibration",
    "TrackingUnavailable",
    "TrainingDiverged",
    "attach",
    "load",
    "retrieve",
    "use",
]

__getattr__, __dir__ = lazily(__name__, globals(), _HOMES)
