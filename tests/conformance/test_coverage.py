"""Checks that every public name of HookedTransformer and ActivationCache is in a table.

A name that a later TransformerLens adds fails here until the tables say whether it is right on a
converted model (and where that is tested) or refused.
"""

import inspect

import torch
from common import needs_hooked_transformer
from transformer_lens import ActivationCache

from attn_only_lens.models.two_blocks.refusals import Refusals
from attn_only_lens.tl import HookedTransformer

pytestmark = needs_hooked_transformer

RIGHT = {
    # tests/conformance/test_model.py
    "W_E", "W_E_pos", "W_U", "W_gate", "W_in", "W_out", "W_pos", "b_O", "b_U", "b_in", "b_out",
    "accumulated_bias", "add_hook", "add_perma_hook", "all_head_labels", "check_and_add_hook",
    "check_hooks_to_add", "cpu", "cuda", "forward", "generate", "generate_stream",
    "get_pos_offset", "get_residual", "get_token_position", "hook_points", "hooks",
    "input_to_embed", "loss_fn", "n_params_total", "remove_all_hook_fns", "reset_hooks",
    "run_with_cache", "run_with_hooks", "set_tokenizer", "set_use_attn_in",
    "set_use_attn_result", "set_use_hook_mlp_in", "set_use_split_qkv_input",
    "set_ungroup_grouped_query_attention", "setup", "to", "to_single_str_token",
    "to_single_token", "to_str_tokens", "to_string", "to_tokens",
    "tokens_to_residual_directions", "clear_contexts", "mps", "move_model_modules_to_device",
    "get_caching_hooks", "add_caching_hooks", "cache_all", "cache_some", "list_hooks",
}  # fmt: skip
# Inherited unchanged. They use neither blocks nor heads, and need a network to run.
NEED_A_NETWORK = {"load_sample_training_dataset", "sample_datapoint"}
REFUSED = {name for name in vars(Refusals) if not name.startswith("_")}
REFUSED -= {"tl_parameters"}  # SVDInterpreter reads it, but HookedTransformer lacks it

CACHE_RIGHT = {
    # tests/conformance/test_cache.py; toggle_autodiff is torch's
    "accumulated_resid", "apply_ln_to_stack", "apply_slice_to_batch_dim", "compute_head_results",
    "decompose_resid", "get_full_resid_decomposition", "get_neuron_results", "items", "keys",
    "logit_attrs", "remove_batch_dim", "stack_activation", "stack_head_results",
    "stack_neuron_results", "to", "values", "toggle_autodiff",
}  # fmt: skip
# No model that can be converted has state-space mixers.
CACHE_NOT_CONCERNED = {"ssm_layers", "compute_ssm_state", "compute_ssm_effective_attention"}


def public(cls):
    return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}


def test_every_method_of_a_model_is_decided():
    names = public(HookedTransformer) - public(torch.nn.Module) | {"forward", "to", "cuda", "cpu"}
    decided = RIGHT | NEED_A_NETWORK | REFUSED
    assert names - decided == set(), "new in TransformerLens: right, or refused?"
    assert decided - names == set(), "gone from TransformerLens"


def test_every_method_of_a_cache_is_decided():
    names = public(ActivationCache)
    decided = CACHE_RIGHT | CACHE_NOT_CONCERNED
    assert names - decided == set(), "new in TransformerLens: right, or refused?"
    assert decided - names == set(), "gone from TransformerLens"
