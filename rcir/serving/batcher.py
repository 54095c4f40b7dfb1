"""Requests answered in batches: what waits while the model works is the next batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from rcir.errors import InvalidConfig, RcirError, RiskUnattainable
from rcir.retrieval.answer import Retrieval
from rcir.retrieval.queries import Queries
from rcir.serving.served import Served
from rcir.serving.terms import Terms

Found = TypeVar("Found")
MOST = 512  # queries in a batch


class Busy(RcirError):
    """More queries wait than may."""


class Stopping(RcirError):
    """The server answers what it has taken, and takes no more."""


@dataclass(eq=False)
class Waiting:
    """A request that waits for the model.

    Attributes:
        served: the retriever that it was prepared for, which answers it.
        prepared: its n queries.
        n: how many.
        terms: the guarantee that is asked for.
        outcome: its answers in the end, or what went wrong.
    """

    served: Served
    prepared: Any
    n: int
    terms: Terms
    outcome: asyncio.Future[tuple[Queries, list[Retrieval]]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Batcher:
    """One model, one thread: it takes what waits, answers it, and takes what waits then.

    No timer: alone, a request is answered at once; among many, it shares its batch.

    Args:
        capacity: queries that may wait; more are refused.
        observe: called with the number of queries of each batch.
    """

    def __init__(self, capacity: int, observe: Callable[[int], None]) -> None:
        self.capacity = capacity
        self._observe = observe
        self._queue: deque[Waiting] = deque()
        self._queued = 0
        self._thread = ThreadPoolExecutor(1, "rcir-model")
        self._working: asyncio.Task[None] | None = None
        self._stopping = False

    async def ask(
        self, served: Served, prepared: Any, n: int, terms: Terms
    ) -> tuple[Queries, list[Retrieval]]:
        """The queries as they were searched, and their answers.

        Raises:
            Busy: too many wait.
            Stopping: the server does not take any more.
            RcirError: as `Retriever.retrieve` does.
        """
        self._require_room(n)
        waiting = Waiting(served, prepared, n, terms)
        self._queue.append(waiting)
        self._queued += n
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await waiting.outcome

    async def run(self, work: Callable[[], Found]) -> Found:
        """Do something else with the model, between two batches.

        Raises:
            Busy, Stopping: as `ask` does.
        """
        self._require_room(1)
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

    def _require_room(self, n: int) -> None:
        if self._stopping:
            raise Stopping("the server is stopping: ask another one, or again in a moment")
        if self._queued + n > self.capacity:
            raise Busy(
                f"{self._queued} queries wait, and at most {self.capacity} may: ask again in a "
                "moment, or with fewer at a time"
            )

    async def _run(self, work: Callable[[], Found]) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _work(self) -> None:
        while self._queue:
            batch = self._take()
            self._observe(sum(each.n for each in batch))
            outcomes = await self._run(partial(answered, batch))
            for each, outcome in zip(batch, outcomes, strict=True):
                if each.outcome.done():  # whoever asked has gone
                    continue
                if isinstance(outcome, Exception):
                    each.outcome.set_exception(outcome)
                else:
                    each.outcome.set_result(outcome)

    def _take(self) -> list[Waiting]:
        batch: list[Waiting] = []
        while self._queue and (not batch or sum(w.n for w in batch) + self._queue[0].n <= MOST):
            waiting = self._queue.popleft()
            self._queued -= waiting.n
            if not waiting.outcome.done():
                batch.append(waiting)
        return batch


def answered(batch: list[Waiting]) -> list[Any]:
    """Of each request, (its queries, their answers), or the exception that it ends with."""
    outcomes: dict[int, Any] = {}
    embedded: dict[int, Queries] = {}
    places = sorted(range(len(batch)), key=lambda place: id(batch[place].served))
    for _, same in groupby(places, lambda place: id(batch[place].served)):
        group = list(same)
        served = batch[group[0]].served
        try:
            found = served.queries([batch[place].prepared for place in group])
        except Exception as error:
            outcomes |= dict.fromkeys(group, error)
        else:
            embedded |= dict(zip(group, found, strict=True))

    def alike(place: int) -> tuple[int, str, bool]:
        waiting = batch[place]
        return id(waiting.served), waiting.terms.key, embedded[place].uncertainty is None

    for _, same in groupby(sorted(embedded, key=alike), alike):
        group = list(same)
        try:
            outcomes |= dict(zip(group, _retrieved(batch, embedded, group), strict=True))
        except (RiskUnattainable, InvalidConfig) as error:  # of what is asked of all of them
            outcomes |= dict.fromkeys(group, error)
        except Exception as error:
            outcomes |= {group[0]: error}
            for place in group if len(group) > 1 else ():  # one must not spoil the others
                try:
                    (outcomes[place],) = _retrieved(batch, embedded, [place])
                except Exception as own:
                    outcomes[place] = own
    return [outcomes[place] for place in range(len(batch))]


def _retrieved(
    batch: list[Waiting], embedded: dict[int, Queries], group: list[int]
) -> list[tuple[Queries, list[Retrieval]]]:
    """Answers of requests of one guarantee, asked of one retriever."""
    first = batch[group[0]]
    terms, parts = first.terms, [embedded[place] for place in group]
    queries = parts[0] if len(parts) == 1 else Queries.joined(parts)
    answers = iter(
        first.served.retriever.retrieve(queries, terms.alpha, terms.delta, **terms.options)
    )
    return [(part, [next(answers) for _ in range(len(part))]) for part in parts]
