"""TransformerLens' own tools, each as one call on a model, for tests that compare two models.

All tools share two prompts, a metric, two answers and a neuron.
"""

import importlib.util
import inspect
import pkgutil
from dataclasses import fields, is_dataclass
from functools import partial

import torch
from common import tokens
from transformer_lens import patching
from transformer_lens.tools import analysis

CLEAN, CORRUPTED = (tokens(seed, batch=1, pos=3) for seed in (1, 2))
PROMPTS = [" ".join(f"w{i % 11}" for i in range(start, start + 9)) for start in (1, 4)]


HAS_SVD_CIRCUITS = importlib.util.find_spec(f"{analysis.__name__}.svd_circuits") is not None


def metric(logits):
    return (logits[:, -1, 7] - logits[:, -1, 11]).sum()


def last(model):
    return lambda inputs: model(inputs)[:, -1]


def cached(model, x=CLEAN):
    return model.run_with_cache(x)[1]


def patch(name, model):
    with torch.no_grad():
        return getattr(patching, name)(model, CORRUPTED, cached(model), metric)


def generic(model):
    with torch.no_grad():
        return patching.generic_activation_patch(
            model,
            CORRUPTED,
            cached(model),
            metric,
            patch_setter=patching.layer_pos_patch_setter,
            activation_name="mlp_out",
            index_axis_names=("layer", "pos"),
        )


def direct_path(name, model, **how):
    with torch.no_grad():
        caches = cached(model), cached(model, CORRUPTED)
        return getattr(analysis, name)(model, CORRUPTED, *caches, metric, **how, verbose=False)


def of_cache(name, model, **how):
    with torch.no_grad():
        return getattr(cached(model, tokens()), name)(**how)


def logit_attrs(model):
    cache = cached(model, tokens())
    stack = cache.decompose_resid()
    return cache.logit_attrs(stack, tokens=5), cache.apply_ln_to_stack(stack)


def edges(model):
    return analysis.attribution_patch(
        model, CLEAN, CORRUPTED, metric, analysis.EdgeAttributionConfig(granularity="edge")
    )


def faithful(model):
    return analysis.faithfulness(
        model, CLEAN, CORRUPTED, metric, edges(model).top_edges(k=7)
    )  # fmt: skip


def interchange(which, model):
    point = "blocks.1.hook_out" if "blocks.1.hook_out" in model.hook_dict else "blocks.1.hook_in"
    positions = torch.full((2,), 10)
    how = {"positions": positions}
    acts = analysis.collect_activations(model, point, tokens(4), last(model), **how)
    if which == "collect_activations":
        return acts
    basis = analysis.mean_difference_basis(acts, [0, 1]).to(acts)
    swap = analysis.SubspaceInterchange(basis)
    call = partial(getattr(analysis, which), model, point)
    if which == "fit_das":
        targets = torch.tensor([3, 5])
        sizes = {"rank": 1, "epochs": 2}
        both = {"base_positions": positions, "source_positions": positions}
        return call(tokens(), tokens(4), targets, last(model), **sizes, **both)
    return call(swap, tokens(), acts, last(model), **how)


def jacobian_lens(model):
    lens = analysis.JacobianLens.fit(
        model, PROMPTS, corpus="two prompts", skip_first_positions=2, show_progress=False
    )
    return [lens.transport(torch.ones(1, model.cfg.d_model), layer) for layer in lens.source_layers]


def backward_lens(model):
    return analysis.BackwardLens(model).analyze(PROMPTS[0], "w3", [1], top_k=3)


def svd(model):
    from transformer_lens.tools.analysis.svd_circuits import decompose_head

    return decompose_head(model, 1, 1)


