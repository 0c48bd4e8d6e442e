"""Event loop mailboxes: items from other threads arrive complete and in order, with few wakes."""

import asyncio
import threading

from jaxinfra.serving.http.service import Deliveries, Mailbox

_EACH = 2000


async def taken(box, count):
    """The values of a mailbox, until there are as many, and none more."""
    values = []
    while len(values) < count:
        values += await box.take()
    assert len(values) == count
    return values


def test_all_that_threads_tell_arrives_in_their_order():
    async def heard() -> list[list[tuple[int, int]]]:
        loop = asyncio.get_running_loop()
        deliveries, boxes = Deliveries(loop), [Mailbox(loop) for _ in range(3)]

        def tell(thread: int) -> None:
            for i in range(_EACH):
                deliveries.put(boxes[i % 3], (thread, i))

        threads = [threading.Thread(target=tell, args=(i,)) for i in range(4)]
        for each in threads:
            each.start()
        counts = [4 * len(range(place, _EACH, 3)) for place in range(3)]
        found = [await taken(*each) for each in zip(boxes, counts, strict=True)]
        for each in threads:
            each.join()
        return found

    found = asyncio.run(asyncio.wait_for(heard(), 60))
    for place, told in enumerate(found):
        for thread in range(4):
            assert [i for who, i in told if who == thread] == [*range(place, _EACH, 3)]


def test_a_loop_is_woken_once_for_all_that_came_meanwhile(monkeypatch):
    async def wakes() -> tuple[int, int, list[int]]:
        loop, count = asyncio.get_running_loop(), 0
        box = Mailbox(loop)
        called = loop.call_soon_threadsafe

        def counted(*args):
            nonlocal count
            count += 1
            return called(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        deliveries = Deliveries(loop)

        def tell() -> None:
            for i in range(50):
                deliveries.put(box, i)

        def told_by_a_thread() -> None:  # while the loop waits for it, and looks at nothing
            thread = threading.Thread(target=tell)
            thread.start()
            thread.join()

        told_by_a_thread()
        first = await box.take()
        once = count
        told_by_a_thread()
        assert await box.take() == first
        return once, count, first

    assert asyncio.run(wakes()) == (1, 2, [*range(50)])
