"""Errors and warnings of rcir, and how they are printed."""

from __future__ import annotations

import errno
import inspect
import os
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from io import TextIOWrapper

_as_flags: ContextVar[bool] = ContextVar("as_flags", default=False)
_PACKAGES = ("rcir", "training", "calibration", "tuning", "contextlib")  # decorates calls
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ADVICE = {
    **dict.fromkeys(_FULL, "make room there, and repeat the command"),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "change the permissions of the file or its folder, or choose another place",
    ),
}


class RcirError(Exception):
    """Base class of every error that rcir raises on purpose.

    IPython and notebooks show the message alone; `traceback.print_last()` prints the traceback.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {printable(self)}"]


class InvalidImage(RcirError):
    """An image cannot be used: unreadable, truncated, too large, or of the wrong type or shape."""


class ImageTooLarge(InvalidImage):
    """An image has more pixels than may be decoded."""


class InvalidRiskLevel(RcirError, ValueError):
    """``alpha`` or ``delta`` lies outside the open interval (0, 1)."""


class NoRetriever(RcirError):
    """No retriever was named, or there is none at the place that was named."""


class CorruptRetriever(RcirError):
    """A retriever folder is incomplete, was changed, or has a format this version cannot read."""


class UntrustedFolder(RcirError):
    """A folder names code or a server that its reader has not allowed."""


class SaveConflict(RcirError):
    """Another change to a retriever, in its folder or in memory, came before this one."""


class StaleCalibration(RcirError):
    """Encoder, preprocessing, gallery or index have changed since calibration."""


class DataUnavailable(RcirError):
    """A data set, or the pretrained weights of a backbone, is neither on disk nor obtainable."""


class InvalidData(RcirError, ValueError):
    """Data, such as a data set on disk, vectors or labels, do not fit their purpose."""


class InvalidConfig(RcirError, ValueError):
    """An option does not exist, has an invalid value, or cannot be combined with another."""


class MissingClass(InvalidConfig):
    """A class that an import path names does not exist, or cannot be imported."""


class MissingPackage(RcirError, ImportError):
    """A package of an extra of rcir is not installed."""


class TrackingUnavailable(RcirError):
    """MLflow's tracking store cannot be reached, or is of a kind that MLflow refuses."""


class TrainingDiverged(RcirError):
    """The loss of a training became NaN or infinite."""


class CheckpointFailed(RcirError):
    """A checkpoint of a training could not be written; those before it are kept."""


class WorkersLost(RcirError):
    """The workers of a training, or those that embed, failed repeatedly at the same place."""


class RiskUnattainable(RcirError):
    """No set size certifies the requested ``alpha`` at the requested ``delta``.

    Attributes:
        minimum_alpha: the smallest alpha that this calibration certifies at this delta; None if
            there is none below 1, or if several risks were requested. It depends on these queries:
            to rely on it, calibrate on new ones.
        required_calibration: the number of calibration queries that would certify alpha, if the
            share of queries without a match within the search depth stays as it is; None if no
            number would.
    """

    def __init__(
        self, message: str, *, minimum_alpha: float | None, required_calibration: int | None
    ) -> None:
        super().__init__(message)
        self.minimum_alpha = minimum_alpha
        self.required_calibration = required_calibration


def warn(message: str) -> None:
    """Issue a `UserWarning` for the line of the caller's code outside the packages of rcir."""
    level, frame = 1, inspect.currentframe()
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def as_option(name: str, value: object = True) -> str:
    """Return how to pass an option, for advice: a keyword in Python, a flag on a command line.

    Example:
        >>> with naming_flags():
        ...     as_option("query_labels", "any"), as_option("anytime")
        ('--query-labels any', '--anytime')
    """
    if _as_flags.get():
        flag = f"--{name.replace('_', '-')}"
        return flag if value is True else f"{flag} {'none' if value is None else value}"
    return f'{name}="{value}"' if isinstance(value, str) else f"{name}={value!r}"


@contextmanager
def naming_flags(flags: bool = True) -> Iterator[None]:
    """Name flags in advice inside the block, see `as_option`; False names keywords."""
    token = _as_flags.set(flags)
    try:
        yield
    finally:
        _as_flags.reset(token)


def _with_advice(error: RcirError | OSError) -> str:
    """Return the message of an error, with what to do about one of the operating system."""
    if isinstance(error, OSError) and error.errno in _ADVICE:
        path = error.filename2 or error.filename  # of a copy, the file that was written
        where = "" if path is None else f"{path}: "
        return f"{where}{error.strerror}: {_ADVICE[error.errno]}"
    return str(error)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Print errors of rcir, of files and of full disks in one line, and exit with status 1.

    Advice names flags, warnings are lines, and text that standard output cannot encode is escaped.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error is
    try:
        with naming_flags(), warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("default", UserWarning)
            warnings.showwarning = lambda message, *_, **__: print(
                f"warning: {printable(message)}", file=sys.stderr
            )
            yield
    except BrokenPipeError:  # of a reader that needs no more, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (RcirError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno not in _FULL:
            raise  # nobody could act on it without the traceback
        print(f"error: {printable(_with_advice(error))}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def printable(text: object) -> str:
    r"""Return the text with unprintable characters escaped.

    Names of files may have line ends, control sequences of terminals, marks that change the
    direction of writing, and bytes that are not UTF-8, which Python keeps as lone surrogates.
    """
    letters = str(text)
    if letters.isprintable():
        return letters
    return "".join(
        letter
        if letter.isprintable() or unicodedata.category(letter) == "Zs"
        else repr(letter)[1:-1]
        for letter in letters
    )
