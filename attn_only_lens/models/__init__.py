"""Models with neuron-heads, and functions that act on whole models.

The public result classes, listed in `__init__.pyi`, are imported at their first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
