"""Hugging Face architectures as data: translation of configs, mapping of weights to ours."""

from jaxinfra.hf.config import computed as computed
from jaxinfra.hf.config import from_hf_config as from_hf_config
from jaxinfra.hf.config import plain_hf_config as plain_hf_config
from jaxinfra.hf.config import prediction_prefix as prediction_prefix
from jaxinfra.hf.config import quantization_of as quantization_of
from jaxinfra.hf.config import to_hf_config as to_hf_config
from jaxinfra.hf.mapping import WeightMap as WeightMap
from jaxinfra.hf.mapping import own_weight_map as own_weight_map
from jaxinfra.hf.mapping import weight_map as weight_map
from jaxinfra.hf.text_part import text_name as text_name
from jaxinfra.hf.text_part import text_part as text_part
from jaxinfra.model.definition import by_path as by_path
