"""Options of an embedding of pictures, which need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class EmbeddingConfig:
    """An embedding of pictures.

    Args:
        pictures: folder of pictures, table (.csv, .tsv, .parquet) with their paths, WebDataset (a
            .tar file or a folder of them), or folder of a Hugging Face data set.
        model: timm:NAME, open_clip:NAME/TAG, transformers:NAME, or the folder of a training;
            repositories of the Hugging Face hub are timm:hf-hub:ORG/NAME and
            open_clip:hf-hub:ORG/NAME.
        output: Parquet file to write (.parquet), or folder of several.
        checkpoint: .safetensors file with the weights of the model, for a machine without a
            network.
        shards: files to write into a folder; unless given, one per 10,000 pictures.
        max_pixels: larger pictures are refused; unless given, those of more than 200 million.
        projected: for a CLIP model of transformers, the vector that it compares with texts.
        num_workers: Ray workers; 0 uses this process alone.
        use_gpu: one GPU per worker.
        max_rejects: unreadable pictures that are left out: a number, or a share below 1, of which
            any above 0 allows at least one; more are an error. NAME.rejects.csv beside the output
            lists them.
        batch: pictures in a forward pass; unless given, as many as fit.
        precision: bfloat16 is faster on GPUs; the vectors are those of another model, and both
            gallery and queries must be embedded by it.
        memory_gib: memory of a forward pass beside the weights, which limits the batch; unless
            given, 0.75, and on a GPU 8.
    """

    pictures: Path
    model: str
    output: Path
    checkpoint: str | None = None
    shards: int | None = None
    max_pixels: int | None = None
    projected: bool = False
    num_workers: int = 0
    use_gpu: bool = False
    max_rejects: float = 0.01
    batch: int | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    memory_gib: float | None = None
