// The coordinates of a circuit's nodes and the paths of its edges, computed as in viz/coordinates.py.
"use strict";
const layout = (() => {
  const GUTTER = 96, AXIS = 40, TOP = 12, BOX = 20;
  const GAP = 12, COLUMN_GAP = 10, LINE = 34, ROW_GAP = 6, FOLDED = 34, RIGHT = 14, WIDEST_ROW_GAP = 120;
  const STACKED = 46, STAGGER = 24;
  const MARGIN = 3, ARROW = 6, LANES = 5, LANE = 5, KINDS = ["q", "gate", "routing", "value", "k"];
  const group = (all, key) => {
    const grouped = new Map();
    for (const entry of all) {
      const at = key(entry);
      if (grouped.has(at)) grouped.get(at).push(entry);
      else grouped.set(at, [entry]);
    }
    return grouped;
  };
  const most = (numbers, least) => numbers.reduce((a, b) => Math.max(a, b), least);

  const fold = (runs, used, columnWidth, excess) => {
    const ends = [-1, ...used.filter((c) => c >= 0), runs.at(-1)[1] + 1], folded = [];
    const width = ([a, b]) => {
      let all = 0;
      for (let c = a; c <= b; c++) all += columnWidth(c);
      return all;
    };
    const empty = ends.slice(1).map((b, i) => [ends[i] + 1, b - 1]).filter(([a, b]) => b > a);
    for (const run of empty.sort((a, b) => width(b) - width(a) || a[0] - b[0]))
      if (excess > 0) {
        folded.push(run);
        excess -= width(run) - FOLDED;
      }
    return [...runs.filter(([c]) => !folded.some(([a, b]) => a <= c && c <= b)), ...folded]
      .sort((a, b) => a[0] - b[0]);
  };
  // boxes: {row, column, width, overhangs} for each node; shown: the nodes to place, in order.
  const place = (boxes, shown, tokens, width, height) => {
    const columnsOf = group(shown, (i) => boxes[i].column);
    const used = [...columnsOf.keys()].sort((a, b) => a - b);
    const step = new Map(), abreast = new Map(), cells = new Map();
    for (const c of used) {
      const members = columnsOf.get(c), rows = group(members, (i) => boxes[i].row);
      const inside = members.filter((i) => !boxes[i].overhangs).map((i) => boxes[i].width);
      step.set(c, most(inside, 0) + GAP);
      abreast.set(c, most([...rows.values()].map((cell) => cell.length), 0));
      cells.set(c, rows);
    }
    const full = new Map(abreast);
    const columnWidth = (c) => Math.max(step.has(c) ? step.get(c) * abreast.get(c) : 0,
                                        c >= 0 ? tokens[c] : 0) + COLUMN_GAP;
    const free = width - GUTTER - RIGHT;
    let runs = tokens.map((_, t) => [t, t]);
    if (step.has(-1)) runs.unshift([-1, -1]);
    const total = () => runs.reduce((all, [a, b]) => all + (a < b ? FOLDED : columnWidth(a)), 0);
    const narrow = (fewest) => {
      while (total() > free) {
        const wide = used.filter((c) => abreast.get(c) > fewest);
        if (!wide.length) break;
        // Narrow the column that will have the fewest lines; of equal columns, the widest.
        const tall = (c) => Math.ceil(full.get(c) / (abreast.get(c) - 1));
        const size = (c) => step.get(c) * abreast.get(c);
        const best = wide.reduce((a, b) => (tall(b) - tall(a) || size(a) - size(b)) < 0 ? b : a);
        abreast.set(best, abreast.get(best) - 1);
      }
    };
    narrow(2);
    if (total() > free) runs = fold(runs, used, columnWidth, total() - free);
    narrow(1);
    for (const c of [...used].sort((a, b) => full.get(b) - full.get(a) || a - b))
      while (abreast.get(c) < full.get(c) && total() + step.get(c) <= free)
        abreast.set(c, abreast.get(c) + 1); // the fullest columns get the remaining width
    const more = Math.max(0, free - total()) / Math.max(used.length, 1);
    let left = GUTTER;
    const columns = runs.map(([a, b]) => {
      const wide = a < b ? FOLDED : columnWidth(a) + (step.has(a) ? more : 0);
      left += wide;
      return { first: a, last: b, left: left - wide, width: wide };
    });
    const lines = new Map();
    for (const [c, rows] of cells)
      for (const [row, cell] of rows)
        lines.set(row, Math.max(lines.get(row) || 1, Math.ceil(cell.length / abreast.get(c))));
    const order = [...lines.keys()].sort((a, b) => a - b);
    const heightOf = (row) => LINE + (lines.get(row) - 1) * STACKED;
    const tall = order.reduce((all, row) => all + heightOf(row), 0)
      + (order.length - 1) * ROW_GAP + TOP + AXIS;
    const gap = ROW_GAP + Math.min(Math.max(0, height - tall) / Math.max(order.length - 1, 1),
                                   WIDEST_ROW_GAP);
    const where = new Map(columns.filter((c) => c.first === c.last).map((c) => [c.first, c]));
    const at = new Map(), rows = [], whole = Math.max(left + RIGHT, width);
    let bottom = 0;
    for (const row of order) {
      for (const c of used) {
        const cell = cells.get(c).get(row) || [], { left: start, width: wide } = where.get(c);
        const n = abreast.get(c);
        cell.forEach((node, k) => {
          const line = Math.floor(k / n), beside = Math.min(n, cell.length - line * n);
          const apart = Math.min((wide - COLUMN_GAP) / beside, 1.6 * step.get(c));
          let x = start + wide / 2 + (k - line * n - (beside - 1) / 2) * apart;
          if (cell.length > n) {
            const spare = wide - COLUMN_GAP - (beside - 1) * apart - step.get(c) + GAP;
            x += Math.min(Math.max(spare, 0) / 2, STAGGER) * (line % 2 ? -1 : 1);
          }
          const half = boxes[node].width / 2 + 2;
          if (boxes[node].overhangs) x = Math.max(GUTTER + half, Math.min(x, whole - half));
          at.set(node, { x, y: bottom - LINE / 2 - line * STACKED });
        });
      }
      rows.push({ row, y: bottom - heightOf(row) / 2, height: heightOf(row) - 6 });
      bottom -= heightOf(row) + gap;
    }
    const base = TOP - (bottom + gap);
    for (const entry of [...at.values(), ...rows]) entry.y += base;
    return { at, columns, rows, width: whole, height: base + AXIS };
  };

  const crossing = (p, q, y) => {
    const s = Math.min(1, Math.max(0, (p[1] - y) / (p[1] - q[1])));
    let low = 0, high = 1;
    for (let i = 0; i < 24; i++) {
      const t = (low + high) / 2;
      if (1.5 * t - 1.5 * t ** 2 + t ** 3 < s) low = t;
      else high = t;
    }
    return p[0] + (q[0] - p[0]) * (3 * low ** 2 - 2 * low ** 3);
  };
  const nearestGap = (covered, x, lane, width) => {
    let best = null, left = GUTTER - 8;
    for (const [right, next] of [...covered, [width, width]]) {
      if (right - left >= 2 * MARGIN) {
        const room = MARGIN + 1 + LANE * lane, wide = right - left;
        const spot = wide >= 2 * room ? Math.max(left + room, Math.min(right - room, x))
          : left + wide * (lane + 1) / (LANES + 1);
        if (best === null || Math.abs(spot - x) < Math.abs(best - x)) best = spot;
      }
      left = next;
    }
    return best;
  };
  const bend = (p, q, lines, lane, width) => {
    for (let i = 0; i < lines.length; i++) {
      const { y, covered } = lines[i];
      const low = y + BOX / 2 + MARGIN, high = y - BOX / 2 - MARGIN;
      const ends = [crossing(p, q, low), crossing(p, q, high)];
      const a = Math.min(...ends), b = Math.max(...ends);
      if (covered.some(([left, right]) => left - MARGIN < b && a < right + MARGIN)) {
        const x = nearestGap(covered, (a + b) / 2, lane, width);
        return [...bend(p, [x, low], lines.slice(0, i), lane, width),
                ...bend([x, high], q, lines.slice(i + 1), lane, width)];
      }
    }
    return [p, q];
  };
  const ports = (at, boxes, pairs, kinds, end) => {
    const places = new Array(pairs.length);
    for (const [node, members] of group(pairs.keys(), (j) => pairs[j][end])) {
      const x = (j) => at.get(pairs[j][1 - end]).x;
      members.sort((a, b) => kinds[a] - kinds[b] || x(a) - x(b));
      const apart = Math.min(7, (boxes[node].width - 10) / members.length);
      members.forEach((j, rank) => {
        places[j] = at.get(node).x + (rank - (members.length - 1) / 2) * apart;
      });
    }
    return places;
  };
  // edges: [source, target, kind]
  const paths = ({ at, width }, boxes, edges) => {
    const covered = group(at.keys(), (node) => at.get(node).y);
    const lines = [...covered].sort(([a], [b]) => b - a).map(([y, inside]) => ({
      y,
      covered: inside.map((i) => [at.get(i).x - boxes[i].width / 2, at.get(i).x + boxes[i].width / 2])
        .sort((a, b) => a[0] - b[0]),
    }));
    const up = edges.map(([a, b]) => (at.get(a).y >= at.get(b).y ? [a, b] : [b, a]));
    const kinds = edges.map(([, , kind]) => KINDS.indexOf(kind));
    const starts = ports(at, boxes, up, kinds, 0), stops = ports(at, boxes, up, kinds, 1);
    return edges.map(([source], j) => {
      const [low, high] = up[j], below = at.get(low).y, above = at.get(high).y;
      const y0 = below - BOX / 2, y1 = above + BOX / 2;
      if (below === above)
        return [[starts[j], y0], [(starts[j] + stops[j]) / 2, y0 - LINE / 2], [stops[j], y0 - ARROW]];
      const forward = low === source;
      const path = bend([starts[j], y0 - (forward ? 0 : ARROW)], [stops[j], y1 + (forward ? ARROW : 0)],
                        lines.filter(({ y }) => above < y && y < below), j % LANES, width);
      return forward ? path : path.reverse();
    });
  };
  const curve = (path) => {
    const n = (x) => Math.round(x * 10) / 10;
    let text = `M${n(path[0][0])} ${n(path[0][1])}`;
    for (let i = 1; i < path.length; i++) {
      const [x0, y0] = path[i - 1], [x1, y1] = path[i], middle = n((y0 + y1) / 2);
      text += `C${n(x0)} ${middle} ${n(x1)} ${middle} ${n(x1)} ${n(y1)}`;
    }
    return text;
  };
  return { place, paths, curve, GUTTER, AXIS, BOX };
})();
