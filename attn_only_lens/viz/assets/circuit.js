// The behaviour of a circuit's page. Texts enter the page only as textContent, never as HTML.
"use strict";
(() => {
  const source = document.documentElement.outerHTML; // the unchanged page, for saving
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const data = read("circuit"), { nodes, edges, tokens, details } = data;
  const N = nodes.id.length, E = edges.source.length;
  const at = (id) => document.getElementById(id);
  const make = (tag, text = "", className = "") => {
    const made = document.createElement(tag);
    made.textContent = text;
    made.className = className;
    return made;
  };
  const button = (text, act) => {
    const made = make("button", text);
    made.type = "button";
    made.addEventListener("click", act);
    return made;
  };
  const number = (value) => (value === null ? "–" : String(value));
  // hasOwn: a node may be called "constructor".
  const lookup = (table, key) => (Object.hasOwn(table, key) ? table[key] : undefined);
  const detailsOf = (i) => ({ ...lookup(details, nodes.name[i]), ...lookup(details, nodes.id[i]) });
  const index = new Map(nodes.id.map((id, i) => [id, i]));

  // --- State that users change, and that is saved with the page --------------------------------
  const KINDS = ["value", "q", "k", "gate", "routing"];
  const state = { nodes: null, edges: null, kinds: ["value"], extras: false,
                  only_pinned: false, pinned: [], names: {}, groups: [], theme: null };
  const take = (saved) => {
    const list = (all) => (Array.isArray(all) ? [...new Set(all)].filter((id) => index.has(id)) : []);
    for (const key of ["nodes", "edges"]) // if a count is missing, show as many as fit
      state[key] = Number.isFinite(saved[key]) ? Math.max(1, Math.round(saved[key])) : null;
    for (const key of ["extras", "only_pinned"]) state[key] = saved[key] === true;
    if (Array.isArray(saved.kinds)) state.kinds = saved.kinds.map(String);
    state.pinned = list(saved.pinned);
    state.names = Object.fromEntries(Object.entries(saved.names || {})
      .filter(([id, name]) => index.has(id) && typeof name === "string"));
    const taken = new Set(); // a node may be in only one group
    state.groups = (Array.isArray(saved.groups) ? saved.groups : [])
      .map((entry) => ({ name: String(entry.name), folded: entry.folded !== false,
                        members: list(entry.members).filter((id) => !taken.has(id) && taken.add(id)) }))
      .filter((entry) => entry.members.length);
    state.theme = saved.theme === "dark" || saved.theme === "light" ? saved.theme : null;
  };
  take({ ...state, ...read("state") });

  // --- Strength, colour ------------------------------------------------------------------------
  const sizes = (values) => values.map((value) => (value === null ? Infinity : Math.abs(value)));
  const strength = { node: sizes(nodes.strength), edge: sizes(edges.weight) }; // ∞: always shown
  const largest = (all) => all.reduce((a, b) => (b < Infinity && b > a ? b : a), 0) || 1;
  const scale = { node: largest(sizes(nodes.attribution.filter((_, i) => nodes.kind[i] !== "metric"))) };
  const STATUS = { kept: "=", lost: "×", gained: "+" };
  const EXTRAS = ["bias", "rest", "offset"];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const isDark = () => (state.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  // Nodes and edges: blue raises the metric, red lowers it. Tokens have other colours, by z or attention.
  const mix = (value, top, colours = ["negative", "positive"]) => {
    const t = value === null ? 0 : Math.sqrt(Math.min(1, Math.abs(value) / top));
    const ends = [css("zero"), css(colours[value < 0 ? 0 : 1])];
    return { fill: d3.interpolateRgb(...ends)(t), strong: t > (isDark() ? 0.64 : 0.77) }; // the text colour with more contrast
  };

  // --- Items that are drawn: nodes of the graph, and groups of nodes ---------------------------
  let items = [], home = [], groupOf = []; // each node's item and group
  const LONGEST = 40, pen = make("canvas").getContext("2d"); // characters of a name; some are wide
  pen.font = "11px monospace";
  const named = (name) => {
    const label = [...name].length > LONGEST ? [...name].slice(0, LONGEST - 1).join("") + "…" : name;
    const width = Math.max(data.per_character * label.length, pen.measureText(label).width) + data.padding;
    return { label, width };
  };
  const attributionSum = (members) => members.reduce((sum, i) => sum + (nodes.attribution[i] || 0), 0);
  const throughGroup = (members) => { // the weight of edges between members, which counts once
    const inside = new Set(members), passed = edges.weight.reduce((sum, weight, j) => sum
      + (data.additive.includes(edges.kind[j]) && inside.has(edges.source[j]) && inside.has(edges.target[j]) ? weight : 0), 0);
    return attributionSum(members) - passed;
  };
  const rebuild = () => {
    home = nodes.id.map((_, i) => i);
    groupOf = nodes.id.map(() => null);
    items = nodes.id.map((id, i) => {
      const name = lookup(state.names, id);
      const { label, width } = name === undefined ? { label: nodes.label[i], width: nodes.width[i] } : named(name);
      return { key: id, label, name: name ?? nodes.label[i], row: nodes.row[i], column: nodes.column[i], width,
               overhangs: nodes.kind[i] === "metric", members: [i], attribution: nodes.attribution[i],
               kind: nodes.kind[i], status: nodes.status ? nodes.status[i] : null, stability: nodes.stability?.[i],
               outside: nodes.outside?.[i] === true };
    });
    state.groups.forEach((entry, g) => {
      const members = entry.members.map((id) => index.get(id));
      const head = members.reduce((a, b) => (strength.node[b] > strength.node[a] ? b : a));
      for (const i of members) {
        groupOf[i] = N + g;
        if (entry.folded) home[i] = N + g; // an unfolded group is drawn as its members
      }
      const { label, width } = named(entry.name);
      items.push({ ...items[head], key: "group " + g, label, name: entry.name, width: width + 6, members, group: entry,
                   attribution: throughGroup(members),
                   status: null, stability: null, outside: false, kind: "group" });
    });
  };
  // A column is a token of the prompt or, in a graph by role, a role with one of these tokens.
  const column = (t) => data.columns[t] + (data.by_role ? `: ${data.below[t]}` : "");
  const position = (i) => (nodes.position[i] === null ? "" : column(nodes.position[i]));

  // --- Which items are shown -------------------------------------------------------------------
  const order = nodes.id.map((_, i) => i).sort((a, b) => (strength.node[b] - strength.node[a]) || a - b); // ∞ - ∞ is NaN: keep the order
  const isExtra = (i) => EXTRAS.includes(nodes.kind[i]);
  const writers = new Set(edges.source);
  const extras = () => (state.extras ? order.filter((i) => isExtra(i) && writers.has(i)) : []);
  let chosen = null, scene = null, shown = [], drawn = [];
  let count = { ...data.first };
  const counting = () => {
    if (state.nodes === null && pane.width) {
      const first = order.filter((i) => !isExtra(i)), { most, fewest } = data.first_view;
      for (count.nodes = Math.min(most, first.length); count.nodes > fewest; count.nodes--) {
        const { width, height } = layout.place(items, [...first.slice(0, count.nodes), ...extras()], data.axis_width,
                                               pane.width, pane.height);
        if (width < pane.width + 1 && height < pane.height + 1) break;
      }
    } else count.nodes = state.nodes ?? count.nodes;
    count.edges = state.edges ?? 2 * count.nodes;
    for (const what of ["nodes", "edges"]) toSlider(what);
  };
  const showing = () => {
    const pinned = new Set(state.pinned.map((id) => index.get(id)));
    for (const entry of state.groups) for (const id of entry.members) pinned.add(index.get(id));
    const first = order.filter((i) => !isExtra(i));
    const strong = state.only_pinned ? first.filter((i) => nodes.kind[i] === "metric")
      : [...first.slice(0, count.nodes), ...extras()];
    const wanted = new Set([...strong, ...pinned]);
    if (chosen !== null) for (const i of items[chosen].members) wanted.add(i);
    return [...new Set(order.filter((i) => wanted.has(i)).map((i) => home[i]))];
  };
  const between = (visible) => {
    const on = new Set(visible), kinds = new Set(state.kinds), found = new Map();
    for (let j = 0; j < E; j++) {
      const a = home[edges.source[j]], b = home[edges.target[j]];
      if (a === b || !on.has(a) || !on.has(b) || !kinds.has(edges.kind[j])) continue;
      const status = edges.status ? edges.status[j] : null;
      const key = a < N && b < N ? j : `${a} ${b} ${edges.kind[j]} ${status}`;
      const one = found.get(key) || { key: "e" + key, source: a, target: b, kind: edges.kind[j], weight: 0, status };
      one.weight += edges.weight[j]; // edges of one kind into a group, or out of it, are added up
      found.set(key, one);
    }
    return [...found.values()].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));
  };
  const isRest = (i) => items[i].members.some((m) => nodes.kind[m] === "rest");
  const countInflow = () => { // along drawn edges, without "rest", and in total
    if (!data.has_bars) return;
    for (const item of items) item.inflow = { drawn: 0, total: 0 };
    for (let j = 0; j < E; j++) {
      const target = home[edges.target[j]];
      if (home[edges.source[j]] !== target && data.additive.includes(edges.kind[j])) items[target].inflow.total += edges.weight[j];
    }
    for (const entry of drawn)
      if (data.additive.includes(entry.kind) && !isRest(entry.source)) items[entry.target].inflow.drawn += entry.weight;
  };
  const inflowOf = (i) => { // its size, the share of it that is drawn, and this share in words
    if (!items[i].inflow) return { size: 0, share: 0, text: "" };
    const { drawn: seen, total } = items[i].inflow, missing = total - seen, size = Math.abs(seen) + Math.abs(missing);
    const [part, other] = [seen, missing].map((value) => Math.round(100 * value / total));
    const text = Math.abs(total) < 1e-4 * size || !size ? "" // weights have five digits
      : `${said.format(part)} % drawn${part * other < 0 ? `, ${said.format(other)} % not` : ""}`.replaceAll("-", "−");
    return { size, share: Math.abs(seen) / size, text };
  };

  // --- The drawing -----------------------------------------------------------------------------
  const svg = d3.select("#stage").append("svg").attr("class", "circuit").attr("role", "img")
    .attr("aria-label", document.title);
  const back = svg.append("rect").attr("class", "back");
  const view = svg.append("g"), bands = view.append("g"), lines = view.append("g");
  const marks = view.append("g");
  const side = svg.append("g"), foot = svg.append("g").attr("class", "axis");
  side.append("rect").attr("class", "back");
  foot.append("rect").attr("class", "back");
  data.axes.forEach((text, i) => foot.append("text").attr("class", "row axis-name").attr("x", 8).attr("y", 17 + 15 * i).text(text));
  let pane = { width: 0, height: 0 }, transform = d3.zoomIdentity;

  // A negative edge ends in a bar, a positive edge in an arrow: signs are visible without colours.
  const head = (edge, path) => {
    const [x, y] = path.at(-1), up = path.at(-2)[1] > y ? 1 : -1, half = edge.width / 2;
    const n = (value) => value.toFixed(1);
    return edge.weight < 0 ? `M${n(x - 4 - half)} ${n(y)}H${n(x + 4 + half)}`
      : `M${n(x - 3 - half)} ${n(y + up * half)}L${n(x)} ${n(y - up * 5)}L${n(x + 3 + half)} ${n(y + up * half)}`;
  };
  const sign = (value) => (value === null || value === 0 ? "" : value < 0 ? "− " : "+ ");
  const drawEdges = () => {
    const top = drawn.reduce((most, entry) => Math.max(most, Math.abs(entry.weight)), 0) || 1;
    for (const entry of drawn) entry.width = 0.8 + 4.2 * Math.abs(entry.weight) / top;
    const paths = layout.paths(scene, items, drawn.map((entry) => [entry.source, entry.target, entry.kind]));
    const colour = (entry) => entry.status || (entry.weight < 0 ? "negative" : "positive");
    lines.selectAll("path").data(drawn, (entry) => entry.key).join("path")
      .attr("class", (entry) => `edge ${entry.kind} ${colour(entry)}`).attr("data-id", (entry) => entry.key)
      .attr("d", (entry, j) => layout.curve(paths[j]) + head(entry, paths[j]))
      .attr("stroke-width", (entry) => entry.width.toFixed(2))
      .attr("opacity", (entry) => (0.35 + 0.6 * Math.sqrt(Math.abs(entry.weight) / top)).toFixed(2))
      .each(function title(entry) {
        d3.select(this).selectAll("title").data([entry]).join("title")
          .text(`${items[entry.source].label} → ${items[entry.target].label}, ${entry.kind}${entry.status ? ", " + entry.status : ""}: ${+entry.weight.toPrecision(4)}`);
      });
  };
  const corner = { attention: 10, group: 10, metric: 4, embed: 4, neuron: 0, skip: 4, error: 4 };
  const slanted = (kind) => (kind === "feature" ? "skewX(-14)" : null); // features are parallelograms
  const drawNodes = () => {
    const pinned = new Set(state.pinned);
    const groups = marks.selectAll("g").data(shown, (i) => items[i].key).join((enter) => {
      const made = enter.append("g").attr("tabindex", 0).attr("role", "button");
      made.append("title");
      made.append("rect").attr("class", "outer");
      made.append("rect").attr("class", "box");
      made.append("text").attr("class", "label").attr("dy", "0.35em");
      for (const part of ["bar", "bar missing"]) made.append("path").attr("class", part);
      made.append("text").attr("class", "said").attr("y", -layout.BOX / 2 - 4);
      return made.on("click", (event, i) => {
        event.stopPropagation();
        if (event.shiftKey || event.ctrlKey || event.metaKey) pin(i);
        else choose(i);
      }).on("mouseenter", (_, i) => light(i)).on("mouseleave", () => light(chosen))
        .on("keydown", (event, i) => {
          if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(i); }
          if (event.key === "p") pin(i);
          if (event.key.startsWith("Arrow")) { event.preventDefault(); walk(i, event.key); }
        });
    });
    groups.order()
      .attr("class", (i) => `node ${items[i].kind} ${items[i].status || ""} ${items[i].stability || ""} ${items[i].outside ? "outside" : ""}`)
      .attr("data-id", (i) => items[i].key)
      .classed("pinned", (i) => items[i].members.some((m) => pinned.has(nodes.id[m])))
      .classed("chosen", (i) => i === chosen)
      .classed("member", (i) => i < N && groupOf[i] !== null)
      .attr("transform", (i) => `translate(${scene.at.get(i).x.toFixed(1)},${scene.at.get(i).y.toFixed(1)})`);
    const box = (selection, more) => selection
      .attr("x", (i) => -items[i].width / 2 - more).attr("width", (i) => items[i].width + 2 * more)
      .attr("y", -layout.BOX / 2 - more).attr("height", layout.BOX + 2 * more)
      .attr("rx", (i) => (corner[items[i].kind] ?? 0) + more).attr("transform", (i) => slanted(items[i].kind));
    box(groups.select(".outer"), 2.5).style("display", (i) => (items[i].group || groupOf[i] !== null ? "" : "none"));
    box(groups.select(".box"), 0)
      .style("fill", (i) => (items[i].status || items[i].outside ? null : mix(items[i].attribution, scale.node).fill));
    const isStrong = (i) => !items[i].status && mix(items[i].attribution, scale.node).strong;
    groups.select(".label").text(labelOf).classed("strong", isStrong);
    const ends = (i) => { // of the bar, and the end of the part that is drawn
      const half = items[i].width / 2 - 8;
      return [-half, half * (2 * inflowOf(i).share - 1), half].map((x) => x.toFixed(1));
    };
    const bar = (selection, which) => selection.classed("strong", isStrong).attr("d", (i) => (inflowOf(i).size
      ? `M${ends(i)[which]} ${layout.BOX / 2 - 1.5}H${ends(i)[which + 1]}` : null));
    bar(groups.select(".bar"), 0);
    bar(groups.select(".missing"), 1);
    groups.select(".said").text((i) => (items[i].kind === "metric" ? inflowOf(i).text : ""));
    groups.select("title").text((i) => (items[i].group
      ? items[i].members.map((m) => nodes.id[m]).join(", ")
      : `${nodes.id[i]}  ${position(i)}\nattribution ${number(items[i].attribution)}`
        + (items[i].stability ? `\ninclusion ${inclusion(i)}` : ""))
      + (inflowOf(i).text && `\ninflow: ${inflowOf(i).text}`));
  };
  const DIRECTIONS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const walk = (i, key) => { // go to the nearest node in that direction; sideways distance counts more
    const [dx, dy] = DIRECTIONS[key], from = scene.at.get(i);
    const distance = (j) => {
      const x = scene.at.get(j).x - from.x, y = scene.at.get(j).y - from.y;
      const along = x * dx + y * dy, across = Math.abs(x * dy) + Math.abs(y * dx);
      return along > 1 ? along + (dx ? 8 : 2) * across : Infinity;
    };
    const next = shown.reduce((best, j) => (distance(j) < distance(best) ? j : best));
    if (distance(next) === Infinity) return;
    marks.selectAll("g").filter((j) => j === next).node().focus({ preventScroll: true });
    if (chosen !== null) choose(next);
    else { light(next); reveal(next); }
  };
  const share = (value) => `${Math.round(100 * value)} %`;
  const inclusion = (i) => {
    const { inclusion: at, inclusion_low: low, inclusion_high: high } = nodes;
    return share(at[i]) + (low && high ? ` (${share(low[i])} to ${share(high[i])})` : "") + ` of resampled circuits, ${nodes.stability[i]}`;
  };
  const labelOf = (i) => (items[i].status ? STATUS[items[i].status] + " " : sign(items[i].attribution))
    + items[i].label;
  const drawAxes = () => {
    const { x, y, k } = transform;
    view.attr("transform", transform);
    svg.attr("width", pane.width).attr("height", pane.height);
    back.attr("width", pane.width).attr("height", pane.height);
    side.select("rect").attr("width", layout.GUTTER - 8).attr("height", pane.height);
    let last = Infinity; // rows come from below; names that would overlap are omitted
    side.selectAll("text").data(scene.rows).join("text").attr("class", "row").attr("x", 8).attr("dy", "0.35em")
      .text((entry) => data.rows[entry.row])
      .attr("y", (entry) => entry.y * k + y)
      .style("display", (entry) => {
        const here = entry.y * k + y, on = last - here >= 13;
        if (on) last = here;
        return on ? "" : "none";
      });
    const top = Math.min(pane.height - layout.AXIS, (scene.height - layout.AXIS) * k + y);
    foot.attr("transform", `translate(0,${top.toFixed(1)})`);
    foot.select("rect").attr("width", pane.width).attr("height", layout.AXIS);
    const place = (entry) => (entry.left + entry.width / 2) * k + x;
    let right = 0; // right end of the last drawn token; tokens that would overlap are omitted
    foot.selectAll("g").data(scene.columns, (entry) => entry.first + "-" + entry.last).join((enter) => {
      const made = enter.append("g");
      made.append("title");
      made.append("text").attr("class", "token").attr("y", 17);
      made.append("text").attr("class", "index").attr("y", 32);
      return made;
    }).attr("transform", (entry) => `translate(${place(entry).toFixed(1)},0)`)
      .classed("folded", (entry) => entry.first < entry.last)
      .style("display", (entry) => {
        const middle = place(entry), half = entry.first === entry.last && entry.first >= 0
          ? data.axis_width[entry.first] / 2 : 12;
        const on = middle - half > Math.max(right, layout.GUTTER - 20);
        if (on) right = middle + half;
        return on ? "" : "none";
      });
    foot.selectAll("g").select("title").text((entry) => (entry.first < 0 ? "of no position"
      : data.columns.slice(entry.first, entry.last + 1).join(data.by_role ? ", " : "")));
    foot.selectAll("g").select(".token").text((entry) => (entry.first < 0 ? "–"
      : entry.first < entry.last ? "⋯" : data.axis[entry.first]));
    foot.selectAll("g").select(".index").text((entry) => (entry.first < 0 ? ""
      : entry.first < entry.last ? `${entry.first}–${entry.last}` : data.below[entry.first]));
  };
  const zoom = d3.zoom().scaleExtent([0.1, 4])
    .filter((event) => (event.type !== "wheel" || event.ctrlKey || event.metaKey) && !event.button)
    .on("zoom", (event) => { transform = event.transform; drawAxes(); });
  svg.call(zoom).on("dblclick.zoom", null)
    .on("wheel", (event) => { // at the end of the drawing, the wheel scrolls the notebook
      if (event.ctrlKey || event.metaKey || !scene) return;
      const before = transform.toString();
      zoom.translateBy(svg, -event.deltaX / transform.k, -event.deltaY / transform.k);
      if (transform.toString() !== before) event.preventDefault();
    }).on("click", () => choose(null));
  zoom.constrain(({ x, y, k }) => {
    const within = (value, low, high) => Math.max(Math.min(low, high), Math.min(value, high));
    return d3.zoomIdentity
      .translate(within(x, pane.width - scene.width * k, layout.GUTTER * (1 - k)),
                 within(y, pane.height - layout.AXIS - (scene.height - layout.AXIS) * k, 0))
      .scale(k);
  });
  const settle = () => zoom.extent([[0, 0], [pane.width, pane.height]]);
  const home_view = () => {
    settle();
    // If the drawing does not fit, show its top right corner, where the metric is.
    svg.call(zoom.transform, d3.zoomIdentity.translate(Math.min(0, pane.width - scene.width), 0));
  };
  const fit = () => {
    settle();
    const k = Math.min(1, (pane.width - layout.GUTTER) / (scene.width - layout.GUTTER),
                       (pane.height - layout.AXIS) / (scene.height - layout.AXIS));
    svg.call(zoom.transform, d3.zoomIdentity.translate(layout.GUTTER * (1 - k), 0).scale(k));
  };

  // --- Redraw everything -----------------------------------------------------------------------
  const measure = () => {
    const box = at("stage").getBoundingClientRect();
    pane = { width: box.width, height: box.height };
    return pane.width > 0 && pane.height > 0; // a hidden frame has no size
  };
  const update = (keep = true) => {
    const sized = measure();
    counting();
    shown = showing();
    const all = between(shown);
    const most = state.only_pinned ? all.length : count.edges;
    drawn = all.filter((entry, j) => j < most || entry.source === chosen || entry.target === chosen);
    tellCounts(all.length);
    countInflow();
    if (!sized) return;
    const anchor = chosen ?? shown[0], before = scene?.at.get(anchor); // the first shown node is the metric
    scene = layout.place(items, shown, data.axis_width, pane.width, pane.height);
    // A drawing that is too large for the window keeps its proportions.
    for (let wide = pane.width; scene.height / pane.height > 1.2 * scene.width / pane.width && wide < 20 * pane.width;) {
      wide *= 1.2;
      scene = layout.place(items, shown, data.axis_width, wide, pane.height);
    }
    bands.selectAll("rect").data(scene.rows).join("rect").attr("class", "band").attr("x", layout.GUTTER - 8)
      .attr("width", scene.width).attr("y", (entry) => entry.y - entry.height / 2)
      .attr("height", (entry) => entry.height);
    drawEdges();
    drawNodes();
    const after = scene.at.get(anchor);
    if (!keep) home_view();
    else { // keep the selected node, or the metric, in place if possible
      settle();
      zoom.translateBy(svg, before && after ? before.x - after.x : 0, before && after ? before.y - after.y : 0);
      if (chosen !== null) reveal(chosen);
    }
    light(chosen);
    search();
    folding();
    at("group").disabled = groupable().length < 2;
    legend();
  };
  const light = (i) => {
    const own = new Set(i === null ? [] : items[i].group?.folded === false ? items[i].members : [i]);
    const near = new Set(own);
    lines.selectAll("path").classed("near", (entry) => {
      const touches = own.has(entry.source) || own.has(entry.target);
      if (touches) near.add(entry.source).add(entry.target);
      return touches;
    }).filter(".near").raise();
    marks.selectAll("g").classed("near", (entry) => near.has(entry));
    view.classed("lit", i !== null);
  };
  const reveal = (i) => { // scroll a node into the window
    const where = scene?.at.get(i);
    if (!where) return;
    const { x, y, k } = transform, half = items[i].width / 2 + 12;
    const here = [where.x * k + x, where.y * k + y];
    const bring = (value, low, high) => (value < low ? low - value : value > high ? high - value : 0);
    const [dx, dy] = [bring(here[0], layout.GUTTER + half, pane.width - half),
                      bring(here[1], 24, pane.height - layout.AXIS - 24)];
    if (!dx && !dy) return;
    zoom.translateBy(svg, dx / k, dy / k);
  };

  // --- Counts, sliders, search -----------------------------------------------------------------
  const candidates = order.filter((i) => !isExtra(i)).length;
  const slider = { nodes: at("node-slider"), edges: at("edge-slider") };
  const most = { nodes: candidates, edges: Math.max(E, 1) };
  const toSlider = (what) => {
    const k = Math.min(count[what], most[what]);
    slider[what].value = most[what] > 1 ? Math.round(1000 * Math.log(k) / Math.log(most[what])) : 1000;
  };
  const said = new Intl.NumberFormat("en");
  const tellCounts = (possible) => {
    const plain = shown.filter((i) => !(i < N && isExtra(i))).length;
    at("nodes-shown").textContent = `${said.format(plain)} of ${said.format(candidates)}`;
    at("edges-shown").textContent = `${said.format(drawn.length)} of ${said.format(possible)}`;
    at("edges-shown").title = "Among edges between shown nodes, of the selected kinds";
    at("more").disabled = state.only_pinned || (count.nodes >= candidates && count.edges >= possible);
  };
  for (const what of ["nodes", "edges"])
    slider[what].addEventListener("input", () => {
      state[what] = Math.round(Math.exp(Math.log(most[what]) * slider[what].value / 1000));
      update();
    });
  at("more").addEventListener("click", () => {
    for (const what of ["nodes", "edges"]) state[what] = Math.min(most[what], 2 * count[what]);
    update();
  });
  const words = nodes.id.map((id, i) => {
    const more = detailsOf(i), ends = [...(more.writes || []), ...(more.reads || [])].map(([token]) => token);
    return [id, nodes.name[i], position(i), ...ends].map((word) => word.toLowerCase());
  });
  let hits = [];
  const search = () => {
    const wanted = at("search").value.trim().toLowerCase();
    const called = (i) => lookup(state.names, nodes.id[i])?.toLowerCase().includes(wanted)
      || items[home[i]].name.toLowerCase().includes(wanted);
    hits = wanted ? order.filter((i) => called(i) || words[i].some((word) => word.includes(wanted))) : [];
    const on = new Set(hits.map((i) => home[i])), visible = new Set(shown);
    marks.selectAll("g").classed("found", (i) => on.has(i));
    view.classed("searching", !!wanted);
    const hidden = hits.filter((i) => !visible.has(home[i])).length;
    at("found").textContent = !wanted ? "" : `${hits.length} found` + (hidden ? `, ${hidden} not shown` : "");
  };
  at("search").addEventListener("input", search);
  at("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && hits.length) choose(home[hits[0]]);
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches?.("input:not([type=range]):not([type=checkbox])");
    if (event.key === "/" && !typing) {
      event.preventDefault();
      at("search").focus();
    }
    if (event.key === "Escape") {
      at("save").open = false;
      if (at("search").value) { at("search").value = ""; search(); }
      else if (chosen !== null) choose(null);
      else { at("panel").classList.remove("open"); update(); }
      if (typing) event.target.blur();
    }
  });

  // --- Pins, names, groups ---------------------------------------------------------------------
  const pin = (i) => {
    const ids = items[i].members.map((m) => nodes.id[m]);
    const on = ids.every((id) => state.pinned.includes(id));
    state.pinned = on ? state.pinned.filter((id) => !ids.includes(id)) : [...new Set([...state.pinned, ...ids])];
    update();
    tell();
  };
  const rename = (i, name) => {
    if (items[i].group) items[i].group.name = name || "group";
    else if (name && name !== nodes.label[i]) state.names[nodes.id[i]] = name;
    else delete state.names[nodes.id[i]];
    rebuild();
    update();
    tell();
  };
  const groupable = () => {
    const taken = new Set(state.groups.flatMap((entry) => entry.members));
    return state.pinned.filter((id) => !taken.has(id) && nodes.kind[index.get(id)] !== "metric");
  };
  const group = () => {
    const members = groupable();
    if (members.length < 2) return;
    state.groups.push({ name: `group ${state.groups.length + 1}`, members, folded: true });
    rebuild();
    choose(N + state.groups.length - 1);
    at("name").select();
  };
  at("group").addEventListener("click", group);
  const fold = (i, folded) => {
    items[i].group.folded = folded;
    rebuild();
    choose(i);
  };
  const measuredOf = (entry) => { // groups are matched by members, under any name
    const members = new Set(entry.members);
    return data.groups.find((one) => one.members.length === members.size && one.members.every((id) => members.has(id)));
  };
  const ungroup = (i) => {
    state.groups = state.groups.filter((entry) => entry !== items[i].group);
    chosen = null;
    rebuild();
    update();
    tell();
  };

  // --- The panel -------------------------------------------------------------------------------
  const MOST = 40;
  const table = (rows, header = null) => {
    const made = make("table");
    if (header) {
      const row = made.insertRow();
      header.forEach((entry, c) => row.append(make("th", entry, c ? "number" : "")));
    }
    for (const { cells, go, title, numbers } of rows) {
      const row = made.insertRow();
      cells.forEach((cell, c) => row.append(make("td", typeof cell === "string" ? cell : number(cell),
        typeof cell !== "string" || (numbers && c) ? "number" : "")));
      if (title) row.title = title;
      if (go !== undefined) {
        row.className = "link";
        row.addEventListener("click", () => choose(go));
        row.addEventListener("mouseenter", () => light(go));
        row.addEventListener("mouseleave", () => light(chosen));
      }
    }
    return made;
  };
  const section = (id, title, note = "") => {
    const part = make("section");
    part.id = id;
    part.append(make("h3", title));
    if (note) part.append(make("p", note, "note"));
    return part;
  };
  const linked = (title, id, here, there) => {
    const members = new Set(items[chosen].members), sums = new Map();
    for (let j = 0; j < E; j++)
      if (members.has(here[j]) && !members.has(there[j])) {
        const key = `${there[j]} ${edges.kind[j]} ${edges.status ? edges.status[j] : ""}`, one = sums.get(key);
        sums.set(key, { j, weight: (one ? one.weight : 0) + edges.weight[j] });
      }
    const list = [...sums.values()].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));
    const cut = list.length > MOST ? `, the strongest ${MOST} below` : "";
    const part = section(id, `${title} (${list.length}${cut})`);
    part.append(table(list.slice(0, MOST).map(({ j, weight }) => ({
      cells: [nameOf(there[j]), edges.kind[j], ...(edges.status ? [edges.status[j] || ""] : []),
              +weight.toPrecision(5)],
      go: home[there[j]],
    }))));
    return part;
  };
  const nameOf = (i) => {
    const name = lookup(state.names, nodes.id[i]) ?? (nodes.kind[i] === "embed" ? nodes.label[i] : undefined);
    return name === undefined ? nodes.id[i] : `${name} (${nodes.id[i]})`;
  };
  const coloured = (texts, values, top, here, say) => {
    const line = make("div", "", "tokens");
    texts.forEach((token, t) => {
      const span = make("span", token, t === here ? "here" : ""), { fill, strong } = mix(values[t], top, ["low", "high"]);
      span.style.background = fill;
      if (strong) span.style.color = "var(--back)";
      span.title = say(t);
      line.append(span);
    });
    return line;
  };
  const furthest = (values) => values.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-12);
  const SPREAD = "Amounts: standard deviations above the mean over the vocabulary (σ), direct path only.";
  const bothEnds = (id, title, note, words, list) => {
    const part = section(id, title, note), both = make("div", "", "both");
    for (const [name, some] of [[words[0], list.filter(([, s]) => s >= 0)],
                                [words[1], list.filter(([, s]) => s < 0).reverse()]])
      both.append(table(some.map(([token, s]) => ({ cells: [token, `${s < 0 ? "−" : "+"}${Math.abs(s).toFixed(1)}`] })),
                        [name, "σ"]));
    for (const cell of both.querySelectorAll("td:last-child")) cell.className = "number";
    part.append(both);
    return part;
  };
  const KIND = { attention: "attention head", feature: "feature of a transcoder", skip: "skip node: what W_skip reads",
                 error: "error: what the transcoder misses of the MLP's output" };
  const panelOf = (i) => {
    const item = items[i], box = document.createDocumentFragment(), name = make("div", "", "name");
    const field = make("input");
    field.id = "name";
    field.type = "text";
    field.value = item.name;
    field.title = "Type another name";
    field.setAttribute("aria-label", "Name");
    field.addEventListener("change", () => rename(i, field.value.trim()));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); field.value = item.name; field.blur(); }
    });
    const close = button("×", () => choose(null));
    close.className = "close";
    close.setAttribute("aria-label", "Close");
    name.append(field, close);
    const on = item.members.every((m) => state.pinned.includes(nodes.id[m]));
    const actions = make("div", "", "actions"), pinning = button(on ? "Unpin" : "Pin", () => pin(i));
    pinning.id = "pin";
    pinning.title = "Shortcut: p, or shift-click";
    const parts = item.group ?? items[groupOf[i]]?.group;
    actions.append(pinning, ...(item.group ? [button("Ungroup", () => ungroup(i))] : []));
    if (parts) actions.append(button(parts.folded ? "Unfold" : `Fold ${item.group ? "" : parts.name}`, () => fold(groupOf[item.members[0]], !parts.folded)));
    box.append(name, actions);
    if (item.group) {
      const facts = [["attribution of the group", +item.attribution.toPrecision(5)],
                     ["Σ attribution of members", +attributionSum(item.members).toPrecision(5)]], measured = measuredOf(item.group);
      if (measured) facts.unshift(["exact effect, patched together", measured.effect], ["Σ exact effects, one by one", measured.sum_of_effects]);
      box.append(table(facts.map((cells) => ({ cells }))));
      box.append(make("p", "The attribution of the group is the sum over its members, minus the edges between them: "
        + "what one member passes on to another counts once.", "note"));
      if (measured) box.append(make("p", "Exact effects: how much the metric falls when z comes from the corrupted run. "
        + "If the first is larger, members can replace each other.", "note"));
      const part = section("members", `Members (${item.members.length})`,
                           "Edges of one kind into a group, or out of it, are added up.");
      part.append(table(item.members.map((m) => ({ cells: [nameOf(m), nodes.attribution[m]], go: item.group.folded ? undefined : m }))));
      box.append(part, linked("Reads", "reads", edges.target, edges.source),
                 linked("Writes", "writes", edges.source, edges.target));
      return box;
    }
    const where = nodes.position[i] === null ? null : data.places[nodes.position[i]], heading = make("h2", nodes.id[i]);
    const measure = { attention: "length of z", neuron: "z", feature: "z", skip: "length", error: "length" }[nodes.kind[i]] || "value";
    const facts = [["kind", KIND[nodes.kind[i]] || nodes.kind[i]], ["layer", nodes.layer[i]],
                   ["token", nodes.position[i] === null ? null : position(i) + (where === null ? "" : `  (${where})`)],
                   [measure + (data.corrupted.length ? ", clean run" : "") + (data.by_role ? ", mean" : ""), nodes.value[i]], ["attribution", nodes.attribution[i]]];
    if (nodes.denoise && nodes.denoise[i] !== null) facts.push(["restores alone", nodes.denoise[i]], ["removes alone", nodes.noise[i]]);
    if (nodes.exact) facts.push(["exact effect", nodes.exact[i]]);
    if (nodes.status) facts.push(["status", nodes.status[i] || "–"]);
    if (item.stability) facts.push(["inclusion", inclusion(i)]);
    if (inflowOf(i).text) facts.push(["inflow", inflowOf(i).text]);
    box.append(heading, table(facts.map((cells) => ({
      cells, numbers: true, title: cells[0] === "exact effect" ? data.exact : "" }))));
    if (nodes.exact && nodes.exact[i] !== null) box.append(make("p", data.exact, "note"));
    const more = detailsOf(i);
    if (more.pattern) {
      const gate = "The attention of each token to itself, 0 to 1; the rest goes to the bias token.";
      // The gate alone would be misleading: SiLU's gate is ½ if the output is 0.
      const part = section("pattern", "Attention", more.z
        ? `Coloured by z, the output of the ${nodes.kind[i]} (gate × value): green is positive, purple negative. `
          + "Point at a token for its gate, the attention to itself."
        : ["neuron", "feature"].includes(nodes.kind[i]) ? gate : "The attention of the outlined token, 0 to 1.");
      const top = furthest([...(more.z || []), ...(more.corrupted_z || [])]); // both runs have one scale
      const run = (texts, pattern, z) => (z
        ? coloured(texts, z, top, where, (t) => `z ${z[t]}, gate ${pattern[t]}`)
        // The values are squared, because mix takes the square root.
        : coloured(texts, pattern.map((w) => w ** 2), 1, where, (t) => `${t}: ${pattern[t]}`));
      part.append(run(tokens, more.pattern, more.z));
      if (more.corrupted_pattern) part.append(make("p", "The same in the corrupted run:", "note"),
                                              run(data.corrupted, more.corrupted_pattern, more.corrupted_z));
      box.append(part);
    }
    if (more.writes) box.append(data.corrupted.length
      ? bothEnds("writes-tokens", "Tokens its change raises and lowers",
                 "The change: the output in the clean run minus the output in the corrupted run. " + SPREAD, ["raises", "lowers"], more.writes)
      : bothEnds("writes-tokens", "Tokens it writes", SPREAD, ["raises", "lowers"], more.writes));
    if (more.reads) box.append(bothEnds("reads-tokens", "Tokens it reads", `How strongly each token's embedding activates this ${nodes.kind[i]}'s gate (standard deviations above the mean of the vocabulary).`,
                                        ["most", "least"], more.reads));
    if (more.examples) {
      const part = section("examples", "Top examples", "Each token is coloured by z: green is positive, purple negative. Point at a token for its values.");
      const top = furthest(more.examples.flatMap((entry) => entry.values));
      for (const entry of more.examples) {
        const line = coloured(entry.tokens, entry.values, top, entry.position,
                              (t) => `z ${entry.values[t]}, gate ${entry.gates[t]} (text ${entry.text})`);
        line.classList.add("example");
        part.append(line);
      }
      box.append(part);
    }
    box.append(linked("Reads", "reads", edges.target, edges.source),
               linked("Writes", "writes", edges.source, edges.target));
    return box;
  };
  let isReading = !data.lead.length; // whether the notes are unfolded
  const panelOfNone = () => {
    const box = document.createDocumentFragment();
    const click = make("p", "Click a node for its attention, tokens, and what it reads and writes. Shift-click pins "
      + "it: pinned nodes stay, and can be grouped. Arrow keys go from node to node. Drag to move, Ctrl and wheel to zoom, "
      + "/ to search.", "note controls");
    const pins = section("pinned", `Pinned (${state.pinned.length})`), list = make("ul");
    for (const id of state.pinned) {
      const line = make("li", nameOf(index.get(id)));
      line.addEventListener("click", () => choose(home[index.get(id)]));
      list.append(line);
    }
    pins.append(list);
    for (const [g, entry] of state.groups.entries())
      pins.append(button(entry.name, () => choose(N + g)));
    const prompt = section("prompt", "Prompt");
    prompt.append(coloured(tokens, tokens.map(() => null), 1, null, String));
    prompt.append(...data.lead.map((text) => make("p", text)));
    const about = make("details");
    about.id = "notes";
    about.open = isReading;
    about.addEventListener("toggle", () => { isReading = about.open; });
    about.append(make("summary", "How to read this graph"), click);
    about.append(...[...data.notes, ...(nodes.exact ? [data.exact] : [])].map((note) => make("p", note, "note")));
    box.append(prompt, about);
    if (state.pinned.length || state.groups.length) box.append(pins);
    return box;
  };
  const tell = () => at("panel").replaceChildren(chosen === null ? panelOfNone() : panelOf(chosen));
  const choose = (i) => {
    chosen = i;
    at("panel").classList.toggle("open", i !== null);
    at("panel").scrollTop = 0;
    update();
    tell();
  };

  // --- Legend ----------------------------------------------------------------------------------
  // Samples of what is drawn: the width of each, how to draw it around y = 0, and its text.
  const chip = (kind, cls, mark, text) => ({ width: 28, text, draw: (box) => {
    const made = box.append("g").attr("class", `chip node ${kind} ${cls}`).attr("transform", "translate(14,0)");
    const filled = cls in STATUS || cls === "outside";
    made.append("rect").attr("x", -13).attr("y", -7).attr("width", 26).attr("height", 14)
      .attr("rx", Math.min(corner[kind] ?? 0, 7)).attr("transform", slanted(kind)).style("fill", filled ? null : "none");
    if (kind === "group") made.append("rect").attr("class", "outer").attr("x", -14).attr("y", -8).attr("width", 28).attr("height", 16).attr("rx", 8);
    if (mark) made.append("text").attr("dy", "0.35em").text(mark);
  } });
  const line = (cls, text, path = "M0 0H26") => ({ width: 26, text, draw: (box) => box.append("path").attr("class", `edge ${cls}`)
    .attr("stroke-width", 2).attr("d", path) });
  const SHAPES = { attention: "attention head", neuron: "neuron", feature: "feature of a transcoder", skip: "W_skip", error: "error of a transcoder" };
  const THROUGH = { value: "through the value", q: "through the query", k: "through the key",
                    gate: "through the gate", routing: "through the routing" };
  const STABILITY = { core: "core: in 90 % of resampled circuits or more", contingent: "contingent: in fewer", noise: "in 10 % or fewer" };
  const figures = (value, n) => String(+value.toPrecision(n));
  const scaleEntry = () => ({ width: 84, text: `attribution of a node, −${figures(scale.node, 3)} to +${figures(scale.node, 3)}`, draw: (box) => {
    for (let i = 0; i < 21; i++)
      box.append("rect").attr("x", 4 * i).attr("y", -6).attr("width", 4).attr("height", 12).style("fill", mix(i / 10 - 1, 1).fill);
    box.append("rect").attr("class", "frame").attr("y", -6).attr("width", 84).attr("height", 12);
  } });
  const widthsEntry = (sign) => {
    const top = drawn.reduce((most, entry) => Math.max(most, Math.abs(entry.weight)), 0), shares = [1, 0.5, 0.1];
    return { width: 62, text: `weight of an edge: ${shares.map((part) => figures(top * part, 2)).join(", ")}`, draw: (box) => shares.forEach((part, i) =>
      box.append("path").attr("class", `edge ${sign}`).attr("d", `M${22 * i} 0H${22 * i + 18}`).attr("stroke-width", 0.8 + 4.2 * part)) };
  };
  const legendEntries = () => {
    const inside = new Set(shown.filter((i) => !items[i].outside).flatMap((i) => items[i].members.map((m) => nodes.kind[m])));
    const through = new Set(drawn.map((entry) => entry.kind)), [plus, minus] = nodes.status ? ["", ""] : ["positive", "negative"];
    const entries = nodes.status ? Object.entries(STATUS).map(([word, mark]) => chip("neuron", word, mark, word)) : [scaleEntry()];
    for (const [kind, text] of Object.entries(SHAPES)) if (inside.has(kind)) entries.push(chip(kind, "", "", text));
    if (shown.some((i) => items[i].outside)) entries.push(chip("neuron", "outside", "", "outside the circuit"));
    for (const [word, text] of Object.entries(STABILITY))
      if (shown.some((i) => items[i].stability === word)) entries.push(chip("neuron", word, "", text));
    if (state.groups.length) entries.push(chip("group", "", "", "group"));
    if (drawn.length) entries.push(widthsEntry(plus));
    if (through.size > 1 || !through.has("value"))
      for (const [kind, text] of Object.entries(THROUGH)) if (through.has(kind)) entries.push(line(`${kind} ${plus}`, text));
    if (drawn.some((entry) => entry.weight < 0))
      entries.push(line(plus, "positive", "M0 0H26M20 -4L26 0L20 4"), line(minus, "negative", "M0 0H26M26 -5V5"));
    if (data.has_bars) entries.push({ width: 26, text: "part of the inflow that is drawn", draw: (box) => {
      box.append("path").attr("class", "bar").attr("d", "M0 0H16");
      box.append("path").attr("class", "bar missing").attr("d", "M16 0H26");
    } });
    return entries;
  };
  const legend = () => at("legend").replaceChildren(...legendEntries().map(({ width, text, draw }) => {
    const made = make("span", text), box = d3.create("svg").attr("class", "circuit").attr("width", width).attr("height", 18)
      .attr("viewBox", `0 -9 ${width} 18`);
    draw(box);
    made.prepend(box.node());
    return made;
  }));

  // --- Saving ----------------------------------------------------------------------------------
  const download = (name, type, content) => {
    const link = make("a");
    link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    at("save").open = false;
  };
  const TITLE = 7.9, TITLE_LINE = 17, LEGEND_LINE = 20, LINE = 14; // width of a character; heights of lines
  const wrapped = (text, most) => text.split(" ").reduce((rows, word) => { // lines of at most so many characters
    const longer = `${rows.at(-1)} ${word}`.trim();
    return longer.length > most ? [...rows, word] : [...rows.slice(0, -1), longer];
  }, [""]).filter(Boolean);
  const sentences = () => { // below the picture, as in circuit_picture.py
    const plain = shown.filter((i) => !(i < N && isExtra(i))).length, possible = between(shown).length, all = [...data.caption];
    const of = (n, whole, what) => (n < whole ? `the ${said.format(n)} strongest of ${said.format(whole)} ${what}` : `all ${said.format(n)} ${what}`);
    if (plain < candidates || drawn.length < possible)
      all.push(`Drawn: ${of(plain, candidates, "nodes")}, and ${of(drawn.length, possible, "edges between them")}.`);
    const linked = new Set(drawn.flatMap((entry) => [entry.source, entry.target]));
    if (shown.some((i) => !linked.has(i) && !items[i].outside))
      all.push("A node without edges acts through nodes and edges that are not drawn.");
    const labels = shown.map((i) => items[i].label).join(" ");
    return [...all, ...data.marks.filter(([mark]) => labels.includes(mark)).map(([, text]) => text)];
  };
  const picture = () => {
    const kept = { pane, transform };
    pane = { width: scene.width, height: scene.height };
    transform = d3.zoomIdentity;
    drawAxes();
    const made = d3.select(svg.node().cloneNode(true)).attr("xmlns", "http://www.w3.org/2000/svg");
    ({ pane, transform } = kept);
    drawAxes();
    const titles = wrapped(document.title, Math.floor((scene.width - 16) / TITLE)), top = 28 + TITLE_LINE * (titles.length - 1);
    titles.forEach((row, i) => made.append("text").attr("class", "title").attr("x", 8).attr("y", 19 - top + TITLE_LINE * i).text(row));
    let x = 8, y = scene.height + 18;
    for (const { width, text, draw } of legendEntries()) {
      const wide = width + 6 + data.per_character * text.length;
      if (x + wide > scene.width - 8 && x > 8) [x, y] = [8, y + LEGEND_LINE];
      const sample = made.append("g").attr("class", "sample").attr("transform", `translate(${x},${y})`);
      draw(sample);
      sample.append("text").attr("class", "row").attr("x", width + 6).attr("dy", "0.35em").text(text);
      x += wide + 18;
    }
    y += LEGEND_LINE + 4;
    const caption = wrapped(sentences().join(" "), Math.floor((scene.width - 16) / data.per_character));
    caption.forEach((row, i) => made.append("text").attr("class", "row").attr("x", 8).attr("y", y + LINE * i).text(row));
    const height = top + y + LINE * caption.length;
    made.attr("viewBox", `0 ${-top} ${scene.width} ${height}`).attr("height", height);
    made.select(".back").attr("y", -top).attr("height", height);
    made.insert("style", ":first-child").text(data.style.replace(/var\(--([\w-]+)\)/g, (_, name) => css(name)));
    return new XMLSerializer().serializeToString(made.node());
  };
  const name = "circuit";
  const changed = () => JSON.stringify(state);
  at("save-svg").addEventListener("click", () => download(name + ".svg", "image/svg+xml", picture()));
  at("save-png").addEventListener("click", () => {
    const image = new Image();
    image.onload = () => {
      const canvas = make("canvas"), { width, height } = image;
      canvas.width = 2 * width;
      canvas.height = 2 * height;
      canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
      canvas.toBlob((blob) => download(name + ".png", "image/png", blob));
    };
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(picture());
  });
  at("save-state").addEventListener("click", () => download(name + ".json", "application/json", changed()));
  at("save-page").addEventListener("click", () => {
    const safe = changed().replace(/[<>&]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
    const text = source.replace(/(<script type="application\/json" id="state">)[^<]*/, (_, start) => start + safe);
    download(name + ".html", "text/html", "<!DOCTYPE html>\n" + text);
  });
  at("load").addEventListener("change", async () => {
    const [file] = at("load").files;
    try {
      const saved = JSON.parse(await file.text());
      const ids = [...saved.pinned, ...Object.keys(saved.names), ...saved.groups.flatMap((entry) => entry.members)];
      const unknown = ids.filter((id) => !index.has(id)).length;
      if (unknown && unknown === ids.length) at("said").textContent = `${file.name} is of another circuit`;
      else {
        take(saved);
        at("said").textContent = `${file.name} loaded` + (unknown ? `; ${unknown} of its nodes are not here` : "");
      }
    } catch {
      at("said").textContent = `${file.name} is not a file of pins, names and groups`;
    }
    at("load").value = "";
    at("save").open = false;
    begin();
  });

  // --- Switches --------------------------------------------------------------------------------
  const check = (box, get, set) => {
    box.checked = get();
    box.onchange = () => { set(box.checked); update(); };
  };
  for (const kind of KINDS.filter((entry) => edges.kind.includes(entry))) {
    const label = make("label", ` ${kind}`), box = make("input");
    box.type = "checkbox";
    box.id = "edges-" + kind;
    label.prepend(box);
    at("edge-kinds").append(label);
  }
  const recolour = () => {
    if (state.theme) document.documentElement.dataset.theme = state.theme;
    else delete document.documentElement.dataset.theme;
    legend();
    if (scene) drawNodes();
    tell();
  };
  let onScreen = null, wasReading = false; // the theme and the notes before printing
  addEventListener("beforeprint", () => {
    onScreen = state.theme;
    state.theme = "light";
    recolour();
    at("paper").innerHTML = picture();
    wasReading = isReading;
    if (at("notes")) at("notes").open = true;
  });
  addEventListener("afterprint", () => {
    state.theme = onScreen;
    recolour();
    at("paper").replaceChildren();
    if (at("notes")) at("notes").open = wasReading;
  });
  at("theme").addEventListener("click", () => {
    state.theme = isDark() ? "light" : "dark";
    recolour();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  at("about").addEventListener("click", () => {
    at("panel").classList.toggle("open");
    update();
  });
  const step = (factor) => svg.call(zoom.scaleBy, factor);
  at("in").addEventListener("click", () => step(1.3));
  at("out").addEventListener("click", () => step(1 / 1.3));
  at("fit").addEventListener("click", fit);
  at("extras-label").hidden = !nodes.kind.some((kind) => EXTRAS.includes(kind));
  const folding = () => {
    at("fold-label").hidden = !state.groups.length;
    at("fold").checked = state.groups.some((entry) => entry.folded);
  };
  at("fold").addEventListener("change", () => {
    for (const entry of state.groups) entry.folded = at("fold").checked;
    rebuild();
    choose(null);
  });
  const begin = () => {
    chosen = null;
    rebuild();
    for (const kind of KINDS) {
      const box = at("edges-" + kind), others = () => state.kinds.filter((entry) => entry !== kind);
      if (box) check(box, () => state.kinds.includes(kind), (on) => { state.kinds = on ? [...others(), kind] : others(); });
    }
    check(at("extras"), () => state.extras, (on) => { state.extras = on; });
    folding();
    check(at("only-pinned"), () => state.only_pinned, (on) => { state.only_pinned = on; });
    update(false);
    recolour();
  };
  begin();
  // A frame may get its size, or change it, after the script has run.
  new ResizeObserver(() => {
    const { width, height } = at("stage").getBoundingClientRect();
    if (Math.abs(width - pane.width) > 1 || Math.abs(height - pane.height) > 1 || !scene) update(false);
  }).observe(at("stage"));
})();
