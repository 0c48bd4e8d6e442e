"""Formats of quantized weights in Hugging Face checkpoints, as their configs describe them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfra.errors import ConfigError
from jaxinfra.hf.keys import Keys
from jaxinfra.ops.quantized import Activations, WeightCode


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaledFp8:
    """e4m3 elements ``NAME`` with a scale per block, ``NAME_scale_inv`` (DeepSeek-V3), or one scale
    per tensor, which may be ``NAME_scale``.
    """

    block: tuple[int, int] | None  # outputs and inputs that share a scale; None: all


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4:
    """Experts of e2m1 elements with an exponent for every 32 (gpt-oss).

    Tensors are ``NAME_blocks`` and ``NAME_scales`` (OCP Microscaling Formats 1.0).
    """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Awq:
    """AWQ's weights of 4 bits with zero points (Lin et al. 2023).

    Eight columns of a row share 32 bits, out of order: ``qweight``, ``qzeros`` and ``scales`` in
    the place of ``weight``.
    """

    group: int  # inputs that share a scale; -1: all


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gptq:
    """GPTQ's weights of 4 or 8 bits (Frantar et al. 2022).

    Several rows of a column share 32 bits: ``qweight``, ``qzeros``, ``scales`` and ``g_idx``, the
    group of each row, in the place of ``weight``.
    """

    bits: int
    group: int  # inputs that share a scale; -1: all
    adds_one: bool  # zero points are stored minus 1, as in version 1 of the format
    act_order: bool  # groups are not of consecutive inputs; ``g_idx`` must give each input's group


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompressedTensors:
    """The format of llm-compressor and vLLM: ``weight`` in 8 bits or ``weight_packed`` in 4 or 8,
    with ``weight_scale``, and ``weight_zero_point`` where the range is not symmetric.
    """

    code: WeightCode
    packed: bool  # several elements in 32 bits
    group: int  # inputs that share a scale; -1: all
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale
    per_tensor: bool = False
    symmetric: bool = True
    activations: Activations | None = None


type Quantization = ScaledFp8 | Mxfp4 | Awq | Gptq | CompressedTensors

# Of what is left as it is: the files say it as well. Of how the reference implementation computes.
_NEUTRAL_NAMES = """
    modules_to_not_convert modules_to_convert ignored_layers dequantize scale_fmt
    backend do_fuse exllama_config disable_exllama fuse_max_seq_len modules_to_fuse
    batch_size block_name_to_quantize cache_block_outputs damp_percent dataset desc_act lm_head
    max_input_length meta model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block modules_in_block_to_quantize pad_token_id
    static_groups sym tokenizer true_sequential use_cuda_fp16 use_exllama act_group_aware hyb_act
    damp_auto_increment offload_to_disk pack_impl
    amp autoround_version enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input
    gradient_accumulate_steps iters low_gpu_mem_usage lr lr_scheduler minmax_lr nsamples scale_dtype
    seqlen to_quant_block_names train_bs
    global_compression_ratio ignore quantization_status version
