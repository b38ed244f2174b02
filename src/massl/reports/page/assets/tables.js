"use strict";
// Tables that are sorted by the column whose heading is pressed: numbers as numbers, missing values last either way.
(() => {
  const order = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

  function keyOf(row, column, isNumeric) {
    const cell = row.cells[column];
    if (isNumeric) return cell.dataset.number === undefined ? null : Number(cell.dataset.number);
    const text = cell.textContent.trim();
    return text === "" || text === "–" ? null : text;
  }

  function sort(table, column, ascending) {
    const isNumeric = table.tHead.rows[0].cells[column].classList.contains("number");
    const keyed = [...table.tBodies[0].rows].map((row) => ({ row, key: keyOf(row, column, isNumeric) }));
    keyed.sort((one, other) => {
      if (one.key === null || other.key === null) return (one.key === null) - (other.key === null);
      const difference = isNumeric ? one.key - other.key : order.compare(one.key, other.key);
      return ascending ? difference : -difference;
    });
    table.tBodies[0].append(...keyed.map(({ row }) => row));
  }

  document.querySelectorAll("table.sortable").forEach((table) => {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        // Large numbers first, since most of them are accuracies; words from a to z.
        const first = heading.classList.contains("number") ? "descending" : "ascending";
        const second = first === "ascending" ? "descending" : "ascending";
        const direction = heading.getAttribute("aria-sort") === first ? second : first;
        headings.forEach((other) => other.setAttribute("aria-sort", "none"));
        heading.setAttribute("aria-sort", direction);
        sort(table, column, direction === "ascending");
      });
    });
  });
})();
