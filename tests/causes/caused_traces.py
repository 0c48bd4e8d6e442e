"""Causes in made-up device traces (``recordings``), read as any trace is."""

from collections.abc import Sequence
from pathlib import Path

from causes.causes import (
    DIFFERENCE,
    TRACE,
    CauseVerdict,
    alarms_of,
    cause,
    first_words,
    healthy,
    verdict_of_delays,
)
from causes.recordings import (
    TracePart,
    changed,
    healthy_step,
    idle_part,
    matmul_part,
    other_part,
    slower,
    write_trace,
)
from jaxinfra.diagnostics.delays import explain_step
from jaxinfra.diagnostics.difference import compare_steps
from jaxinfra.diagnostics.traced_run import read_traced_run
from jaxinfra.faults.arena import Arena

_SCATTER = "jit(train_step)/transpose(jvp(layer))/mlp/psum_scatter"
_LOSS = "jit(train_step)/jvp(loss)/f"
_CORES = ("call.1", "call.2")
_AGAIN = "jit(train_step)/transpose(jvp(layer))/rematted_computation/mlp/dot"


def _named(directory: Path, words: str) -> CauseVerdict:
    return verdict_of_delays(explain_step(directory, read_traced_run(directory)), words=words)


def _alarms(directory: Path) -> str:
    return alarms_of(explain_step(directory, read_traced_run(directory)))


def _scatter(ms: float, *, beside: bool = False) -> TracePart:
    name = "ncclDevKernel_ReduceScatter_Sum_bf16"
    return other_part(name, "reduce-scatter.1", _SCATTER, ms, launches=16, beside=beside)


def _recomputed(ms: float) -> list[TracePart]:
    name, kernel = "again", "nvjet_sm90_tst_128x256_64x4"
    return [*healthy_step(), other_part(kernel, name, _AGAIN, ms, launches=16)]


@cause("exposed-collective", TRACE, made="a trace with 31 ms of reduce-scatter that nothing hides")
def exposed_collective(arena: Arena) -> CauseVerdict:
    """Over the axis that the program says."""
    place = arena.directory / "exposed-collective"
    write_trace(place, [*healthy_step(), _scatter(31)], axes={"reduce-scatter.1": "fsdp"})
    return _named(place, "to communication over fsdp: .*reduce-scatter.1")


@cause("late-launches", TRACE, made="a trace in which the device has nothing to do for 40 ms")
def late_launches(arena: Arena) -> CauseVerdict:
    """The host launches too slowly."""
    good = healthy_step()
    place = write_trace(arena.directory / "late-launches", [*good[:9], idle_part(40), *good[9:]])
    return _named(place, "to host dispatch")


@cause("stacked-copies", TRACE, made="a trace with 25 ms of copies between layouts")
def stacked_copies(arena: Arena) -> CauseVerdict:
    """Arrays stacked over layers."""
    place = write_trace(
        arena.directory / "stacked-copies", changed(healthy_step(), "copy.1", ms=25.0)
    )
    return _named(place, "to copies")


@cause("odd-vocabulary", TRACE, made="a trace whose matmul with 50,257 columns runs at 130 TFLOP/s")
def odd_vocabulary(arena: Arena) -> CauseVerdict:
    """A size that is no multiple of the tensor cores' tiles."""
    odd = matmul_part("logits", _LOSS, (16384, 2048, 50257), launches=1, rate=130e12)
    place = write_trace(arena.directory / "odd-vocabulary", [*healthy_step(), odd])
    return _named(
        place, r"to slow matmuls: logits, \[16384, 2048\] by \[2048, 50257\] in bf16,.*130"
    )


@cause("small-micro-batches", TRACE, made="a trace of 16 micro-batches of 256 tokens")
def small_micro_batches(arena: Arena) -> CauseVerdict:
    """Each launch has few rows."""
    parts = healthy_step(tokens=256, launches=16 * 16, rate=150e12)
    place = write_trace(arena.directory / "small-micro-batches", parts, accumulation=16)
    found = _named(place, r"to slow matmuls: \S+ \[256, ")
    return found if "training.accumulation below 16" in found.remedy else _unnamed(found)


@cause("fp32-matmuls", TRACE, made="a trace whose matmuls are in f32, at 200 TFLOP/s")
def fp32_matmuls(arena: Arena) -> CauseVerdict:
    """A precision that was not meant."""
    parts = healthy_step(dtype="f32", rate=200e12, kernel="nvjet_sm90_sss_128x128")
    found = _named(write_trace(arena.directory / "fp32-matmuls", parts), "to matmuls in f32")
    return found if "precision.policy=bf16" in found.remedy else _unnamed(found)


