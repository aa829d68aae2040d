"use strict";
// circuitsvis draws attention heads; neuron-heads are drawn as coloured tokens.
{
  const data = JSON.parse(document.getElementById("data").textContent);
  const most = (numbers) => Math.max(...numbers.map(Math.abs), 0);
  data.neurons.forEach((neuron) => {
    const limits = { z: most(neuron.z), value: most(neuron.value) };
    const of = { ...neuron, tokens: data.tokens, here: -1 };
    document.getElementById("neurons").append(
      el("section", { class: "neuron" },
        el("h2", {}, neuron.name), tokenLine(of, limits, true), tokenLegend(limits, true))
    );
  });
  if (data.heads) {
    // A heatmap stays empty if it is drawn while a notebook's frame is hidden (size 0 × 0).
    const seen = new ResizeObserver(([{ contentRect }]) => {
      if (!contentRect.width) return;
      seen.disconnect();
      CircuitsVis.render("heads", CircuitsVis.AttentionHeads, data.heads);
    });
    seen.observe(document.getElementById("heads"));
  }
}