"""
_NEUTRAL = frozenset(_NEUTRAL_NAMES.split())
_NEUTRAL_OF_WEIGHTS = frozenset(
    ("observer", "observer_kwargs", "block_structure", "actorder", "scale_dtype", "zp_dtype")
)


def read_quantization(keys: Keys) -> Quantization | None:
    """Reads ``quantization_config``; None where weights are stored plainly.

    Raises:
        ConfigError: the format is not supported.
    """
    values = keys.mapping("quantization_config")
    if values is None:
        return None
    inner = Keys(values, what="quantization_config")
    match inner.text("quant_method", None):
        case "fp8":
            found = _fp8(inner)
        case "mxfp4":
            found: Quantization = Mxfp4()
        case "awq":
            found = _awq(inner)
        case "gptq":
            found = _gptq(inner)
        case "compressed-tensors":
            found = _compressed_tensors(inner)
        case method:
            raise ConfigError(
                f"quantization_config: quant_method={method!r}: of quantized checkpoints those in "
                "awq, gptq, compressed-tensors, fp8 and mxfp4 are read; use the original one, or "
                "quantize it with jaxinfra quantize"
            )
    inner.finish(_NEUTRAL)
    return found


def _fp8(keys: Keys) -> ScaledFp8:
    keys.expect("fmt", ("e4m3", "float8_e4m3fn"), "elements are read as e4m3")
    keys.expect(
        "activation_scheme",
        ("dynamic",),
        "scales of activations are computed, not read from files; use a checkpoint whose scheme is "
        "dynamic, or the original one",
    )
    keys.expect("expert_dtype", ("fp8", None), "experts are read in the format of the others")
    size = keys.sequence("weight_block_size", None)
    return ScaledFp8(block=None if size is None else _block(size, "weight_block_size"))


def _block(size: tuple[Any, ...], name: str) -> tuple[int, int]:
    if len(size) != 2 or not all(type(n) is int and 0 < n <= 1 << 30 for n in size):
        raise ConfigError(
            f"quantization_config: {name}={list(size)}: weights in blocks are read with a scale "
            "for each block of rows and columns, as [128, 128]"
        )
    return size[0], size[1]


def _awq(keys: Keys) -> Awq:
    _bits(keys, "bits", (4,))
    for name in ("version", "format", "checkpoint_format"):  # as releases have called it
        keys.expect(name, ("gemm", "GEMM"), "of AWQ's layouts gemm is read: save in that")
    if keys.text("backend", None) == "llm-awq":
        raise ConfigError(
            "quantization_config: backend='llm-awq' has a layout of its own: of AWQ's layouts gemm "
            "is read: save in that"
        )
    keys.expect("zero_point", (True,), "AWQ is read with zero points; without, use GPTQ's format")
    return Awq(group=_group(keys))


def _gptq(keys: Keys) -> Gptq:
    bits = _bits(keys, "bits", (4, 8))
    older, newer = (keys.text(name, None) for name in ("checkpoint_format", "format"))
    version = older or newer or "gptq"
    if version not in ("gptq", "gptq_v2") or newer not in (None, version):
        raise ConfigError(
            f"quantization_config: checkpoint_format={older!r} and format={newer!r}: of GPTQ's "
            "layouts gptq and gptq_v2 are read, which both must name alike; save in one of those"
        )
    rules = keys.mapping("dynamic") or {}
    # Rules with a minus name layers that are left as they are: the files say so too.
    if others := {name: rule for name, rule in rules.items() if not name.startswith("-:")}:
        raise ConfigError(
            f"quantization_config: dynamic={others}: one format for all layers is read, not rules "
            "by name, but for those of layers that are left out (-:); quantize all layers alike"
        )
    return Gptq(
        bits=bits,
        group=_group(keys),
        adds_one=version == "gptq",
        act_order=keys.flag("desc_act", False),
    )


def _bits(keys: Keys, name: str, known: tuple[int, ...]) -> int:
    bits = keys.integer(name)
    if bits not in known:
        raise ConfigError(
            f"quantization_config: {name}={bits}: weights of {' or '.join(map(str, known))} bits "
            "are read in this format; use the original checkpoint"
        )
    keys.expect("data_type", ("int", None), "elements are read as integers in this format")
    keys.expect("pack_dtype", ("int32", None), "elements are read in words of 32 bits")
    return bits


def _group(keys: Keys) -> int:
    group = keys.integer("group_size")
    if group != -1 and not 1 < group <= 1 << 30:
        raise ConfigError(
            f"quantization_config: group_size={group}: it is a number of inputs, such as 128, or "
            "-1 for all of them"
        )
    return group


def _compressed_tensors(keys: Keys) -> CompressedTensors:
    layout = keys.text("format", None)
    known = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    if layout not in known:
        raise ConfigError(
            f"quantization_config: format={layout!r}: of compressed-tensors "
            f"{', '.join(known)} are read; save in one of those"
        )
    keys.expect(
        "kv_cache_scheme",
        (None,),
        "scales of caches are computed, not read from files; use a checkpoint without one, and a "
        "cache in 8 bits when serving it",
    )
    sparsity = keys.mapping("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ConfigError(
            f"quantization_config: sparsity_config of format={sparsity['format']!r}: sparse "
            "weights are read only if they are stored densely; save them so"
        )
    keys.expect("moe_sparsity_config", (None, {}), "experts that are sparse too are not read")
    keys.expect("transform_config", (None, {}), "weights that are rotated too are not read")
    groups = keys.mapping("config_groups") or {}
    if len(groups) != 1:
        raise ConfigError(
            f"quantization_config: {len(groups)} config_groups ({', '.join(sorted(groups))}): one "
            "format for all linear layers is read; quantize them alike"
        )
    group = _nested(next(iter(groups.values())), "config_groups")
    group.ignore("targets")  # of one format, the files say which layers have it
    group.expect("output_activations", (None,), "outputs are not quantized here")
    group.expect("format", (None, layout), "all weights have one layout")
    inputs = group.mapping("input_activations")
    weights = group.mapping("weights")
    if weights is None:
        raise ConfigError("quantization_config: config_groups without weights quantize nothing")
    group.finish(())
    return _scheme(_nested(weights, "weights"), inputs, is_packed=layout == "pack-quantized")


def _scheme(
    weights: Keys, inputs: Mapping[str, Any] | None, *, is_packed: bool
) -> CompressedTensors:
    bits, kind = weights.integer("num_bits"), weights.text("type", "int")
    codes = {
        (4, "int"): WeightCode.INT4,
        (8, "int"): WeightCode.INT8,
        (8, "float"): WeightCode.E4M3,
    }
    code = codes.get((bits, kind))
    fits = kind == "int" if is_packed else bits == 8
    if code is None or not fits:
        raise ConfigError(
            f"quantization_config: num_bits={bits} of type {kind!r} in this format: read are int 4 "
            "and 8 pack-quantized, int 8 int-quantized, and float 8 float-quantized"
        )
    symmetric = weights.flag("symmetric", True)
    strategy = weights.text("strategy", "tensor")
    group, block = weights.integer("group_size", None), weights.sequence("block_structure", None)
    weights.expect("dynamic", (False,), "scales of weights are in the files")
    weights.finish(_NEUTRAL_OF_WEIGHTS)
    if strategy not in ("tensor", "channel", "group", "block"):
        raise ConfigError(
            f"quantization_config: strategy={strategy!r} of weights: tensor, channel, group and "
            "block are read"
        )
    if strategy == "group" and (group is None or not 1 < group <= 1 << 30):
        raise ConfigError(
            f"quantization_config: group_size={group} with strategy 'group': it is a number of "
            "inputs, such as 128"
        )
    blocks = _block(block or (), "block_structure") if strategy == "block" else None
    activations = None if inputs is None else _activations(_nested(inputs, "input_activations"))
    if activations is not None and activations.value != code.value:
        raise ConfigError(
            f"quantization_config: inputs in {activations} and weights in {code}: both sides of a "
            "product are read in one format"
        )
    return CompressedTensors(
        code=code,
        packed=is_packed,
        group=group if strategy == "group" and group is not None else -1,
        block=blocks,
        per_tensor=strategy == "tensor",
        symmetric=symmetric,
        activations=activations,
    )


def _activations(keys: Keys) -> Activations:
    bits, kind = keys.integer("num_bits"), keys.text("type", "int")
    dynamic, strategy = keys.flag("dynamic", False), keys.text("strategy", "tensor")
    symmetric = keys.flag("symmetric", True)
    keys.ignore("group_size")
    keys.finish(_NEUTRAL_OF_WEIGHTS)
    if bits != 8 or not dynamic or strategy != "token" or not symmetric:
        raise ConfigError(
            f"quantization_config: input_activations with num_bits={bits}, dynamic={dynamic}, "
            f"strategy={strategy!r}, symmetric={symmetric}: inputs are rounded to 8 bits, each "
            "token by its own largest element (dynamic, token, symmetric); use a checkpoint of "
            "that kind, or the original one"
        )
    return Activations.E4M3 if kind == "float" else Activations.INT8


def _nested(values: Any, name: str) -> Keys:
    if not isinstance(values, dict):
        raise ConfigError(f"quantization_config: {name}={values!r} is no object with keys")
    return Keys(values, what=f"quantization_config: {name}")
