"""A batch of requests, answered by the retrievers that they were prepared for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

from rcir.errors import InvalidConfig, RiskUnattainable
from rcir.retrieval.answer import Retrieval
from rcir.retrieval.queries import Queries
from rcir.serving.served import Served
from rcir.serving.terms import Terms

AnsweredQueries: TypeAlias = "tuple[Queries, list[Retrieval]]"


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """A request that waits for the model.

    Attributes:
        served: the retriever that it was prepared for, which answers it.
        prepared: its queries, see `Served`.
        terms: the guarantee that is asked for.
    """

    served: Served
    prepared: Any
    terms: Terms


def answered(batch: Sequence[PreparedRequest]) -> list[AnsweredQueries | Exception]:
    """Of each request its queries and their answers, or the exception that it ends with."""
    embedded: dict[int, Any] = {}
    for group in _groups(range(len(batch)), lambda place: id(batch[place].served)):
        served = batch[group[0]].served
        parts = [batch[place].prepared for place in group]
        embedded |= _each(group, lambda parts: served.queries(parts), parts)  # noqa: B023
    outcomes = {place: one for place, one in embedded.items() if isinstance(one, Exception)}

    def alike(place: int) -> tuple[int, str, bool]:
        asked = batch[place]
        return id(asked.served), asked.terms.key, embedded[place].uncertainty is None

    for group in _groups(embedded.keys() - outcomes.keys(), alike):
        first = batch[group[0]]
        parts = [embedded[place] for place in group]
        outcomes |= _each(group, lambda parts: _retrieved(first, parts), parts)  # noqa: B023
    return [outcomes[place] for place in range(len(batch))]


def _groups(places: Any, key: Callable[[int], Any]) -> list[list[int]]:
    return [list(group) for _, group in groupby(sorted(places, key=key), key)]


def _each(
    group: list[int], work: Callable[[list[Any]], list[Any]], parts: list[Any]
) -> dict[int, Any]:
    """The outcomes of parts together; if that fails, of each by itself: none spoils the others."""
    try:
        return dict(zip(group, work(parts), strict=True))
    except (RiskUnattainable, InvalidConfig) as error:  # of what is asked of all of them
        return dict.fromkeys(group, error)
    except Exception as error:
        if len(group) == 1:
            return {group[0]: error}
    alone: dict[int, Any] = {}
    for place, part in zip(group, parts, strict=True):
        alone |= _each([place], work, [part])
    return alone


def _retrieved(first: PreparedRequest, parts: list[Queries]) -> list[AnsweredQueries]:
    """Answers of requests of one guarantee, asked of one retriever."""
    terms, queries = first.terms, parts[0] if len(parts) == 1 else Queries.joined(parts)
    answers = iter(
        first.served.retriever.retrieve(queries, terms.alpha, terms.delta, **terms.options)
    )
    return [(part, [next(answers) for _ in range(len(part))]) for part in parts]
