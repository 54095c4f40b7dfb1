"""A model of the labels of a gallery, which gives every label a probability for a query."""

from rcir.label_model.experts import Items, codes_of
from rcir.label_model.model import LabelModel

__all__ = ["Items", "LabelModel", "codes_of"]
