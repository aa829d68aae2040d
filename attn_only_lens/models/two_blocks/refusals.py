"""Raise an error for method calls that would return a wrong result for a converted model.

Every error says what to use instead. Adding a hook that could never fire is an error, too.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.models.base import HookChecks

NO_MLP = (
    "no block of a converted model has an MLP, so hook_mlp_out is zero. The output of the MLP "
    'of source layer l is blocks.{2l+1}.hook_attn_out: cache["attn_out", 2 * l + 1]; to patch, '
    'activation name "attn_out", layer 2 * l + 1'
)

# Members that raise an error: names, kind, reason, and what to use instead ({0} is the name).
_Refusal = tuple[tuple[str, ...], Callable[[Any], Any] | None, str, str]
_REFUSED: tuple[_Refusal, ...] = (
    (
        ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "W_O", "QK", "OV"),
        property,
        "its attention heads and its neuron-heads differ in number and width, so one tensor cannot "
        "hold both",
        "model.attention_heads.{0} or model.neuron_heads.{0}",
    ),
    (
        ("from_pretrained", "from_pretrained_no_processing"),
        classmethod,
        "a converted model is made from a source model",
        "attn_only_lens.convert(HookedTransformer.{0}(...))",
    ),
    (
        (
            "load_and_process_state_dict",
            "process_weights_",
            "fill_missing_keys",
            "fold_layer_norm",
            "fold_value_biases",
            "center_writing_weights",
            "center_unembed",
            "refactor_factored_attn_matrices",
        ),
        None,
        "its weights are those of the source, under names that TransformerLens' weight processing "
        "does not know",
        "{0} on the source model and convert that, or load_state_dict for plain weights",
    ),
    (
        ("all_composition_scores",),
        None,
        "its heads are of two kinds",
        "transformer_lens.utils.composition_scores on model.attention_heads.OV and so on",
    ),
    (
        ("init_weights",),
        None,
        "it may share its parameters with the source model",
        "init_weights on the source model, before convert",
    ),
    (
        ("tl_parameters",),
        None,
        "SVDInterpreter expects the heads and the MLP of a layer in one block",
        "SVDInterpreter on the source model; or model.attention_heads.OV[l, h].svd(), and "
        "torch.linalg.svd of W_in.T and W_out of model.blocks[2 * l + 1].attn",
    ),
)

# Endings of hook names, each with the cfg flag that these hook points need to fire.
_SWITCHES = {
    "attn.hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_attn_in": "use_attn_in",
    "hook_mlp_in": "use_hook_mlp_in",
}
_MLP_OUT = "hook_mlp_out"


class Refusals:
    """A mixin that makes some members of `HookedTransformer` raise an error."""


def _refuse_all() -> None:
    for names, kind, reason, instead in _REFUSED:
        for name in names:
            use = instead.format(name)
            text = f"{name} is not available on a converted model: {reason}. Use {use}"

            def refuse(self: object, *args: object, text: str = text, **kwargs: object) -> NoReturn:
                raise UnsupportedCallError(text)

            refuse.__name__ = name
            refuse.__doc__ = f"Raise an error; use {use} instead."
            setattr(Refusals, name, refuse if kind is None else kind(refuse))


_refuse_all()


class ConvertedHookChecks(HookChecks):
    """A converted model that raises an error for hooks that could never fire.

    The value at each `hook_mlp_out` of a converted model is zero. A name filter that selects
    `hook_mlp_out` must also select the block's `hook_attn_out` or `attn.hook_z`, and then hooks
    only these. A hook on the name `hook_mlp_out` itself is allowed only together with hooks on
    every block's `attn.hook_z`, as in `attribution_patch`.
    """

    def _require_all(self, wanted: list[Any]) -> None:
        """Raise an error if a hook on any of these names would never fire, or would need an MLP."""
        names = {name for name in wanted if isinstance(name, str)}
        functions = [list(filter(select, self.hook_dict)) for select in wanted if callable(select)]
        selected = names.union(*functions)
        every_head = {f"blocks.{block}.attn.hook_z" for block in range(self.cfg.n_layers)}
        for name in names:
            if not (name in self.hook_dict and name.endswith(_MLP_OUT) and every_head <= selected):
                self._require_firing(name)
        for matched in functions:
            if not matched:
                raise UnsupportedCallError(
                    "the function given for hook names matches no hook point of the converted "
                    "model: hook points of MLPs are under blocks.{2l+1}.attn; model.hook_dict "
                    "lists all names"
                )
            if all(map(self._silence, matched)):
                self._require_firing(matched[0])
            for name in matched:
                block = name.removesuffix(_MLP_OUT)
                outputs = {f"{block}hook_attn_out", f"{block}attn.hook_z"}
                if name.endswith(_MLP_OUT) and not selected & outputs:
                    self._require_firing(name)

    def _silence(self, hook_name: str) -> str | None:
        if hook_name not in self.hook_dict:
            return (
                f"no hook point {hook_name!r}: source layer l is block 2l (attention heads) and "
                "block 2l + 1 (neuron-heads, under attn: hook_q, hook_k, hook_v, "
                "hook_attn_scores, hook_pattern, hook_z, hook_result); model.hook_dict lists all "
                "names"
            )
        if hook_name.endswith(_MLP_OUT):
            return f"{hook_name}: {NO_MLP}"
        for ending, flag in _SWITCHES.items():
            if hook_name.endswith(ending) and not getattr(self.cfg, flag):
                return (
                    f"{hook_name} does not fire while cfg.{flag} is off: "
                    f"call model.set_{flag}(True) first"
                )
        return None

    def _wanted(self, wanted: Any) -> Any:
        """Return a hook name unchanged, or a name filter without the `hook_mlp_out` names."""
        if isinstance(wanted, str):
            return wanted
        return lambda name: wanted(name) and not name.endswith(_MLP_OUT)
