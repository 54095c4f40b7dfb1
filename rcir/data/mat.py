"""MATLAB's files, in which many data sets are published: whatever is wrong with one is said."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from scipy.io import loadmat
from scipy.io.matlab import MatReadError

from rcir.errors import InvalidData

Content = TypeVar("Content")
DAMAGED = (
    *(OSError, ValueError, TypeError, KeyError, IndexError, EOFError, NotImplementedError),
    # The last two are what scipy raises of some damaged files without compression.
    *(zlib.error, MatReadError, UnboundLocalError),
)


def read_mat(
    path: Path, take: Callable[[Mapping[str, Any]], Content], squeeze: bool = False
) -> Content:
    """Read variables of a MATLAB file.

    Args:
        path: a .mat file of MATLAB up to version 7.2.
        take: gets the variables by name; it may fail as NumPy does where they are not as expected.
        squeeze: whether to drop the dimensions of size 1, which MATLAB adds.

    Raises:
        InvalidData: the file is damaged, or has not what is taken.

    Example:
        >>> read_mat(Path("pyproject.toml"), len)
        Traceback (most recent call last):
        rcir.errors.InvalidData: pyproject.toml cannot be read (...): fetch it again
    """
    try:
        return take(loadmat(path, squeeze_me=squeeze))
    except DAMAGED as error:
        raise InvalidData(f"{path} cannot be read ({error!r}): fetch it again") from error
