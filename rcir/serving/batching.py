"""Batches of the requests that arrive while the model is busy, and their answers."""

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

MAX_BATCH_QUERIES = 512
Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Result = TypeVar("Result")
AnsweredQueries: TypeAlias = "tuple[Queries, list[Retrieval]]"


class Busy(RcirError):
    """More queries wait than the capacity."""


class Stopping(RcirError):
    """The server answers the accepted requests, and accepts no more."""


class Batcher(Generic[Item, Outcome]):
    """A queue in front of the thread of the model, which answers all waiting requests together.

    There is no timer: a single request is answered at once.

    Args:
        work: answers a batch in the thread, with an outcome or an exception for each request.
        capacity: maximum number of waiting queries.
    """

    def __init__(
        self, work: Callable[[Sequence[Item]], Sequence[Outcome | Exception]], capacity: int
    ) -> None:
        self.capacity = capacity
        self._answer = work
        self._queue: deque[tuple[Item, int, asyncio.Future[Outcome]]] = deque()
        self._queued = 0
        self._thread = ThreadPoolExecutor(1, "rcir-model")
        self._working: asyncio.Task[None] | None = None
        self._stopping = False

    async def ask(self, request: Item, n: int) -> Outcome:
        """Return the outcome of a request of n queries."""
        self.require_room(n)
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._queue.append((request, n, outcome))
        self._queued += n
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await outcome

    async def run(self, work: Callable[[], Result]) -> Result:
        """Do other work in the thread of the model, between two batches."""
        self.require_room(1)
        self._queued += 1
        try:
            return await self._run(work)
        finally:
            self._queued -= 1

    async def stop(self) -> None:
        """Answer the accepted requests, accept no more, and end the thread."""
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
            raise Stopping("the server is stopping: try another one, or again in a moment")
        if n > self.capacity:
            raise TooLarge(f"{n} queries at once: send at most {self.capacity} at a time")
        if self._queued + n > self.capacity:
            raise Busy(
                f"{self._queued} queries wait, and at most {self.capacity} may: try again in a "
                "moment, or with fewer at a time"
            )

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _work(self) -> None:
        while self._queue:
            requests, outcomes = self._take()
            try:
                answers = await self._run(partial(self._answer, requests))
            except Exception as error:
                answers = [error] * len(requests)
            for outcome, answer in zip(outcomes, answers, strict=True):
                if outcome.done():  # the client has gone
                    continue
                if isinstance(answer, Exception):
                    outcome.set_exception(answer)
                else:
                    outcome.set_result(answer)

    def _take(self) -> tuple[list[Item], list[asyncio.Future[Outcome]]]:
        """Take the next batch from the queue."""
        requests, outcomes, n_queries = [], [], 0
        while self._queue and (not n_queries or n_queries + self._queue[0][1] <= MAX_BATCH_QUERIES):
            request, n, outcome = self._queue.popleft()
            self._queued -= n
            n_queries += n
            if not outcome.done():
                requests.append(request)
                outcomes.append(outcome)
        return requests, outcomes


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """A request: its retriever, its queries as `Served` prepared them, and its terms."""

    served: Served
    prepared: Any
    terms: Terms


def answered(batch: Sequence[PreparedRequest]) -> list[AnsweredQueries | Exception]:
    """Return the queries and answers of each request, or its exception."""
    embedded: dict[int, Any] = {}
    for group in _groups(range(len(batch)), lambda place: id(batch[place].served)):
        served = batch[group[0]].served
        parts = [batch[place].prepared for place in group]
        embedded |= _each(group, served.queries, parts)
    outcomes = {place: one for place, one in embedded.items() if isinstance(one, Exception)}

    def alike(place: int) -> tuple[int, str, bool]:
        request = batch[place]
        return id(request.served), request.terms.key, embedded[place].uncertainty is None

    for group in _groups(embedded.keys() - outcomes.keys(), alike):
        parts = [embedded[place] for place in group]
        outcomes |= _each(group, partial(_answers, batch[group[0]]), parts)
    return [outcomes[place] for place in range(len(batch))]


def _groups(places: Any, key: Callable[[int], Any]) -> list[list[int]]:
    return [list(group) for _, group in groupby(sorted(places, key=key), key)]


def _each(
    group: list[int], work: Callable[[list[Any]], list[Any]], parts: list[Any]
) -> dict[int, Any]:
    """Return the outcomes of parts together; if that fails, of each part alone."""
    try:
        return dict(zip(group, work(parts), strict=True))
    except (RiskUnattainable, InvalidConfig) as error:  # of the request that all of them make
        return dict.fromkeys(group, error)
    except Exception as error:
        if len(group) == 1:
            return {group[0]: error}
    return {
        place: _each([place], work, [part])[place] for place, part in zip(group, parts, strict=True)
    }


def _answers(request: PreparedRequest, parts: list[Queries]) -> list[AnsweredQueries]:
    """Answer the queries of requests that have the retriever and the guarantee of `request`."""
    retriever, terms = request.served.retriever, request.terms
    queries = parts[0] if len(parts) == 1 else Queries.joined(parts)
    answers = iter(retriever.retrieve(queries, terms.alpha, terms.delta, **terms.options))
    return [(part, [next(answers) for _ in range(len(part))]) for part in parts]
