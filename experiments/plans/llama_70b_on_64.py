"""70B on 8 nodes of 8 H100s: TP 8, PP 2, DP 4 and its alternatives.

    python -m experiments.plans.llama_70b_on_64

16 bytes per parameter are 1.13 TB: 17.6 GB per GPU if everything is sharded 64 ways. Tensor
parallelism stays within a node, where its all-reduces are; the pipeline crosses nodes with the
least traffic and waits (p-1)/(m+p-1); data parallelism needs its traffic once a step. Fully
sharded, no tensor or pipeline axis is needed at all, as long as each GPU has enough tokens to hide
the gathers.
"""

from typing import Any

from experiments.plans.compare import compare
from jaxinfra.config.run import Remat
from jaxinfra.planning.devices import find_device
from jaxinfra.planning.layout import lay_out
from jaxinfra.planning.model import find_model
from jaxinfra.planning.search import Question

LENGTH, BATCH = 4096, 1024  # 4M tokens per step


def main() -> None:
    """Prints the comparison."""
    common: dict[str, Any] = {"length": LENGTH, "batch": BATCH, "sequence_parallel": True}
    layouts = {
        "TP8 PP2 DP4, ZeRO 1": lay_out(
            tensor=8, pipe=2, fsdp=4, zero=1, accumulation=256, remat=Remat.NAMED, **common
        ),
        "the same, few micro-batches": lay_out(
            tensor=8, pipe=2, fsdp=4, zero=1, accumulation=32, remat=Remat.FULL, **common
        ),
        "the same, interleaved in 4": lay_out(
            tensor=8,
            pipe=2,
            chunks=4,
            fsdp=4,
            zero=1,
            accumulation=256,
            remat=Remat.NAMED,
            **common,
        ),
        "TP8 DP8, ZeRO 1": lay_out(
            tensor=8, fsdp=8, zero=1, accumulation=64, remat=Remat.FULL, **common
        ),
        "TP4 PP4 DP4, ZeRO 1": lay_out(
            tensor=4, pipe=4, fsdp=4, zero=1, accumulation=256, remat=Remat.FULL, **common
        ),
        "FSDP 64": lay_out(length=LENGTH, batch=BATCH, fsdp=64, accumulation=4, remat=Remat.NAMED),
        "DP 64, nothing sharded": lay_out(length=LENGTH, batch=BATCH, replica=64, accumulation=16),
    }
    question = Question(devices=64, length=LENGTH, batch=BATCH)
    compare(
        "Llama-3-70B, 64 H100s, 1,024 x 4,096 tokens a step",
        find_model("llama3_70b"),
        find_device("h100"),
        layouts,
        question,
    )


if __name__ == "__main__":
    main()
