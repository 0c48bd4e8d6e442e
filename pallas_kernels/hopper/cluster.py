"""Barrier of the blocks of a thread block cluster on a Hopper GPU."""

from .mosaic import plgpu
from .threads import assembly


def meet(*, ordered: bool) -> None:
    """Waits for every thread of the cluster; if ordered, their earlier writes are then visible."""
    order = "release" if ordered else "relaxed"

    @plgpu.inline_mgpu()
    def meet(ctx):
        del ctx
        assembly(None, [], f"barrier.cluster.arrive.{order}.aligned;", "", pure=False)
        assembly(None, [], "barrier.cluster.wait.acquire.aligned;", "", pure=False)

    meet()
