// Draws views: sections of plain data from memcalc/report/views, for the page and for HTML reports.
// It computes no memory: numbers and sentences come from the data.

/** Create an element. Strings become text nodes, so no name from a configuration becomes markup. */
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

/** Draw a view into an element, and remove its previous content. */
export function render(view, container) {
  container.replaceChildren(...view.sections.map(drawn));
}

/** Replace the section with the same `place`. */
export function replaceSection(section, container) {
  const old = container.querySelector(`[data-place="${section.place}"]`);
  if (old) old.replaceWith(drawn(section));
}

function drawn(section) {
  const made = KINDS[section.kind](section);
  made.classList.add("section", section.kind);
  if (section.place) made.dataset.place = section.place;
  return made;
}

const heading = (section) => (section.title ? make("h2", {}, section.title) : null);

// -- text and tables ----------------------------------------------------------------------------------------------

const SYMBOLS = { fits: "✓", "does-not-fit": "✗", unknown: "?" };

function verdict(section) {
  const [run, ...more] = section.subject;
  return make(
    "section", {},
    make("h2", { class: "run" }, run),
    more.map((line) => make("p", { class: "how" }, line)),
    make(
      "p", { class: `answer ${section.answer ?? "none"}` },
      section.answer ? make("span", { class: "symbol", "aria-hidden": "true" }, `${SYMBOLS[section.answer]} `) : null,
      section.text,
    ),
    section.lines.map((line) => make("p", { class: "why" }, line)),
  );
}

function lines(section) {
  return make(
    "section", {},
    section.lines.map(({ text, indent, style }) => {
      const line = make("p", { class: `line ${style}` }, text);
      line.style.marginInlineStart = `${indent / 2}rem`;
      return line;
    }),
  );
}

function cell(tag, text, right) {
  return make(tag, { class: right ? "right" : null, scope: tag === "th" ? "col" : null }, text);
}

function table(section) {
  const { columns, rows, strong, head, shares } = section;
  const body = rows.map((row, at) =>
    make("tr", { class: strong.includes(at) ? "strong" : null },
      row.map((text, place) => cell("td", text, columns[place].right)), shares ? shareBar(shares[at]) : null));
  const heads = make("thead", {}, make("tr", {}, columns.map((column) => column.head
    ? cell("th", column.head, column.right) : cell("td", "", column.right)), shares ? make("td") : null));
  return make(
    "section", {}, heading(section),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": section.title || "table" },
      make("table", {}, head ? heads : null, make("tbody", {}, body))),
    section.legend ? make("p", { class: "soft" }, section.legend) : null,
  );
}

function shareBar(share) {
  const bar = make("div", { class: "share", "aria-hidden": "true" });
  bar.style.width = `${100 * share}%`;
  return make("td", { class: "shares" }, bar);
}

function list(section) {
  return make("section", {}, heading(section), make("ul", {}, section.items.map((item) => make("li", {}, item))));
}

function waiting(section) {
  return make("section", { "aria-busy": "true" }, heading(section), make("p", { class: "soft" }, "Replaying the allocator…"));
}

function views(section) {
  const each = section.views.map((view) => {
    const inner = make("div", { class: "view" });
    if (!section.folded) {
      inner.append(make("h2", {}, view.title));
      inner.append(...view.sections.map(drawn));
      return inner;
    }
    const folded = make("details", { class: "view" }, make("summary", {}, view.title));
    folded.addEventListener("toggle", () => {
      if (folded.open && folded.children.length === 1) folded.append(...view.sections.map(drawn));
    });
    return folded;
  });
  return make("section", {}, heading(section), make("div", { class: section.folded ? "folded" : "side" }, each));
}

// -- memory ---------------------------------------------------------------------------------------------------------

function swatch(color) {
  const made = make("span", { class: "swatch", "aria-hidden": "true" });
  made.style.backgroundColor = color;
  return made;
}

