"""Makes the golden files beside this script with the reference implementation.

Needs an environment of its own, because PyTorch is no dependency of the project:

    python3.11 -m venv /tmp/hf
    /tmp/hf/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors numpy
    /tmp/hf/bin/python tests/golden/hf/make_golden.py [CASE ...]

A case is a directory: ``config.json``, which says what is made, weights as ``save_pretrained``
writes them, and
``golden.npz`` with

    ids                  int [2, T]
    logits32, logits64   of those ids, in float32 and in float64 [2, T, V]
    logits16             the same with weights and activations in bfloat16, stored as float32; not
                         of models with experts
    short_*              the same of a shorter sequence, where a model treats it differently
    prompts, continued   greedy continuations: prompt lengths [2], tokens [2, new]
    gradient32/NAME, gradient64/NAME   of the mean next-token loss by a few weights

The float64 run is float64 throughout: the reference implementation computes rotary angles, norms
and softmax in float32 whatever the model's dtype, so the names of float32 are rebound meanwhile.
"""

import contextlib
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
LENGTH, SHORT, NEW = 36, 12, 20
PROMPTS = (5, 13)
MIN_GAP = 1e-3  # between the two largest logits of every greedy choice
GRADIENTS = ("k_proj.weight", "qkv_proj.weight", "c_attn.weight", "layernorm.weight", "ln_2.weight")
# Models with experts have shorter sequences: they have many tensors.
EXPERTS_LENGTH = 20
EXPERTS_GRADIENTS = (
    *("gate.weight", "router.weight", "router.bias", "kv_b_proj.weight"),
    *("kv_a_proj_with_mqa.weight", "shared_expert_gate.weight", "experts.gate_up_proj_bias"),
)
# Relative changes of all weights that must leave every choice of experts as it is.
PERTURBATION, PERTURBATIONS = 1e-5, 8

CASES = sorted(path.parent.name for path in HERE.glob("*/config.json"))


@contextlib.contextmanager
def double_precision():
    """All names of float32 mean float64."""
    names = {name: getattr(torch, name) for name in ("float", "float32")}
    cast = torch.Tensor.float
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        for name, value in names.items():
            setattr(torch, name, value)
        torch.Tensor.float = cast
        torch.set_default_dtype(torch.float32)


def build(case):
    """A case's architecture, with weights of the default dtype."""
    config = transformers.AutoConfig.from_pretrained(HERE / case)
    config._attn_implementation = config._experts_implementation = "eager"
    return getattr(transformers, config.architectures[0])(config).eval()


def has_experts(model):
    return hasattr(model.config, "num_experts_per_tok")


def randomize(model, seed):
    """Weights large enough that attention is far from uniform and every one of them is noticed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 3:  # experts, whose inputs come first in gpt-oss alone
            inputs = 1 if "GptOss" in type(model).__name__ else 2
            parameter.data = noise * 1.3 * parameter.shape[inputs] ** -0.5
        elif parameter.ndim == 2 and not name.endswith("bias"):
            is_table = any(table in name for table in ("embed", "wte", "wpe"))
            parameter.data = noise * (1.0 if is_table else 1.3 * parameter.shape[1] ** -0.5)
        elif "norm" in name or ".ln_" in name:
            is_scale = name.endswith("weight") and "Gemma2" not in type(model).__name__
            parameter.data = 0.3 * noise + (1.0 if is_scale else 0.0)
        else:
            parameter.data = 0.3 * noise
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = 0.2 * torch.randn(buffer.shape, generator=generator)


def loss_gradients(model, ids):
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    chosen = {}
    for name, parameter in model.named_parameters():
        if ".1." not in name:
            continue
        if name.endswith((*GRADIENTS, *EXPERTS_GRADIENTS)):
            chosen[stored_name(model, name)] = parameter.grad.numpy().copy()
        elif name.endswith("experts.down_proj"):
            # Files have one tensor for each expert, but those of gpt-oss.
            gradient = parameter.grad.numpy().copy()
            if "GptOss" in type(model).__name__:
                chosen[name] = gradient
            else:
                for e in range(2):
                    chosen[stored_name(model, name, expert=e)] = gradient[e]
    return loss.item(), chosen


def stored_name(model, name, expert=None):
    """What a parameter, or an expert's part of it, is called in files."""
    is_mixtral = "Mixtral" in type(model).__name__
    if expert is not None:
        last = "w2" if is_mixtral else "down_proj"
        name = name.replace("experts.down_proj", f"experts.{expert}.{last}.weight")
    return name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name


def choices(model, ids):
    """The experts of every token and layer, in no order."""
    found = []

    def note(module, inputs, output):
        found.append(output[2].sort(dim=-1).values)

    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(note) for router in routers]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found) if found else None


