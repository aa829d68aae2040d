"""The kinds of models with neuron-heads, and what is done to a whole model.

`__init__.pyi` lists the results of public functions; they are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