function bars(section) {
  const { limit, interval } = section;
  const whole = Math.max(limit?.bytes ?? 0, interval?.[1] ?? 0, ...section.bars.map((bar) => bar.bytes)) || 1;
  const percent = (bytes) => `${(100 * bytes) / whole}%`;
  const rows = section.bars.map((bar) => {
    const track = make("div", { class: "track", "aria-hidden": "true" });
    const fill = make("div", { class: limit && bar.bytes > limit.bytes ? "fill over" : "fill" });
    fill.style.width = percent(bar.bytes);
    track.append(fill);
    if (bar.name === "device" && interval) {
      const range = make("div", { class: "range" });
      range.style.insetInlineStart = percent(interval[0]);
      range.style.width = percent(interval[1] - interval[0]);
      track.append(range);
    }
    if (limit) {
      const mark = make("div", { class: "mark" });
      mark.style.insetInlineStart = percent(limit.bytes);
      track.append(mark);
    }
    return [make("dt", {}, bar.name), make("dd", {}, make("b", {}, bar.text), ` ${bar.note}`, track)];
  });
  const legend = [limit && ["dashes red", limit.text], interval && ["range", "interval of device memory"]].filter(Boolean);
  return make("section", {}, heading(section), make("dl", {}, rows), legend.length ? make("ul", { class: "legend soft" },
    legend.map(([mark, text]) => make("li", {}, make("span", { class: mark, "aria-hidden": "true" }), text))) : null);
}

function components(section) {
  const rows = section.rows.map((row) => {
    const head = [
      swatch(row.color),
      make("span", { class: "name" }, row.label),
      make("span", { class: "right" }, row.text),
      make("span", { class: "right" }, row.share),
      make("span", { class: "soft" }, row.meaning),
    ];
    if (!row.groups.length) return make("div", { class: "component" }, head);
    const opened = make("details", {}, make("summary", { class: "component" }, head));
    opened.addEventListener("toggle", () => {
      if (opened.open && opened.children.length === 1) opened.append(...row.groups.map(rowsOfGroup));
    });
    return opened;
  });
  return make(
    "section", {}, heading(section),
    make("p", { class: "soft" }, "Open a component for its tensors, formulas and sources."),
    rows,
    make("p", { class: "total" }, `${section.total.name}: ${section.total.text}`),
  );
}

function rowsOfGroup(group) {
  return make(
    "div", { class: "group" },
    make("p", { class: "soft" }, `live ${group.phases}; source: ${group.source}`),
    make("ul", {}, group.entries.map((entry) => make(
      "li", {}, make("span", { class: "what" }, entry.what), " ", make("b", {}, entry.size),
      make("br"), make("code", {}, entry.formula)))),
  );
}

// -- the timeline ---------------------------------------------------------------------------------------------------
// Drawn by uPlot as stepped areas: one cumulative series per component, the highest first.

const STEADY = 2; // the steady step: formulas cover steps 1 and 2, and later steps repeat step 2
const HEIGHT = 340, PHASES_HEIGHT = 124; // pixels
const NEAR = 1.3; // a limit further above the peak, as a ratio, is not drawn: it would flatten the plot

