"""`rcir embed FOLDER_OR_TABLE --model MODEL --output FILE_OR_FOLDER`"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from shlex import quote

from rcir.cli.arguments import add_fields, read_fields
from rcir.terminal import print_next


def add_embed_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: the fields of `EmbeddingConfig`."""
    from rcir.runs.config import EmbeddingConfig

    add_fields(parser, EmbeddingConfig, positional="pictures")


def run_embed(options: Namespace) -> None:
    """Embed the pictures, and write their vectors."""
    from rcir.runs.config import EmbeddingConfig
    from rcir.runs.embedding import embed_pictures

    embed_pictures(read_fields(EmbeddingConfig, options))
    print_next(f"certify {quote(str(options.output))}")