PATCHES = [name for name in dir(patching) if name.startswith("get_act_patch_")]
PATHS = [name for name in PATCHES if "direct_path" in name]
TOOLS = {name: partial(patch, name) for name in PATCHES if name not in PATHS}
TOOLS |= {
    "generic_activation_patch": generic,
    "get_act_patch_direct_path": partial(
        direct_path, "get_act_patch_direct_path", src_layer=0, src_head=1
    ),
    "get_act_patch_direct_path_all_sources": partial(
        direct_path, "get_act_patch_direct_path_all_sources"
    ),
    "accumulated_resid": partial(of_cache, "accumulated_resid", return_labels=True),
    "decompose_resid": partial(of_cache, "decompose_resid", return_labels=True),
    "decompose_resid mlp": partial(of_cache, "decompose_resid", mode="mlp", return_labels=True),
    "stack_head_results": partial(of_cache, "stack_head_results", return_labels=True),
    "stack_neuron_results": partial(of_cache, "stack_neuron_results", layer=-1, return_labels=True),
    "get_full_resid_decomposition": partial(
        of_cache, "get_full_resid_decomposition", expand_neurons=True, return_labels=True
    ),
    "get_neuron_results": partial(of_cache, "get_neuron_results", layer=1),
    "stack_activation": partial(of_cache, "stack_activation", activation_name="resid_pre"),
    "logit_attrs": logit_attrs,
    "attribution_patch": lambda model: analysis.attribution_patch(model, CLEAN, CORRUPTED, metric),
    "attribution_patch edges": edges,
    "faithfulness": faithful,
    "direct_logit_attribution": lambda model: [
        analysis.direct_logit_attribution(model, CLEAN, 5, 7, unit=unit)
        for unit in ("component", "layer")
    ],
    "direct_logit_attribution heads": lambda model: analysis.direct_logit_attribution(
        model, CLEAN, 5, 7, unit="head"
    ),
    "logit_lens": lambda model: analysis.logit_lens(model, CLEAN),
    "logit_readout": lambda model: analysis.logit_readout(
        model, torch.eye(model.cfg.d_model, dtype=model.cfg.dtype)[:3]
    ),
    "collect_activations": partial(interchange, "collect_activations"),
    "run_with_intervention": partial(interchange, "run_with_intervention"),
    "intervened_logits": partial(interchange, "intervened_logits"),
    "fit_das": partial(interchange, "fit_das"),
    "JacobianLens": jacobian_lens,
    "BackwardLens": backward_lens,
    "attention_head_subspace_affinity": lambda model: analysis.attention_head_subspace_affinity(
        model, target_role="Q"
    ),
    "decompose_head": svd,
    "reinitialized": lambda model: analysis.reinitialized(model, 0) and None,
}
"""All tools that take a model or a cache, by name."""

# These are in one version only; decompose_head is not in the package's __all__.
OF_ONE_VERSION = {
    "faithfulness", "logit_lens", "logit_readout", "collect_activations", "run_with_intervention",
    "intervened_logits", "fit_das", "reinitialized", "BackwardLens", "decompose_head",
}  # fmt: skip
TOOLS = {
    name: tool
    for name, tool in TOOLS.items()
    if name not in OF_ONE_VERSION
    or hasattr(analysis, name)
    or (name == "decompose_head" and HAS_SVD_CIRCUITS)
}

NEED_NO_MODEL = {
    # patching: helpers of its tools
    "make_df_from_ranges", "layer_pos_patch_setter", "layer_pos_head_vector_patch_setter",
    "layer_head_vector_patch_setter", "layer_head_pattern_patch_setter",
    "layer_head_pos_pattern_patch_setter", "layer_head_dest_src_pos_pattern_patch_setter",
    # linear algebra on tensors
    "orthonormal_subspace", "projection_kernel", "random_projection_kernel_moments",
    "random_basis", "neuron_basis", "random_neuron_basis", "probe_basis", "mean_difference_basis",
    "arbitrary_targets", "fit_sparse_probe", "sweep_sparse_probe", "success_rate_ci",
    "get_sparse_decomposition", "estimate_occupancy", "solve_coordinate_patch",
    "solve_coordinate_patch_positions",
    # attribution_patching: called by attribution_patch
    "enumerate_nodes", "enumerate_edges", "cache_activation_and_gradient",
    "capture_writer_outputs",
    "resolve_model_name",
}  # fmt: skip
NEED_A_NETWORK = {"random_init_bridge"}


def public_functions():
    """Return every public function of `patching` and of the modules in `tools.analysis`."""
    modules = [patching]
    for info in pkgutil.iter_modules(analysis.__path__):
        if not info.name.startswith("_"):
            modules.append(importlib.import_module(f"{analysis.__name__}.{info.name}"))
    names = set(PATCHES)
    for module in modules:
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                names.add(name)
    return {name for name in names if not name.startswith("_")}


def outcome(tool, model):
    """Return a tool's result as tensors and words, or its error."""
    torch.manual_seed(0)
    try:
        return list(leaves(tool(model)))
    except Exception as error:
        text = str(error)
        for kind in type(model).__mro__:
            text = text.replace(kind.__name__, "<model>")
        return [type(error), text[:60]]


def leaves(value):
    """Yield the tensors, numbers and words in a result, in order."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield field.name
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from leaves(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, float):
        yield torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, str | int | bool):
        yield value


def raises(result):
    """Return whether an outcome is an error."""
    return bool(result) and isinstance(result[0], type)


def same(got, expected, rtol=1e-5, atol=1e-6):
    """Check that two outcomes are equal up to rounding: several tools use float32."""
    assert [type(x) for x in got] == [type(x) for x in expected], (got[:2], expected[:2])
    for a, b in zip(got, expected, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
        else:
            assert a == b
