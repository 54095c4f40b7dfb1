"""Models of the labels of a gallery: how probable each is, and whether a query has one of them."""

from rcir.label_model.experts import Items, KnownLabels, codes_of
from rcir.label_model.model import LabelModel

__all__ = ["Items", "KnownLabels", "LabelModel", "codes_of"]
