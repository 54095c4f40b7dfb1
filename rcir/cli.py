"""The `rcir` command. The jobs are imported when they are asked for, and only here."""

from __future__ import annotations

import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from json import dumps
from pathlib import Path
from typing import get_args

import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rcir.api import VARIABLE, default_retriever, use
from rcir.config import reporting_errors
from rcir.data import DATASETS, DataConfig, data_root
from rcir.data.registry import find_dataset
from rcir.data.verification import verify
from rcir.errors import InvalidConfig, InvalidData
from rcir.risk import Risk

# Names of files may look like markup.
console = Console(highlight=False, markup=False)


def retrieve(options: Namespace) -> None:
    """Retrieve a set for an image, with its guarantee."""
    retriever = use(options.retriever) if options.retriever else default_retriever()
    answer = retriever.retrieve(
        options.image,
        options.alpha,
        options.delta,
        risk=options.risk,
        distinct=options.distinct,
        group=options.group,
        abstain=options.abstain,
        simultaneous=options.simultaneous,
        anytime=options.anytime,
        mix=options.mix,
    )
    print(dumps(answer.to_dict(), indent=1) if options.json else answer)


def evaluate(options: Namespace) -> None:
    """Measure a calibrated retriever on the test queries of its data set."""
    from calibration import EvaluationConfig, evaluate_retriever, print_table

    outcome = evaluate_retriever(
        EvaluationConfig(
            options.retriever, options.output, tuple(options.alphas), options.delta, options.ood
        )
    )
    print_table(outcome.evaluation)
    print(f"report: {outcome.report}")


def data(options: Namespace) -> None:
    """Show the data sets, or verify a copy of one."""
    options.action(options, data_root(DataConfig(root=options.root)))


def _list(options: Namespace, root: Path) -> None:
    table = Table("name", "images", "on disk", "what it is, and how to get it", box=None)
    table.columns[1].justify = "right"
    for name, found in DATASETS.items():
        images = "" if found.images is None else f"{found.images:,}"
        there = found.there(root)
        title = found.title if there and found.places else f"{found.title}\n  {found.get}"
        table.add_row(name, images, "yes" if there else "no", title)
    console.print(f"in {root}:", soft_wrap=True)
    console.print(table)


def _check(options: Namespace, root: Path) -> None:
    known = find_dataset(options.name)
    if known.composed and not known.whole:
        console.print(f"{options.name} {known.get}: it needs no check")
        return
    given = {}
    for option in options.option:
        name, equals, value = option.partition("=")
        if not equals:
            raise InvalidConfig(f"--option {option}: give NAME=VALUE")
        try:
            given[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise InvalidConfig(f"--option {option}: {value!r} is not a value of YAML") from error

    def watched(faults: Iterator[str | None], total: int) -> Iterator[str | None]:
        return iter(track(faults, "pictures", total, console=console, transient=True))

    found = verify(options.name, root, given, watched)
    parts = ", ".join(f"{part} {number:,}" for part, number in found.parts.items())
    console.print(f"{options.name}: {sum(found.parts.values()):,} images ({parts})")
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True)
    if found.alone:
        console.print(f"{found.alone} classes have one image only: it is searched, never asked")
    for fault in found.unreadable:
        console.print(f"unreadable: {fault}", soft_wrap=True)
    if not found.complete:
        expected = "" if found.published is None else f" of {found.published:,} published images"
        raise InvalidData(
            f"this copy of {options.name} is not whole: {sum(found.parts.values()):,}{expected}, "
            f"{len(found.unreadable)} unreadable"
        )
    if found.published is None:
        console.print("all pictures can be read; there is no published number to compare with")
    else:
        console.print("all can be read")


def compare(options: Namespace) -> None:
    """Compare runs by how small their guaranteed sets are."""
    from rcir.runs.choose import choose
    from rcir.runs.compare import compare_runs
    from rcir.runs.compare_table import print_choice, print_comparison

    asked = options.runs, options.alphas, options.delta
    if options.choose:
        choice = choose(*asked)
        print(dumps(choice.to_dict(), indent=1)) if options.json else print_choice(choice)
        return
    found = compare_runs(*asked)
    print(dumps(found.to_dict(), indent=1)) if options.json else print_comparison(found)


def demo(options: Namespace) -> None:
    """Train, calibrate, measure and retrieve on handwritten two-digit numbers."""
    from rcir.demo import run

    run(options.output)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `rcir` command."""
    options = _parser().parse_args(argv)
    with reporting_errors():
        options.command(options)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="rcir", description="Image retrieval with a guarantee.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(call: Callable[[Namespace], None]) -> ArgumentParser:
        added = commands.add_parser(
            call.__name__,
            help=call.__doc__,
            description=call.__doc__,
            formatter_class=ArgumentDefaultsHelpFormatter,
        )
        added.set_defaults(command=call)
        return added

    asked = command(retrieve)
    asked.add_argument("image", type=Path, help="image file")
    asked.add_argument("--retriever", help=f"folder or MLflow URI; without it, {VARIABLE} names it")
    asked.add_argument(
        "--alpha", type=float, default=0.1, help="share of queries whose set may hold no match"
    )
    asked.add_argument(
        "--delta", type=float, default=0.1, help="probability of misleading calibration queries"
    )
    asked.add_argument("--risk", choices=get_args(Risk), default="miss", help="what to control")
    asked.add_argument("--distinct", choices=["label"], help="one image of each label")
    asked.add_argument("--group", help="the group that the query belongs to")
    asked.add_argument("--abstain", action="store_true", help="one image, or none if too uncertain")
    asked.add_argument("--simultaneous", action="store_true", help="alpha was chosen after looking")
    asked.add_argument(
        "--anytime", action="store_true", help="calibration queries were added one by one"
    )
    asked.add_argument("--mix", choices=["any"], help="whatever the mix of the groups")
    asked.add_argument("--json", action="store_true", help="print JSON")
    measured = command(evaluate)
    measured.add_argument("--retriever", required=True, help="folder or MLflow URI")
    measured.add_argument("--ood", help="data set whose test images are asked as well")
    measured.add_argument("--output", help="folder to write to (default: evaluation, beside it)")
    measured.add_argument("--alphas", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    measured.add_argument("--delta", type=float, default=0.1)
    compared = command(compare)
    compared.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a training, sweep or calibration, or MLflow id; compared with the first",
    )
    compared.add_argument("--alphas", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    compared.add_argument("--delta", type=float, default=0.1)
    compared.add_argument(
        "--choose",
        action="store_true",
        help="mark the calibrated retriever with the smallest sets at the first alpha as chosen "
        "among these: its guarantee then holds in spite of the choice",
    )
    compared.add_argument("--json", action="store_true", help="print JSON")
    sets = command(data).add_subparsers(required=True, metavar="ACTION")
    listed = sets.add_parser("list", help="which sets there are, and which are on disk")
    listed.set_defaults(action=_list)
    checked = sets.add_parser("check", help="verify a copy: counts, pictures, checksums")
    checked.set_defaults(action=_check)
    checked.add_argument("name", help="of the data set")
    checked.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of the set's reader"
    )
    for one in (listed, checked):
        one.add_argument("--root", help="folder of the data sets (default: RCIR_DATA, or data)")
    shown = command(demo)
    shown.add_argument(
        "--output",
        type=Path,
        default=Path("runs/demo"),
        help="folder to write to; what an earlier demo left there is replaced",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
