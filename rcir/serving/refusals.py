"""Errors as HTTP says them: a status, a kind that programs tell apart, words, and what helps."""

from __future__ import annotations

from typing import Any

from rcir.errors import (
    DataUnavailable,
    InvalidConfig,
    InvalidData,
    InvalidImage,
    InvalidRiskLevel,
    RcirError,
    RiskUnattainable,
    StaleCalibration,
)
from rcir.printable import printable
from rcir.serving.batcher import Busy, Stopping
from rcir.serving.bodies import UnsupportedBody
from rcir.serving.guards import Overloaded, TooLarge
from rcir.serving.store import NoFeedback, StoreUnavailable, UnknownAnswer

# The first that an error is an instance of.
STATUSES: tuple[tuple[type[RcirError], int, str], ...] = (
    (RiskUnattainable, 409, "risk-unattainable"),
    (StaleCalibration, 409, "stale-calibration"),
    (NoFeedback, 409, "no-feedback"),
    (TooLarge, 413, "too-large"),
    (UnsupportedBody, 415, "unsupported-body"),
    (InvalidImage, 400, "invalid-image"),
    (InvalidRiskLevel, 400, "invalid-level"),
    (InvalidConfig, 400, "invalid-request"),
    (InvalidData, 400, "invalid-data"),
    (UnknownAnswer, 404, "unknown-answer"),
    (DataUnavailable, 404, "not-found"),
    (Busy, 429, "busy"),
    (Overloaded, 429, "busy"),
    (Stopping, 503, "stopping"),
    (StoreUnavailable, 507, "store-unavailable"),
)


def refusal(error: RcirError) -> tuple[int, dict[str, Any]]:
    """The status of an error, and the body that says it.

    Example:
        >>> status, body = refusal(InvalidImage("the picture of 0 bytes is not an image"))
        >>> status, body["error"]
        (400, 'invalid-image')
    """
    known = (row[1:] for row in STATUSES if isinstance(error, row[0]))
    status, name = next(known, (500, "failed"))
    body: dict[str, Any] = {"error": name, "message": printable(str(error))}
    if isinstance(error, RiskUnattainable):
        body["minimum_alpha"] = error.minimum_alpha
        body["required_calibration"] = error.required_calibration
    return status, body
