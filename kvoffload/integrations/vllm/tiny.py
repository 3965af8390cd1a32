"""A model of a few megabytes with random weights, for trying an engine out without any download."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 1000

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: starts in seconds
    "OMP_NUM_THREADS": "1",  # more only get in each other's way, and in the timings'
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""How a small engine in one process runs best. It must be set before vLLM is imported."""

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # else every prompt is answered alike
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What the configurations of small models have in common."""


def prepare() -> None:
    """Set :data:`ENVIRONMENT`, where nothing else is set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def save(model: str, folder: Path, layers: int = 4, seed: int = 0, **settings: Any) -> Path:
    """Make a model of a kind that transformers knows, and save it without a tokenizer.

    Args:
        model: what its classes begin with, such as ``"Llama"``.
        folder: where to.
        layers: how many.
        seed: of its weights.
        settings: more for its configuration.

    Returns:
        ``folder``.
    """
    import transformers  # noqa: PLC0415 - it is large, and comes with the engine

    torch.manual_seed(seed)
    config = getattr(transformers, f"{model}Config")(num_hidden_layers=layers, **(SHAPE | settings))
    made = getattr(transformers, f"{model}ForCausalLM")(config)
    made.to(torch.float32).save_pretrained(folder)
    return folder


def engine(folder: Path, kv_transfer_config: dict[str, Any] | None = None, **settings: Any) -> Any:
    """vLLM's engine for a small model, in this process.

    Args:
        folder: of the model.
        kv_transfer_config: as a user gives it; None is without offloading.
        settings: of ``vllm.LLM``, instead of those here.
    """
    from vllm import LLM  # noqa: PLC0415 - only where there is one

    chosen: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 64 << 20,
        "num_gpu_blocks_override": 48,
        "dtype": "float32",
        "seed": 0,
        "disable_log_stats": False,
    }
    if kv_transfer_config is not None:
        chosen["kv_transfer_config"] = kv_transfer_config
    return LLM(str(folder), **(chosen | settings))
