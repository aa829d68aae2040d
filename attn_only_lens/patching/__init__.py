"""Activation patching, path patching and attribution for attention heads and neuron-heads.

A neuron-head is an MLP neuron that is computed as an attention head.
"""

from attn_only_lens.engine.directions import Ablation
from attn_only_lens.engine.interventions import ablated, steered
from attn_only_lens.engine.metrics import (
    custom,
    kl,
    log_probability,
    logit_diff,
    loss,
    probability,
    probability_diff,
)
from attn_only_lens.engine.sites import Sites
from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching._attribution import attribution
from attn_only_lens.patching._path_patch import path_patch
from attn_only_lens.patching._plan import plan
from attn_only_lens.patching.edges import Edges
from attn_only_lens.patching.estimate import Estimate

__all__ = [
    "Ablation",
    "Edges",
    "Estimate",
    "Sites",
    "ablated",
    "activation_patch",
    "attribution",
    "custom",
    "kl",
    "log_probability",
    "logit_diff",
    "loss",
    "path_patch",
    "plan",
    "probability",
    "probability_diff",
    "steered",
]
