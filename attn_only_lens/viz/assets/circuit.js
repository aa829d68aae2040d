// What the page of a circuit does. Texts reach the page as textContent only, never as HTML.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("circuit").textContent);
  const { nodes, edges, tokens, details } = data;
  const N = nodes.id.length, E = edges.source.length;
  const at = (id) => document.getElementById(id);
  const make = (tag, text = "", className = "") => {
    const made = document.createElement(tag);
    made.textContent = text;
    made.className = className;
    return made;
  };
  const number = (value) => (value === null ? "–" : String(value));
  // hasOwn: a node may be called "constructor".
  const own = (key) => (Object.hasOwn(details, key) ? details[key] : {});
  const told = (i) => ({ pattern: null, top: [], read: [], ...own(nodes.name[i]),
                         ...own(nodes.id[i]) });

  // --- Strength, colour ------------------------------------------------------------------------
  const sizes = (values) => values.map((value) => (value === null ? Infinity : Math.abs(value)));
  const strength = { node: sizes(nodes.attribution), edge: sizes(edges.weight) };
  const largest = (all) => all.reduce((a, b) => (b < Infinity && b > a ? b : a), 0) || 1;
  const scale = { node: largest(strength.node), edge: largest(strength.edge) };
  const STATUS = { kept: "#0072B2", lost: "#D55E00", gained: "#009E73" };
  const SIGN = { embed: "▢", attention: "●", neuron: "◆", bias: "⬢", rest: "▼",
                 offset: "★", metric: "■" };
  const SHAPE = { embed: "round-rectangle", attention: "ellipse", neuron: "diamond",
                  bias: "hexagon", rest: "vee", offset: "star", metric: "rectangle" };
  // From white: blue positive, red negative. A root, so that weak ones keep a colour.
  const signed = (value, top) => {
    if (value === null) return "#dddddd";
    const t = Math.sqrt(Math.min(1, Math.abs(value) / top));
    const end = value < 0 ? [178, 24, 43] : [33, 102, 172];
    return "rgb(" + end.map((c) => Math.round(255 + (c - 255) * t)).join(",") + ")";
  };
  const colour = (columns, values, top) => (i) =>
    columns.status ? STATUS[columns.status[i]] || "#dddddd" : signed(values[i], top);
  const nodeColour = colour(nodes, nodes.attribution, scale.node);
  const edgeColour = colour(edges, edges.weight, scale.edge);

  const fullColour = (j) => (edges.status ? edgeColour(j) : signed(edges.weight[j], 1e-300));

  // --- The graph -------------------------------------------------------------------------------
  const elements = [
    ...nodes.id.map((_, i) => ({
      group: "nodes", data: { id: "n" + i, index: i, label: nodes.name[i], colour: nodeColour(i),
                              shape: SHAPE[nodes.kind[i]] },
      position: { x: nodes.x[i], y: nodes.y[i] }, classes: "node",
    })),
    ...edges.source.map((source, j) => ({
      group: "edges", data: { id: "e" + j, index: j, source: "n" + source,
                              target: "n" + edges.target[j], colour: edgeColour(j),
                              sign: fullColour(j),
                              width: 0.7 + 4 * Math.abs(edges.weight[j]) / scale.edge,
                              line: edges.kind[j] === "value" ? "solid" : "dashed" },
      selectable: false,
    })),
  ];
  const cy = cytoscape({
    container: at("graph"), elements, layout: { name: "preset" }, autoungrabify: true,
    boxSelectionEnabled: false, minZoom: 0.05, maxZoom: 4, hideEdgesOnViewport: E > 4000,
    style: [
      { selector: ".node", style: { label: "data(label)", shape: "data(shape)", width: 28,
        height: 28, "background-color": "data(colour)", "border-width": 1, "border-color": "#555",
        "font-size": 14, "text-valign": "bottom", "text-margin-y": 1, "min-zoomed-font-size": 5 } },
      { selector: "edge", style: { "curve-style": "haystack", "haystack-radius": 0,
        "line-color": "data(colour)", width: "data(width)", "line-style": "data(line)",
        opacity: 0.65, events: "no" } },
      { selector: ".weak", style: { display: "none" } },
      { selector: ".faded", style: { opacity: 0.12 } },
      { selector: "edge.near", style: { display: "element", opacity: 1, "z-index": 9, width: 2.5,
        "line-color": "data(sign)" } },
      { selector: ".found", style: { "border-width": 4, "border-color": "#E69F00" } },
      { selector: ".chosen", style: { "border-width": 4, "border-color": "#000000" } },
    ],
  });
  const node = (i) => cy.getElementById("n" + i);
  const allNodes = cy.nodes(".node"), allEdges = cy.edges();
  const whole = () => {
    cy.resize(); // the header grows with what it says
    const ends = (all, margin) => [Math.min(...all) - margin, Math.max(...all) + margin];
    const [x1, x2] = ends(nodes.x, 45), [y1, y2] = ends(nodes.y, 30);
    const left = 100, low = 25; // the names of rows and columns
    const width = cy.width() - left, height = cy.height() - low;
    const zoom = Math.min(width / (x2 - x1), height / (y2 - y1), 1.5);
    cy.viewport({ zoom, pan: { x: left + (width - (x1 + x2) * zoom) / 2,
                               y: (height - (y1 + y2) * zoom) / 2 } });
  };
  let moved = false; // by the reader
  cy.on("dragpan scrollzoom pinchzoom", () => { moved = true; });
  window.circuit = cy; // for the console

  // --- Names of rows and columns, which stay in sight while the graph moves --------------------
  const names = (box, all) => all.map(([name, where]) => {
    const made = make("span", name);
    made.title = name;
    at(box).append(made);
    return { made, where };
  });
  const rows = names("rows", data.rows);
  const columns = names("columns", data.columns.map(([position, x]) =>
    [position < 0 ? "none" : `${position} ${tokens[position]}`, x]));
  const follow = () => {
    const zoom = cy.zoom(), pan = cy.pan();
    let last = Infinity; // rows come from below, and one that would cover the last is left out
    for (const { made, where } of rows) {
      const y = where * zoom + pan.y, on = last - y >= 14;
      made.style.display = on ? "" : "none";
      made.style.top = y + "px";
      if (on) last = y;
    }
    columns.forEach(({ made, where }, i) => {
      const apart = [columns[i - 1], columns[i + 1]].filter(Boolean)
        .map((other) => Math.abs(other.where - where) * zoom);
      made.style.left = where * zoom + pan.x + "px";
      made.style.maxWidth = Math.max(12, Math.min(160, ...apart) - 4) + "px";
    });
  };
  cy.on("viewport resize", follow);

  // --- Search ----------------------------------------------------------------------------------
  const words = nodes.id.map((id, i) => {
    const more = told(i), top = [...more.top, ...more.read].map(([token]) => token);
    const position = nodes.position[i];
    return [id, nodes.name[i], position === null ? "" : tokens[position], ...top]
      .map((word) => word.toLowerCase());
  });
  const search = () => {
    const wanted = at("search").value.trim().toLowerCase();
    const hits = wanted ? words.map((all) => all.some((word) => word.includes(wanted))) : [];
    cy.batch(() => allNodes.forEach((each) => {
      const hit = hits[each.data("index")];
      each.toggleClass("found", !!hit);
      each.toggleClass("faded", hit === false);
    }));
    const hidden = cy.nodes(".found.weak").length;
    at("found").textContent = !wanted ? ""
      : `${hits.filter(Boolean).length} found` + (hidden ? `, ${hidden} hidden` : "");
  };

  // --- Thresholds ------------------------------------------------------------------------------
  // A slider is a number of elements on a logarithmic scale: 0 the strongest alone, 1000 all.
  const order = (all) => [...all].sort((a, b) => b - a);
  const ranked = { node: order(strength.node), edge: order(strength.edge) };
  const slider = { node: at("node-threshold"), edge: at("edge-threshold") };
  const threshold = (what) => {
    const all = ranked[what];
    const k = Math.round(Math.exp(Math.log(Math.max(1, all.length)) * slider[what].value / 1000));
    return all.length ? all[k - 1] : 0;
  };
  const setTo = (what, k) => {
    const n = ranked[what].length;
    slider[what].value = n > 1 ? Math.floor(1000 * Math.log(Math.min(k, n)) / Math.log(n)) : 1000;
    if (k >= n) slider[what].value = 1000;
  };
  const kindOff = new Set();
  let chosen = null;
  const update = () => {
    const least = { node: threshold("node"), edge: threshold("edge") };
    let shownNodes = 0, shownEdges = 0;
    cy.batch(() => {
      const strong = strength.node.map((value, i) => value >= least.node || i === chosen);
      allNodes.forEach((each) => {
        const on = strong[each.data("index")];
        each.toggleClass("weak", !on);
        shownNodes += on;
      });
      allEdges.forEach((each) => {
        const j = each.data("index"), allowed = !kindOff.has(edges.kind[j]);
        const near = allowed && (edges.source[j] === chosen || edges.target[j] === chosen);
        const on = allowed && strength.edge[j] >= least.edge;
        each.toggleClass("near", near);
        each.toggleClass("faded", chosen !== null && !near);
        each.toggleClass("weak", !on && !near);
        // Cytoscape draws no edge whose end is hidden.
        shownEdges += (on || near) && strong[edges.source[j]] && strong[edges.target[j]];
      });
    });
    const say = (what, count, n, sign) =>
      `${count} of ${n} (${sign} ≥ ${least[what] === Infinity ? "∞" : least[what].toPrecision(3)})`;
    search();
    at("nodes-shown").textContent = say("node", shownNodes, N, "|attribution|");
    at("edges-shown").textContent = E ? say("edge", shownEdges, E, "|weight|") : "none";
  };

  // --- A node's details ------------------------------------------------------------------------
  const MOST = 50;
  const table = (rows) => {
    const made = make("table");
    for (const { cells, go } of rows) {
      const row = made.insertRow();
      for (const cell of cells)
        row.append(make("td", typeof cell === "string" ? cell : number(cell),
                        typeof cell === "string" ? "" : "number"));
      if (go !== undefined) {
        row.className = "link";
        row.addEventListener("click", () => choose(go, true));
      }
    }
    return made;
  };
  const linked = (title, id, mine, other) => {
    const list = [];
    for (let j = 0; j < E; j++) if (mine[j] === chosen) list.push(j);
    list.sort((a, b) => strength.edge[b] - strength.edge[a]);
    const part = make("section");
    part.id = id;
    const cut = list.length > MOST ? `, the strongest ${MOST} below` : "";
    part.append(make("h3", `${title} (${list.length}${cut})`));
    part.append(table(list.slice(0, MOST).map((j) => ({
      cells: [nodes.id[other[j]], edges.kind[j], ...(edges.status ? [edges.status[j] || ""] : []),
              edges.weight[j]],
      go: other[j],
    }))));
    return part;
  };
  const coloured = (pattern, here) => {
    const line = make("div", "", "tokens");
    tokens.forEach((token, t) => {
      const span = make("span", token, t === here ? "here" : "");
      span.style.background = signed(pattern[t] ** 2, 1); // signed takes the root
      span.style.color = pattern[t] > 0.6 ? "white" : "black";
      span.title = `${t}: ${pattern[t]}`;
      line.append(span);
    });
    return line;
  };
  const tell = (i) => {
    const box = at("details"), position = nodes.position[i];
    box.replaceChildren(make("h2", nodes.id[i]));
    const facts = [["kind", nodes.kind[i]], ["layer", nodes.layer[i]],
                   ["position", position === null ? null : `${position}  ${tokens[position]}`],
                   ["value", nodes.value[i]], ["attribution", nodes.attribution[i]]];
    if (nodes.status) facts.push(["status", nodes.status[i] || "–"]);
    box.append(table(facts.map((cells) => ({ cells }))));
    const more = told(i);
    if (more.pattern) {
      const part = make("section");
      part.id = "pattern";
      part.append(make("h3", "Pattern"), make("p", nodes.kind[i] === "neuron"
        ? "What each token attends to itself; the rest goes to the bias token."
        : "What the token here attends to.", "note"), coloured(more.pattern, position));
      box.append(part);
    }
    for (const [id, title, list] of [["top-tokens", "Top tokens", more.top],
                                     ["read-tokens", "Tokens it reads", more.read]]) {
      if (!list.length) continue;
      const part = make("section");
      part.id = id;
      part.append(make("h3", title), table(list.map((cells) => ({ cells }))));
      box.append(part);
    }
    box.append(linked("Reads", "reads", edges.target, edges.source),
               linked("Writes", "writes", edges.source, edges.target));
  };
  const nothing = at("details").firstElementChild;
  const choose = (i, centre) => {
    if (chosen !== null) node(chosen).removeClass("chosen");
    chosen = i;
    if (i === null) at("details").replaceChildren(nothing);
    else {
      node(i).addClass("chosen");
      tell(i);
    }
    update();
    if (i !== null && centre) cy.center(node(i));
  };

  // --- Legend and events -----------------------------------------------------------------------
  const key = (text, background) => {
    const made = make("span", text, "key"), box = make("i");
    box.style.background = background;
    made.prepend(box);
    return made;
  };
  at("legend").append(
    ...(nodes.status || edges.status
      ? Object.entries(STATUS).map(([word, tint]) => key(word, tint)) : []),
    ...(nodes.status && edges.status ? []
      : [key("positive", signed(1, 1)), key("negative", signed(-1, 1))]),
    make("p", Object.entries(SIGN).filter(([kind]) => nodes.kind.includes(kind))
      .map(([kind, sign]) => `${sign} ${kind}`).join("   "), "note"),
    ...data.notes.map((note) => make("p", note, "note")),
  );
  for (const kind of ["value", "q", "k"].filter((each) => edges.kind.includes(each))) {
    const label = make("label", ` ${kind} `), box = make("input");
    box.type = "checkbox";
    box.checked = true;
    box.id = "edges-" + kind;
    box.addEventListener("change", () => {
      if (box.checked) kindOff.delete(kind);
      else kindOff.add(kind);
      update();
    });
    label.prepend(box);
    at("edge-kinds").append(label);
  }
  for (const each of Object.values(slider)) each.addEventListener("input", update);
  at("search").addEventListener("input", search);
  at("search").addEventListener("keydown", (event) => {
    const hits = cy.nodes(".found");
    if (event.key === "Enter" && hits.length) {
      moved = true;
      cy.animate({ fit: { eles: hits, padding: 90 } });
    }
  });
  at("fit").addEventListener("click", () => {
    moved = false;
    whole();
  });
  cy.on("tap", ".node", (event) => choose(event.target.data("index"), false));
  cy.on("tap", (event) => { if (event.target === cy) choose(null, false); });

  setTo("node", N);
  setTo("edge", 400); // more is a tangle; the counter beside the slider says how many there are
  update();
  whole();
  follow();
  // The size of a frame may come after its script has run, and change.
  new ResizeObserver(() => moved ? cy.resize() : whole()).observe(at("stage"));
})();
