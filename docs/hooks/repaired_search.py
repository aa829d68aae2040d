"""Repair the site's search, in which a bug of lunr 2.3.9 hides all results of some questions.

lunr keeps words in a graph. To find equal nodes, it writes each node as a string: for every edge, a
letter and the number of the next node. Because nothing separates these parts, two different nodes
whose letters are digits can have the same string. lunr then takes them for one node, and its graph
has words that no page has; a search for the first letters of such a word raises an error. This
happens on sites with many numbers, such as the tables of studies and the names of neurons.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_AS_STRING = re.compile(r"(\w)=\1\+(\w)\+(\w)\.id\}return \1\}")


def on_post_build(config: Any, **_: Any) -> None:
    """Separate the parts of the string, in the script that searches.

    Raises:
        PluginError: the script does not contain lunr's function exactly once.
    """
    scripts = sorted(Path(config.site_dir).glob("assets/javascripts/workers/search*.js"))
    for path in scripts:
        text, n = _AS_STRING.subn(r'\1=\1+\2+\3.id+","}return \1}', path.read_text("utf-8"))
        if n != 1:
            raise PluginError(f"{path.name}: found lunr's TokenSet.toString {n} times, expected 1")
        path.write_text(text, "utf-8")
    if not scripts:
        raise PluginError("the site has no script that searches: is mkdocs-material another one?")
