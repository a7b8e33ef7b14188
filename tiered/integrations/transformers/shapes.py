"""A model of Hugging Face's by its ``config.json`` alone: shapes and modules, on the meta device, without weights."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tiered import MisuseError

__all__ = ["model_of"]


def model_of(folder: str) -> nn.Module:
    """Return the model that generates text of a folder with a ``config.json``, on the meta device and as for training.

    Nothing is downloaded. Raises MisuseError where transformers knows no such model.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        config.use_cache = False
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except (ValueError, OSError, KeyError) as error:
        raise MisuseError(f"transformers makes no model of {folder}: {str(error).splitlines()[0]}") from error
    return model.train()
