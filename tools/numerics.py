"""Runs the numerical tests as other CPUs would: each instruction set, threads, and other seeds.

A bound that holds by argument holds on all of them. One line a run, and the exit status 1 if one
fails; what each test of a run says goes to ``build/numerics/`` as it ends, since all of them take
hours on two cores.
"""

import argparse
import dataclasses
import os
import pathlib
import resource
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "numerics"
# Tests that compare numbers with an oracle within rounding: of random data,
SEEDED = (
    "tests/kernels/test_attention_numerics.py",
    "tests/kernels/test_faults_are_caught.py",
    "tests/kernels/test_grouped_matmul.py",
    "tests/kernels/test_kernels_common.py",
    "tests/kernels/test_ladder.py",
    "tests/kernels/test_linear_cross_entropy_hopper.py",
    "tests/kernels/test_norm.py",
    "tests/kernels/test_paged_attention.py",
    "tests/kernels/test_quantize.py",
    "tests/kernels/test_scaled_matmul.py",
    "tests/kernels/test_softmax.py",
    "tests/sharded/test_context_attention.py",
    "tests/sharded/test_loss.py",
    "tests/sharded/test_matrix.py",
    "tests/sharded/test_meshes.py",
    "tests/sharded/test_pipeline_gradients.py",
    "tests/unit/test_layers.py",
    "tests/unit/test_loss.py",
    "tests/unit/test_model.py",
    "tests/unit/test_optim.py",
    "tests/unit/test_serving_cache.py",
    "tests/unit/test_step.py",
)
# and of data that no seed changes.
FIXED = (
    "tests/kernels/test_attention_edges.py",
    "tests/kernels/test_attention_sharding.py",
    "tests/kernels/test_attention_transforms.py",
    "tests/kernels/test_merge_partials.py",
    "tests/unit/test_exact.py",
    "tests/unit/test_experts.py",
    "tests/unit/test_hf_golden.py",
    "tests/unit/test_rope.py",
)
# They compute nothing.
NO_NUMBERS = "not lowers and not refuse"
# XLA's compiler finds no conversion of fp16 on a CPU that has no instruction for it (F16C, which
# came with AVX).
NO_FP16 = "not fp16 and not dynamic_loss_scale and (not float16 or bfloat16)"
# XLA's name of an instruction set, and the kernel's of a feature that it needs.
INSTRUCTION_SETS = {"SSE4_2": "sse4_2", "AVX": "avx", "AVX2": "avx2", "AVX512": "avx512dq"}
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
# XLA's default, which `make test` goes below to compile faster; but a program as one LLVM module,
# which holds the same kernels and takes two thirds of the CPU seconds.
OPTIMIZED = "--xla_backend_optimization_level=3 --xla_cpu_parallel_codegen_split_count=1"


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The suites in an environment of their own."""

    name: str
    settings: dict[str, str]
    suites: tuple[str, ...]
    kept: str = NO_NUMBERS  # pytest's -k


def runs(num_seeds: int) -> list[Run]:
    """Each instruction set, one thread, each seed.

    How many threads divide a product and which instructions compute the rest of a program have
    nothing to do with each other: one thread runs with the widest instructions alone.
    """
    features = set(pathlib.Path("/proc/cpuinfo").read_text().split())
    here = [isa for isa, feature in INSTRUCTION_SETS.items() if feature in features]
    flags = {isa: f"--xla_cpu_max_isa={isa} {OPTIMIZED}" for isa in here}
    flags |= {f"one thread, {isa}": f"{flags[isa]} {ONE_THREAD}" for isa in here[-1:]}
    return [
        *(
            Run(name, {"XLA_FLAGS": text}, SEEDED + FIXED, f"{NO_NUMBERS} and {NO_FP16}")
            if "SSE" in name
            else Run(name, {"XLA_FLAGS": text}, SEEDED + FIXED)
            for name, text in flags.items()
        ),
        *(
            Run(f"seed {seed}", {"JAXINFRA_TEST_SEED": str(seed)}, SEEDED)
            for seed in range(1, num_seeds + 1)
        ),
    ]


def cpu_s() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Runs them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many other seeds")
    parser.add_argument(
        "--only", default="", help="the run of this name, or all that have it in it"
    )
    parser.add_argument("--workers", default="logical", help="pytest's -n")
    parser.add_argument("suites", nargs="*", help="test files (default: all numerical ones)")
    options = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-v", "-m", "not slow and not gpu"]
    command += ["-n", options.workers, "--dist", "loadfile"]
    LOGS.mkdir(parents=True, exist_ok=True)
    failed = False
    every = runs(options.seeds)
    named = [run for run in every if run.name == options.only]
    for run in named or [run for run in every if options.only in run.name]:
        start, cpu = time.monotonic(), cpu_s()
        log = LOGS / f"{run.name.replace(', ', '-').replace(' ', '-')}.log"
        with log.open("w") as file:
            done = subprocess.run(
                [*command, "-k", run.kept, *(options.suites or run.suites)],
                cwd=ROOT,
                env={**os.environ, **run.settings},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        *_, last = log.read_text().splitlines() or ["nothing was said"]
        spent = f"{time.monotonic() - start:.0f} s, {cpu_s() - cpu:.0f} of the CPU"
        print(f"{run.name}: {last.strip('= ')} ({spent})", flush=True)
        if done.returncode:
            failed = True
            print(f"  {log.relative_to(ROOT)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
