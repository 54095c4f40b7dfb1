"""Nearest-neighbour indexes behind one protocol."""

from rcir.index.base import Index
from rcir.index.flat import FlatIndex

__all__ = ["FlatIndex", "Index"]
