"""Convert a model's MLP neurons to attention heads, then analyse all heads in the same way.

`__init__.pyi` lists the public names. Public names are imported on first use, because importing
torch and TransformerLens takes seconds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
