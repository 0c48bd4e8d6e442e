"""Memory, communication, search and serving: properties and worked cases."""

import dataclasses
import json
import math
import time
from pathlib import Path

import pytest

from jaxinfra.config.exchange import ExchangeConfig
from jaxinfra.config.run import Remat
from jaxinfra.errors import ConfigError
from jaxinfra.planning.devices import NAMES, find_device, with_bench_results, with_measurements
from jaxinfra.planning.layout import Layout, check, lay_out
from jaxinfra.planning.memory import memory
from jaxinfra.planning.model import find_model, total_parameters
from jaxinfra.planning.operations import PlannedMatmul
from jaxinfra.planning.plan import make_plan, traffic
from jaxinfra.planning.search import CHOICES, Question, search
from jaxinfra.planning.step import data_collectives, device_parameters, matmul_s, step_time

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
H200, H100 = find_device("h200"), find_device("h100")
EIGHT_B = find_model("llama3_8b")


def layout(**sizes) -> Layout:
    return lay_out(**{"length": 4096, "batch": 64} | sizes)


@pytest.mark.parametrize("name", NAMES)
def test_every_constant_of_a_device_is_sane(name):
    device = find_device(name)
    assert 0.4 < device.matmul_efficiency["bf16"] < 1
    assert device.network_bytes_per_s < device.node_bytes_per_s < device.hbm_bytes_per_s
    assert {"flops", "matmul_efficiency", "node_bytes_per_s"} <= set(device.sources)


def test_measured_constants_replace_ours_and_are_named():
    device = with_measurements(H200, {"node_bytes_per_s": 1e11}, source="bench.json")
    assert (device.node_bytes_per_s, device.sources["node_bytes_per_s"]) == (1e11, "bench.json")
    with pytest.raises(ConfigError, match="node_bytes_per_s"):
        with_measurements(H200, {"node_bytes_per": 1.0}, source="bench.json")


def test_shipped_links_are_those_of_the_shipped_result():
    measured = with_bench_results(H200, RESULTS)
    assert measured.sources["node_bytes_per_s"].endswith("collectives-h200-x4.json")
    for name in ("node_bytes_per_s", "node_latency_s"):
        assert math.isclose(getattr(measured, name), getattr(H200, name), rel_tol=0.02)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_shards_what_it_says(stage):
    whole = memory(EIGHT_B, layout(fsdp=8, zero=0), H200)
    sharded = memory(EIGHT_B, layout(fsdp=8, zero=stage), H200)
    for name, first in (("optimizer", 1), ("gradients", 2), ("weights", 3)):
        factor = 8 if stage >= first else 1
        assert getattr(sharded, name) * factor == getattr(whole, name)


def test_sums_of_micro_batches_stand_beside_their_gradients():
    """fp32 sums are 4 bytes more for each parameter, by the number of micro-batches alone."""
    for recipe in ("bf16", "bf16-summed"):
        one, two = (
            memory(EIGHT_B, layout(accumulation=n, recipe=recipe), H200).gradients for n in (1, 2)
        )
        assert two - one == 4 * total_parameters(EIGHT_B)
    published = [layout(accumulation=n, recipe="bf16-no-accumulation") for n in (1, 2)]
    assert len({memory(EIGHT_B, each, H200).gradients for each in published}) == 1


