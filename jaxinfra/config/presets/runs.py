"""Whole runs: a model with the data, batch, schedule and precision that suit it."""

import dataclasses
from pathlib import Path

from jaxinfra.config.data import DataConfig, DataFormat, TokenizerConfig, TokenizerKind
from jaxinfra.config.finetune import InitConfig, LoraConfig
from jaxinfra.config.kinds import Head
from jaxinfra.config.model import ModelConfig
from jaxinfra.config.optimizer import MuonConfig, OptimizerConfig
from jaxinfra.config.precision import PolicyName, PrecisionConfig
from jaxinfra.config.preferences import PreferenceConfig, PreferenceLoss
from jaxinfra.config.presets import mixtures, models
from jaxinfra.config.rl import RlConfig
from jaxinfra.config.run import CheckpointConfig, Remat, RunConfig, TrainingConfig


def tiny() -> RunConfig:
    """The default run, which takes a few minutes on two CPU cores."""
    return RunConfig(
        model=models.tiny(),
        data=DataConfig(),
        optimizer=OptimizerConfig(
            learning_rate=9e-3,
            warmup_steps=50,
            weight_decay=0.3,
            muon=MuonConfig(momentum=0.9),
        ),
        training=TrainingConfig(steps=1300, batch_size=16, sequence_length=128, log_every=50),
        checkpoint=CheckpointConfig(every=500),
    )


def small() -> RunConfig:
    """A run of five minutes on one H200."""
    return RunConfig(
        # The text is read about ten times over, so the model is kept from learning it by heart.
        model=dataclasses.replace(models.small(), dropout_rate=0.1),
        data=DataConfig(),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100, final_fraction=0.02),
        # Unrolled, no loop copies each layer's intermediates into stacks: a quarter of its time.
        training=TrainingConfig(
            steps=2000, batch_size=32, sequence_length=1024, log_every=50, unroll=12
        ),
        precision=PrecisionConfig(policy=PolicyName.BF16),
        checkpoint=CheckpointConfig(every=1000),
    )


def tiny_moe() -> RunConfig:
    """The run ``tiny`` with experts of equal active parameters; all other settings are equal."""
    return dataclasses.replace(tiny(), model=mixtures.tiny_moe())


def small_moe() -> RunConfig:
    """The run ``small`` with experts of equal active parameters; all other settings are equal."""
    model = dataclasses.replace(mixtures.small_moe(), dropout_rate=0.1)
    return dataclasses.replace(small(), model=model)


def pretraining(model: ModelConfig) -> RunConfig:
    """Returns pretraining settings for a published model: bf16, 4 sequences per step, and remat
    that keeps matmul outputs.
    """
    return RunConfig(
        model=model,
        data=DataConfig(),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        training=TrainingConfig(
            steps=100_000,
            batch_size=4,
            sequence_length=min(4096, model.max_positions),
            remat=Remat.DOTS,
        ),
        precision=PrecisionConfig(policy=PolicyName.BF16),
        checkpoint=CheckpointConfig(every=1000),
    )


def finetuning(
    model: ModelConfig,
    *,
    init: InitConfig,
    policy: PolicyName,
    lora: LoraConfig | None = None,
    chat: bool = False,
    preferences: PreferenceConfig | None = None,
    rl: RlConfig | None = None,
) -> RunConfig:
    """Settings for the further training of a trained model.

    Learning rates are the usual ones. All parameters: 1e-5 (Llama 2, Touvron et al. 2023, section
    3.1, has 2e-5 for batches of 64). Adapters: 2e-4 (Dettmers et al. 2023, table 9). Preferences:
    1e-6 for all parameters (Rafailov et al. 2023, appendix B), ten times that for adapters. The
    same for reinforcement learning (Shao et al. 2024, section 4.2, has 1e-6).

    Args:
        init: the start model; its tokenizer is used and, with ``chat``, its chat template.
        chat: the data are conversations; with preferences, their answers are rendered as messages.
        preferences: loss settings if the data are pairs of answers. With loss=reward the model has
            a score in place of its logits.
        rl: settings of reinforcement learning, whose model may not drop out.
    """
    rates = (1e-5, 2e-4) if preferences is None and rl is None else (1e-6, 1e-5)
    rate = rates[0] if lora is None else rates[1]
    data_format = DataFormat.CHAT if chat else DataFormat.TEXT
    if preferences is not None:
        data_format = preferences.data_format
        if preferences.loss == PreferenceLoss.REWARD:
            model = dataclasses.replace(model, head=Head.SCORE)
    if rl is not None:
        model = dataclasses.replace(model, dropout_rate=0.0)
    return RunConfig(
        model=model,
        data=DataConfig(
            format=data_format,
            chat_template=init.path if chat else None,
            tokenizer=TokenizerConfig(
                kind=TokenizerKind.FILE, path=str(Path(init.path) / "tokenizer.json")
            ),
        ),
        optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=10, weight_decay=0.0),
        training=TrainingConfig(
            steps=200,
            batch_size=8,
            sequence_length=min(1024, model.max_positions),
            remat=Remat.DOTS,
        ),
        precision=PrecisionConfig(policy=policy),
        checkpoint=CheckpointConfig(every=100),
        init=init,
        lora=lora,
        preferences=preferences,
        rl=rl,
    )
