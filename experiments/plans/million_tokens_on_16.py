"""A million tokens of context for a 70B model on 16 GPUs: what each ingredient buys.

    python -m experiments.plans.million_tokens_on_16

Reading a million tokens is 0.32 MiB of cache each with 8 key/value heads: 344 GB, and 2.7 TB with
64. On 16 GPUs each of 8 heads is held twice. Sharing heads, sharding the sequence and smaller
formats multiply. Training on them is another matter: the stream alone that full recomputation keeps
is 1.4 TB.
"""

import dataclasses
from typing import Any

from jaxinfra.config.model import stacked
from jaxinfra.config.run import Remat
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.inference import (
    Serving,
    cached_bytes,
    decode,
    max_context,
    prefill,
    weight_bytes,
)
from jaxinfra.planning.layout import lay_out
from jaxinfra.planning.memory import memory
from jaxinfra.planning.model import PlannedModel, find_model, plan_model
from jaxinfra.planning.step import step_time
from jaxinfra.planning.table import grid, show

TOKENS = 2**20


def with_heads(model: PlannedModel, **changes: Any) -> PlannedModel:
    """The model with another number of key/value heads, or a window."""
    (stack,) = model.config.stacks
    (block,) = stack.pattern
    changed = dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, **changes))
    stacks = stacked(changed, num_layers=stack.repeats)
    return plan_model(dataclasses.replace(model.config, stacks=stacks), name=model.name)


def main() -> None:
    """Prints what fits for reading, and for training."""
    device = find_device("h200")
    model = find_model("llama3_70b")
    mha = with_heads(model, num_kv_heads=64)
    cases = (
        ("one GPU, MHA, bf16", mha, Serving()),
        ("16 GPUs, MHA", mha, Serving(devices=16)),
        ("16 GPUs, GQA-8", model, Serving(devices=16)),
        ("and cache in int8", model, Serving(devices=16, cache="int8")),
        ("and cache in int4", model, Serving(devices=16, cache="int4")),
        ("and weights in fp8", model, Serving(devices=16, cache="int4", weights="fp8")),
        ("GQA-8, window of 8,192", with_heads(model, window=8192), Serving(devices=16)),
    )
    rows = []
    for name, form, serving in cases:
        cached = cached_bytes(form, serving, batch=1, context=TOKENS)
        each = (weight_bytes(form, device, serving) + cached) / serving.devices
        fits = each <= device.budget_bytes
        read = prefill(form, device, serving, batch=1, length=TOKENS)
        token = decode(form, device, serving, batch=1, context=TOKENS)
        rows.append(
            (
                name,
                f"{cached / 1e9:,.0f} GB",
                f"{each / 1e9:,.0f} GB{'' if fits else ': too much'}",
                f"{max_context(form, device, serving):,}"
                if not form.layers[0].mixer.window
                else "any",
                f"{read.seconds:,.0f} s",
                f"{1e3 * token.seconds:.1f} ms",
            )
        )
    columns = ("reading 1,048,576 tokens", "cache", "a GPU", "longest", "prefill", "a token")
    show(grid("Llama-3-70B on H200s", columns, rows))
    rows = []
    trained: tuple[tuple[str, dict[str, Any]], ...] = (
        ("ring over 16, fully sharded over none", {"context": 16}),
        ("context 2 x tensor 8, stream sharded by both", {"context": 2, "tensor": 8}),
        ("the same, fp8 with short states", {"context": 2, "tensor": 8, "recipe": "fp8-lm-o3"}),
    )
    for name, changes in trained:
        layout = lay_out(
            length=TOKENS,
            batch=1,
            remat=Remat.FULL,
            sequence_parallel="tensor" in changes,
            zero=0,
            **changes,
        )
        needs = memory(model, layout, device)
        rows.append(
            (
                name,
                f"{(needs.weights + needs.gradients + needs.optimizer) / 1e9:,.0f} GB",
                f"{needs.activations / 1e9:,.0f} GB",
                f"{needs.total / 1e9:,.0f} of {device.hbm_bytes / 1e9:.0f} GB",
                f"{step_time(model, layout, device).total_s:,.0f} s",
            )
        )
    columns = ("training on one such sequence", "state", "activations", "a GPU", "a step")
    show(grid("Full recomputation", columns, rows))


if __name__ == "__main__":
    main()
