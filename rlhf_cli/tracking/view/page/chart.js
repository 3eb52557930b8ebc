// A line chart of one metric for one or more runs.

import {useEffect, useRef} from "preact/hooks";
import {colour, html, number, useTheme, useWidth} from "view/shared.js";

const HEIGHT = 210, BROKEN = 8, NEARLY = 1e-5;
// Distances of marks on an axis of whole numbers, such as iterations.
const WHOLE = Array.from({length: 12}, (_, power) => [1, 2, 5].map(digit => digit * 10 ** power)).flat();

// Exponential moving average, corrected for its start as in Adam, so that the first value stays as it is.
export function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map(value => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return mean / total;
  });
}

// Joins lines with different x values: one row of x, one row of values per line.
const joined = lines => uPlot.join(lines.map(line => [line.x, line.y]));

const axis = extra => ({
  stroke: colour("--faint"), grid: {stroke: colour("--grid"), width: 1}, ticks: {show: false},
  font: "12px ui-sans-serif, system-ui, sans-serif", ...extra,
});

// A line of equal values is in the middle, except at 0. So is one of nearly equal values: uPlot would round its range to
// one value, and then add marks without end.
function range(_, low, high) {
  if (low === null) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low <= NEARLY * size) return size === 0 ? [0, 1] : [low - size / 2, low + size / 2];
  return uPlot.rangeNum(low, high, 0.1, true);
}

function options({lines, smoothing, isLog, width, unit, group, readout, height}) {
  const series = [{label: unit}], isWhole = lines.every(line => line.x.every(Number.isInteger));
  for (const line of lines) {
    const points = {show: !line.isHistogram && (line.x.length <= 40 || line.isMarked), size: 5};
    const faint = smoothing > 0 && !line.isMarked;
    series.push({label: line.name, stroke: colour(line.colour), width: faint ? 1 : 2, alpha: faint ? 0.3 : 1, points,
      spanGaps: true, ...(line.isHistogram && {paths: uPlot.paths.stepped({align: 1}), fill: `${colour(line.colour)}22`})});
    if (faint) series.push({label: line.name, stroke: colour(line.colour), width: 2, points: {show: false},
      spanGaps: true});
  }
  return {
    width, height, series, padding: [10, 12, 0, 0], legend: {show: false},
    scales: {x: {time: false}, y: isLog ? {distr: 3} : {range}},
    cursor: {sync: {key: group}, points: {size: 7}, y: false},
    axes: [axis({size: 28, values: (_, ticks) => ticks.map(number), ...(isWhole && {incrs: WHOLE})}),
      axis({size: 56, values: (_, ticks) => ticks.map(tick => tick === null ? "" : number(tick))})],
    hooks: {setCursor: [chart => readout(chart)]},
  };
}

function dataOf(lines, smoothing, isLog) {
  const kept = lines.map(line => isLog ? {...line, y: line.y.map(value => value > 0 ? value : null)} : line);
  const [x, ...rows] = joined(kept);
  const columns = rows.flatMap((values, place) =>
    smoothing > 0 && !kept[place].isMarked ? [values, smoothed(values.map(value => value ?? null), smoothing)] : [values]);
  return [x, ...columns];
}

function description(title, lines, unit) {
  const each = lines.map(({name, x, y}) => {
    const known = y.map((value, place) => [x[place], value]).filter(([, value]) => value !== null);
    if (!known.length) return `${name}: no values`;
    const [[first, from], [last, to]] = [known[0], known[known.length - 1]];
    return `${name}: ${number(from)} to ${number(to)} from ${unit} ${number(first)} to ${number(last)}`;
  });
  return `${title}. ${each.join(". ")}. Arrow keys read values.`;
}

// `version` changes with the values of the lines.
export function LineChart({title, name, lines, version, smoothing = 0, isLog = false, unit, group, height = HEIGHT}) {
  const [box, width] = useWidth(), theme = useTheme();
  const holder = useRef(null), chart = useRef(null), shown = useRef(null);
  const drawn = lines.filter(line => line.x.length), key = drawn.map(line => line.name + line.colour).join("|");
  const readout = plot => {
    const place = plot.cursor.idx;
    if (!shown.current) return;
    const values = place === null || place === undefined ? [] : drawn.map((line, number) => {
      const step = smoothing > 0 ? 1 + drawn.slice(0, number).reduce((sum, one) => sum + (one.isMarked ? 1 : 2), 0)
        : number + 1;
      return [line, plot.data[step][place]];
    }).filter(([, value]) => value !== null && value !== undefined);
    const heading = values.length ? `${unit} ${number(plot.data[0][place])}: ` : "";
    shown.current.textContent = heading + values.map(([line, value]) =>
      drawn.length > 1 ? `${line.name} ${number(value)}` : number(value)).join(", ");
  };
  useEffect(() => {
    if (!width || !drawn.length) return undefined;
    const made = options({lines: drawn, smoothing, isLog, width, unit, group, readout, height});
    chart.current = new uPlot(made, dataOf(drawn, smoothing, isLog), holder.current);
    return () => chart.current.destroy();
  }, [key, width, smoothing, isLog, theme, unit]);
  useEffect(() => { chart.current?.setData(dataOf(drawn, smoothing, isLog)); }, [version]);
  const onKey = event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key], plot = chart.current;
    if (!move || !plot) return;
    event.preventDefault();
    const place = Math.max(0, Math.min(plot.data[0].length - 1, (plot.cursor.idx ?? (move > 0 ? -1 : plot.data[0].length)) + move));
    plot.setCursor({left: plot.valToPos(plot.data[0][place], "x"), top: 10});
  };
  const broken = lines.flatMap(line => line.broken ?? []);
  const last = drawn.length === 1 && !drawn[0].isHistogram ? drawn[0].y.findLast(value => value !== null) : undefined;
  return html`<figure class="card" aria-label=${title}>
    <figcaption class="cardhead"><h3 title=${name}>${title}</h3>
      <span class="now">${last === undefined ? "" : number(last)}</span></figcaption>
    <div ref=${box} class="plot" tabindex="0" role="img" aria-label=${description(title, drawn, unit)} onKeyDown=${onKey}>
      <div ref=${holder}></div></div>
    ${broken.length > 0 && html`<p class="broken">Not finite: ${unit} ${broken.slice(0, BROKEN).map(number).join(", ")}${
      broken.length > BROKEN ? ", …" : ""}</p>`}
    <div ref=${shown} class="readout" aria-live="polite"></div></figure>`;
}
