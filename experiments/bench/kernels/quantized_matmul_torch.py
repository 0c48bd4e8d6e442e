"""PyTorch's products with int4 weights (tinygemm), for ``quantized_matmul``."""

import statistics

import torch  # pyrefly: ignore  (no dependency: where it is installed)

GROUP = 128
ROUNDS = 5


def tinygemm(rows: int, depth: int, columns: int, beyond_cache: int) -> dict:
    """Time of a call that rotates through so many bytes of weights."""
    num_bytes = depth * columns // 2
    count = 1 + -(-beyond_cache // num_bytes)
    x = torch.randn(rows, depth, dtype=torch.bfloat16, device="cuda")
    scales = torch.rand(depth // GROUP, columns, 2, dtype=torch.bfloat16, device="cuda")
    codes = torch.randint(0, 256, (columns, depth // 2), dtype=torch.uint8, device="cuda")
    packed = torch._convert_weight_to_int4pack(codes, 8)
    weights = [packed.roll(i, 0).contiguous() for i in range(count)]

    def calls() -> None:
        for weight in weights:
            torch._weight_int4pack_mm(x, weight, GROUP, scales)

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / count)
    us = statistics.median(times)
    return {"us": round(us, 2), "gb_s": round(num_bytes / us / 1e3)}
