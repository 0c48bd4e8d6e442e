"""How the weights of a Hugging Face checkpoint are quantized: what its config says."""

import dataclasses

from jaxinfra.core.errors import ConfigError
from jaxinfra.models.hf.keys import Keys


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockScaledFp8:
    """e4m3 elements, a scale for each block: ``NAME`` times ``NAME_scale_inv`` (DeepSeek-V3)."""

    block: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4:
    """Experts as e2m1 elements, an exponent for every 32: ``NAME_blocks`` and ``NAME_scales``
    (gpt-oss; OCP Microscaling Formats 1.0).
    """


type Quantization = BlockScaledFp8 | Mxfp4

# Of what is left as it is: the files say it as well. Of how the reference implementation computes.
_NEUTRAL = frozenset(
    ("modules_to_not_convert", "ignored_layers", "dequantize", "scale_fmt", "activation_scheme")
)


def read_quantization(keys: Keys) -> Quantization | None:
    """``quantization_config``; None where weights are stored plainly.

    Raises:
        ConfigError: a format that is not read.
    """
    values = keys.mapping("quantization_config")
    if values is None:
        return None
    inner = Keys(values, what="quantization_config")
    match inner.text("quant_method", None):
        case "fp8":
            inner.expect("fmt", ("e4m3",), "elements are read as e4m3")
            size = inner.sequence("weight_block_size", None)
            if size is None or len(size) != 2 or not all(isinstance(n, int) for n in size):
                raise ConfigError(
                    f"quantization_config: weight_block_size={size}: FP8 weights are read with a "
                    "scale for each block of rows and columns, as [128, 128]"
                )
            found: Quantization = BlockScaledFp8(block=(size[0], size[1]))
        case "mxfp4":
            found = Mxfp4()
        case method:
            raise ConfigError(
                f"quantization_config: quant_method={method!r}: of quantized checkpoints those in "
                "fp8 and mxfp4 are read; use the original one"
            )
    inner.finish(_NEUTRAL)
    return found
