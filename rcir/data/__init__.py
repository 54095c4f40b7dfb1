"""Data sets, all as one record type; splits; preprocessing.

Names are resolved on first use: to list the sets takes none of what decodes and transforms images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rcir.imports import lazily

if TYPE_CHECKING:
    from rcir.data.augmentation import Augmentation, TransformParameters
    from rcir.data.catalogue import DATASETS, DataConfig, data_root, load_splits, with_cluster
    from rcir.data.datasets.user_images import read_class_folders
    from rcir.data.division import cluster_warning
    from rcir.data.images import ImageLike, read_image
    from rcir.data.preprocessing import Preprocessing
    from rcir.data.records import ImageSet, Source, Splits
    from rcir.data.relevance import WithinRadius
    from rcir.data.repeats import without_repeats

_HOMES = {
    "rcir.data.augmentation": ("Augmentation", "TransformParameters"),
    "rcir.data.datasets.user_images": ("read_class_folders",),
    "rcir.data.division": ("cluster_warning",),
    "rcir.data.images": ("ImageLike", "read_image"),
    "rcir.data.catalogue": (
        *("DATASETS", "DataConfig", "data_root", "load_splits", "with_cluster"),
    ),
    "rcir.data.preprocessing": ("Preprocessing",),
    "rcir.data.records": ("ImageSet", "Source", "Splits"),
    "rcir.data.repeats": ("without_repeats",),
    "rcir.data.relevance": ("WithinRadius",),
}

__all__ = [
    "DATASETS",
    "Augmentation",
    "DataConfig",
    "ImageLike",
    "ImageSet",
    "Preprocessing",
    "Source",
    "Splits",
    "TransformParameters",
    "WithinRadius",
    "cluster_warning",
    "data_root",
    "load_splits",
    "read_class_folders",
    "read_image",
    "with_cluster",
    "without_repeats",
]

__getattr__, __dir__ = lazily(__name__, globals(), _HOMES)
