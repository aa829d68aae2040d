"""The state of a bridge before and after its neurons are exposed, and comparisons of states."""

import torch
from common import relative

EXACT = 1e-12


def drop(index, dim):
    return lambda x, hook: x.index_fill(dim, torch.tensor(index), 0.0)


def same(cache, expected, bound=EXACT):
    """Check that every hook that fires on the plain model fires equally on the exposed one."""
    for key, value in expected.items():
        if value is not None and value.is_floating_point():
            finite = value.isfinite()
            assert relative(cache[key][finite], value[finite]) <= bound, key


def state(bridge):
    """Return the state that `undo` has to restore."""
    modules = {name: (type(m), m.training) for name, m in bridge.named_modules()}
    points = {name: (type(p), p.name, set(vars(p))) for name, p in bridge.hook_dict.items()}
    registries = [list(block.mlp._hook_registry) for block in bridge.blocks]
    return type(bridge), modules, list(points.items()), registries, list(bridge._hook_registry)
