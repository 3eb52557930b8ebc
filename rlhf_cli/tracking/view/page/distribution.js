// Histograms of samples over the iterations, and of all selected iterations with runs overlaid.

import {useEffect, useRef, useState} from "preact/hooks";
import {LineChart} from "view/chart.js";
import {boundsOf, FILES, Range, RANGES} from "view/samples.js";
import {colour, colourOf, Coverage, Failed, go, html, number, useRequest, useTheme, useWidth} from "view/shared.js";

const COLUMNS = ["reward", "advantage", "length"];
const HEIGHT = 190, INDEX_AGAIN = 200, LIVE_AGAIN = 5000;

// Share of samples by value, over all iterations.
function totals(data) {
  const counts = new Array(data.bins).fill(0);
  for (const [, bin, count] of data.counts) counts[bin] += count;
  const all = counts.reduce((sum, one) => sum + one, 0), width = (data.high - data.low) / data.bins;
  // From the lower end of each bin, and the upper end of the last one.
  const shares = counts.map(count => count / all);
  return {x: [...counts.map((_, bin) => data.low + bin * width), data.high], y: [...shares, shares[data.bins - 1]]};
}

function draw(canvas, width, data, run) {
  const scale = devicePixelRatio, context = canvas.getContext("2d");
  [canvas.width, canvas.height] = [width * scale, HEIGHT * scale];
  const rows = new Array(data.steps).fill(0);
  for (const [step, , count] of data.counts) rows[step] += count;
  context.fillStyle = colour(colourOf(run));
  const [w, h] = [canvas.width / data.steps, canvas.height / data.bins];
  for (const [step, bin, count] of data.counts) {
    // Square root: rare values stay visible.
    context.globalAlpha = 0.08 + 0.92 * Math.sqrt(count / rows[step]);
    context.fillRect(step * w, canvas.height - (bin + 1) * h, Math.ceil(w), Math.ceil(h));
  }
}

function HeatMap({run, column, data}) {
  const [box, width] = useWidth(), canvas = useRef(null), theme = useTheme();
  useEffect(() => { if (width) draw(canvas.current, width, data, run); }, [data, width, theme]);
  const label = `${column} of ${run.name}: from ${number(data.low)} to ${number(data.high)}, ${run.unit} ${data.first} to ${
    data.last}. Darker: more samples.`;
  return html`<figure class="card"><figcaption class="cardhead"><h3>${column} by ${run.unit}: ${run.name}</h3></figcaption>
    <div class="heat"><div class="scale"><span>${number(data.high)}</span><span>${number(data.low)}</span></div>
      <div ref=${box} role="img" aria-label=${label}><canvas ref=${canvas} style=${{width: "100%", height: `${HEIGHT}px`}}></canvas></div>
      <div></div><div class="scale across"><span>${data.first}</span><span>${data.last}</span></div></div></figure>`;
}

function One({run, file, column, bounds, report}) {
  const {data, error, isCurrent} = useRequest("histogram", {run: run.number, file, column, ...bounds},
    found => found.indexed < 1 ? INDEX_AGAIN : run.outcome === "running" ? LIVE_AGAIN : null);
  useEffect(() => { if (data) report(run.number, data); }, [data]);
  return html`<${Failed} error=${error}/>${data && html`<${Coverage} ...${data}/>`}
    ${data && isCurrent && (data.counts.length ? html`<${HeatMap} run=${run} column=${column} data=${data}/>`
      : html`<section class="card"><h3>${column}: ${run.name}</h3><p class="soft">No sample has this value.</p></section>`)}`;
}

export function Distribution({runs, parameters}) {
  const [found, setFound] = useState({});
  const file = parameters.file ?? "samples.jsonl", column = parameters.column ?? "reward";
  const change = values => go("distribution", {...parameters, ...values});
  const having = runs.filter(run => run.files.includes(file)), bounds = boundsOf(parameters);
  const files = Object.keys(FILES).filter(name => runs.some(run => run.files.includes(name)));
  const key = `${column} ${file} ${JSON.stringify(bounds)}`;
  const lines = having.filter(run => found[`${key} ${run.number}`]?.counts.length).map(run => ({
    name: run.name, colour: colourOf(run), isHistogram: true, ...totals(found[`${key} ${run.number}`])}));
  const report = (run, data) => setFound(previous => ({...previous, [`${key} ${run}`]: data}));
  return html`
    <form class="controls" onSubmit=${event => event.preventDefault()}>
      <label>Value <select value=${column} onChange=${event => change({column: event.target.value})}>
        ${COLUMNS.map(name => html`<option value=${name}>${name}</option>`)}</select></label>
      ${files.length > 1 && html`<label>File <select value=${file} onChange=${event => change({file: event.target.value})}>
        ${files.map(name => html`<option value=${name}>${FILES[name]}</option>`)}</select></label>`}
      ${Object.entries(RANGES).filter(([name]) => name !== "group").map(([name, title]) => html`
        <${Range} name=${name} title=${title} parameters=${parameters} change=${change}/>`)}</form>
    ${having.length ? html`<div class="grid">
      <${LineChart} title=${`share of samples by ${column}`} lines=${lines} version=${found} unit=${column}
        group="distribution" height=${HEIGHT}/>
      ${having.map(run => html`<${One} key=${run.number} run=${run} file=${file} column=${column} bounds=${bounds}
        report=${report}/>`)}</div>`
      : html`<p class="soft">These runs have no samples yet.</p>`}`;
}
