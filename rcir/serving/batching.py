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

from rcir.errors import InvalidConfig, RiskUnattainable
from rcir.retrieval.answer import Retrieval, State
from rcir.retrieval.queries import Queries
from rcir.serving.errors import Busy, Stopping, TooLarge
from rcir.serving.schemas import Terms
from rcir.serving.served import Served

MAX_BATCH_QUERIES = 512
Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Result = TypeVar("Result")
AnsweredQueries: TypeAlias = "tuple[Queries, list[Retrieval]]"


class Batcher(Generic[Item, Outcome]):
    """A queue of at most `capacity` queries in front of the thread of the model.

    There, `work` answers all waiting requests together, each by an outcome or an exception.
    """

    def __init__(
        self, work: Callable[[Sequence[Item]], Sequence[Outcome | Exception]], capacity: int
    ) -> None:
        self.capacity = capacity
        self.stopping = False  # True: no more requests are accepted
        self._answer = work
        self._queue: deque[tuple[Item, int, asyncio.Future[Outcome]]] = deque()
        self._queued = 0
        self._thread = ThreadPoolExecutor(1, "rcir-model")
        self._working: asyncio.Task[None] | None = None

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
        self.stopping = True
        if self._working is not None:
            await asyncio.wait([self._working])
        self._thread.shutdown()

    def require_room(self, n: int) -> None:
        """Raise `TooLarge`, `Busy` or `Stopping` unless n more queries may wait."""
        if self.stopping:
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


def answer_batch(batch: Sequence[PreparedRequest]) -> list[AnsweredQueries | Exception]:
    """Return the queries and answers of each request, or its exception."""
    outcomes: list[Any] = [request.prepared for request in batch]

    def embed(row: int, parts: list[Any]) -> list[Queries]:
        return batch[row].served.queries(parts)

    def answer(row: int, parts: list[Queries]) -> list[AnsweredQueries]:
        retriever, terms = batch[row].served.retriever, batch[row].terms
        queries = parts[0] if len(parts) == 1 else Queries.joined(parts)
        state: Any = State(retriever.searcher, retriever.calibration)
        answers = iter(state.answer(queries, terms.request.promised, terms.outside))
        return [(part, [next(answers) for _ in range(len(part))]) for part in parts]

    def alike(row: int) -> tuple[object, ...]:
        request, queries = batch[row], outcomes[row]
        lacks = (values is None for values in (queries.uncertainty, queries.keys, queries.pictures))
        return id(request.served), request.terms.guarantee, request.terms.outside, *lacks

    def describe(row: int, parts: list[Queries]) -> list[Queries]:
        request = batch[row].terms.request
        return [batch[row].served.retriever.searcher.as_requested(part, request) for part in parts]

    _replace_by_group(outcomes, lambda row: id(batch[row].served), embed)
    _replace_by_group(outcomes, lambda row: row, describe)  # keys and encounters are its own
    _replace_by_group(outcomes, alike, answer)
    return outcomes


def _replace_by_group(
    outcomes: list[Any],
    key: Callable[[int], Any],
    work: Callable[[int, list[Any]], Sequence[Any]],
) -> None:
    """Replace outcomes of requests by those of `work(row, parts)`, except for exceptions.

    Requests with equal keys are worked on together, and each alone if that fails.
    """

    def replace(rows: list[int]) -> None:
        try:
            results = work(rows[0], [outcomes[row] for row in rows])
            replaced = dict(zip(rows, results, strict=True))
        except (RiskUnattainable, InvalidConfig) as error:  # of the request that all of them make
            replaced = dict.fromkeys(rows, error)
        except Exception as error:
            if len(rows) > 1:
                for row in rows:
                    replace([row])
                return
            replaced = {rows[0]: error}
        for row, result in replaced.items():
            outcomes[row] = result

    rows = [row for row, outcome in enumerate(outcomes) if not isinstance(outcome, Exception)]
    for _, group in groupby(sorted(rows, key=key), key):
        replace(list(group))