def test_gathered_weights_stay_where_a_job_would_keep_them():
    """At most 95% of what is not reserved, by predicted bytes."""
    asked = layout(fsdp=8, batch=8)
    forms = make_plan(EIGHT_B, asked, H200).gathers
    assert forms is not None
    tables = 2 * EIGHT_B.config.vocab_size * EIGHT_B.config.model_dim
    layers = 2 * (total_parameters(EIGHT_B) - tables)
    assert math.isclose(forms.kept.arrays - forms.again.arrays, layers, rel_tol=1e-4)
    least = forms.kept.arrays / 0.95 + H200.reserved_bytes
    plans = []
    for keeps, size in ((True, math.ceil(least)), (False, math.floor(least) - 1)):
        device = with_measurements(H200, {"hbm_bytes": size}, source="here")
        plan = make_plan(EIGHT_B, asked, device)
        assert plan.layout.keep_gathered is keeps
        assert plan.asked == asked
        # What needs less leaves them room.
        assert plan.by_remat()["full"].layout.keep_gathered is True
        told = make_plan(EIGHT_B, dataclasses.replace(asked, keep_gathered=not keeps), device)
        assert told.layout.keep_gathered is not keeps
        assert told.asked.keep_gathered is not keeps
        plans.append(plan)
    kept, again = (plan.as_dict() for plan in plans)
    less = again["collective_bytes"]["all-gather"] - kept["collective_bytes"]["all-gather"]
    assert math.isclose(less, layers, rel_tol=1e-4)
    assert kept["step_s"] < again["step_s"]
    assert kept["memory_bytes"]["total"] - again["memory_bytes"]["total"] == pytest.approx(layers)


def test_a_search_keeps_gathered_weights_as_it_is_told():
    question = Question(devices=8, length=4096, batch=64, remat=Remat.FULL, zero=3)
    for told, keeps in ((None, True), (False, False), (True, True)):
        found = search(EIGHT_B, dataclasses.replace(question, keep_gathered=told), H200)
        assert found.best.layout.mesh.fsdp > 1
        assert found.best.layout.keep_gathered is keeps
        assert found.best.asked.keep_gathered is told
        kept = [plan.layout for plan, _ in found.runners_up if plan.layout.keep_gathered]
        assert all(each.may_keep_gathered for each in kept)
        assert told is not True or len(kept) == len(found.runners_up)


def test_parameters_of_all_stages_add_up():
    """Two stages of equal layers, each with one table: what is counted twice is the final norm."""
    whole = memory(EIGHT_B, layout(), H200).weights
    half = memory(EIGHT_B, layout(pipe=2, accumulation=2), H200).weights
    assert whole == 4 * total_parameters(EIGHT_B)
    assert half == (whole - 4 * EIGHT_B.config.model_dim) / 2


def test_stronger_recomputation_keeps_less_and_costs_more():
    order = (Remat.NONE, Remat.DOTS, Remat.MLP, Remat.NAMED, Remat.FULL)
    kept = [memory(EIGHT_B, layout(remat=each), H200).activations for each in order]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)
    times = [
        step_time(EIGHT_B, layout(remat=each), H200).parts.get("recomputation", 0.0)
        for each in order
    ]
    assert times == sorted(times)


def test_pipeline_activations_do_not_grow_with_micro_batches():
    def activations(micro):
        return memory(EIGHT_B, layout(pipe=4, accumulation=micro, batch=micro), H200).activations

    assert activations(8) == activations(32)


@pytest.mark.parametrize(
    ("name", "sizes", "compiled_gib"),
    [
        ("llama32_1b", {"batch": 4, "remat": Remat.NONE}, 62.44),
        ("llama32_1b", {"batch": 4}, 18.44),
        ("llama32_1b", {"batch": 4, "remat": Remat.FULL}, 7.25),
        # Not looked at when the formula was written.
        ("llama32_1b", {"batch": 4, "remat": Remat.MLP}, 10.69),
        ("llama32_3b", {"batch": 2}, 25.92),
        ("llama32_3b", {"batch": 2, "remat": Remat.FULL}, 14.38),
        ("llama32_1b", {"batch": 16, "fsdp": 4}, 16.06),
        ("llama32_1b", {"batch": 16, "fsdp": 4, "keep_gathered": True}, 17.61),
        # Both as they run on two: by copies, in kernels.
        ("llama32_1b", {"batch": 8, "fsdp": 2, "keep_gathered": True}, 18.46),
        ("llama32_1b", {"batch": 8, "tensor": 2, "sequence_parallel": True}, 16.33),
        ("llama32_1b", {"batch": 2, "accumulation": 2, "remat": Remat.FULL}, 10.82),
    ],
)
def test_temporaries_are_those_of_a_step_compiled_for_an_h200(name, sizes, compiled_gib):
    """XLA's buffer assignment without a GPU (``--compile gpu``): attention hopper, length 4096."""
    predicted = memory(find_model(name), layout(**sizes), H200).temporaries
    assert abs(predicted / 2**30 / compiled_gib - 1) < 0.15


