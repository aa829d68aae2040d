"""A small circuit with awkward texts, for tests of its picture."""

import numpy as np
import pandas as pd

from attn_only_lens.neurons.statistics import Example
from attn_only_lens.viz.circuit_data import NodeDetails

EVIL = [
    "<bos>",
    "</script>",
    "<b>bold</b>",
    "\n",
    ' "q"',
    "日\u2028",
    "<img src=//x.invalid onerror=a()>",
]
META = {"tokens": EVIL, "metric": "p('</title>') & \"x\"", "value": 3.7, "model": "<tiny>"}


def circuit(n_neurons=13, seed=0):
    """Return embeddings, neurons of three layers, a head, a bias, a rest, a metric, and edges."""
    rng = np.random.default_rng(seed)
    rows = [(f"embed@{t}", "embed", None, "embed", t) for t in range(len(EVIL))]
    rows += [
        (f"L{i % 3}N{i}@{i % 7}", "neuron", i % 3, f"L{i % 3}N{i}", i % 7) for i in range(n_neurons)
    ]
    rows += [
        ("L1H3@6", "attention", 1, "L1H3", 6),
        ("bias L2", "bias", 2, "<i>bias", None),
        ("rest", "rest", None, "rest", None),
        ("metric", "metric", None, "metric", 6),
    ]
    nodes = pd.DataFrame(rows, columns=["id", "kind", "layer", "name", "position"])
    nodes["value"] = rng.normal(size=len(nodes))
    nodes["attribution"] = rng.normal(size=len(nodes))
    depth = [
        {"embed": -1, "rest": -1, "metric": 99}.get(kind, 2 * (layer or 0) + (kind != "attention"))
        for kind, layer in zip(nodes["kind"], nodes["layer"].fillna(0), strict=True)
    ]
    pairs = [(a, b) for a in range(len(nodes)) for b in range(len(nodes)) if depth[a] < depth[b]]
    ids = nodes["id"].to_numpy()
    edges = pd.DataFrame(
        {
            "source": [ids[a] for a, _ in pairs],
            "target": [ids[b] for _, b in pairs],
            "kind": rng.choice(["value", "q", "k"], size=len(pairs)),
            "weight": rng.normal(size=len(pairs)),
        }
    )
    return nodes, edges


def details():
    """Return details of one neuron by name, and of one node by id."""
    ramp = [t / len(EVIL) for t in range(len(EVIL))]
    return {
        "L1N4": NodeDetails(
            pattern=ramp,
            writes=[("</script>", 2.5), (" Zebra", -1.28)],
            examples=[Example(("a", " <b>"), (0.5, -0.25), (0.75, 0.5), 1, -0.25, 3)],
        ),
        "L1H3@6": NodeDetails(pattern=ramp[::-1]),
    }
