"""Make the pictures in the README and the guide: `make pictures`.

Pictures show the small language model that ships with the package. If the SmolLM2-135M folder is
an argument (`make pictures SMOLLM2=FOLDER`), five explanations of that model are drawn too. A
headless Chromium takes screenshots of pages; pictures of circuits are drawn without a browser.
`measured.py` then updates the numbers in the pages.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import measured
import torch
from browser import chromium
from PIL import Image
from torch.nn.functional import cross_entropy

from attn_only_lens import (
    Contrast,
    Work,
    compare,
    explain,
    expose_neuron_heads,
    grow,
    growth,
    load,
    pretrained,
    tasks,
    viz,
)
from attn_only_lens import patching as p
from attn_only_lens.neurons import Corpus

HERE = Path(__file__).parent
TEXT = "The keys near the cabinet"
FIGURE, PAGE = 800, 900  # widths in CSS pixels; the guide's text column is 690 wide


def main() -> None:
    """Draw all pictures of the small language model."""
    model = load("small-english")
    expose_neuron_heads(model)
    keys = Contrast(TEXT, TEXT.replace("keys", "key"), p.logit_diff(" are", " is"))
    quiet = Work(progress=False)
    task = tasks.agreement(model.tokenizer, n=20, structure="relative")
    sweep = p.activation_patch(model, task, sites=p.Sites(positions="roles"), work=quiet)
    pair = p.activation_patch(model, keys, work=quiet)
    strongest = pair.top(12)["name"].unique().tolist()
    read = [name for name in strongest if "N" in name][:3]
    pairs = tasks.agreement(model.tokenizer, 16)
    circuit = explain(model, pairs[:8], held_out=pairs[8:]).view()
    viz.write(circuit, HERE / "circuit.svg")
    texts = pretrained.small_english_texts()
    sizes = growth.ComparisonSizes(n_nodes=40)
    models = load("small-english"), grown_and_trained(texts)
    found = compare(*models, task, sizes=sizes, work=quiet)
    pages: dict[str, tuple[Any, int, int]] = {
        "circuit_page": (circuit, PAGE, 760),
        "sweep_bars": (viz.bars(sweep, k=12), FIGURE, 520),
        "sweep_heatmap": (viz.heatmap(pair), FIGURE, 470),
        "attention": (viz.attention_view(model, strongest[:4], TEXT), FIGURE, 1280),
        "neuron": (viz.neuron_page(model, read, Corpus(texts)), PAGE, 900),
        "comparison": (viz.circuit_view(found), PAGE, 760),
    }
    with tempfile.TemporaryDirectory() as folder, chromium(Path(folder) / "profile") as browser:
        for name, (picture, width, height) in pages.items():
            size = {"width": width, "height": height, "deviceScaleFactor": 1.5, "mobile": False}
            browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
            browser.open(viz.write(picture, Path(folder) / f"{name}.html"))
            browser.wait("document.readyState === 'complete'")
            browser.js("document.querySelectorAll('.modebar').forEach(each => each.remove())")
            browser.drawn()
            path = HERE / f"{name}.png"
            browser.driver.save_screenshot(str(path))
            few = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
            few.save(path, optimize=True)  # a third of the file size, and rare colours stay


def grown_and_trained(texts: list[str]) -> Any:
    """Grow the model and train it for a few steps, so that its circuits change."""
    model = load("small-english")
    grown = grow(model, d_mlp=model.cfg.d_mlp + 32, n_heads=model.cfg.n_heads + 1, seed=0)
    optimizer = torch.optim.AdamW(grown.model.parameters(), lr=3e-3)
    rows = [model.to_tokens(text)[0] for text in texts]
    for step in range(8):
        logits_of = [(grown.model(row[None])[0], row) for row in rows[step::8][:8]]
        losses = [cross_entropy(logits[:-1], row[1:]) for logits, row in logits_of]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return grown


if __name__ == "__main__":
    main()
    values = measured.of_small_english()
    for folder in sys.argv[1:]:
        values |= measured.of_smollm2(
            folder, lambda name, why: viz.write(why.view(), HERE / f"explain_{name}.svg")
        )
    measured.write(values)
