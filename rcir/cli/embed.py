"""`rcir embed FOLDER_OR_TABLE --model MODEL --output FILE`"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rcir.data.preprocessing import Preprocessing
    from rcir.encoders import Encoder


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: pictures, model, where to write to, and with what."""
    parser.add_argument(
        "pictures", type=Path, help="folder of pictures, or table (.csv, .parquet) with their paths"
    )
    parser.add_argument(
        "--model",
        required=True,
        help="timm:NAME, open_clip:NAME/TAG, transformers:NAME, or the folder of a training",
    )
    parser.add_argument("--output", type=Path, required=True, help="Parquet file to write")
    parser.add_argument("--checkpoint", help=".safetensors file with the weights of the model")
    parser.add_argument("--num_workers", type=int, default=0, help="on Ray; 0: this process alone")
    parser.add_argument("--use_gpu", action="store_true", help="one GPU for each")
    parser.add_argument("--batch", type=int, default=128, help="pictures in a forward pass")


def run(options: Namespace) -> None:
    """Embed the pictures, and write their vectors."""
    import numpy as np
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from rcir.data.pictures import list_pictures
    from rcir.data.vector_writing import write_vectors
    from rcir.encoders.embedder import Embedder
    from rcir.errors import InvalidConfig
    from rcir.memory import keep_freed_memory

    output: Path = options.output
    if output.suffix != ".parquet" or not output.parent.is_dir():
        raise InvalidConfig(
            f"--output is {output}: give a file that ends in .parquet, in a folder that is there"
        )
    pictures = list_pictures(options.pictures)
    encoder, preprocessing, name = _model(options.model, options.checkpoint)
    console = Console(highlight=False, markup=False)
    bar = Progress(
        *(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("", total=len(pictures))
    embedder = Embedder(
        options.num_workers,
        options.use_gpu,
        output.with_name(f"{output.name}.parts"),
        lambda images, _: bar.advance(task, images),
        options.batch,
    )
    keep_freed_memory()
    with bar:
        embedding = embedder(encoder, preprocessing, pictures.paths)
    vectors = embedding.vectors.numpy()
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    uncertainty = None if embedding.uncertainty is None else embedding.uncertainty.numpy()
    write_vectors(output, vectors, pictures.ids, pictures.columns, uncertainty, name)
    embedder.clear()
    n, d = vectors.shape
    console.print(f"{output}: {n:,} vectors of {d} numbers, by {name}", soft_wrap=True)


def _model(model: str, checkpoint: str | None) -> tuple[Encoder, Preprocessing, str]:
    """An encoder, its preprocessing, and its name with a digest of weights and preprocessing."""
    import json
    from hashlib import sha256

    from rcir.encoders import EncoderConfig, build_encoder, model_preprocessing
    from rcir.encoders.hub import is_of_hub
    from rcir.errors import InvalidConfig
    from rcir.runs.folder import find_run

    encoder: Encoder
    if is_of_hub(model):
        config = EncoderConfig(
            "pretrained",
            model,
            "avg",
            pretrained=checkpoint is None,
            checkpoint_path=checkpoint,
        )
        preprocessing = model_preprocessing(config)
        encoder = build_encoder(config, preprocessing.channels, preprocessing.size).eval()
    else:
        if checkpoint is not None:
            raise InvalidConfig(
                f"--checkpoint is for models of hubs, such as timm:resnet18; {model} has its own "
                "weights: leave it out"
            )
        trained = find_run(model)
        encoder, preprocessing, model = trained.encoder(), trained.preprocessing, trained.path.name
    described = encoder.weights_digest() + json.dumps(preprocessing.to_dict(), sort_keys=True)
    return encoder, preprocessing, f"{model}@{sha256(described.encode()).hexdigest()[:12]}"
