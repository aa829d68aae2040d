"""Counting the memory that operations allocate."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """The peak memory in bytes of all tensors that operations allocate."""

    def __init__(self):
        super().__init__()
        self.alive, self.total, self.most = {}, 0, 0  # total: with freed tensors

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {self.key(leaf) for leaf in tree_leaves((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            key = self.key(leaf)
            if key is not None and key not in inputs and key not in self.alive:
                storage = leaf.untyped_storage()
                self.alive[key] = StorageWeakRef(storage), storage.nbytes()
                self.total += storage.nbytes()
        if self.total > self.most:
            self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
            self.total = sum(size for _, size in self.alive.values())
            self.most = max(self.most, self.total)
        return out

    @staticmethod
    def key(value):
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