function timeline(section) {
  const { document: run, unit } = section;
  const { points, phases, events } = run;
  const names = Object.keys(points.component_bytes);
  const size = (bytes) => `${(bytes / unit.bytes).toLocaleString("en", {
    minimumFractionDigits: unit.decimals, maximumFractionDigits: unit.decimals })} ${unit.name}`;
  const plot = make("div", { class: "plot", tabindex: "0", role: "application",
    "aria-label": `${section.title}. ${section.summary} Arrow keys move through the run.` });
  const tip = make("div", { class: "tip", hidden: true });
  const spoken = make("p", { class: "spoken", role: "status" });
  const highest = section.highest;
  const limit = run.limit_bytes && run.limit_bytes <= NEAR * highest ? run.limit_bytes : 0; // 0: not drawn
  const legend = make("ul", { class: "legend" },
    [...names].reverse().map((name) => make("li", {}, swatch(section.components[name].color), section.components[name].label)),
    points.reserved_bytes ? make("li", {}, make("span", { class: "dashes", "aria-hidden": "true" }), "reserved") : null,
    limit ? make("li", {}, make("span", { class: "dashes red", "aria-hidden": "true" }), section.limit) : null);
  const made = make(
    "section", {}, heading(section), make("p", { class: "soft" }, section.summary, section.note ? ` ${section.note}` : ""),
    make("div", { class: "frame" }, plot, tip), legend, spoken);
  if (!points.begin.length) return made;

  const x = [...points.begin, events];
  const extended = (values) => [...values, values.at(-1)];
  const stacks = [];
  names.forEach((name, at) => stacks.push(points.component_bytes[name].map((bytes, index) => bytes + (at ? stacks[at - 1][index] : 0))));
  const phaseAt = (event) => phases.findLast((phase) => phase.begin <= event)?.phase ?? "";
  const top = Math.max(highest, limit) * 1.06;
  const data = [x, ...stacks.map(extended).reverse(), ...(points.reserved_bytes ? [extended(points.reserved_bytes)] : [])];
  let chart;

  const describe = (index) => {
    const phase = phaseAt(points.event[index]);
    const reserved = points.reserved_bytes ? `, ${size(points.reserved_bytes[index])} reserved` : "";
    return `${phase}: ${size(points.allocated_bytes[index])} allocated${reserved}`;
  };

  const show = (index, bytes) => {
    const phase = phaseAt(points.event[index]);
    const under = names.findIndex((_, at) => bytes <= stacks[at][index]);
    const rows = names.map((name, at) => {
      const count = points.component_bytes[name][index];
      return count ? make("tr", { class: at === under ? "under" : null }, make("td", {}, swatch(section.components[name].color)),
        make("td", {}, section.components[name].label), make("td", { class: "right" }, size(count))) : null;
    }).reverse();
    const step = Number(/_(\d+)$/.exec(phase)?.[1] ?? 0);
    const known = step > STEADY ? phase.replace(/\d+$/, STEADY) : phase;
    const formula = (section.formulas[names[under]] ?? []).find((row) => row.phases.includes(known));
    tip.replaceChildren(make("b", {}, describe(index)), make("table", {}, rows),
      formula ? make("p", {}, `largest tensor of ${section.components[names[under]].label}: ${formula.text}`) : "");
    tip.hidden = false;
    const left = chart.valToPos(x[index], "x") + chart.over.offsetLeft;
    const right = left > plot.clientWidth / 2;
    tip.style.insetInlineStart = right ? "auto" : `${left + 14}px`;
    tip.style.insetInlineEnd = right ? `${plot.clientWidth - left + 14}px` : "auto";
  };

  const draw = () => {
    const style = getComputedStyle(plot);
    const ink = style.getPropertyValue("--ink").trim(), soft = style.getPropertyValue("--soft").trim();
    const grid = style.getPropertyValue("--rule").trim(), red = style.getPropertyValue("--red").trim();
    const edge = style.getPropertyValue("--edge").trim();
    const stepped = uPlot.paths.stepped({ align: 1 });
    const series = [...names].reverse().map((name) => ({ label: section.components[name].label,
      fill: section.components[name].color, stroke: edge, width: 0.5, paths: stepped, points: { show: false } }));
    if (points.reserved_bytes) {
      series.push({ label: "reserved", stroke: ink, width: 1.2, dash: [6, 4], paths: stepped, points: { show: false } });
    }
    chart?.destroy();
    chart = new uPlot({
      width: plot.clientWidth, height: HEIGHT + PHASES_HEIGHT, legend: { show: false },
      scales: { x: { time: false, range: (_, low, high) => [low, high] }, y: { range: [0, top] } },
      series: [{}, ...series],
      axes: [
        { stroke: soft, size: PHASES_HEIGHT, grid: { show: false }, ticks: { show: false }, values: (_, splits) => splits.map(() => "") },
        { stroke: soft, size: 64, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid },
          splits: (_, __, low, high) => roundSteps(high / unit.bytes).map((value) => value * unit.bytes),
          values: (_, splits) => splits.map((bytes) => (bytes / unit.bytes).toLocaleString("en")), label: unit.name, labelSize: 18 },
      ],
      cursor: { drag: { x: true, y: false }, points: { show: false }, y: false },
      hooks: {
        drawClear: [(u) => fill(u, style.getPropertyValue("--field").trim())],
        draw: [(u) => { limitLine(u, limit, red); phaseLabels(u, phases, soft, ink, grid); }],
        setCursor: [(u) => {
          const { idx, left, top: y } = u.cursor;
          if (idx === null || idx === undefined || left < 0) { tip.hidden = true; return; }
          show(Math.min(idx, points.begin.length - 1), u.posToVal(y, "y"));
        }],
      },
    }, data, plot);
  };

  let at = points.allocated_bytes.indexOf(Math.max(...points.allocated_bytes));
  plot.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? Math.ceil(points.begin.length / 20) : 1;
    const moves = { ArrowLeft: at - far, ArrowRight: at + far, Home: 0, End: points.begin.length - 1 };
    if (!(event.key in moves) || !chart) return;
    event.preventDefault();
    at = Math.max(0, Math.min(points.begin.length - 1, moves[event.key]));
    chart.setCursor({ left: chart.valToPos(x[at] + (x[at + 1] - x[at]) / 2, "x"), top: chart.valToPos(points.allocated_bytes[at] / 2, "y") });
    show(at, points.allocated_bytes[at] / 2);
    spoken.textContent = describe(at);
  });
  plot.addEventListener("blur", () => { tip.hidden = true; });
  new ResizeObserver(() => { if (plot.clientWidth && chart?.width !== plot.clientWidth) draw(); }).observe(plot);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (plot.isConnected) draw(); });
  return made;
}

