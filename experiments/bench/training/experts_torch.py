"""PyTorch's contender for the training step: transformers' model with its grouped matmul experts,
pure bf16, SDPA, torch.compile, fused AdamW."""

import time
from typing import Any

import numpy as np
import torch  # pyrefly: ignore  (no dependency: where it is installed)
import transformers  # pyrefly: ignore

from jaxinfra.config.model import ExpertsConfig, ModelConfig


class TorchStep:
    """A step that carries its own state and trains on one batch."""

    def __init__(self, config: ModelConfig, tokens: np.ndarray, targets: np.ndarray):
        torch.manual_seed(0)
        hf = _hf_config(config, length=tokens.shape[1])
        with torch.device("cuda"):
            self._model = transformers.AutoModelForCausalLM.from_config(hf).bfloat16().train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self._tokens = torch.as_tensor(tokens, dtype=torch.int64, device="cuda")
        self._targets = torch.as_tensor(targets, dtype=torch.int64, device="cuda")
        self._loss = torch.compile(self._objective)
        self.losses: list[float] = []

    def _objective(self) -> Any:
        logits = self._model(input_ids=self._tokens, use_cache=False).logits
        flat = logits.float().view(-1, logits.shape[-1])
        return torch.nn.functional.cross_entropy(flat, self._targets.view(-1))

    def _advance(self) -> Any:
        loss = self._loss()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def time_steps(self, count: int) -> float:
        """Seconds per step over ``count`` steps, the queue drained before and after."""
        self._advance().item()
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses = [self._advance() for _ in range(count)]
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / count
        self.losses += [loss.item() for loss in losses]
        return seconds


def _hf_config(config: ModelConfig, *, length: int) -> Any:
    (block,) = config.blocks
    mixer, experts = block.mixer, block.feed_forward
    assert isinstance(experts, ExpertsConfig)
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.model_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mixer.num_q_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "max_position_embeddings": length,
        "num_experts_per_tok": experts.top_k,
        "tie_word_embeddings": False,
        "output_router_logits": False,
    }
    if experts.num_experts == 8:
        hf = transformers.MixtralConfig(
            **common, num_local_experts=8, intermediate_size=experts.hidden_dim, sliding_window=None
        )
    else:
        hf = transformers.Qwen3MoeConfig(
            **common,
            num_experts=experts.num_experts,
            moe_intermediate_size=experts.hidden_dim,
            intermediate_size=experts.hidden_dim,
            norm_topk_prob=True,
            decoder_sparse_step=1,
        )
    hf._attn_implementation = "sdpa"
    hf._experts_implementation = "grouped_mm"
    return hf
