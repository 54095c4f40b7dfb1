"""Retrievers of whole numbers through their public interface, and what they return."""

import numpy as np

from rcir import Retriever
from tests.retrieval.whole_numbers import CALIBRATION, DELTA, DEPTH, GALLERY, TEST, TUNING


def build(labels=GALLERY.labels, **options):
    """A retriever of the gallery that is not calibrated."""
    options = {"depth": DEPTH, "uncertainty": GALLERY.uncertainty} | options
    return Retriever.from_embeddings(GALLERY.vectors, labels=labels, metric="euclidean", **options)


def search(retriever, part, groups=True, **options):
    """Search queries with their labels and uncertainties."""
    if groups:
        options["groups"] = part.groups
    queries = retriever.labelled(part.vectors, part.labels, part.uncertainty, **options)
    return retriever.search_labelled(queries)


def calibrate(retriever, score_function="quantile", groups=True, **options):
    """Tune and calibrate on the two splits; returns the retriever."""
    tuning, calibration = (search(retriever, part, groups) for part in (TUNING, CALIBRATION))
    options = {"query_uncertainty": "encoder"} | options
    retriever.calibrate_splits(tuning, calibration, score_function, **options)
    return retriever


def retrieve(retriever, alpha, delta=DELTA, part=TEST, **options):
    """The answers to the queries of a part."""
    return retriever.retrieve(part.vectors, alpha, delta, uncertainty=part.uncertainty, **options)


def guarantee(retriever, alpha, delta=DELTA, **options):
    """The guarantee of a request."""
    return retriever.guarantee(alpha, delta, **options)


def missed(answers, part):
    """(n,) whether each answer lacks the label of its query."""
    return np.array(
        [label not in answer.labels for answer, label in zip(answers, part.labels, strict=True)]
    )


def plain(answers):
    """Everything that answers say, to be compared."""
    return [answer.to_dict() for answer in answers]


def name_case(value):
    """The name of a test case; options are "name=value"."""
    if isinstance(value, dict):
        return " ".join(f"{name}={option}" for name, option in value.items()) or "defaults"
    return str(value)
