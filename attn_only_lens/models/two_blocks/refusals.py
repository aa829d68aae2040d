"""Calls that have no right answer on a converted model, and what to use instead of each.

Hooks on points that could never fire are refused; TransformerLens would stay silent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

from transformer_lens.hook_points import HookPoint

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.tl import HookedTransformer

__all__ = ["NO_MLP", "Firing", "Refusals", "is_mlp_output"]

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


# Hook points that exist but fire only while a flag of cfg is set, by the end of their name.
_SWITCHES = {
    "attn.hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_attn_in": "use_attn_in",
    "hook_mlp_in": "use_hook_mlp_in",
}


class Firing(HookedTransformer):
    """The part of a converted model that adds hooks."""

    def get_caching_hooks(self, names_filter: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens, for hook points that fire as the model is set."""
        return super().get_caching_hooks(self._firing(names_filter), *args, **kwargs)

    def add_caching_hooks(self, names_filter: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens, for hook points that fire as the model is set."""
        return super().add_caching_hooks(self._firing(names_filter), *args, **kwargs)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: list[Any] = [],  # noqa: B006 - TransformerLens' signature; never changed
        bwd_hooks: list[Any] = [],  # noqa: B006
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """As in TransformerLens; a hook that could never fire is refused before any is added.

        No block has an MLP, and `hook_mlp_out` of each is zero. A function of names selects what
        the block does write, `hook_attn_out` or `attn.hook_z`, and leaves that out. By name it can
        be hooked together with `attn.hook_z` of every block, as TransformerLens'
        `attribution_patch` does, which asks for all that heads and MLPs write.

        Raises:
            UnsupportedCallError: a hook point does not exist, or does not fire as the model is
                set (`hook_result` without `set_use_attn_result(True)`, say); or it is
                `hook_mlp_out`, and what the block writes instead is not asked for.
        """
        self._require_all([name for name, _ in [*fwd_hooks, *bwd_hooks]])
        with super().hooks(
            [(self._but_mlps(name), hook) for name, hook in fwd_hooks],
            [(self._but_mlps(name), hook) for name, hook in bwd_hooks],
            reset_hooks_end,
            clear_contexts,
        ) as hooked:
            yield hooked

    def add_hook(
        self, name: str | Callable[[str], bool], hook: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """As in TransformerLens; what `hooks` refuses is refused here, before any is added."""
        self._require_all([name])
        wanted = self._but_mlps(name)
        if not isinstance(wanted, str):
            for each in filter(wanted, self.hook_dict):
                self._require_firing(each)
        super().add_hook(wanted, hook, *args, **kwargs)

    def check_hooks_to_add(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: Callable[..., Any],
        dir: Literal["fwd", "bwd"] = "fwd",
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        """Refuse a hook on a point that does not fire as the model is set."""
        self._require_firing(hook_point_name)

    def _firing(self, names_filter: Any) -> Callable[[str], bool]:
        """The filter for hook points that fire; a name among those that do not is refused."""
        if isinstance(names_filter, str):
            names_filter = [names_filter]
        if isinstance(names_filter, list | tuple | set | frozenset):
            for name in names_filter:
                self._require_firing(name)
            return set(names_filter).__contains__
        wanted = (lambda name: True) if names_filter is None else names_filter
        if any(wanted(name) for name in self.hook_dict):
            self._require_match(wanted)
        wanted = self._but_mlps(wanted)
        return lambda name: wanted(name) and self._switch_off(name) is None

    def _but_mlps(self, wanted: Any) -> Any:
        """A function of names that selects the output of no MLP; a name as it is."""
        if isinstance(wanted, str):
            return wanted
        return lambda name: wanted(name) and not is_mlp_output(name)

    def _require_all(self, wanted: list[Any]) -> None:
        """Refuse, of hooks added together, those that never fire or see a zero for an output."""
        selected = {name for name in wanted if isinstance(name, str)}
        for function in wanted:
            if not isinstance(function, str):
                self._require_match(function)
                selected |= set(filter(function, self.hook_dict))
        every_head = {f"blocks.{block}.attn.hook_z" for block in range(self.cfg.n_layers)}
        for each in wanted:
            if isinstance(each, str):
                if each not in self.hook_dict or not (
                    is_mlp_output(each) and every_head <= selected
                ):
                    self._require_firing(each)
                continue
            for name in filter(is_mlp_output, filter(each, self.hook_dict)):
                block = name.removesuffix("hook_mlp_out")
                if not selected & {f"{block}hook_attn_out", f"{block}attn.hook_z"}:
                    self._require_firing(name)

    def _require_match(self, wanted: Callable[[str], bool]) -> None:
        """Refuse a filter whose hooks could never fire."""
        matched = [name for name in self.hook_dict if wanted(name)]
        if not matched:
            raise UnsupportedCallError(
                "the function given for hook names matches no hook point of the converted model: "
                "mlp names are under blocks.{2l+1}.attn; model.hook_dict lists all"
            )
        if not any(self._fires(name) for name in matched):
            self._require_firing(matched[0])

    def _switch_off(self, hook_name: str) -> str | None:
        """The flag of cfg that keeps this hook point from firing, if one does."""
        for ending, flag in _SWITCHES.items():
            if hook_name.endswith(ending) and not getattr(self.cfg, flag):
                return flag
        return None

    def _fires(self, hook_name: str) -> bool:
        return not is_mlp_output(hook_name) and self._switch_off(hook_name) is None

    def _require_firing(self, hook_name: str) -> None:
        if hook_name not in self.hook_dict:
            raise UnsupportedCallError(
                f"no hook point {hook_name!r}: source layer l is block 2l (attention heads) and "
                "block 2l + 1 (neuron-heads, under attn: hook_q, hook_k, hook_v, "
                "hook_attn_scores, hook_pattern, hook_z, hook_result); model.hook_dict lists all"
            )
        if is_mlp_output(hook_name):
            raise UnsupportedCallError(f"{hook_name}: {NO_MLP}")
        flag = self._switch_off(hook_name)
        if flag is not None:
            raise UnsupportedCallError(
                f"{hook_name} does not fire while cfg.{flag} is off: "
                f"call model.set_{flag}(True) first"
            )
