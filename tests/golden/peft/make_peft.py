"""Makes the golden adapters beside this script with PEFT, over models of ``tests/golden/hf``.

Needs an environment of its own, because PyTorch is no dependency of the project:

    python3.11 -m venv /tmp/hf
    /tmp/hf/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2 safetensors numpy
    /tmp/hf/bin/python tests/golden/peft/make_peft.py

A case is a directory: ``adapter_config.json`` and ``adapter_model.safetensors`` as PEFT writes
them, all of the latter drawn at random, and ``golden.npz`` with

    ids                  int [2, T]
    plain64              logits of those ids without the adapters, in float64 [2, T, V]
    logits32, logits64   with the adapters beside the model, in float32 and in float64
    merged64             merged into it
    begin/NAME           magnitudes as PEFT begins them, of DoRA
    gradient32/NAME, gradient64/NAME   of the mean next-token loss by what some adapters train
"""

import copy
import pathlib
import sys

import numpy as np
import peft
import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "hf"))
from make_golden import double_precision  # noqa: E402

LENGTH = 12
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    # Biases, which DoRA's factor does not reach.
    "qwen2_dora": ("qwen2", dict(r=3, lora_alpha=7, target_modules=ALL, use_dora=True)),
    # Fused projections, each with one A.
    "phi3_dora_rslora": (
        "phi3",
        dict(
            r=4,
            lora_alpha=5,
            target_modules=["qkv_proj", "down_proj"],
            use_dora=True,
            use_rslora=True,
        ),
    ),
    # Ranks that differ, and a layer without adapters.
    "mistral_lora": (
        "mistral",
        dict(
            r=2,
            lora_alpha=6,
            target_modules=["q_proj", "v_proj", "down_proj"],
            rank_pattern={"v_proj": 5},
            alpha_pattern={"down_proj": 1.5},
            layers_to_transform=[1],
        ),
    ),
}
WATCHED = ("layers.1.self_attn.q_proj", "layers.1.self_attn.qkv_proj", "layers.1.mlp.down_proj")


def base(name):
    return transformers.AutoModelForCausalLM.from_pretrained(
        HERE.parent / "hf" / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def in_double(model):
    """A copy, within ``double_precision``: rotary angles, too, are then of float64."""
    made = type(model)(model.config).eval()
    made.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
    return made


def trained(model):
    return {
        name.replace(".default", "").removeprefix("base_model.model."): value
        for name, value in model.named_parameters()
        if "lora_" in name
    }


def randomize(model, generator):
    with torch.no_grad():
        for key, value in trained(model).items():
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(value * (1 + 0.2 * noise) if "magnitude" in key else 0.15 * noise)


def results(model, ids, bits):
    """Logits, and gradients of the loss by what some modules train."""
    logits = model(ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1)
    ).backward()
    watched = {k: v for k, v in trained(model).items() if any(each in k for each in WATCHED)}
    gradients = {f"gradient{bits}/{key}": value.grad.numpy() for key, value in watched.items()}
    return {f"logits{bits}": logits.detach().numpy()} | gradients


def golden(case, name, options, seed):
    generator = torch.Generator().manual_seed(seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(base(name), config).eval()
    arrays = {
        f"begin/{key}": value.detach().numpy().copy()
        for key, value in trained(model).items()
        if "magnitude" in key and "layers.1" in key
    }
    randomize(model, generator)
    model.peft_config["default"].base_model_name_or_path = name
    model.save_pretrained(HERE / case)
    (HERE / case / "README.md").unlink(missing_ok=True)
    ids = torch.randint(0, model.config.vocab_size, (2, LENGTH), generator=generator)
    arrays["ids"] = ids.numpy().astype(np.int32)
    arrays |= results(model, ids, 32)
    fresh = base(name)
    with double_precision():
        plain = in_double(fresh)
        with torch.no_grad():
            arrays["plain64"] = plain(ids, use_cache=False).logits.numpy()
        model64 = peft.get_peft_model(plain, copy.deepcopy(config)).double().eval()
        pairs = zip(trained(model64).items(), trained(model).items(), strict=True)
        for (key, to), (same, value) in pairs:
            assert key == same
            to.data = value.detach().double()
        arrays |= results(model64, ids, 64)
        with torch.no_grad():
            arrays["merged64"] = model64.merge_and_unload()(ids, use_cache=False).logits.numpy()
    return arrays


def main():
    for seed, (case, (name, options)) in enumerate(CASES.items()):
        arrays = golden(case, name, options, seed)
        changed = np.abs(arrays["plain64"] - arrays["logits64"]).max()
        error = np.abs(arrays["logits32"] - arrays["logits64"]).max()
        apart = np.abs(arrays["merged64"] - arrays["logits64"]).max()
        assert arrays["logits64"].dtype == np.float64
        assert apart < 1e-9, apart
        print(f"{case}: changed by {changed:.2g}, float32 error {error:.1e}, {len(arrays)} arrays")
        np.savez_compressed(HERE / case / "golden.npz", **arrays)


if __name__ == "__main__":
    main()
