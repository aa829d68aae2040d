"use strict";
// A list of neurons and heads to search and sort, and the page of the selected one.
{
  const data = JSON.parse(document.getElementById("data").textContent);
  const ends = unpackEnds(data.ends), quadrants = unpackEnds(data.quadrants);
  const [BINS, JOINT] = data.bins;
  const histograms = Object.fromEntries(
    Object.entries(data.histograms ?? {}).map(([name, h]) => [name, { ...h, counts: unpack(h.counts, "u4") }])
  );
  const joint = unpack(data.joint ?? "", "u1");
  // Neurons, and then heads.
  const N = data.names.length, names = [...data.names, ...(data.heads?.names ?? [])];
  const number = new Map(names.map((name, i) => [name, i]));
  const visible = (text) => text.replace(/^ +/, (spaces) => "·".repeat(spaces.length));
  const vocabulary = data.vocabulary.map((text) => ({ shown: text, name: visible(text) }));
  const isFeature = (i) => /F/.test(names[i]), noun = (i) => (isFeature(i) ? "feature" : "neuron");
  const heads = data.heads ? headView(data.heads, vocabulary) : null;
  const isHead = (i) => i >= N, endsOf = (i) => (isHead(i) ? heads.ends : ends), rowOf = (i) => (isHead(i) ? i - N : i);

  // Examples

  function windowOf(end, neuron, rank) {
    const at = (neuron * end.k + rank) * end.width;
    const tokens = [], z = [], gate = [], value = [];
    for (let i = at; i < at + end.width && end.tokens[i] < vocabulary.length; i++) {
      tokens.push(vocabulary[end.tokens[i]]);
      z.push(half(end.z[i]) * data.limits[neuron]);
      gate.push(half(end.gate[i]));
      const last = gate.length - 1;
      value.push(gate[last] !== 0 ? z[last] / gate[last] : null);
    }
    const from = neuron * end.k + rank;
    return { tokens, z, gate, value, here: end.position[from], score: end.score[from], text: end.text[from] };
  }
  // Examples with the same words in several texts are shown once.
  function examplesOf(end, neuron) {
    const found = new Map();
    for (let rank = 0; rank < end.found[neuron]; rank++) {
      const entry = windowOf(end, neuron, rank);
      const key = entry.tokens.map((token) => token.name).join("\u0000") + "\u0000" + entry.here;
      const same = found.get(key);
      if (same) same.times += 1;
      else found.set(key, { ...entry, times: 1 });
    }
    return [...found.values()];
  }
  const score = (end) => (i) => (end && end.found[rowOf(i)] ? end.score[rowOf(i) * end.k] : 0);
  const named = (i, name) => endsOf(i).find((end) => end.end === name);
  // The end that is further from 0 is shown first.
  const further = (i) => endsOf(i).reduce((a, b) => (Math.abs(score(b)(i)) > Math.abs(score(a)(i)) ? b : a));
  const peak = (i, end = further(i)) => {
    if (!end?.found[rowOf(i)]) return null;
    const from = rowOf(i) * end.k;
    return vocabulary[end.tokens[from * end.width + end.position[from]]];
  };

  // The list

  const largest = ends.find((e) => e.end === "largest"), smallest = ends.find((e) => e.end === "smallest");
  const positive = (neuron) => {
    const { counts } = histograms.z;
    let all = 0, above = 0;
    for (let i = 0; i < 2 * BINS; i++) {
      const n = counts[neuron * 2 * BINS + i];
      all += n;
      if (i >= BINS) above += n;
    }
    return all ? (above - data.zeros[neuron]) / all : 0; // 0 is in the first positive bin
  };
  const isDead = (i) => !isHead(i) && isFeature(i) && positive(i) === 0; // never active in these texts
  const by = data.by ?? data.heads.by;
  const ofNeurons = (key) => (i) => (isHead(i) ? Infinity : key(i)); // heads come last
  const orders = [
    ["Order: by name", (i) => (isHead(i) ? i - N - names.length : i), ""],
    ["Order: furthest from 0", (n) => -Math.abs(score(further(n))(n)), ""],
    (largest || heads) && [`Order: largest ${by}`, (i) => -score(named(i, "largest"))(i), "largest"],
    smallest && [`Order: smallest ${by}`, (i) => score(named(i, "smallest"))(i), "smallest"],
    N && ["Order: most often positive", ofNeurons((n) => -positive(n)), positive],
    N && ["Order: least often positive", ofNeurons(positive), positive],
  ].filter(Boolean);
  const $ = (id) => document.getElementById(id);
  orders.forEach(([name], i) => $("order").append(el("option", { value: i }, name)));

  const words = names.map(() => null);
  const wordsOf = (neuron) =>
    (words[neuron] ??= [
      ...endsOf(neuron).flatMap((end) => Array.from({ length: end.found[rowOf(neuron)] }, (_, rank) => {
        const from = rowOf(neuron) * end.k + rank;
        return vocabulary[end.tokens[from * end.width + end.position[from]]].shown;
      })),
      ...Object.values((isHead(neuron) ? data.heads : data).tokens).flatMap((all) => all[rowOf(neuron)].map(([token]) => vocabulary[token].shown)),
    ].map((text) => text.trim().toLowerCase()));
  let listed = names.map((_, i) => i), chosen = -1;
  const ROW = 24;
  function list() {
    const wanted = $("search").value.trim(), low = wanted.toLowerCase();
    const isName = /^l\d+([nhf]\d*)?$/i.test(wanted);
    listed = names.map((_, i) => i).filter((i) =>
      !low || (isName ? names[i].toLowerCase().startsWith(low) : wordsOf(i).some((word) => word.startsWith(low))));
    const order = orders[$("order").value][1];
    const keys = new Map(listed.map((i) => [i, order(i)]));
    listed.sort((a, b) => keys.get(a) - keys.get(b) || a - b);
    $("count").textContent = listed.length === names.length ? data.count
      : `${listed.length.toLocaleString("en")} of ${names.length.toLocaleString("en")}`;
    $("rows").style.height = `${listed.length * ROW}px`;
    $("list").scrollTop = 0;
    drawRows();
  }
  function drawRows() {
    const first = Math.max(0, Math.floor($("list").scrollTop / ROW) - 5);
    const shownBy = orders[$("order").value][2];
    $("rows").replaceChildren(...listed.slice(first, first + Math.ceil($("list").clientHeight / ROW) + 10).map((i, at) => {
      const end = (shownBy && shownBy !== positive && named(i, shownBy)) || further(i);
      const shown = isDead(i) ? "dead" : shownBy === positive && !isHead(i) ? `${short(100 * positive(i))}%` : short(score(end)(i));
      const row = el("a", { href: `#${names[i]}`, class: i === chosen ? "chosen" : "" },
        el("span", {}, names[i]), el("span", { class: "peak" }, peak(i, end)?.name ?? ""),
        el("span", { class: "number" }, shown));
      row.style.top = `${(first + at) * ROW}px`;
      row.addEventListener("click", (event) => { event.preventDefault(); choose(i); });
      return row;
    }));
  }

  // The selected neuron

  const FEW = 8; // few, so that the sections below are in view
  let shownEnd = 0, strips = true, whole = false;
  // Pictures are as wide as their panels, so that text keeps its size.
  let W = 260;
  const H = 130, LEFT = 6, BOTTOM = 18;
  function axis(picture, x, edges, y = H - BOTTOM) {
    picture.append(svg("line", { x1: LEFT, x2: W - LEFT, y1: y, y2: y, stroke: "var(--line)" }));
    edges.forEach((value, i) => {
      const anchor = i === 0 ? "start" : i === edges.length - 1 ? "end" : "middle";
      picture.append(svg("text", { x: x(value), y: y + 13, "text-anchor": anchor }, short(value)));
    });
  }
  // The bins in use, from the most negative one, and the edges of the first and the last bin.
  function bins(name, neuron) {
    const { counts, exponent } = histograms[name];
    const all = Array.from(counts.subarray(neuron * 2 * BINS, (neuron + 1) * 2 * BINS));
    const signed = [...all.slice(0, BINS).reverse(), ...all.slice(BINS)];
    let first = signed.findIndex((n) => n > 0), last = signed.length - 1;
    if (first < 0) return null;
    while (!signed[last]) last--;
    first = Math.min(first, BINS); // 0 is always included
    last = Math.max(last, BINS - 1);
    const step = 2 ** exponent[neuron] / BINS;
    return { counts: signed.slice(first, last + 1), low: (first - BINS) * step, high: (last + 1 - BINS) * step, step };
  }
  const ends3 = (low, high) => (low < 0 && high > 0 ? [low, 0, high] : [low, high])
    .filter((value, i, all) => value !== 0 || i === 0 || i === all.length - 1 ||
      (Math.abs(low) > 0.15 * (high - low) && high > 0.15 * (high - low)));
  function histogram(name, neuron, title, colour) {
    const found = bins(name, neuron);
    const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
    if (found) {
      const { counts, low, high, step } = found;
      const x = (value) => LEFT + ((value - low) / (high - low)) * (W - 2 * LEFT);
      const total = counts.reduce((a, b) => a + b, 0), most = Math.log1p(Math.max(...counts));
      counts.forEach((n, i) => {
        if (!n) return;
        const from = low + i * step, height = (Math.log1p(n) / most) * (H - BOTTOM - 6);
        const bar = svg("rect", { x: x(from), y: H - BOTTOM - height, height, width: Math.max(1, x(from + step) - x(from) - 0.4), fill: colour(from + step / 2) });
        bar.append(svg("title", {}, `${short(from)} to ${short(from + step)}: ${n.toLocaleString("en")} tokens, ${short((100 * n) / total)}%`));
        picture.append(bar);
      });
      axis(picture, x, ends3(low, high));
    }
    return el("div", { class: "panel" }, el("h4", {}, title), picture);
  }
  function together(neuron) {
    const size = 2 * JOINT;
    const at = (g, v) => joint[(neuron * size + g) * size + v]; // index from 0 outward: negative side, then positive
    const order = [...Array(JOINT).keys()].reverse().concat([...Array(JOINT).keys()].map((i) => JOINT + i));
    const rows = order.filter((g) => order.some((v) => at(g, v))), columns = order.filter((v) => order.some((g) => at(g, v)));
    const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "gate and value together" });
    if (rows.length) {
      const span = (used) => [order.indexOf(used[0]), order.indexOf(used[used.length - 1])];
      const [[g0, g1], [v0, v1]] = [span(rows), span(columns)];
      const edge = (i, name) => ((i - JOINT) / JOINT) * 2 ** histograms[name].exponent[neuron];
      const left = 46, wide = (W - left - LEFT) / (v1 - v0 + 1), high = (H - BOTTOM - 4) / (g1 - g0 + 1);
      for (let g = g0; g <= g1; g++) for (let v = v0; v <= v1; v++) {
        const n = at(order[g], order[v]);
        if (!n) continue;
        const off = isFeature(neuron) && order[g] === JOINT; // the bin of gate 0, where z is 0
        const z = (edge(g, "gate") + edge(g + 1, "gate")) * (edge(v, "value") + edge(v + 1, "value"));
        picture.append(svg("rect", { x: left + (v - v0) * wide, y: 4 + (g1 - g) * high, width: wide + 0.3, height: high + 0.3,
          fill: `var(--${off ? "soft" : z < 0 ? "negative" : "positive"})`, opacity: 0.12 + 0.88 * (n / 255) }));
      }
      const x = (value) => left + ((value - edge(v0, "value")) / (edge(v1 + 1, "value") - edge(v0, "value"))) * (W - left - LEFT);
      picture.append(svg("line", { x1: left, x2: left, y1: 4, y2: H - BOTTOM, stroke: "var(--line)" }));
      picture.append(svg("text", { x: left - 4, y: 12, "text-anchor": "end" }, short(edge(g1 + 1, "gate"))));
      picture.append(svg("text", { x: left - 4, y: H - BOTTOM, "text-anchor": "end" }, short(edge(g0, "gate"))));
      axis(picture, x, ends3(edge(v0, "value"), edge(v1 + 1, "value")));
    }
    return el("div", { class: "panel" }, el("h4", {}, "Gate (up) by value (across)"), picture);
  }

  const link = (name) => {
    if (number.has(name)) {
      const made = el("a", { href: `#${name}` }, name);
      made.addEventListener("click", (event) => { event.preventDefault(); choose(number.get(name)); });
      return made;
    }
    const page = data.others[/^L(\d+)/.exec(name)[1]];
    return page ? el("a", { href: `${page}#${name}` }, name) : name;
  };
  const READS = { q: "gate", v: "value", k: "key" };
  function connections(title, rows, reads) {
    const most = Math.max(...rows.map((row) => Math.abs(row[2])), 1e-9);
    const inputs = (name, kind) => (/H/.test(name) ? { q: "query", k: "key", v: "value" }[kind] : READS[kind]);
    const gated = data.tokens["The value reads"]?.[chosen].length > 0;
    const body = rows.map(([name, kind, amount]) => {
      const isHead = /H/.test(name);
      const meter = el("span", { class: "meter" });
      const colour = isHead ? "var(--soft)" : amount < 0 ? "var(--negative)" : "var(--positive)";
      const full = Math.round((100 * Math.abs(amount)) / most);
      meter.style.background = `linear-gradient(to right, ${colour} ${full}%, var(--line) ${full}%)`;
      const token = number.has(name) ? peak(number.get(name))?.name ?? "" : "";
      const through = reads && isHead ? inputs(name, kind) : gated ? READS[kind] : "input";
      return el("tr", {}, el("td", {}, link(name)), el("td", {}, through),
        el("td", { class: "number" }, isHead ? short(amount) : `${amount > 0 ? "+" : ""}${short(amount)}`, " ", meter), el("td", {}, token));
    });
    const head = el("tr", {}, ...["Head", reads ? "Its" : "Into", "Score", rows.some(([name]) => number.has(name)) ? "Peaks at" : ""].map((text, i) => el("th", { class: i === 2 ? "number" : "" }, text)));
    return el("div", {}, el("h4", {}, title), rows.length ? el("table", {}, head, ...body) : el("p", { class: "note" }, reads ? `No later layer reads this ${noun(chosen)}.` : `This ${noun(chosen)} reads no earlier layer.`));
  }

  function tokenLists(neuron) {
    const panels = Object.entries(data.tokens).filter(([, all]) => all[neuron].length).map(([title, all]) => {
      const limit = Math.max(...all[neuron].map(([, amount]) => Math.abs(amount)), 1e-9);
      const half = (keep, order) => el("div", {}, ...order(all[neuron].filter(([, amount]) => keep(amount))).map(([token, amount]) => {
        const entry = el("div", { class: "entry" }, el("span", { class: "token", title: vocabulary[token].name }, vocabulary[token].name), el("span", { class: "number" }, short(amount)));
        entry.style.background = `color-mix(in srgb, var(--${amount < 0 ? "negative" : "positive"}) ${Math.round((38 * Math.abs(amount)) / limit)}%, transparent)`;
        return entry;
      }));
      return el("div", {}, el("h4", {}, title), el("div", { class: "ends" }, half((amount) => amount > 0, (list) => list), half((amount) => amount <= 0, (list) => list.reverse())));
    });
    return el("div", { class: "lists" }, ...panels);
  }

  const signed = { "+": "positive", "-": "negative" };
  function signs(neuron, limits) {
    if (!quadrants.length || !data.signs[neuron].some((share) => share > 0)) return []; // no W_gate
    const boxes = quadrants.map((end, i) => el("div", { class: "quadrant" },
      el("h4", {}, `Gate input ${signed[end.end[0]]}, linear input ${signed[end.end[1]]}: ${short(100 * data.signs[neuron][i])}% of tokens`),
      ...examplesOf(end, neuron).map((entry) => el("div", { class: "example" },
        el("span", { class: "value" }, short(entry.z[entry.here])), tokenLine(entry, limits, false)))));
    return [el("h3", {}, "Signs of the gate's input and of the linear input"), el("div", { class: "quadrants" }, ...boxes),
      el("p", { class: "note" }, "Gate input: x W_gate. Linear input: x W_in. Each quadrant shows the tokens with the largest |z|, and z.")];
  }

  const ENDS = { largest: "Largest", smallest: "Smallest" };
  function draw() {
    hideTip();
    const inside = $("one").clientWidth - 36, columns = Math.max(1, Math.min(3, Math.floor((inside + 22) / 222)));
    W = inside > 0 ? (inside - 22 * (columns - 1)) / columns : 260;
    const go = (by) => () => {
      const at = listed.indexOf(chosen); // -1 if the search excludes it
      if (listed.length) choose(listed[at < 0 ? 0 : (at + by + listed.length) % listed.length]);
    };
    const heading = (note) => el("header", {}, el("h2", {}, names[chosen]),
      el("button", { type: "button", title: "Previous", onclick: go(-1) }, "‹"),
      el("button", { type: "button", title: "Next", onclick: go(1) }, "›"), el("span", { class: "note" }, note));
    if (isHead(chosen)) return drawHead(heading, inside);
    const neuron = chosen, end = ends[shownEnd];
    const examples = examplesOf(end, neuron);
    const limits = { z: data.limits[neuron], value: Math.max(...examples.flatMap((entry) => entry.value.map((v) => Math.abs(v ?? 0))), 0) };
    const tabs = ends.map((entry, i) => el("button", { type: "button", "aria-pressed": i === shownEnd, onclick: () => { shownEnd = i; draw(); } },
      `${ENDS[entry.end]} ${by} (${short(score(entry)(neuron))})`));
    const box = el("input", { type: "checkbox", onchange: (event) => { strips = event.target.checked; draw(); } });
    box.checked = strips;
    const found = bins("z", neuron), isZ = data.by === "z";
    const low = isZ && smallest ? score(smallest)(neuron) : found?.low, high = isZ && largest ? score(largest)(neuron) : found?.high;
    const sideColour = (middle) => (middle < 0 ? "var(--negative)" : "var(--positive)");
    const [writers, readers] = data.partners[neuron].length ? data.partners[neuron] : [[], []];
    $("one").replaceChildren(
      heading(isDead(neuron) ? "dead: this feature is never active in these texts"
        : `z from ${short(low)} to ${short(high)}, ${isFeature(neuron) ? "active" : "positive"} at ${short(100 * positive(neuron))}% of tokens`),
      ...(isDead(neuron) ? [] : [el("div", { class: "bar-of-tabs" }, ...tabs, el("label", {}, box, " gate and value under tokens")),
        tokenLegend(limits, strips)]),
      el("div", {}, ...examples.slice(0, whole ? undefined : FEW).map((entry) => el("div", { class: "example" },
        el("span", { class: "value" }, short(entry.score)), tokenLine(entry, limits, strips),
        el("span", { class: "from", title: entry.times > 1 ? `number of the ${end.found[neuron]} examples with these words` : "" }, entry.times > 1 ? `${entry.times} times` : `text ${entry.text}`)))),
      examples.length > FEW ? el("button", { type: "button", onclick: () => { whole = !whole; draw(); } },
        whole ? `Only the first ${FEW}` : `All ${examples.length} examples`) : "",
      el("h3", {}, "How often"),
      el("div", { class: "panels" }, ...(isDead(neuron) ? [histogram("value", neuron, "Pre-activation", () => "var(--soft)"), el("div"), el("div")]
        : [histogram("z", neuron, "z", sideColour), histogram("gate", neuron, "Gate", () => "var(--soft)"), together(neuron)])),
      el("p", { class: "note" }, "Heights and shades count tokens, on a logarithmic scale."),
      ...signs(neuron, limits),
      ...(Object.keys(data.tokens).length ? [el("h3", {}, "Tokens, by weights alone"), tokenLists(neuron),
        el("p", { class: "note" }, `Reads: tokens whose embeddings raise (blue) or lower (red) the ${noun(neuron)}'s input. Writes: logits that the ${noun(neuron)} raises or lowers if z is positive. Units: standard deviations over the vocabulary.`)] : []),
      ...(data.partners[neuron].length ? [el("h3", {}, "Connections, by weights alone"),
        el("div", { class: "connections" }, connections(`Writers: what the ${noun(neuron)} reads from`, writers, false), connections(`Readers: what reads the ${noun(neuron)}`, readers, true)),
        el("p", { class: "note" }, "Composition scores. Scores between neurons or features have the sign of the cosine: blue excites, red inhibits (if the writer's z is positive).")] : []),
      ...data.notes.map((text) => el("p", { class: "note" }, text)));
  }
  function drawHead(heading, inside) {
    const head = chosen - N, end = heads.ends[shownEnd], n = end.found[head];
    const tabs = heads.ends.map((entry, i) => el("button", { type: "button", "aria-pressed": i === shownEnd, onclick: () => { shownEnd = i; draw(); } },
      `${heads.tabs(entry)} (${short(score(entry)(chosen))})`));
    $("one").replaceChildren(heading(heads.summary(head)), ...heads.looks(head, Math.max(240, inside > 700 ? (inside - 44) / 2 : inside)),
      el("h3", {}, "Where its output is largest"), ...(tabs.length > 1 ? [el("div", { class: "bar-of-tabs" }, ...tabs)] : []), heads.legend(),
      el("div", {}, ...Array.from({ length: whole ? n : Math.min(n, FEW) }, (_, rank) => heads.example(end, head, rank))),
      n > FEW ? el("button", { type: "button", onclick: () => { whole = !whole; draw(); } }, whole ? `Only the first ${FEW}` : `All ${n} examples`) : "");
  }
  function choose(neuron) {
    chosen = neuron;
    $("one").scrollTop = 0;
    shownEnd = endsOf(neuron).indexOf(further(neuron));
    try { history.replaceState(null, "", `#${names[neuron]}`); } catch { /* a frame of a notebook */ }
    const at = listed.indexOf(neuron);
    const { scrollTop, clientHeight } = $("list");
    if (at >= 0 && (at * ROW < scrollTop || (at + 1) * ROW > scrollTop + clientHeight)) $("list").scrollTop = Math.max(0, at * ROW - clientHeight / 2);
    drawRows();
    draw();
  }
  $("search").addEventListener("input", list);
  $("order").addEventListener("change", list);
  $("list").addEventListener("scroll", drawRows);
  new ResizeObserver(drawRows).observe($("list"));
  new ResizeObserver(() => chosen >= 0 && draw()).observe($("one"));
  const fromHash = () => number.get(location.hash.slice(1));
  addEventListener("hashchange", () => { if (fromHash() !== undefined && fromHash() !== chosen) choose(fromHash()); });
  addEventListener("keydown", (event) => {
    if (event.key === "/" && event.target !== $("search")) { event.preventDefault(); $("search").focus(); }
  });
  list();
  choose(fromHash() ?? listed[0]);
}
