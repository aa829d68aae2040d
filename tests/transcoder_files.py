"""Files of transcoders with random tensors, and errors of `load`."""

import json

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from attn_only_lens import transcoders as t
from attn_only_lens.errors import CheckpointError

CONFIG = {
    "model_name": "google/gemma-2-2b",
    "model_kind": "transcoder_set",
    "feature_input_hook": "hook_resid_mid",
    "feature_output_hook": "hook_mlp_out",
    "scan": "a-scan",
}


def random(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype)


def write(folder, stored, name="layer_5.safetensors", dtype=None, **configs):
    """Write a file of tensors, and config files; a keyword is a file's name without its dot."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = {key: tensor.to(dtype or tensor.dtype) for key, tensor in stored.items()}
    if name.endswith(".npz"):
        np.savez(path, **{key: tensor.numpy() for key, tensor in stored.items()})
    else:
        save_file(stored, path)
    for config, content in configs.items():
        text = yaml.safe_dump(content) if config == "config_yaml" else json.dumps(content)
        (path.parent / config.replace("_", ".")).write_text(text, "utf-8")
    return path


def refused(path, *words, error=CheckpointError, **options):
    with pytest.raises(error) as caught:
        t.load(path, **options)
    for word in words:
        assert word in str(caught.value), caught.value
