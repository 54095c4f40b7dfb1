"""Data sets, all as one record type; splits; preprocessing."""

from rcir.data.augmentation import Augmentation, TransformParameters
from rcir.data.clusters import cluster_warning
from rcir.data.images import ImageLike, read_image
from rcir.data.loading import DataConfig, data_root, load_splits, with_cluster
from rcir.data.preprocessing import Preprocessing
from rcir.data.records import ImageSet, Splits
from rcir.data.registry import DATASETS
from rcir.data.repeats import without_repeats

__all__ = [
    "DATASETS",
    "Augmentation",
    "DataConfig",
    "ImageLike",
    "ImageSet",
    "Preprocessing",
    "Splits",
    "TransformParameters",
    "cluster_warning",
    "data_root",
    "load_splits",
    "read_image",
    "with_cluster",
    "without_repeats",
]
