"""Batches of requests: those that arrive while the model is busy are answered together."""

import asyncio
import threading

import pytest

from rcir.serving.batching import Batcher
from rcir.serving.errors import Busy, Stopping, TooLarge


def run(scenario, capacity=100):
    """Run a scenario with a batcher whose work waits for `go`; return the batches of the work."""
    batches, go = [], threading.Event()

    def work(batch):
        batches.append(list(batch))
        assert go.wait(60)
        return [ValueError(one) if one == "bad" else one.upper() for one in batch]

    async def main():
        await scenario(Batcher(work, capacity), go)

    asyncio.run(asyncio.wait_for(main(), 120))
    return batches


async def start(batcher, names):
    """Requests that wait in the batcher, or are at work there."""
    tasks = [asyncio.create_task(batcher.ask(name, 1)) for name in names]
    await asyncio.sleep(0.05)
    return tasks


def test_waiting_requests_are_the_next_batch_and_those_that_left_are_not_answered():
    async def scenario(batcher, go):
        first = await start(batcher, "a")
        waiting = await start(batcher, "bcd")
        waiting.pop(0).cancel()
        await asyncio.sleep(0.05)
        go.set()
        assert [await one for one in first + waiting] == ["A", "C", "D"]

    assert run(scenario) == [["a"], ["c", "d"]]


def test_a_request_that_fails_fails_alone():
    async def scenario(batcher, go):
        go.set()
        tasks = (batcher.ask(name, 1) for name in ("a", "bad", "c"))
        first, failed, last = await asyncio.gather(*tasks, return_exceptions=True)
        assert (first, type(failed), last) == ("A", ValueError, "C")

    run(scenario)


def test_an_error_of_the_work_is_raised_by_each_request_of_the_batch():
    def work(batch):
        raise MemoryError("no room")

    async def scenario():
        batcher = Batcher(work, 10)
        tasks = (batcher.ask(name, 1) for name in "ab")
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in errors] == [MemoryError, MemoryError]
        await batcher.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_requests_beyond_the_capacity_are_refused_until_there_is_room():
    async def scenario(batcher, go):
        with pytest.raises(TooLarge, match="4"):
            await batcher.ask("a", 5)
        (first,) = await start(batcher, "a")  # at work
        second = asyncio.create_task(batcher.ask("b", 3))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="3"):
            await batcher.ask("c", 2)
        go.set()
        assert [await first, await second] == ["A", "B"]
        assert await batcher.ask("d", 4) == "D"

    run(scenario, capacity=4)


def test_accepted_requests_are_answered_before_it_stops():
    async def scenario(batcher, go):
        tasks = await start(batcher, "abc")
        stopping = asyncio.create_task(batcher.stop())
        await asyncio.sleep(0)
        with pytest.raises(Stopping):
            await batcher.ask("d", 1)
        go.set()
        await stopping
        assert [await one for one in tasks] == ["A", "B", "C"]

    run(scenario)
