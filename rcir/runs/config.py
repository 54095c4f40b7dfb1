"""Options of an embedding of pictures, which need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EmbeddingConfig:
    """An embedding of pictures.

    Args:
        pictures: folder of pictures, or table (.csv, .tsv, .parquet) with their paths.
        model: timm:NAME, open_clip:NAME/TAG, transformers:NAME, or the folder of a training;
            repositories of the Hugging Face hub are timm:hf-hub:ORG/NAME and
            open_clip:hf-hub:ORG/NAME.
        output: Parquet file to write; with shards a folder.
        checkpoint: .safetensors file with the weights of the model, for a machine without a
            network.
        shards: files to write, each when its pictures are embedded; finished ones are kept.
        max_pixels: larger pictures are refused; unless given, those of more than 200 million.
        projected: for a CLIP model of transformers, the vector that it compares with texts.
        num_workers: Ray workers; 0 uses this process alone.
        use_gpu: one GPU per worker.
        max_rejects: unreadable pictures that are left out: a number, or a share below 1, of which
            any above 0 allows at least one; more are an error. NAME.rejects.csv beside the output
            lists them.
        batch: pictures in a forward pass; unless given, as many as fit.
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
    memory_gib: float | None = None
