"""Errors of a server, and how HTTP reports those of the library."""

from __future__ import annotations

from typing import Any

from rcir.errors import (
    DataUnavailable,
    ImageTooLarge,
    InvalidConfig,
    InvalidData,
    InvalidImage,
    InvalidRiskLevel,
    RcirError,
    RiskUnattainable,
    StaleCalibration,
    printable,
)


class TooLarge(RcirError):
    """A body or a picture is larger than this server allows."""


class TooSlow(RcirError):
    """A body did not arrive in time."""


class UnsupportedBody(RcirError):
    """A body has another media type than the route accepts."""


class Busy(RcirError):
    """More queries or bytes are in progress than the capacity."""


class Stopping(RcirError):
    """The server answers the accepted requests, and accepts no more."""


class StoreUnavailable(RcirError):
    """The file of answers and feedback cannot be written or read."""


class NoFeedback(RcirError):
    """The server stores no feedback."""


class UnknownAnswer(RcirError):
    """The file contains no such answer."""


STATUSES: tuple[tuple[type[RcirError], int, str], ...] = (  # the first row that matches counts
    (RiskUnattainable, 409, "risk-unattainable"),
    (StaleCalibration, 409, "stale-calibration"),
    (NoFeedback, 409, "no-feedback"),
    (TooLarge, 413, "too-large"),
    (TooSlow, 408, "too-slow"),
    (UnsupportedBody, 415, "unsupported-body"),
    (ImageTooLarge, 413, "too-large"),
    (InvalidImage, 400, "invalid-image"),
    (InvalidRiskLevel, 400, "invalid-level"),
    (InvalidConfig, 400, "invalid-request"),
    (InvalidData, 400, "invalid-data"),
    (UnknownAnswer, 404, "unknown-answer"),
    (DataUnavailable, 404, "not-found"),
    (Busy, 429, "busy"),
    (Stopping, 503, "stopping"),
    (StoreUnavailable, 507, "store-unavailable"),
)
STATUS_WORDS = {
    400: "The picture, the vector or the requested guarantee is invalid.",
    401: "The token is missing or wrong.",
    403: "The request comes from a page of another site, or names another host.",
    404: "There is no such path, item or answer.",
    408: "The body did not arrive in time.",
    409: "No calibration certifies the guarantee, or the calibration is stale.",
    413: "The body, or a picture, is too large.",
    415: "The body is neither multipart/form-data nor application/json.",
    429: "Too many queries wait.",
    503: "The server is stopping.",
    507: "The file of answers and feedback cannot be written.",
}


def refusal(error: RcirError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of the response to an error."""
    rows = (row[1:] for row in STATUSES if isinstance(error, row[0]))
    status, kind = next(rows, (500, "failed"))
    body: dict[str, Any] = {"error": kind, "message": printable(str(error))}
    if isinstance(error, RiskUnattainable):
        body["minimum_alpha"] = error.minimum_alpha
        body["required_calibration"] = error.required_calibration
    return status, body
