"""`rcir retrieve PICTURE ...`"""

from __future__ import annotations

from argparse import Action, ArgumentError, ArgumentParser, Namespace
from functools import partial
from json import dumps
from typing import Any

from rcir.errors import InvalidConfig
from rcir.printable import printable
from rcir.risk.request import RequestOption, request_options


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments: queries, the retriever, the guarantee."""
    images = parser.add_argument(
        "image",
        nargs="+",
        action="extend",
        help="image file; for a retriever of vectors, a file of vectors",
    )
    parser.add_argument(
        "--retriever", help="folder or MLflow URI; without it, RCIR_RETRIEVER names it"
    )
    for one in request_options():
        kind: dict[str, Any] = {"action": "store_true"}
        if one.kind is not bool:
            value = "|".join(one.choices) or one.name.upper()
            kind = {
                "action": partial(_Values, option=one, images=images),
                "nargs": "+" if one.table else 1,
                "metavar": (value, "NAME=NUMBER") if one.table else value,
            }
        flag = f"--{one.name.replace('_', '-')}"
        parser.add_argument(flag, default=one.default, help=one.help, **kind)
    parser.add_argument(
        "--json", action="store_true", help="print JSON: of several pictures, a list"
    )


class _Values(Action):
    """Read the value of an option; words that follow NAME=NUMBER, or one value, are images."""

    def __init__(self, *, option: RequestOption, images: Action, **settings: Any) -> None:
        super().__init__(**settings)
        self.option, self.images = option, images

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, flag: str | None = None
    ) -> None:
        last = next((n for n, word in enumerate(values) if n and "=" not in word), len(values))
        try:
            setattr(namespace, self.dest, self.option.parse(values[:last]))
        except InvalidConfig as error:
            raise ArgumentError(self, str(error)) from None
        if images := values[last:]:
            self.images(parser, namespace, images)
            self.images.required = False


def run(options: Namespace) -> None:
    """Print the answer of each picture."""
    from rcir.api import default_retriever, use

    retriever = use(options.retriever) if options.retriever else default_retriever()
    request = {one.name: getattr(options, one.name) for one in request_options()}
    names: list[str] = options.image
    queries: dict[str, Any] = {}
    if retriever.encoder is None:
        names, queries = _vectors(options.image)
    query = queries.pop("query", names)
    answers = retriever.retrieve(query, **request, **queries)
    if options.json:
        plain = [answer.to_dict() for answer in answers]
        print(dumps(plain if len(plain) > 1 else plain[0], indent=1))
    elif len(answers) == 1:
        print(answers[0])
    else:
        for name, answer in zip(names, answers, strict=True):
            print(f"{printable(name)}:\n{answer}\n")


def _vectors(files: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Names of the vectors of one file, and what `Retriever.retrieve` is asked."""
    from pathlib import Path

    from rcir.data.vector_files import read_all_vectors

    if len(files) > 1:
        raise InvalidConfig(f"{len(files)} files: of vectors give one, with a row for each query")
    table = read_all_vectors(Path(files[0]))
    names = table.ids or [f"row {row}" for row in range(len(table))]
    arguments = {"query": table.vectors, "uncertainty": table.uncertainty, "model": table.model}
    return names, arguments
