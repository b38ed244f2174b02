"use strict";
// Draws the charts again from the data in the page, at the width they have, and lets the reader choose runs, axis and point.
(() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  if (!data.charts) return;
  const AXES = ["step", "epoch", "minutes"]; // the order of numbers in a point; its value comes last
  const MARGIN = { left: 56, right: 14, top: 10, bottom: 40 };
  const HEIGHT = 250;
  const LEVEL_ROW = 20; // above the plot: the level's name, where no curve can pass through it
  const NUM_COLOURS = 6;
  const LEAST_SPAN = 1e-290; // less cannot be divided into ticks
  const DASHES = ["", "6 4", "2 4"];
  const state = { axis: data.axis, hidden: new Set() };
  const panels = [];

  const colourOf = (run) => `var(--run-${run % NUM_COLOURS})`;
  const dashOf = (run) => DASHES[Math.min(Math.floor(run / NUM_COLOURS), DASHES.length - 1)];

  function svg(name, attributes, parent, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) if (value !== "") element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  }

  function ticks(low, high, most) {
    if (high - low <= Math.max(1e-9 * Math.max(Math.abs(low), Math.abs(high)), LEAST_SPAN)) { // equal but for rounding
      const margin = Math.abs(low) > LEAST_SPAN ? Math.abs(low) * 0.1 : 1;
      [low, high] = [low - margin, high + margin];
    }
    const rough = (high - low) / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * (1 - 1e-9));
    const found = [];
    for (let number = Math.floor(low / step + 1e-9); number <= Math.ceil(high / step - 1e-9); number++) {
      found.push(Number((number * step).toPrecision(12)));
    }
    return found;
  }

  const exponential = (number) => {
    const [digits, power] = number.toExponential(2).split("e");
    return `${Number(digits)}e${Number(power)}`;
  };

  function numberText(number, digits) {
    const size = Math.abs(number);
    if (size === 0) return "0";
    if (size >= 1e8) return exponential(number);
    if (size >= 1000) return number.toLocaleString("en-GB", { maximumFractionDigits: 0 });
    return size < 0.001 ? exponential(number) : String(Number(number.toPrecision(digits)));
  }

  // Alike along an axis: 1e-3 and 8e-4, not 0.001 and 8e-4.
  function tickText(tick, all) {
    const largest = all.reduce((most, number) => Math.max(most, Math.abs(number)), 0);
    return tick !== 0 && largest < 0.01 ? exponential(tick) : numberText(tick, 4);
  }

  // A marker of its own for each of the first six runs, so that a print in grey can be read.
  function marker(run, x, y, parent) {
    const size = 3.6;
    const shapes = [
      `M${x - size} ${y}a${size} ${size} 0 1 0 ${2 * size} 0a${size} ${size} 0 1 0 ${-2 * size} 0`,
      `M${x - size} ${y - size}h${2 * size}v${2 * size}h${-2 * size}z`,
      `M${x} ${y - size * 1.2}l${size * 1.2} ${size * 2.1}h${-size * 2.4}z`,
      `M${x} ${y - size * 1.35}l${size * 1.35} ${size * 1.35}l${-size * 1.35} ${size * 1.35}l${-size * 1.35} ${-size * 1.35}z`,
      `M${x} ${y + size * 1.2}l${size * 1.2} ${-size * 2.1}h${-size * 2.4}z`,
      `M${x - size} ${y - 1.2}h${size - 1.2}v${1.2 - size}h2.4v${size - 1.2}h${size - 1.2}v2.4h${1.2 - size}v${size - 1.2}h-2.4v${1.2 - size}h${1.2 - size}z`,
    ];
    return svg("path", { class: "marker", d: shapes[run % NUM_COLOURS], fill: colourOf(run) }, parent);
  }

  class Panel {
    constructor(figure) {
      this.figure = figure;
      this.chart = data.charts[figure.dataset.chart];
      this.svg = figure.querySelector("svg");
      this.svg.setAttribute("tabindex", "0");
      this.readout = document.createElement("div");
      this.readout.className = "readout";
      this.readout.hidden = true;
      this.readout.setAttribute("role", "status");
      figure.append(this.readout);
      this.svg.addEventListener("pointermove", (event) => this.pointAt(event));
      this.svg.addEventListener("pointerdown", (event) => this.pointAt(event));
      this.svg.addEventListener("pointerleave", () => this.forget());
      this.svg.addEventListener("blur", () => this.forget());
      this.svg.addEventListener("keydown", (event) => this.walk(event));
    }

    get axis() { return this.chart.axis || state.axis; }

    get visible() { return this.chart.series.filter((series) => !state.hidden.has(series.run)); }

    draw(given) {
      const width = given || Math.max(220, this.svg.clientWidth || 520);
      const place = AXES.indexOf(this.axis);
      const points = (this.visible.length ? this.visible : this.chart.series).flatMap((series) => series.points);
      const places = points.map((point) => point[place]);
      const level = this.chart.level;
      const values = points.map((point) => point[3]).concat(level ? [level.value] : []);
      const end = places.reduce((one, other) => Math.max(one, other), 0) || 1;
      const yTicks = ticks(values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b)), 5);
      const span = { x: [0, end], y: [yTicks[0], yTicks[yTicks.length - 1]] };
      const edge = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top + (level ? LEVEL_ROW : 0), bottom: HEIGHT - MARGIN.bottom };
      this.across = (value) => edge.left + ((value - span.x[0]) / (span.x[1] - span.x[0])) * (edge.right - edge.left);
      this.above = (value) => edge.bottom - ((value - span.y[0]) / (span.y[1] - span.y[0])) * (edge.bottom - edge.top);
      this.width = width;
      this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      this.svg.setAttribute("aria-label", `${this.chart.title} by ${data.axes[this.axis]}; arrow keys read the points`);
      this.svg.replaceChildren();
      for (const tick of yTicks) {
        const y = this.above(tick);
        svg("line", { class: "grid", x1: edge.left, x2: edge.right, y1: y, y2: y }, this.svg);
        svg("text", { x: edge.left - 8, y: y + 4, "text-anchor": "end" }, this.svg, tickText(tick, yTicks));
      }
      svg("line", { class: "axis", x1: edge.left, x2: edge.right, y1: edge.bottom, y2: edge.bottom }, this.svg);
      const xTicks = ticks(0, end, width < 380 ? 4 : 6).filter((tick) => tick <= end);
      for (const tick of xTicks) {
        const x = this.across(tick);
        svg("line", { class: "axis", x1: x, x2: x, y1: edge.bottom, y2: edge.bottom + 4 }, this.svg);
        svg("text", { x, y: edge.bottom + 17, "text-anchor": "middle" }, this.svg, tickText(tick, xTicks));
      }
      svg("text", { x: edge.right, y: edge.bottom + 34, "text-anchor": "end" }, this.svg, data.axes[this.axis]);
      if (level) {
        const y = this.above(level.value);
        svg("line", { class: "level", x1: edge.left, x2: edge.right, y1: y, y2: y }, this.svg);
        svg("line", { class: "level-sign", x1: edge.left, x2: edge.left + 26, y1: 10, y2: 10 }, this.svg);
        svg("text", { class: "level-name", x: edge.left + 32, y: 14 }, this.svg, level.label);
      }
      for (const series of this.visible) this.drawSeries(series, place);
      this.over = svg("g", {}, this.svg);
      this.edge = edge;
      this.forget();
    }

    drawSeries(series, place) {
      const corners = series.points.map((point) => [this.across(point[place]), this.above(point[3])]);
      const line = corners.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
      const look = { class: "series", "data-run": series.run, stroke: colourOf(series.run), "stroke-dasharray": dashOf(series.run) };
      svg("polyline", { ...look, points: line }, this.svg);
      if (corners.length > 1 && !this.chart.markers) return;
      const every = Math.ceil(corners.length / 15); // more would hide the line
      corners.forEach(([x, y], number) => {
        if (number % every === 0 || number === corners.length - 1) marker(series.run, x, y, this.svg);
      });
    }

    pointAt(event) {
      const box = this.svg.getBoundingClientRect();
      this.show(((event.clientX - box.left) / box.width) * this.width);
    }

    walk(event) {
      if (event.key === "Escape") return this.forget();
      const direction = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const first = this.visible[0];
      if (!direction || !first) return undefined;
      event.preventDefault();
      const place = AXES.indexOf(this.axis);
      const last = first.points.length - 1;
      this.walked = this.walked === undefined ? (direction > 0 ? 0 : last) : Math.min(last, Math.max(0, this.walked + direction));
      return this.show(this.across(first.points[this.walked][place]));
    }

    // The nearest point of each visible run.
    show(x) {
      const place = AXES.indexOf(this.axis);
      const found = this.visible.map((series) => ({
        run: series.run,
        point: series.points.reduce((best, point) => (Math.abs(this.across(point[place]) - x) < Math.abs(this.across(best[place]) - x) ? point : best)),
      }));
      if (!found.length) return this.forget();
      const nearest = found.reduce((one, other) => (Math.abs(this.across(other.point[place]) - x) < Math.abs(this.across(one.point[place]) - x) ? other : one));
      const at = nearest.point[place];
      this.over.replaceChildren();
      svg("line", { class: "cross", x1: this.across(at), x2: this.across(at), y1: this.edge.top, y2: this.edge.bottom }, this.over);
      this.readout.replaceChildren();
      const head = document.createElement("span");
      head.className = "muted";
      head.textContent = `${data.axes[this.axis]} ${numberText(at, 4)}`;
      this.readout.append(head);
      for (const { run, point } of found) {
        svg("circle", { cx: this.across(point[place]), cy: this.above(point[3]), r: 4.5, fill: colourOf(run), stroke: "var(--card)", "stroke-width": 1.5 }, this.over);
        const row = document.createElement("div");
        const value = document.createElement("b");
        const elsewhere = point[place] === at ? "" : ` (at ${numberText(point[place], 4)})`;
        value.textContent = numberText(point[3], 5) + (this.chart.unit ? ` ${this.chart.unit}` : "");
        const swatch = svg("svg", { class: "swatch", viewBox: "0 0 22 12" }, row);
        svg("line", { x1: 1, x2: 21, y1: 6, y2: 6, stroke: colourOf(run), "stroke-width": 3, "stroke-dasharray": dashOf(run) }, swatch);
        row.append(data.runs[run].label.length > 28 ? `…${data.runs[run].label.slice(-27)}` : data.runs[run].label, elsewhere, value);
        this.readout.append(row);
      }
      this.readout.hidden = false;
      const offset = this.svg.offsetLeft || this.figure.clientLeft;
      const scale = (this.svg.clientWidth || this.width) / this.width;
      const room = this.figure.clientWidth - this.readout.offsetWidth - 8;
      const right = this.across(at) * scale + offset + 28;
      const left = this.across(at) * scale + offset - this.readout.offsetWidth;
      this.readout.style.left = `${Math.max(8, right <= room ? right : Math.min(left, room))}px`;
      return undefined;
    }

    forget() {
      this.readout.hidden = true;
      this.walked = undefined;
      if (this.over) this.over.replaceChildren();
    }
  }

  const PRINTED_WIDTH = 330; // two beside each other on A4
  const drawAll = () => panels.forEach((panel) => panel.draw());
  addEventListener("beforeprint", () => panels.forEach((panel) => panel.draw(PRINTED_WIDTH)));
  addEventListener("afterprint", drawAll);
  document.querySelectorAll(".chart[data-chart]").forEach((figure) => panels.push(new Panel(figure)));

  document.querySelectorAll(".legend button").forEach((button) => {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      const shown = !state.hidden.delete(run);
      if (shown) state.hidden.add(run);
      button.setAttribute("aria-pressed", String(!shown));
      drawAll();
    });
  });
  const choices = document.querySelectorAll("button[data-axis]");
  choices.forEach((button) => {
    button.addEventListener("click", () => {
      state.axis = button.dataset.axis;
      choices.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      drawAll();
    });
  });
  document.querySelectorAll("details").forEach((details) => details.addEventListener("toggle", drawAll));
  let lastWidth = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== lastWidth) {
      lastWidth = document.body.clientWidth;
      drawAll();
    }
  }).observe(document.body);
  drawAll();
})();
