"""The `rcir` command. The jobs are imported when they are asked for, and only here."""

from __future__ import annotations

import shutil
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
from PIL import Image

from rcir.api import VARIABLE, default_retriever, use
from rcir.config import reporting_errors
from rcir.data import read_image
from rcir.errors import InvalidConfig
from rcir.risk import Risk

if TYPE_CHECKING:
    from calibration import Calibrated

DEMO_ALPHA = DEMO_DELTA = 0.1
DEMO_PARTS = ("training", "queries", "retriever", "report.html", "results.json")


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
    )
    print(dumps(answer.to_dict(), indent=1) if options.json else answer)


def demo(options: Namespace) -> None:
    """Train, calibrate, measure and retrieve on handwritten two-digit numbers."""
    import torch

    from calibration import CalibrationConfig, calibrate, print_table, write_results
    from rcir.data import Augmentation, DataConfig
    from rcir.losses import LossConfig
    from training import TrainingConfig, train

    started = time.monotonic()
    torch.set_num_threads(1)  # on images this small, more threads only wait for each other
    _clear(options.output)
    config = TrainingConfig(
        name="training",
        data=DataConfig("digits", seed=1),  # options were chosen on seed 0
        storage=str(options.output),
        augmentation=Augmentation(occlusion=0.15),
        loss=LossConfig(kl_scale=1e-5),
    )
    print("Training: Bayesian Triplet Loss on two-digit numbers, occluded at random")
    run = train(config)
    print("\nCalibration: on unseen classes, half of the digits occluded")
    outcome = calibrate(CalibrationConfig(str(run.path), output=str(options.output)))
    print_table(outcome.evaluation)
    example = _show_queries(outcome, options.output / "queries")
    write_results(options.output / "results.json", outcome.evaluation, time.monotonic() - started)
    print(f"\nreport:    {outcome.report}\nretriever: {outcome.folder}\ntry:")
    print(
        f"  {sys.argv[0]} retrieve {example} --retriever {outcome.folder} "
        f"--alpha {DEMO_ALPHA} --delta {DEMO_DELTA}"
    )


def _clear(output: Path) -> None:
    """Remove what an earlier demo wrote; refuse a folder that holds anything else."""
    if output.exists():
        names = {path.name for path in output.iterdir()} if output.is_dir() else {output.name}
        ours = names <= set(DEMO_PARTS) and (output / "training" / "run.json").is_file()
        if names and not ours:
            raise InvalidConfig(
                f"{output} exists and is not the output of a demo: it is left alone; name another "
                "folder with --output"
            )
        for name in names:
            path = output / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    output.mkdir(parents=True, exist_ok=True)


def _show_queries(outcome: Calibrated, folder: Path) -> Path:
    """Retrieve for three test queries, easy to hard; save them as PNG; return the hardest."""
    test = outcome.splits.test
    order = np.argsort(outcome.test.found.uncertainty, kind="stable")
    folder.mkdir()
    for name, quantile in (("easy", 0.05), ("medium", 0.6), ("hard", 0.9)):
        row = int(order[int(quantile * len(order))])
        path = folder / f"{name}.png"
        Image.fromarray(read_image(test.images[row], channels=1)).save(path)
        answer = outcome.retriever.retrieve(path, alpha=DEMO_ALPHA, delta=DEMO_DELTA)
        shown = " ".join(f"{label:02d}" for label in (answer.labels or ())[:12])
        more = f" + {answer.size - 12} more" if answer.size > 12 else ""
        print(
            f"{name:>6}: a {test.labels[row]:02d}, uncertainty {answer.uncertainty:.2g} -> "
            f"{answer.size} image{'s' * (answer.size > 1)}: {shown}{more}"
        )
    print(answer.guarantee)
    return path


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
    asked.add_argument("--json", action="store_true", help="print JSON")
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