@cause("idle-memory", TRACE, made="a trace with 45 ms of recomputation and 44 of 141 GiB in use")
def idle_memory(arena: Arena) -> CauseVerdict:
    """Recomputation that frees memory which nobody needs."""
    place = write_trace(arena.directory / "idle-memory", _recomputed(45), used_gib=44)
    return _named(place, "to recomputation: .*44.0 of 141.0 GiB")


def _unnamed(found: CauseVerdict) -> CauseVerdict:
    return CauseVerdict(said=found.said, named=False, remedy=found.remedy)


def _job(place: Path, *ranks: Sequence[TracePart]) -> Path:
    """Traces of several ranks: who is done first waits for the last in a reduce-scatter."""
    own = [sum(part.ms for part in parts) for parts in ranks]
    for rank, parts in enumerate(ranks):
        waits = _scatter(1.5 + max(own) - own[rank])
        write_trace(place, [*parts, waits], rank=rank, axes={"reduce-scatter.1": "fsdp"})
    return place


@cause("capped-device", TRACE, made="traces of four ranks, one at 75% of the others' clock")
def capped_device(arena: Arena) -> CauseVerdict:
    """A straggler by its device."""
    good = healthy_step()
    place = _job(arena.directory / "capped-device", good, good, slower(good, 1 / 0.75), good)
    found = _named(place, "to rank 2, which is slow: its kernels")
    return found if "power limit" in found.remedy else _unnamed(found)


@cause("late-rank", TRACE, made="traces of four ranks, one of which launches 50 ms late")
def late_rank(arena: Arena) -> CauseVerdict:
    """A straggler by its host."""
    good = healthy_step()
    place = _job(arena.directory / "late-rank", good, [*good, idle_part(50)], good, good)
    return _named(place, "to rank 1, which is slow: it has nothing to do")


def _differs(
    arena: Arena,
    name: str,
    first: Sequence[TracePart],
    second: Sequence[TracePart],
    words: str,
    *,
    options: Sequence[str] = (),
) -> CauseVerdict:
    places = (
        write_trace(arena.directory / name / "a", first),
        write_trace(arena.directory / name / "b", second, xla_options=options),
    )
    runs = [read_traced_run(each) for each in places]
    found = compare_steps(runs[0].waterfall, runs[1].waterfall, runs[0].step, runs[1].step)
    # The first sentence says the two times, the next what differs most.
    said = first_words(found.paragraph())
    return CauseVerdict(
        said=said,
        named=words in said,
        remedy=found.changes[0].remedy if found.changes else "",
    )


@cause(
    "attention-in-xla", DIFFERENCE, made="attention's kernels, then XLA's fusions at 3x their time"
)
def attention_in_xla(arena: Arena) -> CauseVerdict:
    """Another implementation."""
    good = healthy_step()
    other = changed(good, *_CORES, kernel="input_reduce_fusion_7", ms=46.0)
    words = "attention/core takes 61.0 ms longer: it runs XLA fusions in place of a Mosaic GPU"
    return _differs(arena, "attention-in-xla", good, other, words)


@cause("unfused-loss", DIFFERENCE, made="the loss's kernel, then cuBLAS and all logits")
def unfused_loss(arena: Arena) -> CauseVerdict:
    """A loss that makes an array of all logits."""
    good = healthy_step()
    other = changed(good, "call.3", kernel="nvjet_sm90_tst_128x256", ms=47.0)
    words = "loss takes 17.0 ms longer: it runs cuBLAS in place of a Mosaic GPU kernel"
    return _differs(arena, "unfused-loss", good, other, words)


@cause(
    "costly-flag", DIFFERENCE, made="a flag, and Triton in place of cuBLAS: a step takes 8% longer"
)
def costly_flag(arena: Arena) -> CauseVerdict:
    """A flag by which XLA chooses other matmuls."""
    good = healthy_step()
    mlp = [part for part in good if "/mlp/dot" in part.op_name]
    times = 1 + 0.08 * sum(part.ms for part in good) / sum(part.ms for part in mlp)
    slow = {part.hlo_op: times * part.ms for part in mlp}
    other = [
        *(part for part in good if part.hlo_op not in slow),
        *(changed([p], p.hlo_op, kernel="gemm_fusion_dot_3", ms=slow[p.hlo_op])[0] for p in mlp),
    ]
    flag = "xla_gpu_cublas_fallback=false"
    words = f"XLA's options differ: {flag} in the second"
    return _differs(arena, "costly-flag", good, other, words, options=[flag])


