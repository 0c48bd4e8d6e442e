"""What is planned of serving: caches, what fits, prefill and decode."""

import dataclasses

from jaxinfra.config.model import stacked
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.inference import (
    Serving,
    by_batch,
    by_cache,
    cache_copies,
    cached_bytes,
    crossover_batch,
    decode,
    device_budget,
    max_batch,
    max_context,
    memory_needs,
    prefill,
    ridge,
)
from jaxinfra.planning.layout import lay_out
from jaxinfra.planning.memory import kv_bytes, kv_bytes_per_token
from jaxinfra.planning.model import find_model, plan_model
from jaxinfra.planning.plan import make_plan
from jaxinfra.planning.rollouts import plan_rollouts

H200, H100 = find_device("h200"), find_device("h100")
EIGHT_B = find_model("llama3_8b")


def test_caches():
    model = find_model("llama2_70b")
    assert kv_bytes(model, batch=3, context=100) == 3 * 100 * kv_bytes_per_token(model)
    (block,) = model.config.blocks
    mha = dataclasses.replace(block.mixer, num_kv_heads=block.mixer.num_q_heads)
    stacks = stacked(dataclasses.replace(block, mixer=mha), num_layers=model.config.num_layers)
    wide = plan_model(dataclasses.replace(model.config, stacks=stacks))
    assert kv_bytes_per_token(wide) == 8 * kv_bytes_per_token(model) == 2.5 * 2**20
    # A windowed layer keeps its window: half of Gemma-2's layers see 4,096 tokens.
    gemma = find_model("gemma2_9b")
    assert kv_bytes(gemma, batch=1, context=8192) == 0.75 * 8192 * kv_bytes_per_token(gemma)


def test_what_fits_beside_the_weights():
    serving = Serving()
    batch = max_batch(EIGHT_B, H200, serving, context=8192)
    used, budget = memory_needs(EIGHT_B, H200, serving).fixed_bytes, device_budget(H200)
    one = kv_bytes(EIGHT_B, batch=1, context=8192)
    assert used + batch * one <= budget < used + (batch + 1) * one
    context = max_context(EIGHT_B, H200, serving, batch=4)
    assert used + kv_bytes(EIGHT_B, batch=4, context=context) <= budget
    assert used + kv_bytes(EIGHT_B, batch=4, context=context + 1) > budget
    assert max_batch(find_model("llama3_405b"), H200, serving, context=1) == 0


def test_latent_attention_decodes_its_latents():
    """128 heads of (512 + 64) + 512 a cached token, against 2 (192 + 128) rebuilt ones."""
    model = find_model("deepseek_v3")
    a_token = model.decode_flops(4097) - model.decode_flops(4096)
    assert a_token == 61 * 2 * 128 * (512 + 64 + 512)


def test_batches_and_caches_that_fit_are_listed():
    serving = Serving()
    rows = by_batch(EIGHT_B, H200, serving, context=8192)
    most = max_batch(EIGHT_B, H200, serving, context=8192)
    assert max(row["batch"] for row in rows if row["fits"]) == most
    assert [row["fits"] for row in rows][-1] is False
    caches = {row["cache"]: row for row in by_cache(EIGHT_B, H200, serving, context=8192)}
    # 8 bits, and a scale of 16 for the 128 of a token and head, in place of 16.
    one = kv_bytes(EIGHT_B, batch=1, context=8192, cache_format="bf16") * (8 + 16 / 128) / 16
    room = device_budget(H200) - memory_needs(EIGHT_B, H200, serving).fixed_bytes
    assert caches["fp8"]["max_batch"] == room // one > 1.9 * caches["bf16"]["max_batch"]
    assert caches["int4"]["max_context"] > 3.5 * caches["bf16"]["max_context"]


def test_heads_fewer_than_devices_are_held_several_times():
    """Eight KV heads over 16 devices are held twice; latents are held by each device."""
    assert [cache_copies(EIGHT_B, devices) for devices in (1, 8, 16)] == [1, 1, 2]
    assert cache_copies(find_model("deepseek_v3"), 16) == 16
    eight, sixteen = (Serving(devices=devices) for devices in (8, 16))
    sizes = [cached_bytes(EIGHT_B, each, batch=1, context=8192) for each in (eight, sixteen)]
    assert sizes[1] == 2 * sizes[0] == 2 * kv_bytes(EIGHT_B, batch=1, context=8192)


def test_prefill_is_compute_bound_and_decode_memory_bound():
    serving = Serving()
    assert prefill(EIGHT_B, H200, serving, batch=1, length=4096).bound == "compute"
    step = decode(EIGHT_B, H200, serving, batch=1, context=4096)
    assert step.bound == "memory"
    assert step.intensity < 2
    assert round(ridge(H100)) == 295
    assert round(ridge(H200)) == 206
    short = crossover_batch(EIGHT_B, H200, serving, context=1)
    assert short is not None
    assert abs(short / ridge(H200) - 1) < 0.1  # 2 bytes and 2 FLOPs a weight
    assert crossover_batch(EIGHT_B, H200, serving, context=8192) is None


def test_rollouts_take_turns_with_training():
    plan = make_plan(find_model("qwen3_4b"), lay_out(batch=64, length=1088, accumulation=8), H200)
    found = plan_rollouts(plan)
    one = cached_bytes(plan.model, Serving(), batch=1, context=1088)
    needs = memory_needs(plan.model, H200, Serving())
    held = plan.memory.weights + plan.memory.optimizer
    assert found.running == 64
    assert found.sampling_bytes == needs.fixed_bytes + held + 64 * one
    step_s = decode(plan.model, H200, Serving(), batch=64, context=544).seconds
    assert found.sampling_s == 1088 * step_s
    assert found.total_s == found.sampling_s + found.scoring_s + plan.time.total_s
    eight = make_plan(EIGHT_B, lay_out(batch=8, length=8192, accumulation=8), H200)
    assert not plan_rollouts(eight).fits  # 16 bytes per parameter
