"use strict";
// Light or dark as the system has it, until the button is pressed; commands that are copied.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.querySelector(".theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
  });
  system.addEventListener("change", name);
  name();

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch { // an old browser, or one that does not let a page from the disk write there
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  }
  document.querySelectorAll("button.copy").forEach((one) => {
    one.addEventListener("click", async () => {
      await copy(one.parentElement.querySelector("pre").textContent);
      one.textContent = "Copied";
      setTimeout(() => { one.textContent = "Copy"; }, 1500);
    });
  });

  // On paper everything is open.
  const closed = [];
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details:not([open]):not(.recipe)").forEach((details) => {
      details.open = true;
      closed.push(details);
    });
  });
  addEventListener("afterprint", () => closed.splice(0).forEach((details) => { details.open = false; }));
})();
