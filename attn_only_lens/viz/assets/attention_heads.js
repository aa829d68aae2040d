"use strict";
// The page of an attention head: its attention, and the tokens where its output is largest.

const KINDS_OF_NUMBERS = { u1: Uint8Array, u2: Uint16Array, i2: Int16Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array };
const unpack = (text, kind) => {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new KINDS_OF_NUMBERS[kind](bytes.buffer);
};
// Convert the bits of a half-precision number.
const half = (bits) => {
  const exponent = (bits >> 10) & 31, digits = bits & 1023;
  return (bits >> 15 ? -1 : 1) * (exponent ? 2 ** (exponent - 25) * (1024 + digits) : 2 ** -24 * digits);
};
const unpackEnds = (ends) => Object.entries(ends ?? {}).map(([end, e]) => {
  const kinds = { score: "f4", text: "i4", position: "i2", bos: "f4", tokens: e.wide ? "u4" : "u2", z: "u2", gate: "u2", pattern: "u2" };
  const packed = Object.entries(kinds).filter(([name]) => name in e).map(([name, kind]) => [name, unpack(e[name], kind)]);
  return { end, ...e, ...Object.fromEntries(packed) };
});
const svg = (tag, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
const percent = (share) => `${short(Math.round(1000 * share) / 10)}%`;

function headView(data, vocabulary) {
  const ends = unpackEnds(data.ends), offsets = unpack(data.offsets, "f4");
  const nOffsets = offsets.length / data.names.length, middle = (nOffsets - 1) / 2;
  const what = data.by === "norm" ? "Output norm" : "Attribution";

  const blue = (weight) => `color-mix(in srgb, var(--positive) ${Math.round(85 * Math.min(1, weight))}%, var(--zero))`;
  function example(end, head, rank) {
    const from = head * end.k + rank, start = from * end.width, line = el("div", { class: "line" });
    let rest = 1;
    for (let i = 0; i < end.width && end.tokens[start + i] < vocabulary.length; i++) {
      const weight = half(end.pattern[start + i]), token = vocabulary[end.tokens[start + i]];
      rest -= weight;
      const text = el("span", { class: weight > 0.6 ? "t strong" : "t" }, token.shown);
      if (weight > 0.003) text.style.background = blue(weight);
      const cell = el("span", { class: i === end.position[from] ? "tok here" : "tok" }, text);
      cell.addEventListener("mouseenter", () => showTip(cell, [el("b", {}, token.name), `attention ${percent(weight)}`]));
      cell.addEventListener("mouseleave", hideTip);
      line.append(cell);
    }
    const bos = end.bos[from], notes = [`text ${end.text[from]}`];
    if (bos > 0.0005) notes.push(`BOS ${percent(bos)}`);
    if (rest > 0.0005 && Math.abs(rest - bos) > 0.01) notes.push(`not shown ${percent(rest)}`);
    return el("div", { class: "example of-head" }, el("span", { class: "value" }, short(end.score[from])), line,
      el("span", { class: "from" }, ...notes.map((note) => el("div", {}, note))));
  }

  function split(head) {
    const of = offsets.subarray(head * nOffsets, (head + 1) * nOffsets);
    const sum = of.reduce((a, b) => a + b, 0), itself = of[middle], previous = of[middle + 1] ?? 0;
    const parts = [["BOS", data.bos[head]], ["itself", itself], ["the token before", previous], ["other tokens", sum - itself - previous]];
    const bar = el("div", { class: "split" }), shades = ["var(--none)", "var(--mark)", "var(--positive)", "var(--soft)"];
    parts.forEach(([name, share], i) => bar.append(el("i", { title: `${name} ${percent(share)}`, style: `width:${100 * share}%;background:${shades[i]}` })));
    const legend = el("div", { class: "legend" }, ...parts.map(([name, share], i) =>
      el("span", {}, el("i", { class: "chip", style: `background:${shades[i]}` }), `${name} ${percent(share)}`)));
    return el("div", {}, bar, legend);
  }

  function distances(head, W) {
    const H = 130, LEFT = 6, BOTTOM = 18;
    const of = Array.from(offsets.subarray(head * nOffsets, (head + 1) * nOffsets));
    const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "attention by distance" });
    const used = of.map((share, i) => (share > 0 ? i - middle : null)).filter((i) => i !== null);
    if (used.length) {
      const low = Math.min(used[0], 0), high = used[used.length - 1], most = Math.max(...of);
      const wide = (W - 2 * LEFT) / (high - low + 1), x = (offset) => LEFT + (high - offset) * wide; // earlier tokens are on the left, as in the text
      for (let offset = low; offset <= high; offset++) {
        const share = of[offset + middle], height = (share / most) * (H - BOTTOM - 6);
        const bar = svg("rect", { x: x(offset), y: H - BOTTOM - height, height, width: Math.max(0.5, wide - 0.4), fill: "var(--positive)" });
        bar.append(svg("title", {}, `${offset} tokens back: ${percent(share)}`));
        picture.append(bar);
      }
      picture.append(svg("line", { x1: LEFT, x2: W - LEFT, y1: H - BOTTOM, y2: H - BOTTOM, stroke: "var(--line)" }));
      const labels = low < 0 ? [high, 0, low] : [high, Math.round(high / 2), 0];
      labels.forEach((offset, i) => picture.append(svg("text", { x: x(offset) + wide / 2, y: H - 5,
        "text-anchor": i === 0 ? "start" : i === labels.length - 1 ? "end" : "middle" }, `${offset}`)));
      picture.append(svg("text", { x: LEFT, y: 12 }, `highest ${percent(most)}`));
    }
    return el("div", { class: "panel wide" }, el("h4", {}, "Attention by distance, in tokens back"), picture);
  }

  function tokens(head, side, title) {
    const rows = data.tokens[side][head];
    const most = Math.max(...rows.map(([, share]) => share), 1e-9);
    const body = rows.slice(0, 12).map(([token, share, mean]) => {
      const name = el("span", { class: "token", title: vocabulary[token].name }, vocabulary[token].name);
      const row = el("div", { class: "entry" }, name, el("span", { class: "number" }, `${percent(share)} · ${short(mean)}`));
      row.style.background = `linear-gradient(to right, color-mix(in srgb, var(--positive) 22%, transparent) ${Math.round((100 * share) / most)}%, transparent 0)`;
      return row;
    });
    return el("div", {}, el("h4", {}, title), body.length ? el("div", {}, ...body) : el("p", { class: "note" }, "It attends to no other tokens."));
  }

  return {
    ends,
    summary: (head) => `${percent(data.bos[head])} of its attention is on BOS`,
    tabs: (end) => (data.by === "norm" ? what : `${end.end === "largest" ? "Largest" : "Smallest"} attribution`),
    legend: () => el("div", { class: "legend" },
      el("span", {}, el("b", {}, what), data.by === "norm" ? " z W_O at the token with a frame" : " at the token with a frame"),
      el("span", {}, el("b", {}, "Colour: attention"), " of that token to each token ",
        el("span", { class: "scale" }, "0", el("i", { style: `background:linear-gradient(to right, var(--zero), ${blue(1)})` }), "1"))),
    example,
    looks: (head, W) => [
      el("h3", {}, "What it attends to"), split(head),
      el("div", { class: "looks" }, distances(head, W),
        tokens(head, "attended", "Tokens that it attends to"), tokens(head, "attending", "Tokens that attend")),
      el("p", { class: "note" }, "Means over all tokens of the corpus. Distances exclude BOS. Tokens: the share of the head's attention to "
        + "other tokens (without BOS and itself), then the mean attention that an occurrence receives or gives."),
    ],
  };
}
