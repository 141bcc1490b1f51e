// Sliders over recorded simulations: a map of the cache and the time to the first token. Asks nobody for anything.
(() => {
  const root = document.currentScript.parentElement;
  const data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
  const slots = ["holds tokens", "kept for later", "never used", "nobody's"];
  const make = (tag, attributes, ...children) => {
    const svg = ["svg", "path", "circle", "text", "title", "rect"].includes(tag);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const state = { allocation: 3, prompt: 1, output: 1, rate: 4 };
  const lists = { allocation: data.allocations, prompt: data.prompts, output: data.outputs, rate: data.rates };
  const labels = { allocation: "memory", prompt: "prompt, mean tokens", output: "answer, mean tokens", rate: "requests a second" };
  const controls = make("div", { class: "ce-controls" });
  for (const name of Object.keys(lists)) {
    const value = make("output", {});
    const slider = make("input", { type: "range", min: 0, max: lists[name].length - 1, step: 1 });
    slider.value = state[name];
    const move = () => {
      state[name] = Number(slider.value);
      value.textContent = lists[name][state[name]];
      slider.setAttribute("aria-valuetext", value.textContent);
    };
    slider.addEventListener("input", () => { move(); draw(); });
    move();
    controls.append(make("label", {}, `${labels[name]} `, value, slider));
  }
  const words = make("p", { "aria-live": "polite" });
  const pictures = make("div", { class: "ce-pictures" });
  root.append(controls, words, pictures);

  const run = (allocation) => data.runs[`${allocation}|${data.prompts[state.prompt]}|${data.outputs[state.output]}`];

  function map(point) {
    const svg = make("svg", { viewBox: "0 0 340 236", role: "img" }, make("title", {}, "The cache: each square is half a percent of it"));
    const ends = point.slice(2).map((_, i) => point.slice(2, 3 + i).reduce((sum, each) => sum + each, 0));
    for (let i = 0; i < 200; i++) {
      const kind = ends.findIndex((end) => (i + 0.5) / 200 < end);
      svg.append(make("rect", { class: `ce-${kind < 0 ? 3 : kind}`, x: (i % 20) * 17, y: Math.floor(i / 20) * 17, width: 15, height: 15, rx: 2 }));
    }
    slots.forEach((name, i) => {
      const x = (i % 2) * 200, y = 184 + Math.floor(i / 2) * 22;
      svg.append(make("rect", { class: `ce-${i}`, x, y, width: 13, height: 13, rx: 2 }));
      svg.append(make("text", { x: x + 18, y: y + 11 }, name));
    });
    return svg;
  }

  function chart() {
    const svg = make("svg", { viewBox: "0 0 360 236", role: "img" }, make("title", {}, "Median time to the first token against the rate, all allocations"));
    const last = data.rates[data.rates.length - 1];
    const x = (rate) => 44 + (300 * rate) / last;
    const y = (seconds) => 196 - (180 * (Math.log10(Math.max(seconds, 0.01)) + 2)) / 4;
    for (const seconds of [0.01, 0.1, 1, 10, 100]) {
      svg.append(make("path", { class: "ce-grid", d: `M44 ${y(seconds)}H344` }));
      svg.append(make("text", { x: 38, y: y(seconds) + 4, "text-anchor": "end" }, `${seconds} s`));
    }
    for (const rate of data.rates) svg.append(make("text", { x: x(rate), y: 214, "text-anchor": "middle" }, `${rate}`));
    svg.append(make("text", { x: 194, y: 232, "text-anchor": "middle" }, "requests a second"));
    const chosenName = data.allocations[state.allocation];
    for (const name of [...data.allocations.filter((each) => each !== chosenName), chosenName]) {
      const chosen = name === chosenName;
      const path = run(name).points.map((point, i) => `${x(data.rates[i])} ${y(point[0])}`).join("L");
      svg.append(make("path", { class: chosen ? "ce-chosen" : "ce-other", d: `M${path}` }, make("title", {}, name)));
    }
    const point = run(chosenName).points[state.rate];
    svg.append(make("circle", { class: "ce-dot", cx: x(data.rates[state.rate]), cy: y(point[0]), r: 5 }));
    return svg;
  }

  function draw() {
    const allocation = data.allocations[state.allocation], found = run(allocation), point = found.points[state.rate];
    const share = (number) => `${(100 * number).toFixed(1)} %`;
    words.textContent = `${allocation}: ${found.fit} requests of these lengths fit. At ${data.rates[state.rate]} a second, over `
      + `${data.duration_s} s of arrivals, the median first token takes ${point[0]} s, ${point[1]} requests run on average, and `
      + `${share(point[2])} of the cache holds tokens, ${share(point[3] + point[4])} is set aside and holds none.`;
    pictures.replaceChildren(map(point), chart());
  }
  draw();
})();
