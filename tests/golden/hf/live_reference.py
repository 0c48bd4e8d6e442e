"""The reference implementation's side of ``experiments/bench/training/hf_parity.py``, without JAX.

    python tests/golden/hf/live_reference.py OUT [--device cuda] [--no-large] [--cases CASE ...]

For every dense architecture of ``make_golden.py`` beside it, writes a model directory and
``reference.npz``: ids, logits in float32, float64 and bfloat16, the loss and its gradient by every
parameter in float32 and float64. A large model has logits in bfloat16 and, as their oracle, of the
same weights in float32.

One float32 run is one draw of its rounding errors: a bias of 12 values that nearly cancel may come
out exact by luck. So the float32 gradients are computed in every order at hand (rows of the batch
either way round, this device and the host, PyTorch's fused and its plain attention), and all are
left for the comparison to take the largest error from.
"""

import argparse
import itertools
import json
import pathlib
import time

import make_golden
import numpy as np
import torch
import transformers

LENGTH = 36
# In other orders of sums a token of the others may go to another expert.
DENSE = [name for name in make_golden.CASES if not make_golden.has_experts(make_golden.build(name))]
LARGE = json.loads((make_golden.HERE / "published.json").read_text())["llama32_1b"]
LARGE_LENGTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-large", action="store_true")
    parser.add_argument("--cases", nargs="*", default=DENSE)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    started = time.perf_counter()
    for name in args.cases:
        small(args.out / name, name, device=args.device)
    if not args.no_large:
        large(args.out / "llama32_1b", device=args.device)
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "seconds": round(time.perf_counter() - started, 1),
    }
    (args.out / "reference.json").write_text(json.dumps(versions))


def small(path: pathlib.Path, case: str, *, device: str) -> None:
    model = make_golden.build(case)
    make_golden.randomize(model, seed=1)
    path.mkdir(parents=True)
    model.save_pretrained(path)
    weights = model.state_dict()
    ids = torch.randint(0, 61, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    arrays = {"ids": ids.numpy()}
    for number, (attention, where, rows) in enumerate(orders(model, device)):
        model.set_attn_implementation(attention)
        model.zero_grad()
        found = results(model.to(where), ids.flip(0).to(where) if rows else ids.to(where), "32")
        if number == 0:
            arrays |= found
        arrays |= {
            name.replace("gradient32/", f"gradient32-{number}/"): value
            for name, value in found.items()
            if name.startswith("gradient32/") and number
        }
    ids = ids.to(device)
    with make_golden.double_precision():
        double = make_golden.build(case)
        double.load_state_dict({name: value.double() for name, value in weights.items()})
        # Buffers such as rotary angles are made on the device that computes them.
        arrays |= results(double.to(device), ids, "64")
    half = make_golden.build(case)
    half.load_state_dict(weights)
    with torch.no_grad():
        logits = half.to(torch.bfloat16).to(device)(ids, use_cache=False).logits
    arrays["logits16"] = logits.float().cpu().numpy()
    np.savez(path / "reference.npz", **arrays)


def orders(model: torch.nn.Module, device: str) -> list[tuple[str, str, bool]]:
    """(attention, device, rows turned round?), the usual one first."""
    # Some versions take the fused attention for Gemma 2 too, and leave its soft cap out.
    is_capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    attentions = ("eager", "sdpa") if model._supports_sdpa and not is_capped else ("eager",)
    return list(itertools.product(attentions, dict.fromkeys((device, "cpu")), (False, True)))


def results(model: torch.nn.Module, ids: torch.Tensor, suffix: str) -> dict[str, np.ndarray]:
    logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    arrays = {f"logits{suffix}": logits, f"loss{suffix}": loss}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        arrays[f"gradient{suffix}/{name}"] = parameter.grad
    return {name: value.detach().cpu().numpy() for name, value in arrays.items()}


def large(path: pathlib.Path, *, device: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LARGE)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    path.mkdir(parents=True)
    model.save_pretrained(path)
    del model
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, LARGE["vocab_size"], (1, LARGE_LENGTH), generator=generator)
    arrays = {"ids": ids.numpy()}
    for bits, dtype in (("16", torch.bfloat16), ("32", torch.float32)):
        # Loaded, not cast: a cast rounds the rotary frequencies too, and no user runs that.
        model = transformers.LlamaForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
        with torch.no_grad():
            logits = model(ids.to(device), use_cache=False).logits
        arrays[f"logits{bits}"] = logits.float().cpu().numpy()
    np.savez(path / "reference.npz", **arrays)


if __name__ == "__main__":
    main()
