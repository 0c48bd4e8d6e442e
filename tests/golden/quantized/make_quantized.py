"""Makes the quantized golden directories beside this script.

Needs an environment of its own, because PyTorch is no dependency of the project:

    python3.11 -m venv /tmp/hf
    /tmp/hf/bin/pip install torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0
    /tmp/hf/bin/pip install --no-deps autoawq==0.2.9
    /tmp/hf/bin/python tests/golden/quantized/make_quantized.py [CASE ...]

What packs and unpacks each format is its own program, where that can be imported on a CPU:
compressed-tensors for its formats, AutoAWQ's unpacking for AWQ. AWQ's packing, GPTQ (Frantar et
al. 2022) and DeepSeek's blocks are written here from the formats' definitions, an element at a
time, and share no code with what reads them.

A case is a directory: ``config.json``, ``model.safetensors``, and ``golden.npz`` with

    ids            int [2, T]
    logits32       of those ids in float32, of the model with dequantized weights [2, T, V]
    sums/NAME      SHA-256 of the dequantized weight, float32 [outputs, inputs], as uint8 [32]
"""

import hashlib
import importlib.util
import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
LENGTH, GROUP = 16, 16
MODEL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
    initializer_range=0.3,
)


def unpack_awq():
    """AutoAWQ's ``dequantize_gemm``, from its file: the package imports what a CPU lacks."""
    found = importlib.util.find_spec("awq")
    file = pathlib.Path(found.origin).parent / "utils" / "packing_utils.py"
    spec = importlib.util.spec_from_file_location("packing_utils", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.dequantize_gemm


def grid(w, group, levels=15):
    """Codes 0 to 15, zero points and fp16 scales of groups of inputs; w is [outputs, inputs]."""
    outputs, inputs = w.shape
    grouped = w.reshape(outputs, inputs // group, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / levels).to(torch.float16)
    zeros = torch.round(-low / scales.float()).clamp(1, levels)
    codes = torch.round(grouped / scales.float()[..., None]) + zeros[..., None]
    return codes.clamp(0, levels).reshape(w.shape).to(torch.int64), zeros.to(torch.int64), scales


def words(values, dim, order=range(8)):
    """Eight 4-bit values in 32 bits along a dim; place i of a word holds element order[i]."""
    values = values.movedim(dim, -1)
    values = values.reshape(*values.shape[:-1], -1, 8)
    packed = torch.zeros(values.shape[:-1], dtype=torch.int64)
    for i, element in enumerate(order):
        packed |= values[..., element] << (4 * i)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
    return packed.movedim(-1, dim).to(torch.int32).contiguous()


def awq(name, w):
    codes, zeros, scales = grid(w, GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        f"{name}.qweight": words(codes.T, 1, order),
        f"{name}.qzeros": words(zeros.T, 1, order),
        f"{name}.scales": scales.T.contiguous(),
    }
    parts = (stored[f"{name}.{part}"] for part in ("qweight", "qzeros"))
    value = unpack_awq()(*parts, stored[f"{name}.scales"].float(), 4, GROUP)
    return stored, value.T


def gptq(name, w, *, act_order, symmetric, adds_one):
    generator = torch.Generator().manual_seed(len(name))
    inputs = w.shape[1]
    order = torch.randperm(inputs, generator=generator) if act_order else torch.arange(inputs)
    # Groups are of inputs in the order in which GPTQ took them.
    codes_sorted, zeros, scales = grid(w[:, order], GROUP)
    if symmetric:
        largest = w[:, order].reshape(len(w), -1, GROUP).abs().amax(-1)
        scales, zeros = (largest / 7).to(torch.float16), torch.full_like(zeros, 8)
        each = scales.float().repeat_interleave(GROUP, 1)
        codes_sorted = (torch.round(w[:, order] / each) + 8).clamp(0, 15).to(torch.int64)
    g_idx = torch.zeros(inputs, dtype=torch.int32)
    codes = torch.zeros_like(codes_sorted)
    for place, column in enumerate(order.tolist()):
        g_idx[column] = place // GROUP
        codes[:, column] = codes_sorted[:, place]
    value = torch.zeros_like(w)
    for column in range(inputs):
        g = int(g_idx[column])
        value[:, column] = (codes[:, column] - zeros[:, g]).float() * scales[:, g].float()
    return {
        f"{name}.qweight": words(codes.T, 0),
        f"{name}.qzeros": words((zeros - (1 if adds_one else 0)).T, 1),
        f"{name}.scales": scales.T.contiguous(),
        f"{name}.g_idx": g_idx,
    }, value


def blocks(name, w, block=16):
    """DeepSeek's: e4m3, a scale for each block, the last ones of a dim partial."""
    rows, columns = (-(-n // block) for n in w.shape)
    scales = torch.zeros(rows, columns)
    elements, value = torch.zeros(w.shape, dtype=torch.float8_e4m3fn), torch.zeros_like(w)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scales[i, j] = w[at].abs().max() / 448
            elements[at] = (w[at] / scales[i, j]).to(torch.float8_e4m3fn)
            value[at] = elements[at].float() * scales[i, j]
    return {f"{name}.weight": elements, f"{name}.weight_scale_inv": scales}, value


def compressed(name, w, *, layout, scheme):
    """By compressed-tensors: its scales, its rounding, its packing, and what it reads back."""
    args = scheme.weights
    grouped = w.reshape(len(w), -1, args.group_size) if args.group_size else w[:, None]
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    state = {"weight": w, "weight_scale": scale.float(), "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(layout)
    stored = compressor.compress(state, scheme)
    value = compressor.decompress(stored, scheme)["weight"].float()
    return {f"{name}.{part}": x.contiguous() for part, x in stored.items()}, value


def scheme_of(*, inputs=None, **weights):
    both = {"weights": QuantizationArgs(**weights)}
    if inputs is not None:
        both["input_activations"] = QuantizationArgs(
            num_bits=8, type=inputs, strategy="token", dynamic=True, symmetric=True
        )
    return QuantizationScheme(targets=["Linear"], **both)


def compressed_case(layout, scheme):
    group = json.loads(scheme.model_dump_json())
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return (lambda name, w: compressed(name, w, layout=layout, scheme=scheme)), config


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
CHANNEL = dict(num_bits=8, strategy="channel", symmetric=True)
CASES = {
    "awq": (awq, AWQ),
    "gptq": (
        lambda name, w: gptq(name, w, act_order=False, symmetric=True, adds_one=True),
        GPTQ | {"desc_act": False, "sym": True},
    ),
    "gptq_act": (
        lambda name, w: gptq(name, w, act_order=True, symmetric=False, adds_one=False),
        GPTQ | {"desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "fp8_blocks": (
        blocks,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [16, 16],
        },
    ),
    "ct_int4": compressed_case(
        "pack-quantized",
        scheme_of(num_bits=4, strategy="group", group_size=GROUP, symmetric=False),
    ),
    "ct_int8": compressed_case("int-quantized", scheme_of(**CHANNEL, type="int", inputs="int")),
    "ct_fp8": compressed_case(
        "float-quantized", scheme_of(**CHANNEL, type="float", inputs="float")
    ),
}


def make(case):
    quantize, config = CASES[case]
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL)).eval()
    stored, sums = {}, {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                tensors, value = quantize(name, module.weight.detach().clone())
                stored |= tensors
                module.weight.copy_(value)
                content = value.float().contiguous().numpy().tobytes()
                digest = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
                sums[f"sums/{name}.weight"] = digest
        quantized = {name.rpartition(".")[0] for name in stored}
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[0] not in quantized:
                stored[name] = parameter.detach().clone()
        ids = torch.randint(0, MODEL["vocab_size"], (2, LENGTH))
        logits = model(ids).logits
    directory = HERE / case
    directory.mkdir(exist_ok=True)
    model.config.save_pretrained(directory)
    file = directory / "config.json"
    values = json.loads(file.read_text()) | {"quantization_config": config, "dtype": "float32"}
    values["architectures"] = ["LlamaForCausalLM"]
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    np.savez_compressed(directory / "golden.npz", ids=ids.numpy(), logits32=logits.numpy(), **sums)


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        make(case)
        print(case)
