"""A trillion parameters in experts on 2,048 H100s: TP 8, PP 16, DP 16, EP 16.

    python -m experiments.plans.moe_1t_on_2048

96% of the weights are routed experts, of which a token meets 8 in 128: compute is that of 81B,
memory that of 1T. Tensor parallelism cuts the experts' small matmuls into smaller ones and pays an
all-reduce of the stream each; expert parallelism keeps them whole and pays two exchanges of
tokens x top_k x d; within a node these are cheap, across nodes each GPU has one adapter. Weights
that are gathered for every micro-batch want long micro-batches, a pipeline wants many.
"""

from typing import Any

from experiments.plans.compare import compare
from jaxinfra.config.run import Remat
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.layout import lay_out
from jaxinfra.planning.model import find_model
from jaxinfra.planning.search import Question

LENGTH, BATCH = 4096, 8192  # 32M tokens per step


def main() -> None:
    """Prints the comparison."""
    common: dict[str, Any] = {"length": LENGTH, "batch": BATCH}
    pipeline: dict[str, Any] = {"pipe": 16, "zero": 1, "accumulation": 64, **common}
    layouts = {
        "TP8 PP16 DP16 EP16": lay_out(
            tensor=8,
            fsdp=16,
            expert=16,
            sequence_parallel=True,
            remat=Remat.FULL,
            pipe=16,
            zero=1,
            accumulation=512,
            **common,
        ),
        "TP1 PP16 DP128 EP16": lay_out(fsdp=128, expert=16, remat=Remat.FULL, **pipeline),
        "TP1 PP16 DP128 EP8, in the node": lay_out(
            fsdp=128, expert=8, remat=Remat.FULL, **pipeline
        ),
        "FSDP 2048, EP8": lay_out(fsdp=2048, expert=8, remat=Remat.NAMED, **common),
        "FSDP 2048, no expert axis": lay_out(fsdp=2048, remat=Remat.FULL, **common),
    }
    question = Question(devices=2048, length=LENGTH, batch=BATCH)
    compare(
        "1T in 128 experts, 2,048 H100s, 8,192 x 4,096 tokens a step",
        find_model("moe_1t"),
        find_device("h100"),
        layouts,
        question,
    )


if __name__ == "__main__":
    main()
