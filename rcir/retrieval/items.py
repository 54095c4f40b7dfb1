"""New gallery items: embedded images, templates of several images, clusters of items."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.data.bursts import as_seconds, find_moments
from rcir.data.names import MISSING_VALUES, require_utf8
from rcir.data.records import ImageSet
from rcir.data.relevance import Relevance, same_relevance
from rcir.data.repeats import digests
from rcir.errors import InvalidData
from rcir.index import lengths
from rcir.retrieval.gallery import Gallery
from rcir.retrieval.queries import VectorOptions, as_names, embedded_vectors

if TYPE_CHECKING:  # vectors need no torch
    from rcir.data.preprocessing import Preprocessing
    from rcir.encoders.base import Encoder
    from rcir.encoders.batches import Embed

GALLERY = "the images of the gallery"  # in messages


def embed_gallery(
    encoder: Encoder,
    preprocessing: Preprocessing,
    images: ImageSet,
    embedder: Embed | None,
    templates: str | None,
    key: str | None,
) -> tuple[NDArray[np.float32], Gallery]:
    """Return the vectors (n, d) and the items of a gallery of images, see `Retriever.build`."""
    if len(images) == 0:
        raise InvalidData("the gallery is empty: pass at least one image")
    from rcir.encoders import require_encoder
    from rcir.encoders.batches import embed

    require_encoder(encoder)
    items, template = (images, None) if templates is None else templates_of(images, templates)
    keys = None if key is None else as_names(images.attribute(key, GALLERY), key)
    if keys is not None and template is not None:
        first = np.unique(template, return_index=True)[1]
        if not np.array_equal(keys, keys[first][template]):
            raise InvalidData(f"the images of one template have different values of {key}")
        keys = keys[first]
    require_utf8(items.ids, "the ids of the gallery")
    require_utf8(images.label_names.values(), "the labels of the gallery")
    embedding = (embedder or embed)(encoder, preprocessing, images.images)
    item_digests = digests(images.images)
    if template is not None:
        import torch

        from rcir.encoders.batches import fuse

        if not encoder.draws:  # its variance is not a variance of the vectors
            embedding = replace(embedding, variance=None)
        templates_on_device = torch.from_numpy(template).to(embedding.vectors.device)
        embedding = fuse(embedding, templates_on_device, len(items))
        item_digests = template_digests(item_digests, template)
    vectors, uncertainty = embedded_vectors(embedding)
    return vectors, Gallery(
        ids=np.array(items.ids, object),
        norms=lengths(vectors),
        relevance=items.relevance,
        uncertainty=uncertainty,
        digests=item_digests,
        items=embedding.map(lambda values: values.cpu()) if encoder.reranks else None,
        keys=keys,
    )


def cluster_items(
    vectors: NDArray[np.float32],
    relevance: Relevance | None,
    options: VectorOptions,
    clusters: ArrayLike | Literal["auto"] | None,
    cluster: str,
    times: ArrayLike | None,
) -> tuple[NDArray[np.str_] | None, VectorOptions]:
    """Return the cluster (n,) of each item, and options that say where they come from.

    The arguments are those of `Retriever.from_embeddings`.
    """
    if clusters is None:
        return None, options
    if isinstance(clusters, str) and clusters == "auto":
        labels = None if relevance is None else relevance.single
        if not options.leave_one_out or labels is None:
            return None, options
        seconds = None if times is None else as_seconds(times, "times")
        if seconds is not None and seconds.shape != (len(vectors),):
            raise InvalidData(
                f"got {len(seconds)} times for {len(vectors)} vectors: pass one for each"
            )
        return moments_of(vectors, labels, seconds), replace(options, clusters="found")
    if isinstance(clusters, str):
        raise InvalidData(f'clusters is {clusters!r}: pass one for each item, "auto" or None')
    names = as_names(clusters, "clusters")
    if not options.leave_one_out:
        raise InvalidData(
            "clusters of gallery items are for leave_one_out=True; pass the clusters of other "
            "queries to `calibrate`"
        )
    return names, replace(options, clusters="passed", cluster=cluster)


def moments_of(
    vectors: NDArray[np.float32],
    labels: NDArray[np.int64],
    times: NDArray[np.float64] | None = None,
    known: NDArray[np.str_] | None = None,
) -> NDArray[np.str_]:
    """Return the moment (n,) of each item, named by the digest of its first one."""
    numbers = find_moments(vectors, labels, times, known)
    _, first, moments = np.unique(numbers, return_index=True, return_inverse=True)
    names: NDArray[np.str_] = digests(vectors[first]).astype(str)[moments]
    return names


def templates_of(images: ImageSet, attribute: str) -> tuple[ImageSet, NDArray[np.int64]]:
    """Return the templates of an image set, and the template of each image.

    A template is a gallery item that stands for several images of one thing.

    Args:
        images: n images.
        attribute: the attribute that names the template of each image.

    Returns:
        The first image of each template, in the order of the images, with the name of the template
        as its id; and the number (n,) of each image's template.

    Raises:
        InvalidData: the images do not have the attribute, it is missing for some images, or images
            of one template match different queries.

    Example:
        >>> images = ImageSet(
        ...     np.zeros((3, 8, 8), np.uint8), np.array([4, 2, 4]), ["a", "b", "c"],
        ...     {"person": np.array(["Ann", "Bo", "Ann"])},
        ... )
        >>> templates, number = templates_of(images, "person")
        >>> templates.ids, templates.labels.tolist(), number.tolist()
        (['Ann', 'Bo'], [4, 2], [0, 1, 0])
    """
    values = images.attribute(attribute, GALLERY).astype(str)
    if missing := int(np.isin(values, MISSING_VALUES).sum()):
        raise InvalidData(
            f"{missing} gallery images have no {attribute}: name the template of each image; for a "
            "template of one image, its id will do"
        )
    templates, first, number = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    first, number = first[order], np.argsort(order)[number]
    _check_templates(images, attribute, first[number])
    return replace(images.subset(first), ids=templates[order].tolist()), number


def template_digests(
    digests: NDArray[np.bytes_], template: NDArray[np.int64]
) -> NDArray[np.bytes_]:
    """Return (templates, m) digests of images (n,), grouped by the number (n,) of their template.

    m is the number of images of the largest template; smaller ones end in empty digests.

    Example:
        >>> template_digests(np.array([b"a", b"b", b"c"]), np.array([0, 1, 0])).tolist()
        [[b'a', b'c'], [b'b', b'']]
    """
    counts = np.bincount(template)
    order = np.argsort(template, kind="stable")
    column = np.arange(len(template)) - np.repeat(np.cumsum(counts) - counts, counts)
    by_template = np.zeros((len(counts), counts.max()), digests.dtype)
    by_template[template[order], column] = digests[order]
    return by_template


def _check_templates(images: ImageSet, attribute: str, first: NDArray[np.int64]) -> None:
    """Raise `InvalidData` if an image and the first image of its template match differently."""
    if same_relevance(images.relevance, images.relevance.subset(first)):
        return
    for row, first_row in enumerate(first.tolist()):
        image, other = images.subset(np.array([row])), images.subset(np.array([first_row]))
        if same_relevance(image.relevance, other.relevance):
            continue
        raise InvalidData(
            f"{image.ids[0]} and {other.ids[0]} are images of one template "
            f"({attribute} {image.attributes[attribute][0]}) but match different queries: give all "
            "images of a template the same label, or choose another attribute for templates"
        )
