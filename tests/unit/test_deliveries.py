"""What other threads tell the queues of an event loop: all of it, in order, with few wakes."""

import asyncio
import threading

from jaxinfra.serving.http.service import Deliveries

_EACH = 2000


def test_all_that_threads_tell_arrives_in_their_order():
    async def heard() -> list[list[tuple[int, int]]]:
        deliveries = Deliveries(asyncio.get_running_loop())
        queues = [asyncio.Queue() for _ in range(3)]

        def tell(thread: int) -> None:
            for i in range(_EACH):
                deliveries.put(queues[i % 3], (thread, i))

        threads = [threading.Thread(target=tell, args=(i,)) for i in range(4)]
        for each in threads:
            each.start()
        counts = [4 * len(range(place, _EACH, 3)) for place in range(3)]
        found = [
            [await queue.get() for _ in range(count)]
            for queue, count in zip(queues, counts, strict=True)
        ]
        for each in threads:
            each.join()
        assert all(queue.empty() for queue in queues)
        return found

    found = asyncio.run(asyncio.wait_for(heard(), 60))
    for place, told in enumerate(found):
        for thread in range(4):
            assert [i for who, i in told if who == thread] == [*range(place, _EACH, 3)]


def test_a_loop_is_woken_once_for_all_that_came_meanwhile(monkeypatch):
    async def wakes() -> tuple[int, int, list[int]]:
        loop, queue, count = asyncio.get_running_loop(), asyncio.Queue(), 0
        called = loop.call_soon_threadsafe

        def counted(*args):
            nonlocal count
            count += 1
            return called(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        deliveries = Deliveries(loop)

        def tell() -> None:
            for i in range(50):
                deliveries.put(queue, i)

        def told_by_a_thread() -> None:  # while the loop waits for it, and looks at nothing
            thread = threading.Thread(target=tell)
            thread.start()
            thread.join()

        told_by_a_thread()
        first = [await queue.get() for _ in range(50)]
        once = count
        told_by_a_thread()
        assert [await queue.get() for _ in range(50)] == first
        return once, count, first

    assert asyncio.run(wakes()) == (1, 2, [*range(50)])
