"""Nearest-neighbour indexes behind one protocol."""

from rcir.index.base import Index
from rcir.index.flat import FlatIndex
from rcir.index.leave_one_out import nearest_others

__all__ = ["FlatIndex", "Index", "nearest_others"]
