"""Requests in batches: what waits while the model works is the next batch."""

import asyncio
import threading

import pytest

from rcir.serving.batcher import Batcher, Busy, Stopping
from rcir.serving.guards import TooLarge


def run(scenario, capacity=100):
    """A scenario with a batcher whose work waits for `go`, and the batches that it saw."""
    batches, go = [], threading.Event()

    def work(batch):
        batches.append(list(batch))
        assert go.wait(10)
        return [ValueError(one) if one == "bad" else one.upper() for one in batch]

    async def whole():
        batcher = Batcher(work, capacity)
        await scenario(batcher, go)

    asyncio.run(whole())
    return batches


def test_what_waits_is_the_next_batch():
    async def scenario(batcher, go):
        first = asyncio.create_task(batcher.ask("a", 1))
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(batcher.ask(name, 1)) for name in "bcd"]
        await asyncio.sleep(0.05)
        go.set()
        assert await first == "A"
        assert [await one for one in others] == ["B", "C", "D"]

    assert run(scenario) == [["a"], ["b", "c", "d"]]


def test_one_that_fails_fails_alone():
    async def scenario(batcher, go):
        go.set()
        found = await asyncio.gather(
            *(batcher.ask(name, 1) for name in ("a", "bad", "c")), return_exceptions=True
        )
        assert found[0] == "A"
        assert isinstance(found[1], ValueError)
        assert found[2] == "C"

    run(scenario)


def test_work_that_breaks_is_told_to_all_of_the_batch():
    def work(batch):
        raise MemoryError("no room")

    async def scenario():
        batcher = Batcher(work, 10)
        found = await asyncio.gather(
            *(batcher.ask(name, 1) for name in "ab"), return_exceptions=True
        )
        assert [str(one) for one in found] == ["no room", "no room"]
        await batcher.stop()

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_more_than_may_wait_are_refused_and_room_comes_back():
    async def scenario(batcher, go):
        first = asyncio.create_task(batcher.ask("a", 1))
        await asyncio.sleep(0.05)  # the model has it
        second = asyncio.create_task(batcher.ask("b", 3))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="3 queries wait"):
            await batcher.ask("c", 2)
        go.set()
        assert [await first, await second] == ["A", "B"]
        assert await batcher.ask("d", 4) == "D"

    run(scenario, capacity=4)


def test_more_than_can_ever_wait_are_told_how_many_may():
    async def scenario(batcher, go):
        with pytest.raises(TooLarge, match="send at most 4 at a time"):
            await batcher.ask("a", 5)

    run(scenario, capacity=4)


def test_what_was_taken_is_answered_before_it_stops():
    async def scenario(batcher, go):
        asked = [asyncio.create_task(batcher.ask(name, 1)) for name in "abc"]
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(batcher.stop())
        await asyncio.sleep(0)
        with pytest.raises(Stopping):
            await batcher.ask("d", 1)
        go.set()
        await stopping
        assert [await one for one in asked] == ["A", "B", "C"]

    run(scenario)


def test_whoever_left_is_not_answered():
    async def scenario(batcher, go):
        first = asyncio.create_task(batcher.ask("a", 1))
        await asyncio.sleep(0.05)
        gone, stays = (asyncio.create_task(batcher.ask(name, 1)) for name in "bc")
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0.01)
        go.set()
        assert [await first, await stays] == ["A", "C"]

    assert run(scenario) == [["a"], ["c"]]


def test_large_requests_make_batches_of_their_own():
    async def scenario(batcher, go):
        go.set()
        asked = [batcher.ask(name, n) for name, n in (("a", 1), ("b", 400), ("c", 200))]
        assert await asyncio.gather(*asked) == ["A", "B", "C"]

    assert run(scenario, capacity=1000) == [["a", "b"], ["c"]]
