"""What blocks that share a row tell each other, thread by thread: no interpreter has clusters."""

import collections
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import threads
from pallas_kernels.rows import exchange
from pallas_kernels.rows.config import Flat, Wide
from pallas_kernels.rows.smem import BARRIER_BYTES, TURNS
from tests.kernels.thread_stand_in import Ref, Warpgroup

WARPS = 4
NUMBERS, BARRIERS = 4096, 512  # where they lie in each block's shared memory


class Cluster(Warpgroup):
    """The threads of one warpgroup at a time, and what all blocks' memory and barriers count."""

    def __init__(self, num_numbers: int, num_parts: int, *, teams: int):
        super().__init__(jnp.bfloat16)
        self.shape = (teams * TURNS, num_numbers, num_parts)
        self.blocks: dict = collections.defaultdict(lambda: np.full(self.shape, np.nan, np.float32))
        self.expected: dict = collections.Counter()
        self.arrived: dict = collections.Counter()
        self.came: dict = collections.Counter()

    def inline_asm(self, result, operands, text, *_, **__):
        del result
        operands = [np.broadcast_to(x, self.count) for x in operands]
        if "expect_tx" in text:
            place, num_bytes, one = operands
            assert one.sum() == 1
            (i,) = np.flatnonzero(one)
            self.expected[self.rank, int(place[i])] += int(num_bytes[i])
            self.arrived[self.rank, int(place[i])] += 1
            return
        assert "st.async" in text, text
        most = int(re.findall(r"active, \$3, (\d+)", text)[0])
        for place, barrier, number, block in zip(*operands, strict=True):
            if block < most:
                at = np.unravel_index((int(place) - NUMBERS) // 4, self.shape)
                self.blocks[int(block)][at] = number
                self.came[int(block), int(barrier)] += 4

    def send(self, c, *, turn: int, rank: int, wg: int, numbers: list[np.ndarray]) -> None:
        """One warpgroup's exchange; numbers [warps] each."""
        self.rank = rank
        array = lambda x: types.SimpleNamespace(registers=np.array([x], object))  # noqa: E731
        first = rank * (self.shape[-1] // c.cluster) + wg * WARPS
        smem = types.SimpleNamespace(numbers=Ref(NUMBERS), exchanged=Ref(BARRIERS))
        smem.numbers.shape = self.shape
        each = []
        for x in numbers:  # every lane of a warp has its number
            held = np.empty(1, object)
            held[0] = np.repeat(x, 32)
            each.append(types.SimpleNamespace(registers=held))
        splat = lambda layout: types.SimpleNamespace(reduce=lambda _: layout)  # noqa: E731
        with self.running(), pytest.MonkeyPatch.context() as patch:
            utils = types.SimpleNamespace(
                ThreadSubset=types.SimpleNamespace(WARPGROUP=128),
                single_thread_predicate=lambda _: np.arange(self.count) == 0,
            )
            plgpu = types.SimpleNamespace(
                inline_mgpu=lambda **_: lambda f: lambda *args: f(None, *args),
                Layout=types.SimpleNamespace(WG_SPLAT=lambda _: None),
                RefType=lambda: None,
                layout_cast=lambda x, _: x,
            )
            places = {
                "arith": threads.arith, "mgpu_utils": utils, "plgpu": plgpu, "tile_layout": splat,
                "vectors": types.SimpleNamespace(extract=lambda x, **_: x),
            }  # fmt: skip
            for name, stand_in in places.items():
                patch.setattr(exchange, name, stand_in)
            exchange._to_cluster(c, smem, array(turn), array(first), tuple(each))


@pytest.mark.parametrize(
    ("c", "teams"),
    [
        (Wide(cluster=2), 1), (Wide(cluster=8, warpgroups=4), 1),
        (Flat(cluster=4, group=2, vector=2), 1), (Flat(cluster=8, group=1, vector=4), 1),
        (Flat(cluster=8, group=2, teams=2, vector=4), 2),
    ],
    ids=lambda x: x if isinstance(x, int) else f"{type(x).__name__} {x.cluster}x{x.warpgroups}",
)  # fmt: skip
@pytest.mark.parametrize("num_numbers", [1, 2, 3])
def test_every_block_gets_all_numbers_and_waits_for_their_bytes(c, teams, num_numbers):
    """More exchanges than turns; one sends a number less, as a second turn over a row may."""
    members = c.warpgroups // teams
    num_parts = c.cluster * members * WARPS
    cluster = Cluster(num_numbers, num_parts, teams=teams)
    rng = np.random.default_rng(0)
    for i, team in np.ndindex(TURNS + 3, teams):
        turn = team * TURNS + i % TURNS
        sent = num_numbers - (i == 1 and num_numbers > 1)
        want = rng.standard_normal((sent, num_parts)).astype(np.float32)
        parts = want.reshape(sent, c.cluster, members, WARPS)
        cluster.expected.clear()
        cluster.arrived.clear()
        cluster.came.clear()
        for rank, wg in np.ndindex(c.cluster, members):
            cluster.send(c, turn=turn, rank=rank, wg=wg, numbers=list(parts[:, rank, wg]))
        barrier = BARRIERS + BARRIER_BYTES * turn
        every = {(rank, barrier) for rank in range(c.cluster)}
        assert set(cluster.came) == set(cluster.expected) == every, "at the turn's barrier alone"
        assert cluster.came == cluster.expected, "a barrier would wait for ever, or not at all"
        assert set(cluster.arrived.values()) == {members}, "as many as the barrier is made for"
        for rank in range(c.cluster):
            np.testing.assert_array_equal(cluster.blocks[rank][turn, :sent], want)
