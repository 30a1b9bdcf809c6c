"""GPT-NeoX, the architecture of Pythia, as a `lib.probe.Forward`: the same probes as for the book's own Transformer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lib.config import InputError
from lib.language.checkpoints import needs
from lib.models.transformer import Tap
from lib.probe import Forward

TAPPED = "tapped"


def _attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *, scaling: float, tap: Tap | None = None, **_):
    """Causal attention with its pattern in the open; query, key and value (batch, head, position, head_dim)."""
    length = query.shape[-2]
    hidden = ~torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    pattern = (query @ key.mT * scaling).masked_fill(hidden, -torch.inf).softmax(-1)
    if tap is not None:
        pattern = tap(module.layer_idx, pattern[None])[0]
    return (pattern @ value).transpose(1, 2).contiguous(), pattern


def load(folder: Path | str, device: str = "cpu"):
    """(model, tokenizer) of a checkpoint in the hub's format, in float32 and, as the library leaves it, for inference; else InputError."""
    transformers = needs()
    transformers.AttentionInterface.register(TAPPED, _attention)
    try:
        model = transformers.GPTNeoXForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=TAPPED, local_files_only=True, weights_only=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library's errors for damaged files have no common class
        raise InputError(f"{folder}: cannot be loaded ({_first_line(error)}); delete it, and it is fetched again") from None
    return model.requires_grad_(False).to(device), tokenizer


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:160]


def bind(model, tokens: Tensor) -> Forward:
    """The model on tokens (batch, position) as a forward: one member, logits (1, batch, position, token)."""
    return lambda tap: model(input_ids=tokens, use_cache=False, tap=tap).logits[None]
