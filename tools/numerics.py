"""Runs the numerical tests as other CPUs would: each instruction set, threads, and other seeds.

A bound that holds by argument holds on all of them. One line a run; the output of one that fails,
and exit status 1, at the end.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What compares numbers with an oracle within rounding.
SUITES = (
    "tests/kernels/test_attention_numerics.py",
    "tests/kernels/test_attention_edges.py",
    "tests/kernels/test_attention_sharding.py",
    "tests/kernels/test_attention_transforms.py",
    "tests/kernels/test_faults_are_caught.py",
    "tests/kernels/test_kernels_common.py",
    "tests/kernels/test_ladder.py",
    "tests/kernels/test_linear_cross_entropy_hopper.py",
    "tests/kernels/test_merge_partials.py",
    "tests/kernels/test_norm.py",
    "tests/kernels/test_norm_fp8.py",
    "tests/kernels/test_softmax.py",
    "tests/sharded/test_context_attention.py",
    "tests/sharded/test_loss.py",
    "tests/sharded/test_matrix.py",
    "tests/sharded/test_meshes.py",
    "tests/sharded/test_pipeline_gradients.py",
    "tests/unit/test_hf_golden.py",
    "tests/unit/test_layers.py",
    "tests/unit/test_loss.py",
    "tests/unit/test_model.py",
    "tests/unit/test_optim.py",
    "tests/unit/test_rope.py",
    "tests/unit/test_serving_cache.py",
    "tests/unit/test_step.py",
)
# XLA's name of an instruction set, and the kernel's of a feature that it needs.
INSTRUCTION_SETS = {"SSE4_2": "sse4_2", "AVX": "avx", "AVX2": "avx2", "AVX512": "avx512dq"}
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
# XLA's default, which `make test` goes below to compile faster.
OPTIMIZED = "--xla_backend_optimization_level=3"


def environments(num_seeds: int) -> dict[str, dict[str, str]]:
    """What to set for each run, by its name."""
    features = set(pathlib.Path("/proc/cpuinfo").read_text().split())
    found = {}
    for isa, feature in INSTRUCTION_SETS.items():
        if feature in features:
            flags = f"--xla_cpu_max_isa={isa} {OPTIMIZED}"
            found[f"{isa}, several threads"] = {"XLA_FLAGS": flags}
            found[f"{isa}, one thread"] = {"XLA_FLAGS": f"{flags} {ONE_THREAD}"}
    for seed in range(1, num_seeds + 1):
        found[f"seed {seed}"] = {"JAXINFRA_TEST_SEED": str(seed)}
    return found


def main() -> int:
    """Runs them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many other seeds")
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--workers", default="logical", help="pytest's -n")
    parser.add_argument("suites", nargs="*", default=SUITES, help="test files")
    options = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu"]
    command += ["-n", options.workers, "--dist", "loadfile", *options.suites]
    failed = []
    for name, settings in environments(options.seeds).items():
        if options.only not in name:
            continue
        start = time.monotonic()
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True
        )
        *_, last = done.stdout.splitlines() or [done.stderr]
        print(f"{name}: {last} ({time.monotonic() - start:.0f} s)", flush=True)
        if done.returncode:
            failed.append(f"{name}\n{done.stdout}{done.stderr}")
    print("\n\n".join(failed), end="", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
