"""Activation patching over attention heads and neuron-heads: prompts, metrics, sites, results."""

from attn_only_lens.patching._activation_patch import activation_patch
from attn_only_lens.patching._agreement import agreement
from attn_only_lens.patching._attribution import attribution
from attn_only_lens.patching._gate_and_value import gate_and_value
from attn_only_lens.patching.results import Sweep
from attn_only_lens.patching.resume import PartStore
from attn_only_lens.runs.identity import fingerprint
from attn_only_lens.runs.metrics import (
    BoundMetric,
    Metric,
    bind,
    custom,
    kl,
    log_probability,
    logit_diff,
    loss,
    probability,
    require_differentiable,
    require_distinct,
)
from attn_only_lens.runs.positions import PositionSet, resolve_positions
from attn_only_lens.runs.prompts import PromptPair, prompt_pair
from attn_only_lens.runs.sites import LayerSites, Selection, all_heads, heads, neuron_heads, resolve

__all__ = [
    "BoundMetric",
    "LayerSites",
    "Metric",
    "PartStore",
    "PositionSet",
    "PromptPair",
    "Selection",
    "Sweep",
    "activation_patch",
    "agreement",
    "all_heads",
    "attribution",
    "bind",
    "custom",
    "fingerprint",
    "gate_and_value",
    "heads",
    "kl",
    "log_probability",
    "logit_diff",
    "loss",
    "neuron_heads",
    "probability",
    "prompt_pair",
    "require_differentiable",
    "require_distinct",
    "resolve",
    "resolve_positions",
]
