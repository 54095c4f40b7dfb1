"""Batches of requests: those that wait while the model works, and their answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Generic, TypeAlias, TypeVar

from rcir.errors import InvalidConfig, RcirError, RiskUnattainable
from rcir.retrieval.answer import Retrieval
from rcir.retrieval.queries import Queries
from rcir.serving.middleware import TooLarge
from rcir.serving.schemas import Terms
from rcir.serving.served import Served

Taken = TypeVar("Taken")
Outcome = TypeVar("Outcome")
Result = TypeVar("Result")
MOST = 512  # queries in a batch


class Busy(RcirError):
    """More queries wait than the capacity."""


class Stopping(RcirError):
    """The server answers what it has taken, and takes no more."""


class Batcher(Generic[Taken, Outcome]):
    """One model, one thread: it takes what waits, answers it, and takes what waits then.

    No timer: alone, a request is answered at once; among many, it shares its batch.

    Args:
        work: answers a batch, in the thread: of each request what came of it, or an exception.
        capacity: queries that may wait; more are refused.
    """

    def __init__(
        self, work: Callable[[Sequence[Taken]], Sequence[Outcome | Exception]], capacity: int
    ) -> None:
        self.capacity = capacity
        self._answer = work
        self._queue: deque[tuple[Taken, int, asyncio.Future[Outcome]]] = deque()
        self._queued = 0
        self._thread = ThreadPoolExecutor(1, "rcir-model")
        self._working: asyncio.Task[None] | None = None
        self._stopping = False

    async def ask(self, request: Taken, n: int) -> Outcome:
        """The outcome of a request of n queries.

        Raises:
            Busy: too many wait.
            Stopping: no more are taken.
            Exception: what `work` gave for it.
        """
        self.require_room(n)
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._queue.append((request, n, outcome))
        self._queued += n
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await outcome

    async def run(self, work: Callable[[], Result]) -> Result:
        """Do something else with the model, between two batches.

        Raises:
            Busy, Stopping: as `ask` does.
        """
        self.require_room(1)
        self._queued += 1
        try:
            return await self._run(work)
        finally:
            self._queued -= 1

    async def stop(self) -> None:
        """Answer what was taken, take no more, and end the thread."""
        self._stopping = True
        if self._working is not None:
            await asyncio.wait([self._working])
        self._thread.shutdown()

    @property
    def stopping(self) -> bool:
        """True if no more requests are accepted."""
        return self._stopping

    def require_room(self, n: int) -> None:
        """Raise `TooLarge`, `Busy` or `Stopping` unless n more queries may wait."""
        if self._stopping:
            raise Stopping("the server is stopping: ask another one, or again in a moment")
        if n > self.capacity:
            raise TooLarge(f"{n} queries at once: send at most {self.capacity} at a time")
        if self._queued + n > self.capacity:
            raise Busy(
                f"{self._queued} queries wait, and at most {self.capacity} may: ask again in a "
                "moment, or with fewer at a time"
            )

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _work(self) -> None:
        while self._queue:
            requests, outcomes = self._take()
            try:
                answers = await self._run(partial(self._answer, requests))
            except Exception as error:  # each of them is told
                answers = [error] * len(requests)
            for outcome, one in zip(outcomes, answers, strict=True):
                if outcome.done():  # whoever asked has gone
                    continue
                if isinstance(one, Exception):
                    outcome.set_exception(one)
                else:
                    outcome.set_result(one)

    def _take(self) -> tuple[list[Taken], list[asyncio.Future[Outcome]]]:
        requests, outcomes, n_queries = [], [], 0
        while self._queue and (not n_queries or n_queries + self._queue[0][1] <= MOST):
            request, n, outcome = self._queue.popleft()
            self._queued -= n
            n_queries += n
            if not outcome.done():
                requests.append(request)
                outcomes.append(outcome)
        return requests, outcomes


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
    """Return the queries and answers of each request, or the exception that it ends with."""
    embedded: dict[int, Any] = {}
    for group in _groups(range(len(batch)), lambda place: id(batch[place].served)):
        served = batch[group[0]].served
        parts = [batch[place].prepared for place in group]
        embedded |= _each(group, lambda parts: served.queries(parts), parts)  # noqa: B023
    outcomes = {place: one for place, one in embedded.items() if isinstance(one, Exception)}

    def alike(place: int) -> tuple[int, str, bool]:
        first = batch[place]
        return id(first.served), first.terms.key, embedded[place].uncertainty is None

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
