"""`rcir data list` and `rcir data check NAME`"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.table import Table

from rcir.cli.arguments import read_values
from rcir.errors import InvalidConfig, InvalidData, printable
from rcir.terminal import console


def add_data_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: an action, and the data set."""
    sets = parser.add_subparsers(required=True, metavar="ACTION")
    list_parser = sets.add_parser("list", help="list the data sets, and whether they are on disk")
    list_parser.set_defaults(action=_list)
    check_parser = sets.add_parser("check", help="verify a copy: counts, pictures, checksums")
    check_parser.set_defaults(action=_check)
    check_parser.add_argument("name", help="name of the data set")
    check_parser.add_argument(
        "--max-pixels", type=int, help="larger pictures are refused (default: 200 million)"
    )
    check_parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="option of its reader"
    )
    for subparser in (list_parser, check_parser):
        subparser.add_argument(
            "--root", help="folder of the data sets (default: RCIR_DATA, or data)"
        )


def run_data(options: Namespace) -> None:
    """List the data sets, or verify a copy."""
    from rcir.data import DataConfig, data_root

    options.action(options, data_root(DataConfig(root=options.root)))


def _list(options: Namespace, root: Path) -> None:
    from rcir.data import DATASETS

    table = Table("name", "images", "on disk", "what it is, and how to get it", box=None)
    table.columns[1].justify = "right"
    for name, dataset in DATASETS.items():
        images = "" if dataset.images is None else f"{dataset.images:,}"
        on_disk = dataset.is_on_disk(root)
        title = dataset.title if on_disk and dataset.places else f"{dataset.title}\n  {dataset.get}"
        table.add_row(name, images, "yes" if on_disk else "no", title)
    console.print(f"in {root}:", soft_wrap=True)
    console.print(table)


def _check(options: Namespace, root: Path) -> None:
    import yaml

    from rcir.data.catalogue import find_dataset, verify

    dataset = find_dataset(options.name)
    if not dataset.reader:
        console.print(f"{options.name} {dataset.get}: it needs no check")
        return
    try:
        values = read_values("--option", options.option, yaml.safe_load)
    except yaml.YAMLError as error:
        raise InvalidConfig(f"--option has a value that is not YAML: {error}") from error

    findings = verify(options.name, root, values, options.max_pixels)
    parts = ", ".join(f"{part} {number:,}" for part, number in findings.parts.items())
    n_images = sum(findings.parts.values())
    console.print(f"{options.name}: {n_images:,} images ({parts})")
    for note in findings.notes:
        console.print(f"note: {printable(note)}", soft_wrap=True)
    if findings.alone:
        console.print(f"{findings.alone} classes have one image, which is never a query")
    for fault in findings.unreadable:
        console.print(f"unreadable: {printable(fault)}", soft_wrap=True)
    n_bad = len(findings.unreadable)
    if findings.published is None and n_bad:
        raise InvalidData(
            f"{n_bad} image{'s' * (n_bad > 1)} of {options.name} cannot be read, see above: "
            "replace or remove them. rcir embed, train and calibrate leave such images out, up to "
            "--max-rejects"
        )
    if not findings.complete:
        raise InvalidData(
            f"this copy of {options.name} is not complete: {n_images:,} of "
            f"{findings.published:,} published images, {n_bad} unreadable"
        )
    suffix = "; no number of images is published" if findings.published is None else ""
    console.print(f"all pictures can be read{suffix}")
