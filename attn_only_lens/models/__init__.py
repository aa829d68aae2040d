"""The kinds of models with neuron-heads, and the functions that act on a whole model.

`__init__.pyi` lists the public result classes, which are imported at their first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