def test_time_parts_add_up_and_more_devices_are_faster():
    one = step_time(EIGHT_B, layout(), H200)
    eight = step_time(EIGHT_B, layout(fsdp=8), H200)
    assert math.isclose(sum(one.parts.values()), one.total_s)
    assert one.total_s / 8 < eight.total_s < one.total_s / 7


def test_bubble():
    time_ = step_time(EIGHT_B, layout(pipe=4, accumulation=16, batch=16), H200)
    assert time_.bubble_fraction == 3 / 19
    interleaved = layout(pipe=4, accumulation=16, batch=16, chunks=2)
    assert step_time(EIGHT_B, interleaved, H200).bubble_fraction == 3 / 35


def test_micro_batches_cost_passes_over_the_weights_and_sharded_ones_more_collectives():
    one, four = layout(fsdp=8), layout(fsdp=8, accumulation=4)
    both = [step_time(EIGHT_B, each, H200) for each in (one, four)]
    assert both[1].parts["weights and gradients"] > 4 * both[0].parts["weights and gradients"]
    calls = [
        {each.kind: each.wire_bytes for each in make_plan(EIGHT_B, layout_, H200).traffic}
        for layout_ in (one, four, dataclasses.replace(four, zero=1))
    ]
    assert calls[1]["reduce-scatter"] == 4 * calls[0]["reduce-scatter"]
    assert calls[2]["reduce-scatter"] < 1.1 * calls[0]["reduce-scatter"]


def test_layers_are_gathered_in_eight_bits_and_the_logits_table_is_not():
    wide, narrow = layout(fsdp=8, keep_gathered=False), layout(fsdp=8, recipe="fp8")
    gathered = [
        sum(
            each.count * each.size
            for each in data_collectives(EIGHT_B, layout_)
            if each.name == "weights"
        )
        for layout_ in (wide, narrow)
    ]
    table = 128_256 * 4096
    layers = total_parameters(EIGHT_B) - 2 * table
    assert gathered == pytest.approx([2 * (2 * layers + table), 2 * layers + 2 * table], rel=1e-6)


def test_short_sequences_attend_more_slowly():
    long, short = layout(length=16_384, batch=1), layout(length=1024, batch=16)
    seconds = [step_time(EIGHT_B, each, H200).parts["attention"] for each in (long, short)]
    assert 16 * 0.5 < seconds[0] / seconds[1] < 16


def test_a_matmul_is_bound_by_memory_or_arithmetic():
    large = matmul_s(H200, PlannedMatmul("square", 8192, 8192, 8192))
    assert 600e12 < 2 * 8192**3 / large < 800e12
    vector = matmul_s(H200, PlannedMatmul("decode", 1, 8192, 8192))
    assert vector > 2 * 8192 * 8192 / H200.hbm_bytes_per_s


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor": 3}, "num_q_heads=32"),
        ({"pipe": 64, "accumulation": 64}, "64 stages"),
        ({"fsdp": 128}, "does not divide over"),
        ({"expert": 2, "fsdp": 2}, "no experts"),
        ({"context": 3}, "pieces"),
        ({"recipe": "fp9"}, "unknown recipe"),
        ({"zero": 4}, "stages are 0 to 3"),
        ({"chunks": 2}, "pipe=1"),
        ({"keep_gathered": True}, "keep_gathered with fsdp=1"),
        ({"keep_gathered": True, "fsdp": 8, "zero": 2}, "zero=2"),
        ({"keep_gathered": True, "fsdp": 8, "pipe": 2, "accumulation": 2}, "pipe=2"),
        ({"keep_gathered": True, "fsdp": 8, "recipe": "fp8"}, "recipe fp8"),
    ],
)
def test_nonsense_is_refused_with_the_rule(sizes, words):
    with pytest.raises(ConfigError, match=words):
        check(EIGHT_B, layout(**sizes))


