"""One JAX/XLA system for training and serving large language models on NVIDIA GPUs.

Each public name is imported at its first use: every import within the package runs this file, and
the lowest floor must not load all of those above it.
"""

from etils import epy as _epy

with _epy.lazy_api_imports(globals()):
    from jaxinfra.api.analysis import plan as plan
    from jaxinfra.api.analysis import trace as trace
    from jaxinfra.api.models import GeneratedText as GeneratedText
    from jaxinfra.api.models import evaluate as evaluate
    from jaxinfra.api.models import generate as generate
    from jaxinfra.api.models import save as save
    from jaxinfra.api.models import start_from as start_from
    from jaxinfra.api.presets import PresetInfo as PresetInfo
    from jaxinfra.api.presets import preset as preset
    from jaxinfra.api.presets import presets as presets
    from jaxinfra.config.codec import override as override
    from jaxinfra.config.customize import customize as customize
    from jaxinfra.config.data import DataConfig as DataConfig
    from jaxinfra.config.data import TokenizerConfig as TokenizerConfig
    from jaxinfra.config.files import read_run_config as read_run_config
    from jaxinfra.config.finetune import LoraConfig as LoraConfig
    from jaxinfra.config.latent import IndexerConfig as IndexerConfig
    from jaxinfra.config.mesh import MeshConfig as MeshConfig
    from jaxinfra.config.mesh import ShardingConfig as ShardingConfig
    from jaxinfra.config.mesh import parse_mesh as parse_mesh
    from jaxinfra.config.mixture import MixtureSource as MixtureSource
    from jaxinfra.config.mixture import ValidationSet as ValidationSet
    from jaxinfra.config.model import AttentionBesideStateConfig as AttentionBesideStateConfig
    from jaxinfra.config.model import BlockConfig as BlockConfig
    from jaxinfra.config.model import ExpertsConfig as ExpertsConfig
    from jaxinfra.config.model import GroupedAttentionConfig as GroupedAttentionConfig
    from jaxinfra.config.model import LatentAttentionConfig as LatentAttentionConfig
    from jaxinfra.config.model import MlpConfig as MlpConfig
    from jaxinfra.config.model import ModelConfig as ModelConfig
    from jaxinfra.config.model import NormConfig as NormConfig
    from jaxinfra.config.model import Stack as Stack
    from jaxinfra.config.optimizer import MuonConfig as MuonConfig
    from jaxinfra.config.optimizer import OptimizerConfig as OptimizerConfig
    from jaxinfra.config.own import OwnFeedForward as OwnFeedForward
    from jaxinfra.config.own import OwnMixer as OwnMixer
    from jaxinfra.config.parts import part as part
    from jaxinfra.config.precision import PrecisionConfig as PrecisionConfig
    from jaxinfra.config.preferences import PreferenceConfig as PreferenceConfig
    from jaxinfra.config.preferences import PreferenceLoss as PreferenceLoss
    from jaxinfra.config.recurrent import GatedDeltaConfig as GatedDeltaConfig
    from jaxinfra.config.recurrent import NoMixer as NoMixer
    from jaxinfra.config.recurrent import SelectiveScanConfig as SelectiveScanConfig
    from jaxinfra.config.recurrent import ShortConvolutionConfig as ShortConvolutionConfig
    from jaxinfra.config.recurrent import StateSpaceConfig as StateSpaceConfig
    from jaxinfra.config.rl import Algorithm as Algorithm
    from jaxinfra.config.rl import JudgeConfig as JudgeConfig
    from jaxinfra.config.rl import RlConfig as RlConfig
    from jaxinfra.config.rope import QueryScaling as QueryScaling
    from jaxinfra.config.rope import RopeConfig as RopeConfig
    from jaxinfra.config.run import CheckpointConfig as CheckpointConfig
    from jaxinfra.config.run import KeptValues as KeptValues
    from jaxinfra.config.run import RunConfig as RunConfig
    from jaxinfra.config.run import TrainingConfig as TrainingConfig
    from jaxinfra.data.batch import batch_of as batch_of
    from jaxinfra.errors import CheckpointError as CheckpointError
    from jaxinfra.errors import ConfigError as ConfigError
    from jaxinfra.errors import DataError as DataError
    from jaxinfra.errors import JaxinfraError as JaxinfraError
    from jaxinfra.errors import UnsupportedError as UnsupportedError
    from jaxinfra.model.passes import LayerOutput as LayerOutput
    from jaxinfra.model.passes import Pass as Pass
    from jaxinfra.model.passes import Sums as Sums
    from jaxinfra.reinforcement.session import rl as rl
    from jaxinfra.serving.convert import Conversion as Conversion
    from jaxinfra.serving.convert import convert as convert
    from jaxinfra.serving.harness import evaluate_tasks as evaluate_tasks
    from jaxinfra.serving.load import LoadedModel as LoadedModel
    from jaxinfra.serving.load import load as load
    from jaxinfra.serving.load import load_model as load_model
    from jaxinfra.training.metrics import Callback as Callback
    from jaxinfra.training.metrics import JsonLinesLogger as JsonLinesLogger
    from jaxinfra.training.metrics import MetricsLogger as MetricsLogger
    from jaxinfra.training.metrics import MlflowLogger as MlflowLogger
    from jaxinfra.training.metrics import StopTraining as StopTraining
    from jaxinfra.training.metrics import TensorBoardLogger as TensorBoardLogger
    from jaxinfra.training.metrics import WandbLogger as WandbLogger
    from jaxinfra.training.policy import policy_loss as policy_loss
    from jaxinfra.training.preferences import PairLoss as PairLoss
    from jaxinfra.training.preferences import preference_loss as preference_loss
    from jaxinfra.training.session import train as train
    from jaxinfra.training.steps import Steps as Steps
    from jaxinfra.training.summary import Outcome as Outcome
    from jaxinfra.training.summary import SourceRead as SourceRead
    from jaxinfra.training.summary import read_mixture as read_mixture

__version__ = "0.1.0"
__all__ = ["__version__", *(name for name in globals()["__dir__"]() if name[0] != "_")]
