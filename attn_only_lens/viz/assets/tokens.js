"use strict";
// A text's tokens with a neuron-head's activations: the colour is z, the bar under a token is the
// gate, and the strip under the bar is the value. Attention pages and neuron pages use this code.

const el = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") made.style.cssText = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
};

const short = (x) => {
  if (x === null || x === undefined || !Number.isFinite(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  const text = size >= 1000 || size < 0.001 ? x.toExponential(1) : x.toPrecision(3);
  const plain = text.includes("e") || !text.includes(".") ? text : text.replace(/\.?0+$/, "");
  return plain.replace("-", "−");
};

// The colour of a signed number; 0 has the page's background colour.
const share = (x, limit) => Math.round(100 * Math.min(1, limit > 0 ? Math.abs(x) / limit : 0));
const diverging = (x, limit) =>
  `color-mix(in srgb, var(--${x < 0 ? "negative" : "positive"}) ${share(x, limit)}%, var(--zero))`;

const tip = el("div", { id: "tip", role: "tooltip", hidden: "" });
document.body.append(tip);
const hideTip = () => (tip.hidden = true);
function showTip(at, rows) {
  tip.replaceChildren(...rows.map((row) => el("div", {}, row)));
  tip.hidden = false;
  const box = at.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.max(4, Math.min(box.left, innerWidth - width - 4));
  const below = box.bottom + height + 8 < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? box.bottom + 4 : box.top - height - 4}px`;
}

// A line of tokens. `window` has tokens [{shown, name}], z, gate, value, and `here`, the index of
// the example's token, or -1. `limits` has the limits of z and value.
function tokenLine(window, limits, strips) {
  const line = el("div", { class: strips ? "line strips" : "line" });
  window.tokens.forEach((token, i) => {
    const z = window.z[i];
    const strong = share(z, limits.z) > 70;
    const text = el("span", { class: strong ? "t strong" : "t" }, token.shown);
    text.style.background = diverging(z, limits.z);
    const cell = el("span", { class: i === window.here ? "tok here" : "tok" }, text);
    if (strips) {
      const full = Math.round(100 * Math.max(0, Math.min(1, window.gate[i])));
      const gate = el("i", { class: "gate" });
      gate.style.background = `linear-gradient(to right, var(--soft) ${full}%, var(--line) ${full}%)`;
      const value = el("i", { class: "value" });
      value.style.background = diverging(window.value[i] ?? 0, limits.value);
      cell.append(gate, value);
    }
    cell.addEventListener("mouseenter", () =>
      showTip(cell, [
        el("b", {}, token.name),
        `z ${short(z)}`,
        `gate ${short(window.gate[i])}`,
        `value ${short(window.value[i])}`,
      ])
    );
    cell.addEventListener("mouseleave", hideTip);
    line.append(cell);
  });
  return line;
}

const scale = (limit) =>
  el("span", { class: "scale" }, `−${short(limit)}`, el("i", { class: "ramp" }), `+${short(limit)}`);

// The legend.
function tokenLegend(limits, strips) {
  const parts = [
    el("span", {}, el("b", {}, "Colour: z"), " = gate × value, the output ", scale(limits.z)),
  ];
  if (strips) {
    parts.push(
      el("span", {}, el("b", {}, "Bar: gate"), ", attention to the token itself ",
        el("span", { class: "scale" }, "0", el("i", { class: "bar" }), "1")),
      el("span", {}, el("b", {}, "Strip: value"), " ", scale(limits.value))
    );
  }
  return el("div", { class: "legend" }, ...parts);
}

document.getElementById("theme")?.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = getComputedStyle(root).colorScheme === "dark";
  root.dataset.theme = dark ? "light" : "dark";
});
