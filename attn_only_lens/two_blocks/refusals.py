"""Calls that have no right answer on a converted model, and what to use instead of each."""

from typing import Any, NoReturn

from attn_only_lens.errors import UnsupportedCallError

__all__ = ["NO_MLP", "Refusals", "is_mlp_output"]

NO_MLP = (
    "no block of a converted model has an MLP, and its hook_mlp_out is zero. The output of the MLP "
    'of source layer l is blocks.{2l+1}.hook_attn_out: cache["attn_out", 2 * l + 1]; to patch, '
    'activation name "attn_out", layer 2 * l + 1'
)

_STACKED = ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "W_O", "QK", "OV")
_PROCESS = (
    "load_and_process_state_dict",
    "process_weights_",
    "fill_missing_keys",
    "fold_layer_norm",
    "fold_value_biases",
    "center_writing_weights",
    "center_unembed",
    "refactor_factored_attn_matrices",
)
_BUILD = ("from_pretrained", "from_pretrained_no_processing")


def _stacked(name: str) -> property:
    def refuse(self: object) -> NoReturn:
        raise UnsupportedCallError(
            f"{name} of a converted model: its attention heads and its neuron-heads differ in "
            f"number and width, so no one tensor holds both. Use model.attention_heads.{name} or "
            f"model.neuron_heads.{name}"
        )

    return property(refuse, doc=f"Raises: use attention_heads.{name} or neuron_heads.{name}.")


def _method(name: str, why: str, instead: str) -> Any:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedCallError(f"{name} on a converted model: {why}. Use {instead}")

    refuse.__name__ = name
    refuse.__doc__ = f"Raises: use {instead}."
    return refuse


class Refusals:
    """Mixed in before `HookedTransformer`: each member raises before anything is changed."""

    all_composition_scores = _method(
        "all_composition_scores",
        "its heads are of two kinds, and its block order is not TransformerLens' layer order",
        "transformer_lens.utils.composition_scores on model.attention_heads.OV, "
        "model.neuron_heads.QK and their like",
    )
    init_weights = _method(
        "init_weights",
        "its parameters may be those of the source model",
        "init_weights on the source model, before convert",
    )


def is_mlp_output(hook_name: str) -> bool:
    """Whether a hook point bears the name of the output of an MLP, of which there is none."""
    return hook_name.endswith("hook_mlp_out")


for _name in _STACKED:
    setattr(Refusals, _name, _stacked(_name))
for _name in _PROCESS:
    setattr(
        Refusals,
        _name,
        _method(
            _name,
            "its weights are those of the source, under names that TransformerLens' weight "
            "processing does not know",
            f"{_name} on the source model and convert that, or load_state_dict for plain weights",
        ),
    )
for _name in _BUILD:
    setattr(
        Refusals,
        _name,
        classmethod(
            _method(
                _name,
                "a converted model is made from a source model",
                f"attn_only_lens.convert(HookedTransformer.{_name}(...))",
            )
        ),
    )
