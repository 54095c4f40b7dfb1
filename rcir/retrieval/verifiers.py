"""Verifiers: second opinions on a query and its candidates, slower and better than the search."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.data.vector_files import read_scores
from rcir.errors import InvalidData, printable
from rcir.files import checksum

RATIO = 0.8  # of the distances to the nearest and the second nearest feature, at most
REPROJECTION_ERROR = 5.0  # pixels
MAX_FEATURES, LONGER_SIDE = 2048, 1024  # of a picture
REMEMBERED_PICTURES = 4096


class Verifier(Protocol):
    """Any object with a name, a version, and scores of candidates."""

    @property
    def name(self) -> str:
        """The name of the method."""

    @property
    def version(self) -> str:
        """The version, which changes whenever a score may: of model, prompt or settings."""

    def score(self, query: str, candidate_ids: Sequence[str]) -> ArrayLike:
        """Return the scores (n,) of n candidates of a query, larger for a likelier match.

        That of a candidate must not depend on the others of the same call.
        """


class TableVerifier:
    """Scores that were computed elsewhere: a table with the columns `query`, `item` and `score`.

    Args:
        path: .csv or .parquet file.
        name, version: of what scored; the version is by default the checksum of the file, so that a
            table with further rows is another verifier.

    Raises:
        DataUnavailable, InvalidData: there is no file, a column is missing, or a pair has two
            scores.

    Example:
        >>> path = Path("scores.csv")
        >>> _ = path.write_text("query,item,score\\nq1,a,0.5\\nq1,b,2\\n")
        >>> TableVerifier(path).score("q1", ["b", "a"]).tolist()
        [2.0, 0.5]
    """

    def __init__(
        self, path: str | os.PathLike[str], name: str = "table", version: str | None = None
    ) -> None:
        self.path, self.name = Path(path), name
        self.scores = read_scores(self.path)
        self.version = checksum(self.path) if version is None else version

    def score(self, query: str, candidate_ids: Sequence[str]) -> NDArray[np.float64]:
        """Return the scores (n,) of candidates; `InvalidData` if one has none."""
        scores = [self.scores.get((query, item)) for item in candidate_ids]
        if None in scores:
            item = candidate_ids[scores.index(None)]
            raise InvalidData(
                f"{self.path} has no score of {scores.count(None)} of {len(scores)} candidates of "
                f"{printable(query)}, such as {printable(item)}: score every pair that a "
                "shortlist can hold (`rcir verify --pairs` writes them)"
            )
        return np.array(scores, np.float64)


class LocalFeatures:
    """Inliers of one homography between the SIFT features of two pictures (extra "verify").

    Features match if the nearest is much nearer than the second (Lowe, IJCV 2004); inliers are
    counted by MAGSAC++ (Barath et al., CVPR 2020).

    Args:
        images: folder of the gallery's pictures, named by the ids of its items.
        query_images: folder of the queries' pictures; the same one by default.
    """

    name = "sift-homography"

    def __init__(
        self, images: str | os.PathLike[str], query_images: str | os.PathLike[str] | None = None
    ) -> None:
        self.images = Path(images)
        self.query_images = self.images if query_images is None else Path(query_images)
        self._features = lru_cache(REMEMBERED_PICTURES)(self._read_features)

    @cached_property
    def version(self) -> str:
        """The version of OpenCV, and the settings."""
        import cv2

        return f"{cv2.__version__}-{RATIO}-{REPROJECTION_ERROR}-{MAX_FEATURES}-{LONGER_SIDE}"

    def score(self, query: str, candidate_ids: Sequence[str]) -> NDArray[np.float64]:
        """Return the number of inliers (n,) of each candidate; `InvalidImage` if unreadable."""
        ours = self._features(self.query_images / query)
        theirs = (self._features(self.images / item) for item in candidate_ids)
        return np.array([_n_inliers(ours, features) for features in theirs], np.float64)

    @staticmethod
    def _read_features(path: Path) -> tuple[NDArray[np.float32], Any]:
        """Return places (n, 2) and descriptors (n, 128) of the features of a picture."""
        import cv2

        from rcir.data.images import read_image

        picture = read_image(path, 1)
        scale = min(1.0, LONGER_SIDE / max(picture.shape))
        if scale < 1:
            picture = cv2.resize(picture, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        found, descriptors = cv2.SIFT_create(MAX_FEATURES).detectAndCompute(picture, None)
        return np.array([point.pt for point in found], np.float32).reshape(-1, 2), descriptors


def _n_inliers(
    query: tuple[NDArray[np.float32], Any], item: tuple[NDArray[np.float32], Any]
) -> int:
    import cv2

    if min(len(query[0]), len(item[0])) < 4:
        return 0
    nearest = cv2.BFMatcher().knnMatch(query[1], item[1], k=2)
    pairs = [
        (first.queryIdx, first.trainIdx)
        for first, second in nearest
        if first.distance < RATIO * second.distance
    ]
    if len(pairs) < 4:  # of which any homography is one
        return 0
    rows, columns = np.array(pairs).T
    _, inliers = cv2.findHomography(
        query[0][rows], item[0][columns], cv2.USAC_MAGSAC, REPROJECTION_ERROR
    )
    return 0 if inliers is None else int(inliers.sum())
