"""Hooks that could never fire are refused; TransformerLens would stay silent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformer_lens.hook_points import HookPoint

from attn_only_lens.errors import UnsupportedCallError
from attn_only_lens.tl import HookedTransformer


class HookChecks(HookedTransformer):
    """A HookedTransformer some of whose hook points fire only as it is set, or never."""

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
        """As in TransformerLens; what `hooks` refuses is refused here, before any is added."""
        self._require_all([name])
        wanted = self._wanted(name)
        if callable(wanted):
            for each in filter(wanted, self.hook_dict):
                self._require_firing(each)
        super().add_hook(wanted, hook, *args, **kwargs)

    def check_hooks_to_add(
        self, hook_point: HookPoint, hook_point_name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Refuse a hook on a point that does not fire as the model is set."""
        self._require_firing(hook_point_name)
        super().check_hooks_to_add(hook_point, hook_point_name, *args, **kwargs)

    def _silence(self, hook_name: str) -> str | None:
        """The reason why a hook point never fires as the model is set; None where it fires."""
        return None

    def _wanted(self, wanted: Any) -> Any:
        """The name, or the function of names, to give to TransformerLens instead."""
        return wanted

    def _require_all(self, wanted: list[Any]) -> None:
        """Refuse, of hooks added together, those that never fire."""
        for name in wanted:
            if isinstance(name, str):
                self._require_firing(name)

    def _firing(self, names_filter: Any) -> Callable[[str], bool]:
        """The filter for hook points that fire; a name of one that does not is refused."""
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
