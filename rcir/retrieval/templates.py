"""Templates: gallery entries that stand for several pictures of one thing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rcir.data.records import ImageSet
from rcir.errors import InvalidData

MISSING = ("", "None", "nan", "<NA>", "NaT")


def templates_of(images: ImageSet, attribute: str) -> tuple[ImageSet, NDArray[np.int64]]:
    """The templates of an image set, and the template of each image.

    Args:
        images: n of them.
        attribute: the name of the attribute that names the template of each image.

    Returns:
        The first picture of each template, in the order of the images, under the template's name
        and with what its pictures match; and (n,) the number of each image's template.

    Raises:
        InvalidData: there is no such attribute, an image has none, or pictures of one template
            match different things.

    Example:
        >>> images = ImageSet(
        ...     np.zeros((3, 8, 8), np.uint8), np.array([4, 2, 4]), ["a", "b", "c"],
        ...     {"person": np.array(["Ann", "Bo", "Ann"])},
        ... )
        >>> templates, number = templates_of(images, "person")
        >>> templates.ids, templates.labels.tolist(), number.tolist()
        (['Ann', 'Bo'], [4, 2], [0, 1, 0])
    """
    if not isinstance(attribute, str) or attribute not in images.attributes:
        known = ", ".join(images.attributes) or "none"
        raise InvalidData(f"the gallery has no attribute {attribute!r}; it has {known}")
    given = images.attributes[attribute].astype(str)
    if nameless := int(np.isin(given, MISSING).sum()):
        raise InvalidData(
            f"{nameless} images of the gallery have no {attribute}: name the template of each; an "
            "image that stands alone can have its own id"
        )
    names, first, number = np.unique(given, return_index=True, return_inverse=True)
    order = np.argsort(first)
    first, number = first[order], np.argsort(order)[number]
    _require_alike(images, attribute, first[number])
    return replace(images.subset(first), ids=names[order].tolist()), number


def template_digests(
    digests: NDArray[np.bytes_], template: NDArray[np.int64]
) -> NDArray[np.bytes_]:
    """The digests of the pictures of each template.

    Args:
        digests: (n,) of the pictures, see `rcir.data.digests`.
        template: (n,) the template of each, numbered from 0 on.

    Returns:
        (number of templates, m), empty texts where a template has fewer than m pictures.

    Example:
        >>> template_digests(np.array([b"a", b"b", b"c"]), np.array([0, 1, 0])).tolist()
        [[b'a', b'c'], [b'b', b'']]
    """
    counts = np.bincount(template)
    order = np.argsort(template, kind="stable")
    place = np.arange(len(template)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.zeros((len(counts), counts.max()), digests.dtype)
    found[template[order], place] = digests[order]
    return found


def _require_alike(images: ImageSet, attribute: str, first: NDArray[np.int64]) -> None:
    """Raise `InvalidData` unless each image matches what the first of its template matches."""
    own, others = images.relevance.arrays(), images.relevance.subset(first).arrays()
    if all(np.array_equal(values, others[name]) for name, values in own.items()):
        return
    for row, other in enumerate(first.tolist()):
        _refuse(images.subset(np.array([row])), images.subset(np.array([other])), attribute)


def _refuse(image: ImageSet, other: ImageSet, attribute: str) -> None:
    """Raise `InvalidData` if an image matches other things than the first of its template."""
    own, others = image.relevance.arrays(), other.relevance.arrays()
    if any(not np.array_equal(values, others[name]) for name, values in own.items()):
        raise InvalidData(
            f"{image.ids[0]} and {other.ids[0]} are pictures of one template "
            f"({attribute} {image.attributes[attribute][0]}), and match different things: give "
            "pictures of a template the same label, or name templates by another attribute"
        )