function roundSteps(high) {
  const rough = high / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= rough);
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, index) => index * step);
}

function fill(u, color) {
  const { left, top, width, height } = u.bbox;
  u.ctx.save();
  u.ctx.fillStyle = color;
  u.ctx.fillRect(left, top, width, height);
  u.ctx.restore();
}

function limitLine(u, limit, color) {
  if (!limit) return;
  const y = u.valToPos(limit, "y", true);
  u.ctx.save();
  u.ctx.strokeStyle = color;
  u.ctx.lineWidth = 2 * uPlot.pxRatio;
  u.ctx.setLineDash([10 * uPlot.pxRatio, 4 * uPlot.pxRatio]);
  u.ctx.beginPath();
  u.ctx.moveTo(u.bbox.left, y);
  u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
  u.ctx.stroke();
  u.ctx.restore();
}

/** Write phases below the axis, rotated if they are narrow and omitted if they would overlap; steps below them. */
function phaseLabels(u, phases, soft, ink, grid) {
  const { ctx, bbox } = u, ratio = uPlot.pxRatio, bottom = bbox.top + bbox.height, end = bbox.left + bbox.width;
  const place = (event) => Math.min(end, Math.max(bbox.left, u.valToPos(event, "x", true)));
  ctx.save();
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = "middle";
  ctx.setLineDash([]);
  const steps = [], trains = phases.some(({ phase }) => phase.startsWith("backward"));
  for (const { phase, begin, end: last } of phases) {
    const [, word, step] = trains ? /^(.*?)(?:_(\d+))?$/.exec(phase) : [phase, phase, ""];
    const from = place(begin), to = place(last), name = step ? `step ${step}` : "setup";
    if (steps.at(-1)?.name === name) steps.at(-1).to = to;
    else steps.push({ name, from, to });
    if (to <= from) continue;
    ctx.fillStyle = soft;
    ctx.strokeStyle = grid;
    line(ctx, from, bottom, from, bottom + 6 * ratio);
    if (ctx.measureText(word).width + 6 * ratio <= to - from) {
      ctx.textAlign = "center";
      ctx.fillText(word, (from + to) / 2, bottom + 14 * ratio);
    } else if (to - from >= 13 * ratio) {
      ctx.save();
      ctx.translate((from + to) / 2, bottom + 6 * ratio);
      ctx.rotate(-Math.PI / 2);
      ctx.textAlign = "right";
      ctx.fillText(word, 0, 0);
      ctx.restore();
    }
  }
  for (const { name, from, to } of steps.length > 1 ? steps : []) {
    ctx.strokeStyle = soft;
    line(ctx, from, bbox.top, from, bottom + 118 * ratio);
    ctx.fillStyle = ink;
    ctx.textAlign = "center";
    if (ctx.measureText(name).width + 6 * ratio <= to - from) ctx.fillText(name, (from + to) / 2, bottom + 114 * ratio);
  }
  ctx.restore();
}

function line(ctx, x1, y1, x2, y2) {
  ctx.lineWidth = uPlot.pxRatio;
  ctx.beginPath();
  ctx.moveTo(x1, y1);
  ctx.lineTo(x2, y2);
  ctx.stroke();
}

const KINDS = { verdict, lines, table, list, waiting, views, bars, components, timeline };
