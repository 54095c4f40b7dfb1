"""`rcir retrieve PICTURE ...`"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from json import dumps

from rcir.levels import ALPHA, DELTA
from rcir.printable import printable
from rcir.retrieval.answer import Options
from rcir.risk.risks import risk_names


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: queries, the retriever, the guarantee."""
    parser.add_argument("image", nargs="+", help="image file")
    parser.add_argument(
        "--retriever", help="folder or MLflow URI; without it, RCIR_RETRIEVER names it"
    )
    parser.add_argument(
        "--alpha", type=float, default=ALPHA, help="share of queries whose set may hold no match"
    )
    parser.add_argument(
        "--delta", type=float, default=DELTA, help="probability of misleading calibration queries"
    )
    parser.add_argument("--risk", choices=risk_names(), default="miss", help="what to control")
    parser.add_argument("--distinct", choices=["label"], help="one image of each label")
    parser.add_argument("--group", help="the group that the queries belong to")
    parser.add_argument(
        "--abstain", action="store_true", help="one image, or none if too uncertain"
    )
    parser.add_argument(
        "--simultaneous", action="store_true", help="alpha was chosen after looking"
    )
    parser.add_argument(
        "--anytime", action="store_true", help="calibration queries were added one by one"
    )
    parser.add_argument("--mix", choices=["any"], help="whatever the mix of the groups")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: of several pictures, a list"
    )


def run(options: Namespace) -> None:
    """Print the answer of each picture."""
    from rcir.api import default_retriever, use

    retriever = use(options.retriever) if options.retriever else default_retriever()
    asked = {name: getattr(options, name) for name in Options.__annotations__}
    answers = retriever.retrieve(options.image, options.alpha, options.delta, **asked)
    if options.json:
        found = [answer.to_dict() for answer in answers]
        print(dumps(found if len(found) > 1 else found[0], indent=1))
    elif len(answers) == 1:
        print(answers[0])
    else:
        for image, answer in zip(options.image, answers, strict=True):
            print(f"{printable(image)}:\n{answer}\n")
