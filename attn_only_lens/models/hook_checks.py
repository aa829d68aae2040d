"""Refuse hooks that could never fire; TransformerLens would ignore them silently."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformer_lens.hook_points import HookPoint

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.tl import HookedTransformer


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
