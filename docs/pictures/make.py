"""Make the pictures of the README and the guide: `make pictures`.

Each is of the small language model that ships with the package. Pages are opened in a headless
Chromium; the circuit's own picture is drawn without one.
"""

import tempfile
from pathlib import Path
from typing import Any

from browser import chromium
from PIL import Image

from attn_only_lens import (
    circuits,
    compare,
    expose_neuron_heads,
    grow,
    pretrained,
    tasks,
    viz,
)
from attn_only_lens import patching as p

HERE = Path(__file__).parent
TEXT = "The keys near the cabinet"
WIDTH = 1000


def main() -> None:
    """Draw all."""
    model = pretrained.small_english()
    expose_neuron_heads(model)
    metric = p.logit_diff(" are", " is")
    task = tasks.agreement(model.tokenizer, n=8)
    sweep = p.activation_patch(
        model, task.clean, task.corrupted, task.metric, positions=task.roles, progress=False
    )
    pair = p.activation_patch(model, TEXT, TEXT.replace("keys", "key"), metric, progress=False)
    strongest = pair.query("kind == 'neuron'").top(8)["name"].unique()[:3].tolist()
    graph = circuits.attribution_graph(model, TEXT, metric, top=60)
    circuit = viz.circuit_view(graph, model, TEXT)
    viz.write_svg(circuit, HERE / "circuit.svg")
    texts = pretrained.small_english_texts()
    grown = grow(pretrained.small_english(), d_mlp=model.cfg.d_mlp + 8, seed=0)
    found = compare(
        pretrained.small_english(), grown, task.clean, task.metric, n_nodes=30, progress=False
    )
    pages: dict[str, tuple[Any, int]] = {
        "circuit_page": (circuit, 760),
        "sweep_bars": (viz.sweep_bars(sweep, k=12), 440),
        "sweep_heatmap": (viz.sweep_heatmap(pair), 420),
        "attention": (viz.attention_view(model, strongest[0], TEXT), 420),
        "neuron": (viz.neuron_page(model, strongest, texts), 900),
        "comparison": (viz.comparison_circuit(found), 760),
    }
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder) / "profile") as browser:
        for name, (picture, height) in pages.items():
            browser.driver.set_window_size(WIDTH, height)
            browser.open(viz.write_html(picture, Path(folder) / f"{name}.html"))
            browser.wait("document.readyState === 'complete'")
            browser.drawn()
            path = HERE / f"{name}.png"
            browser.driver.save_screenshot(str(path))
            Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    main()
