"""Convert a model's MLP neurons to attention heads, then analyse all heads in the same way.

`__init__.pyi` lists the public names. Each name is imported when it is first used, because torch
and TransformerLens take seconds to import.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
