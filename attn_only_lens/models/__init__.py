"""Models whose MLP neurons act as attention heads, and functions to build, save and load them.

`__init__.pyi` lists the public classes, which are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
