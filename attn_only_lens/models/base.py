"""What converted and exposed models have in common: their hosts, and the checks of hooks.

TransformerLens ignores hooks that can never fire; these models refuse them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from attn_only_lens.engine.model_checks import weight_hook_reasons
from attn_only_lens.errors import InputError, UnsupportedCallError
from attn_only_lens.heads.host import CHANGED, Host
from attn_only_lens.models.norms import Norm, known_norm, norm_modules, norms_of
from attn_only_lens.tl import HookedTransformer


class ModelHost(Host):
    """A model whose weights are checked by its modules and by the hooks on them."""

    def require_weights(self) -> None:
        """Refuse replaced modules, and torch hooks that may change what weights compute."""
        InputError.raise_if(self.reasons() or weight_hook_reasons(self.model), CHANGED)

    def norm_modules(self) -> list[nn.Module]:
        """Return the norms of the stream, and of queries and keys."""
        return norm_modules(self.model)

    def norms_of(self, seen: Mapping[nn.Module, tuple[Tensor, Tensor]]) -> dict[nn.Module, Norm]:
        """Return the norms that modules are, by an input and its output."""
        return norms_of(seen)


class HookedTransformerHost(ModelHost):
    """A `HookedTransformer`, converted or exposed."""

    def final_norm(self) -> Norm:
        """Return the norm before the unembedding."""
        return known_norm(getattr(self.model, "ln_final", None))

    def tokens_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the length of the keys in the first block's entry of a cache."""
        entry = kwargs.get("past_kv_cache_entry")
        return 0 if entry is None else int(entry.past_keys.shape[1])


class HookChecks(HookedTransformer):
    """A HookedTransformer with hook points that fire only under some settings, or never."""

    def get_caching_hooks(self, names_filter: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens, for hook points that fire under the present settings."""
        return super().get_caching_hooks(self._firing(names_filter), *args, **kwargs)

    def add_caching_hooks(self, names_filter: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in TransformerLens, for hook points that fire under the present settings."""
        return super().add_caching_hooks(self._firing(names_filter), *args, **kwargs)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: list[Any] = [],  # noqa: B006 - TransformerLens' signature; never changed
        bwd_hooks: list[Any] = [],  # noqa: B006
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """As in TransformerLens, but refuse hooks that could never fire before adding any.

        Raises:
            UnsupportedCallError: a hook point does not exist, or does not fire under the present
                settings (for example `hook_result` without `set_use_attn_result(True)`).
        """
        fwd_hooks, bwd_hooks = list(fwd_hooks), list(bwd_hooks)
        self._require_all([name for name, _ in [*fwd_hooks, *bwd_hooks]])
        with super().hooks(
            [(self._wanted(name), hook) for name, hook in fwd_hooks],
            [(self._wanted(name), hook) for name, hook in bwd_hooks],
            reset_hooks_end,
            clear_contexts,
        ) as hooked:
            yield hooked

    def add_hook(
        self, name: str | Callable[[str], bool], hook: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """As in TransformerLens, with the checks of `hooks`."""
        self._require_all([name])
        wanted = self._wanted(name)
        if callable(wanted):
            for hook_name in filter(wanted, self.hook_dict):
                self._require_firing(hook_name)
        super().add_hook(wanted, hook, *args, **kwargs)

    def check_hooks_to_add(
        self, hook_point: HookPoint, hook_point_name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Refuse a hook on a point that does not fire under the present settings."""
        self._require_firing(hook_point_name)
        super().check_hooks_to_add(hook_point, hook_point_name, *args, **kwargs)

    def _silence(self, hook_name: str) -> str | None:
        """Return why a hook point does not fire under the present settings; None if it fires."""
        return None

    def _wanted(self, wanted: Any) -> Any:
        """Return the name, or the function of names, to pass to TransformerLens instead."""
        return wanted

    def _require_all(self, wanted: list[Any]) -> None:
        """Refuse hooks that never fire, among hooks that are added together."""
        for name in wanted:
            if isinstance(name, str):
                self._require_firing(name)

    def _firing(self, names_filter: Any) -> Callable[[str], bool]:
        """Return a filter for hook points that fire; refuse the name of one that does not."""
        if isinstance(names_filter, str):
            names_filter = [names_filter]
        if isinstance(names_filter, list | tuple | set | frozenset):
            for name in names_filter:
                self._require_firing(name)
            return set(names_filter).__contains__
        wanted = (lambda name: True) if names_filter is None else names_filter
        matched = list(filter(wanted, self.hook_dict))
        firing = {name for name in matched if self._silence(name) is None}
        if matched and not firing:
            self._require_firing(matched[0])
        return firing.__contains__

    def _require_firing(self, hook_name: str) -> None:
        if reason := self._silence(hook_name):
            raise UnsupportedCallError(reason)