def test_key_value_heads_fewer_than_the_tensor_axis_are_copied():
    """Of 8 heads, 16 devices keep all for their use of one, and sum the copies' gradients."""
    wide, wider = (layout(tensor=size) for size in (8, 16))
    check(EIGHT_B, wider)
    heads = 2 * 4096 * 8 * 128 * EIGHT_B.config.num_layers  # elements of keys' and values' weights
    kept = [device_parameters(EIGHT_B, each, experts=False) for each in (wide, wider)]
    used = device_parameters(EIGHT_B, wider, experts=False, used=True)
    # A sixteenth of the rest, and all of the heads, which are an eighth each for the eight devices.
    assert kept[1] - kept[0] / 2 == pytest.approx(heads * (1 - 1 / 16), rel=1e-3)
    assert kept[1] - used == heads * (1 - 1 / 8)
    gathers = {e.axis: e.array_bytes for e in traffic(EIGHT_B, wider, H200) if "gather" in e.kind}
    assert gathers == {"tensor": wider.training_recipe.gradients * heads}


def test_experts_must_divide():
    with pytest.raises(ConfigError, match="num_experts=8"):
        check(find_model("mixtral_8x7b"), layout(expert=16, fsdp=16))


def test_stages_do_not_send_what_a_window_reaches():
    windowed = find_model("gemma2_9b")
    check(windowed, layout(length=4096, pipe=2, context=2))
    with pytest.raises(ConfigError, match=r"window of 4096 .* all_gather or ulysses"):
        check(windowed, layout(length=8192, pipe=2, context=2))


def test_plan_json_has_the_promised_keys():
    values = make_plan(EIGHT_B, layout(fsdp=8), H200).as_dict(tokens=1e12)
    assert {"params_total", "params_active", "flops_per_token", "kv_bytes_per_token", "mesh"} <= {
        *values
    }
    assert {"weights", "gradients", "optimizer", "activations", "total"} <= {
        *values["memory_bytes"]
    }
    assert values["collective_bytes"]["all-gather"] > 0
    for key in ("bubble_fraction", "step_s", "tokens_per_s_per_device", "mfu", "days", "dollars"):
        assert values[key] >= 0


@pytest.mark.slow_cases("512-512-15")
@pytest.mark.parametrize(
    ("devices", "batch", "bound_s"),
    # 2 and 8 on an idle core; one whose other thread is busy has counted 20 for the second.
    [(512, 512, 15), pytest.param(2048, 8192, 60, marks=pytest.mark.slow)],
)
def test_search_takes_seconds_and_ranks(devices, batch, bound_s):
    start = time.process_time()
    found = search(find_model("moe_1t"), Question(devices=devices, length=4096, batch=batch), H100)
    assert time.process_time() - start < bound_s
    assert found.best.fits
    assert all(plan.time.total_s >= found.best.time.total_s for plan, _ in found.runners_up)
    assert all("takes" in why for _, why in found.runners_up)
    told = {each.choice for each in found.alternatives}
    assert told == {*CHOICES} - {"recipe"}  # of which one was asked for
    for each in found.alternatives:
        assert CHOICES[each.choice](each.plan.layout) != CHOICES[each.choice](found.best.layout)
        assert each.plan.time.total_s >= found.best.time.total_s or not each.plan.fits
    sizes = [each.bytes_total for each in found.pareto]
    seconds = [each.seconds for each in found.pareto]
    assert sizes == sorted(sizes)
    assert seconds == sorted(seconds, reverse=True)


