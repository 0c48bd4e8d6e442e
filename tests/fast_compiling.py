"""XLA's flags under which a suite waits least for programs to compile."""

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
    )
)
