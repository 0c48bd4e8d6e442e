"""XLA's flags under which a suite waits least for compiling, and does not end for waiting."""

# Devices of a collective wait for each other, and XLA ends the process of one that waited for 40 s.
# On a busy machine of two cores, eight devices take longer. A test has as long as this: what hangs
# for good still ends, with the stacks of all threads.
PATIENCE = " ".join(
    (
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    )
)
FLAGS = " ".join(
    (
        # The older code generator and none of LLVM's passes: a tenth of the CPU seconds. What is
        # tested, the sharding, scheduling and fusing of a program, comes before both. They round
        # otherwise, which every bound allows: `make numerics` compiles as users do.
        "--xla_backend_optimization_level=0",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        # A program is one module of LLVM's. Cut into several for several threads, it takes half
        # as many CPU seconds again, and the other threads have tests of their own to run.
        "--xla_cpu_parallel_codegen_split_count=1",
        PATIENCE,
    )
)
