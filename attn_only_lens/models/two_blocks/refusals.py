"""Calls that have no right answer on a converted model, and what to use instead of each.

Hooks on points that could never fire are refused; TransformerLens would stay silent.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.models.hook_checks import HookChecks
from attn_only_lens.models.two_blocks.get_act_patch import sweep_of_caller, written_at

NO_MLP = (
    "no block of a converted model has an MLP, and its hook_mlp_out is zero. The output of the MLP "
    'of source layer l is blocks.{2l+1}.hook_attn_out: cache["attn_out", 2 * l + 1]; to patch, '
    'activation name "attn_out", layer 2 * l + 1'
)

# Names, the reason, and what to use instead, where {} stands for the name.
_STACKS = (
    ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "W_O", "QK", "OV"),
    "its attention heads and its neuron-heads differ in number and width, so no one tensor holds "
    "both",
    "model.attention_heads.{0} or model.neuron_heads.{0}",
)
_CONSTRUCTORS = (
    ("from_pretrained", "from_pretrained_no_processing"),
    "a converted model is made from a source model",
    "attn_only_lens.convert(HookedTransformer.{}(...))",
)
_METHODS = (
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
        "its weights are those of the source, under names that TransformerLens' weight processing "
        "does not know",
        "{} on the source model and convert that, or load_state_dict for plain weights",
    ),
    (
        ("all_composition_scores",),
        "its heads are of two kinds, and its block order is not TransformerLens' layer order",
        "transformer_lens.utils.composition_scores on model.attention_heads.OV, "
        "model.neuron_heads.QK and their like",
    ),
    (
        ("init_weights",),
        "its parameters may be those of the source model",
        "init_weights on the source model, before convert",
    ),
    (
        ("tl_parameters",),
        "SVDInterpreter looks for the heads and the MLP of a layer in one block",
        "SVDInterpreter on the source model; or model.attention_heads.OV[l, h].svd(), and "
        "torch.linalg.svd of W_in.T and W_out of model.blocks[2 * l + 1].attn",
    ),
)


class Refusals:
    """Mixed in before `HookedTransformer`: each member raises before anything is changed."""


def _refuse(
    names: tuple[str, ...], why: str, instead: str, kind: Callable[[Any], Any] | None = None
) -> None:
    for name in names:
        use = instead.format(name)
        text = f"{name} on a converted model: {why}. Use {use}"

        def refuse(self: object, *args: object, text: str = text, **kwargs: object) -> NoReturn:
            raise UnsupportedCallError(text)

        refuse.__name__ = name
        refuse.__doc__ = f"Raises: use {use}."
        setattr(Refusals, name, refuse if kind is None else kind(refuse))


_refuse(*_STACKS, property)
_refuse(*_CONSTRUCTORS, classmethod)
for _row in _METHODS:
    _refuse(*_row)


# Hook points that exist but fire only while a flag of cfg is set, by the end of their name.
_SWITCHES = {
    "attn.hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_attn_in": "use_attn_in",
    "hook_mlp_in": "use_hook_mlp_in",
}
_MLP_OUT = "hook_mlp_out"


class ConvertedHookChecks(HookChecks):
    """The part of a converted model that adds hooks, and refuses those that could never fire.

    No block has an MLP, and `hook_mlp_out` of each is zero. A function of names that selects it has
    to select the block's output, `hook_attn_out` or `attn.hook_z`, too, and is called for that
    alone. By name it can be hooked together with `attn.hook_z` of every block, as TransformerLens'
    `attribution_patch` does, which asks for all that heads and MLPs write.
    """

    def run_with_hooks(self, *model_args: Any, fwd_hooks: Any = (), **kwargs: Any) -> Any:
        """As in TransformerLens; for `get_act_patch_*`, translate names of hook points first."""
        if sweep_of_caller(1) is not None:
            points = [(written_at(name), hook) for name, hook in fwd_hooks]
            fwd_hooks = [(name, hook) for name, hook in points if name is not None]
        return super().run_with_hooks(*model_args, fwd_hooks=list(fwd_hooks), **kwargs)

    def _require_all(self, wanted: list[Any]) -> None:
        """Refuse, of hooks added together, those that never fire or would see an absent MLP."""
        names = {name for name in wanted if isinstance(name, str)}
        functions = [list(filter(each, self.hook_dict)) for each in wanted if callable(each)]
        selected = names.union(*functions)
        every_head = {f"blocks.{block}.attn.hook_z" for block in range(self.cfg.n_layers)}
        for name in names:
            # TransformerLens' attribution_patch reads hook_mlp_out with the heads of all blocks.
            if not (name in self.hook_dict and name.endswith(_MLP_OUT) and every_head <= selected):
                self._require_firing(name)
        for matched in functions:
            if not matched:
                raise UnsupportedCallError(
                    "the function given for hook names matches no hook point of the converted "
                    "model: mlp names are under blocks.{2l+1}.attn; model.hook_dict lists all"
                )
            if all(map(self._silence, matched)):
                self._require_firing(matched[0])
            for name in matched:
                block = name.removesuffix(_MLP_OUT)
                instead = {f"{block}hook_attn_out", f"{block}attn.hook_z"}
                if name.endswith(_MLP_OUT) and not selected & instead:
                    self._require_firing(name)

    def _silence(self, hook_name: str) -> str | None:
        """The reason why a hook point never fires as the model is set; None where it fires."""
        if hook_name not in self.hook_dict:
            return (
                f"no hook point {hook_name!r}: source layer l is block 2l (attention heads) and "
                "block 2l + 1 (neuron-heads, under attn: hook_q, hook_k, hook_v, "
                "hook_attn_scores, hook_pattern, hook_z, hook_result); model.hook_dict lists all"
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
        """A function of names that selects no output of an MLP; a name as it is."""
        if isinstance(wanted, str):
            return wanted
        return lambda name: wanted(name) and not name.endswith(_MLP_OUT)
