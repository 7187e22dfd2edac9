// Draws the charts from the specifications in the page. Colours are CSS variables, so a change of theme needs no redraw.
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("charts").textContent);
  const options = {
    mode: "vega-lite",
    renderer: "svg",
    ast: true, // expressions are interpreted, never evaluated: the page forbids eval
    actions: false,
    defaultStyle: false,
    config: page.config,
    tooltip: { disableDefaultStyle: true },
  };
  const draw = (spec, place) => {
    const box = document.getElementById(`chart-${place}`);
    return vegaEmbed(box, spec, options).catch((error) => {
      box.classList.add("empty");
      box.textContent = "This chart could not be drawn; its figures are in the table below.";
      throw error;
    });
  };
  Promise.allSettled(page.specs.map(draw)).then((results) => {
    for (const result of results) {
      if (result.status === "rejected") console.error(result.reason);
    }
    document.documentElement.dataset.charts = "drawn";
  });

  // Paper has nothing to click on: tables are printed open, and closed again afterwards.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
    opened = [];
  });
})();
