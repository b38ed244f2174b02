// Pictures of a report: which run is shown, and what a dot of the map stands for.
(() => {
  "use strict";

  function showRun(number) {
    for (const panels of document.querySelectorAll(".fig-panels")) {
      const select = panels.querySelector(".fig-runs select");
      if (!select) continue;
      select.value = String(number);
      for (const panel of panels.querySelectorAll(".fig-panel")) panel.hidden = panel.dataset.run !== select.value;
    }
  }

  function startPanels(panels) {
    const choice = panels.querySelector(".fig-runs");
    if (!choice) return;
    choice.hidden = false;
    panels.classList.add("fig-one");
    choice.querySelector("select").addEventListener("change", (event) => showRun(event.target.value));
  }

  // Nearest dot to (x, y) within `reach` units of the drawing.
  function nearest(dots, x, y, reach) {
    let best = null;
    let bestDistance = reach * reach;
    for (const dot of dots) {
      const distance = (dot.x - x) ** 2 + (dot.y - y) ** 2;
      if (distance <= bestDistance) [best, bestDistance] = [dot, distance];
    }
    return best;
  }

  // Next dot in a direction: ahead rather than aside, at most 45 degrees off.
  function nextDot(dots, from, stepX, stepY) {
    let best = null;
    let bestCost = Infinity;
    for (const dot of dots) {
      const ahead = (dot.x - from.x) * stepX + (dot.y - from.y) * stepY;
      const aside = Math.abs((dot.x - from.x) * stepY - (dot.y - from.y) * stepX);
      if (dot === from || ahead <= 0 || aside > ahead) continue;
      const cost = ahead + 2 * aside;
      if (cost < bestCost) [best, bestCost] = [dot, cost];
    }
    return best;
  }

  function line(parent, tag, text, className = "") {
    const element = document.createElement(tag);
    element.textContent = text;
    if (className) element.className = className;
    parent.append(element);
  }

  function startMap(map) {
    const facts = JSON.parse(map.querySelector(".fig-facts").textContent);
    const svg = map.querySelector(".fig-plane svg");
    const ring = svg.querySelector(".fig-ring");
    const card = map.querySelector(".fig-card");
    const canvas = card.querySelector("canvas");
    const said = card.querySelector(".fig-said");
    const invitation = said.textContent;
    const sprite = new Image();
    sprite.src = document.getElementById(facts.sprite).getAttribute("href");
    const groups = [...svg.querySelectorAll(".fig-dots")];
    const dots = [...svg.querySelectorAll(".fig-dots use")].map((element, place) => ({
      x: Number(element.getAttribute("x")),
      y: Number(element.getAttribute("y")),
      image: facts.order[place],
      isWrong: element.classList.contains("fig-miss"),
      group: element.parentNode,
    }));
    const drawn = new Set(facts.thumbnails);
    const thumbnails = dots.filter((dot) => drawn.has(dot.image));
    let chosen = null;
    let latest = 0;

    function visible() {
      const onlyWrong = map.classList.contains("fig-only-wrong");
      return dots.filter((dot) => !dot.group.hasAttribute("hidden") && (dot.isWrong || !onlyWrong));
    }

    async function paint(image) {
      const request = ++latest;
      await sprite.decode();
      if (request !== latest) return;
      const [left, top] = [facts.side * (image % facts.columns), facts.side * Math.floor(image / facts.columns)];
      const pen = canvas.getContext("2d");
      pen.imageSmoothingQuality = "high";
      pen.drawImage(sprite, left, top, facts.side, facts.side, 0, 0, canvas.width, canvas.height);
    }

    function choose(dot) {
      if (dot === chosen) return;
      chosen = dot;
      ring.setAttribute("visibility", dot ? "visible" : "hidden");
      said.replaceChildren();
      if (!dot) {
        latest++;
        canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
        canvas.setAttribute("aria-label", "no image chosen");
        said.textContent = invitation;
        return;
      }
      ring.setAttribute("r", drawn.has(dot.image) ? 0.74 * facts.thumbnail : 17);
      ring.setAttribute("cx", dot.x);
      ring.setAttribute("cy", dot.y);
      const key = facts.keys[dot.image];
      if (facts.labels.length) {
        line(said, "b", facts.names[facts.labels[dot.image]]);
        const guess = facts.names[facts.predictions[dot.image]];
        if (dot.isWrong) line(said, "span", `✗ k-NN says ${guess}`, "fig-verdict-wrong");
        else line(said, "span", "✓ k-NN agrees");
      }
      line(said, "span", key);
      canvas.setAttribute("aria-label", `image ${key}`);
      paint(dot.image);
    }

    // The image whose thumbnail is there, else the nearest dot.
    function pointed(event, reachInPixels) {
      const box = svg.getBoundingClientRect();
      const unit = svg.viewBox.baseVal.width / box.width;
      const [x, y] = [(event.clientX - box.left) * unit, (event.clientY - box.top) * unit];
      const isUnder = (dot) => Math.max(Math.abs(dot.x - x), Math.abs(dot.y - y)) <= facts.thumbnail / 2;
      return thumbnails.find(isUnder) || nearest(visible(), x, y, reachInPixels * unit);
    }

    function refresh() {
      for (const [place, button] of legend.entries()) groups[place].toggleAttribute("hidden", button.getAttribute("aria-pressed") !== "true");
      if (all) all.setAttribute("aria-pressed", String(groups.every((group) => !group.hasAttribute("hidden"))));
      if (chosen && !visible().includes(chosen)) choose(null);
    }

    svg.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch") return; // a finger that moves scrolls the page; it chooses by tapping
      const dot = pointed(event, 14);
      if (dot) choose(dot);
    });
    svg.addEventListener("click", (event) => choose(pointed(event, 28)));

    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    svg.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      if (event.key === "Escape") choose(null);
      if (!(event.key in steps)) return;
      event.preventDefault();
      const { width, height } = svg.viewBox.baseVal;
      const next = chosen ? nextDot(visible(), chosen, ...steps[event.key]) : nearest(visible(), width / 2, height / 2, Infinity);
      if (next) choose(next);
    });

    const legend = [...map.querySelectorAll(".fig-legend button")];
    const [all, wrong] = ["all", "wrong"].map((what) => map.querySelector(`.fig-tools [data-do="${what}"]`));
    const flip = (button) => button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
    for (const button of legend) {
      button.addEventListener("click", () => {
        flip(button);
        refresh();
      });
    }
    if (all) {
      all.addEventListener("click", () => {
        flip(all);
        for (const button of legend) button.setAttribute("aria-pressed", all.getAttribute("aria-pressed"));
        refresh();
      });
      wrong.addEventListener("click", () => {
        flip(wrong);
        map.classList.toggle("fig-only-wrong", wrong.getAttribute("aria-pressed") === "true");
        refresh();
      });
      map.querySelector(".fig-tools").hidden = false;
    }
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("role", "application");
    svg.setAttribute("aria-label", `${svg.getAttribute("aria-label")} Arrow keys walk from dot to dot, Escape lets go.`);
    card.hidden = false;
    map.classList.add("fig-with-script");
  }

  function start() {
    document.querySelectorAll(".fig-panels").forEach(startPanels);
    document.querySelectorAll(".fig-map").forEach(startMap);
    showRun(0);
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