def choices_are_clear(model64, ids):
    """Whether weights a little other choose the same experts."""
    want = choices(model64, ids)
    if want is None:
        return True
    generator = torch.Generator().manual_seed(0)
    weights = {name: value.clone() for name, value in model64.state_dict().items()}
    clear = True
    for _ in range(PERTURBATIONS):
        for value in model64.state_dict().values():
            if value.is_floating_point():
                noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
                value.mul_(1.0 + PERTURBATION * noise)
        clear &= torch.equal(choices(model64, ids), want)
        model64.load_state_dict(weights)
    return clear


def continuation(model, prompt):
    # Without a mask, tokens equal to the padding id would be taken for padding.
    mask = torch.ones_like(prompt)
    tokens = model.generate(
        prompt, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    return tokens[0, prompt.shape[1] :]


def smallest_gap(model64, prompt, new):
    with torch.no_grad():
        logits = model64(torch.cat([prompt[0], new])[None], use_cache=False).logits[0]
    chosen = logits[prompt.shape[1] - 1 : -1]
    best = chosen.topk(2).values
    assert torch.equal(chosen.argmax(-1), new), "the float64 model continues otherwise"
    return (best[:, 0] - best[:, 1]).min().item()


def golden(case, seed):
    """All arrays of a case, or None where a greedy choice is too close for rounding."""
    model = build(case)
    randomize(model, seed)
    with double_precision():
        model64 = build(case)
        model64.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    generator = torch.Generator().manual_seed(seed)
    length = EXPERTS_LENGTH if has_experts(model) else LENGTH
    ids = torch.randint(0, 61, (2, length), generator=generator)
    rope = getattr(model.config, "rope_parameters", None) or {}
    is_long = rope.get("rope_type") == "longrope"
    long_prompts = model.config.original_max_position_embeddings if is_long else None
    prompts = PROMPTS if long_prompts is None else (PROMPTS[0], long_prompts + 1)
    new = [continuation(model, ids[row : row + 1, :n]) for row, n in enumerate(prompts)]
    with torch.no_grad(), double_precision():
        gaps = [
            smallest_gap(model64, ids[row : row + 1, :n], new[row]) for row, n in enumerate(prompts)
        ]
        sequences = [torch.cat([ids[row, :n], new[row]]) for row, n in enumerate(prompts)]
        if not all(choices_are_clear(model64, each[None]) for each in (*ids, *sequences)):
            return None
    if min(gaps) < MIN_GAP:
        return None
    arrays = {"ids": ids.numpy(), "prompts": np.array(prompts), "continued": torch.stack(new)}
    with torch.no_grad():
        arrays["logits32"] = model(ids, use_cache=False).logits
        arrays["short_logits32"] = model(ids[:, :SHORT], use_cache=False).logits
        with double_precision():
            arrays["logits64"] = model64(ids, use_cache=False).logits
            arrays["short_logits64"] = model64(ids[:, :SHORT], use_cache=False).logits
        if not has_experts(model):  # a rounded score sends a token elsewhere
            half = build(case)
            half.load_state_dict(model.state_dict())
            half = half.to(torch.bfloat16)
            arrays["logits16"] = half(ids, use_cache=False).logits.float()
    if long_prompts is None:
        del arrays["short_logits32"], arrays["short_logits64"]
    arrays["loss32"], gradients = loss_gradients(model, ids)
    arrays |= {f"gradient32/{name}": value for name, value in gradients.items()}
    with double_precision():
        arrays["loss64"], gradients = loss_gradients(model64, ids)
    arrays |= {f"gradient64/{name}": value for name, value in gradients.items()}
    arrays = {name: np.asarray(value) for name, value in arrays.items()}
    assert arrays["logits32"].dtype == np.float32
    assert arrays["logits64"].dtype == np.float64
    error = np.abs(arrays["logits64"] - arrays["logits32"]).max()
    assert 0 < error < 1e-4, error
    print(f"  seed {seed}: gap {min(gaps):.1e}, float32 error {error:.1e}, {len(gradients)} grads")
    return model, arrays


def main(names):
    for name in names or CASES:
        print(name)
        for seed in range(60):
            made = golden(name, seed)
            if made is not None:
                break
        else:
            raise SystemExit(f"{name}: no seed gives clear greedy choices")
        model, arrays = made
        directory = HERE / name
        shutil.rmtree(directory, ignore_errors=True)
        # One case in shards.
        model.save_pretrained(directory, max_shard_size="40KB" if name == "qwen3" else "5GB")
        (directory / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(directory / "golden.npz", **arrays)


if __name__ == "__main__":
    main(sys.argv[1:])