@cause("lower-clock", DIFFERENCE, made="the same kernels, then all of them at 80% of the clock")
def lower_clock(arena: Arena) -> CauseVerdict:
    """One of two devices whose power is capped."""
    good = healthy_step()
    found = _differs(arena, "lower-clock", good, slower(good, 1.25), "power cap")
    return CauseVerdict(said=found.said, named=found.named, remedy="jaxinfra doctor")


@cause("wider-format", DIFFERENCE, made="matmuls in bf16, then in f32")
def wider_format(arena: Arena) -> CauseVerdict:
    """A precision that changed."""
    wide = healthy_step(dtype="f32", rate=200e12)
    return _differs(
        arena, "wider-format", healthy_step(), wide, "it multiplies in f32 in place of bf16"
    )


@cause("more-recomputation", DIFFERENCE, made="no recomputation, then 45 ms of it")
def more_recomputation(arena: Arena) -> CauseVerdict:
    """A policy that changed."""
    words = "mlp takes 45.0 ms longer, which is recomputation"
    return _differs(arena, "more-recomputation", healthy_step(), _recomputed(45), words)


@healthy("dense-step", TRACE, what="a made-up trace of 1.2B parameters on an H200")
def dense_step(arena: Arena) -> str:
    """Nothing but computing."""
    return _alarms(write_trace(arena.directory / "dense-step", healthy_step()))


@healthy("hidden-communication", TRACE, what="the same with a reduce-scatter behind its matmuls")
def hidden_communication(arena: Arena) -> str:
    """On a stream of its own."""
    parts = [_scatter(60, beside=True), *healthy_step()]
    place = arena.directory / "hidden-communication"
    return _alarms(write_trace(place, parts, axes={"reduce-scatter.1": "fsdp"}))


@healthy(
    "needed-recomputation", TRACE, what="45 ms of recomputation where 120 of 141 GiB are in use"
)
def needed_recomputation(arena: Arena) -> str:
    """It would not fit without."""
    place = arena.directory / "needed-recomputation"
    return _alarms(write_trace(place, _recomputed(45), used_gib=120))


@healthy("few-micro-batches", TRACE, what="four micro-batches of 4,096 tokens")
def few_micro_batches(arena: Arena) -> str:
    """Large enough for the tensor cores."""
    parts = healthy_step(tokens=4096, launches=64, rate=560e12)
    return _alarms(write_trace(arena.directory / "few-micro-batches", parts, accumulation=4))


@healthy("fp32-router", TRACE, what="routers that multiply in f32 for 2.7 ms of a step")
def fp32_router(arena: Arena) -> str:
    """As experts' routers must."""
    scope = "jit(train_step)/jvp(layer)/mlp/routing/dot"
    router = matmul_part("router", scope, (16384, 2048, 128), rate=50e12, dtype="f32")
    return _alarms(write_trace(arena.directory / "fp32-router", [*healthy_step(), router]))


@healthy("thin-matmuls", TRACE, what="matmuls of 128 rows, as fast as their weights can be read")
def thin_matmuls(arena: Arena) -> str:
    """Bound by memory, which is no fault of theirs: 64 of 4096 x 14336 at 3.4 TB/s."""
    rate = 2 * 128 * 3.4e12 / 2
    scope = "jit(train_step)/jvp(layer)/mlp/dot"
    thin = matmul_part("thin", scope, (128, 4096, 14336), launches=256, rate=rate)
    return _alarms(write_trace(arena.directory / "thin-matmuls", [*healthy_step(), thin]))


@healthy("uneven-ranks", TRACE, what="traces of four ranks whose devices differ by 1%")
def uneven_ranks(arena: Arena) -> str:
    """As any four do."""
    good = healthy_step()
    ranks = [slower(good, times) for times in (1.0, 1.01, 1.005, 0.995)]
    return _alarms(_job(arena.directory / "uneven-ranks", *ranks))


@healthy("same-steps", DIFFERENCE, what="two steps whose kernels' times differ by up to 2%")
def same_steps(arena: Arena) -> str:
    """Measured twice."""
    good = healthy_step()
    other = [slower([part], 1 + 0.02 * (place % 3 - 1))[0] for place, part in enumerate(good)]
    found = _differs(arena, "same-steps", good, other, "No part differs")
    return "" if found.named else found.said
