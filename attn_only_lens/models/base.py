"""Base classes for models whose MLP neurons act as attention heads.

TransformerLens silently accepts hooks that can never fire; these models raise an error instead.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import Slice

from attn_only_lens.engine.model_checks import weight_hook_reasons
from attn_only_lens.errors import InputError, UnsupportedCallError
from attn_only_lens.heads.host import CHANGED, Host
from attn_only_lens.models.norms import Norm, known_norm, norm_modules, norms_of
from attn_only_lens.tl import HookedTransformer


class ModelHost(Host):
    """The interface to a model with neuron-heads, with checks for replaced modules and hooks."""

    def require_weights(self) -> None:
        """Raise an error if modules were replaced, or if torch hooks may change module outputs."""
        InputError.raise_if(self.reasons() or weight_hook_reasons(self.model), CHANGED)

    def norm_modules(self) -> list[nn.Module]:
        """Return the modules that normalise the residual stream, the queries or the keys."""
        return norm_modules(self.model)

    def norms_of(self, seen: Mapping[nn.Module, tuple[Tensor, Tensor]]) -> dict[nn.Module, Norm]:
        """Return which norm each module computes, inferred from one recorded input and output."""
        return norms_of(seen)


class HookedTransformerHost(ModelHost):
    """The host of a `HookedTransformer` with neuron-heads."""

    def final_norm(self) -> Norm:
        """Return the final norm layer, before the unembedding."""
        return known_norm(getattr(self.model, "ln_final", None))

    def tokens_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return how many earlier tokens the key-value cache passed to the first block holds."""
        entry = kwargs.get("past_kv_cache_entry")
        return 0 if entry is None else int(entry.past_keys.shape[1])


class HookChecks(HookedTransformer):
    """A HookedTransformer that raises an error for hooks on hook points that can never fire."""

    def get_caching_hooks(
        self,
        names_filter: Any = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: Any = None,
        pos_slice: Any = None,
    ) -> Any:
        """Return TransformerLens' caching hooks, but only for hook points that can fire.

        TransformerLens applies `pos_slice` to an axis that it finds by the hook point's name, so
        the activations of neuron-heads are sliced here, before its hooks store them.
        """
        firing, wanted = self._firing(names_filter), Slice.unwrap(pos_slice)
        names = {name: hasattr(point, "pos_dim") for name, point in self.hook_dict.items()}
        options = (incl_bwd, device, remove_batch_dim)

        def of_positions(save: Any, tensor: Tensor, hook: Any) -> None:
            save(wanted.apply(tensor, dim=hook.pos_dim), hook=hook)

        cache, *others = super().get_caching_hooks(
            lambda name: firing(name) and not names[name], *options, cache, wanted
        )
        _, *heads = super().get_caching_hooks(
            lambda name: firing(name) and names[name], *options, cache
        )
        sliced = [[(name, partial(of_positions, save)) for name, save in x] for x in heads]
        return cache, *(x + y for x, y in zip(others, sliced, strict=True))

    def add_caching_hooks(self, names_filter: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Add TransformerLens' caching hooks, except to hook points that can never fire."""
        return super().add_caching_hooks(self._firing(names_filter), *args, **kwargs)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: list[Any] = [],  # noqa: B006 - TransformerLens' signature; never changed
        bwd_hooks: list[Any] = [],  # noqa: B006
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """Add hooks as TransformerLens does, but raise an error for hooks that could never fire.

        Raises:
            UnsupportedCallError: a hook point does not exist, or does not fire under the current
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
        """Add a hook as TransformerLens does, but raise an error if the hook could never fire."""
        self._require_all([name])
        wanted = self._wanted(name)
        if callable(wanted):
            for hook_name in filter(wanted, self.hook_dict):
                self._require_firing(hook_name)
        super().add_hook(wanted, hook, *args, **kwargs)

    def check_hooks_to_add(
        self, hook_point: HookPoint, hook_point_name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Raise an error if a hook point does not fire with the model's current options."""
        self._require_firing(hook_point_name)
        super().check_hooks_to_add(hook_point, hook_point_name, *args, **kwargs)

    def _silence(self, hook_name: str) -> str | None:
        """Return an error message if a hook point does not fire with the current options."""
        return None

    def _wanted(self, wanted: Any) -> Any:
        """Return the hook name or name filter to pass to TransformerLens in place of `wanted`."""
        return wanted

    def _require_all(self, wanted: list[Any]) -> None:
        """Raise an error if a hook on any of the given names would never fire."""
        for name in wanted:
            if isinstance(name, str):
                self._require_firing(name)

    def _firing(self, names_filter: Any) -> Callable[[str], bool]:
        """Return a name filter for hook points that can fire; raise an error for other names."""
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