def test_search_finds_what_trying_everything_finds():
    question = Question(devices=8, length=4096, batch=64, remat=Remat.DOTS, zero=3)
    found = search(EIGHT_B, question, H200)
    best = min(
        step_time(EIGHT_B, each, H200).total_s
        for tensor in (1, 2, 4, 8)
        for fsdp in (1, 2, 4, 8)
        for rows in (1, 2, 4, 8)
        if tensor * fsdp == 8
        for each in [
            layout(
                tensor=tensor,
                fsdp=fsdp,
                accumulation=64 // fsdp // rows,
                zero=3 if fsdp > 1 else 0,
                sequence_parallel=tensor > 1,
            )
        ]
        if make_plan(EIGHT_B, each, H200).fits
    )
    assert found.best.time.total_s <= best


def test_search_says_why_nothing_fits():
    with pytest.raises(ConfigError, match="no layout fits the 134 of 141 GB"):
        search(find_model("llama3_405b"), Question(devices=8, length=4096, batch=8), H200)


def test_an_exchange_is_priced_with_the_room_it_has():
    """Room for any load is 8 N rows on 8 devices; of even loads 2 N or less."""
    mixtral = find_model("mixtral_8x7b")
    sizes = {"fsdp": 8, "expert": 8, "batch": 8}
    wide, even = (
        layout(**sizes, exchange=ExchangeConfig(room_factor=factor)) for factor in (None, 1.0)
    )
    rows = [
        sum(e.array_bytes for e in traffic(mixtral, each, H200) if e.axis == "expert")
        for each in (wide, even)
    ]
    visited = 8 * (1 - 7 * 6 / (8 * 7))
    assert rows[0] / rows[1] == pytest.approx(8 / visited, rel=1e-3)
    parts = [step_time(mixtral, each, H200).parts["expert communication"] for each in (wide, even)]
    assert parts[0] > 2 * parts[1]


def test_an_exchange_in_two_levels_is_priced_on_both_links():
    """Of 8 nodes that are its 8 groups a token of DeepSeek-V3 crosses to 4 at most."""
    deepseek, nodes = find_model("deepseek_v3"), ExchangeConfig(node_size=8)
    sizes = {"fsdp": 64, "expert": 64, "batch": 64}
    found = {}
    for exchange in (nodes, dataclasses.replace(nodes, room_factor=1.0)):
        each = layout(**sizes, exchange=exchange)
        sent = {e.axis: e for e in traffic(deepseek, each, H200)}
        assert (sent["expert nodes"].link, sent["expert"].link) == ("network", "node")
        parts = step_time(deepseek, each, H200).parts
        for axis, rate, latency in (
            ("expert nodes", H200.network_bytes_per_s, H200.network_latency_s),
            ("expert", H200.node_bytes_per_s, H200.node_latency_s),
        ):
            seconds = sent[axis].wire_bytes / rate + sent[axis].count * latency
            assert parts[f"{axis} communication"] == pytest.approx(seconds, rel=1e-9)
        found[exchange.room_factor] = sent
    wide, even = found[None]["expert nodes"], found[1.0]["expert nodes"]
    assert wide.array_bytes * 8 == found[None]["expert"].array_bytes
    assert 0.4 < even.array_bytes / wide.array_bytes < 4 / 8


@pytest.mark.parametrize(("name", "recipe"), [("8b-bf16", "bf16"), ("8b-fp8", "fp8")])
def test_temporaries_of_whole_models_are_those_that_were_compiled(name, recipe):
    """The FP8 step keeps quantized inputs and weights: 21 GB of its 91 GB of temporaries."""
    found = json.loads((RESULTS / "node-h200-x4.json").read_text())["rows"][name]
    whole = layout(fsdp=4, zero=2, accumulation=8, length=8192, recipe=recipe)
    predicted = make_plan(find_model("llama31_8b"), whole, H200).memory.temporaries
    assert predicted == pytest.approx(found["temporary_bytes"], rel=0.03)
