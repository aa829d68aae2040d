"""Hooks on points that could never fire are refused; TransformerLens would stay silent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from transformer_lens.hook_points import HookPoint

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.tl import HookedTransformer

__all__ = ["Firing"]

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

        Raises:
            UnsupportedCallError: a hook point does not exist, or does not fire as the model is
                set (`hook_result` without `set_use_attn_result(True)`, say).
        """
        for name, _ in [*fwd_hooks, *bwd_hooks]:
            if isinstance(name, str):
                self._require_firing(name)
                continue
            self._require_match(name)
        with super().hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts) as hooked:
            yield hooked

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
        return lambda name: wanted(name) and self._switch_off(name) is None

    def _require_match(self, wanted: Callable[[str], bool]) -> None:
        """Refuse a filter whose hooks could never fire."""
        matched = [name for name in self.hook_dict if wanted(name)]
        if not matched:
            raise UnsupportedCallError(
                "the function given for hook names matches no hook point of the converted model: "
                "mlp names are under blocks.{2l+1}.attn; model.hook_dict lists all"
            )
        if all(self._switch_off(name) for name in matched):
            self._require_firing(matched[0])

    def _switch_off(self, hook_name: str) -> str | None:
        """The flag of cfg that keeps this hook point from firing, if one does."""
        for ending, flag in _SWITCHES.items():
            if hook_name.endswith(ending) and not getattr(self.cfg, flag):
                return flag
        return None

    def _require_firing(self, hook_name: str) -> None:
        if hook_name not in self.hook_dict:
            raise UnsupportedCallError(
                f"no hook point {hook_name!r}: source layer l is block 2l (attention heads) and "
                "block 2l + 1 (neuron-heads, under attn: hook_q, hook_k, hook_v, "
                "hook_attn_scores, hook_pattern, hook_z, hook_result); model.hook_dict lists all"
            )
        flag = self._switch_off(hook_name)
        if flag is not None:
            raise UnsupportedCallError(
                f"{hook_name} does not fire while cfg.{flag} is off: "
                f"call model.set_{flag}(True) first"
            )
