// Data of the runs from report.html itself: the answers of the server (app.py), about the samples in the file.

const exported = JSON.parse(document.getElementById("data").textContent);
export const isLive = false;
export const {name, headline, note} = exported;

const BINS = 24, STEPS = 60;
const runOf = parameters => exported.runs[parameters.run];
const textOf = row => row.response || (row.messages ? JSON.stringify(row.messages) : "");
const valueOf = (row, column) => row[column === "prompt" ? "prompt_number" : column] ?? null;

function selected({file = "samples.jsonl", run, ...parameters}) {
  const {rows, all} = exported.runs[run].samples[file];
  const bounds = Object.entries(parameters).filter(([name, value]) => /_(min|max)$/.test(name) && value);
  const fits = row => bounds.every(([name, end]) => {
    const value = valueOf(row, name.slice(0, -4));
    return value !== null && (name.endsWith("min") ? value >= +end : value <= +end);
  });
  return {rows: rows.filter(fits), exported: rows.length, all, indexed: 1};
}

// Rows without the value are last.
function sorted(rows, column, descending) {
  const sign = descending ? -1 : 1;
  const compare = (a, b) => a === null || b === null ? (a === null) - (b === null) : sign * (a - b);
  return rows.toSorted((a, b) => compare(valueOf(a, column), valueOf(b, column)) || sign * (a.number - b.number));
}

// `total` is the number before the text is searched, as in the answer of the server.
function samples({order = "number", descending, text = "", ...parameters}) {
  const {rows, ...extent} = selected(parameters), words = text.toLowerCase();
  const contains = row => JSON.stringify([row.id, row.prompt, textOf(row), row.label]).toLowerCase().includes(words);
  const listed = sorted(rows.filter(contains), order, descending).map(row => ({...row, response: textOf(row)}));
  return {...extent, rows: listed, next: null, total: rows.length};
}

function groups(parameters) {
  const {rows, ...extent} = selected(parameters);
  const found = Map.groupBy(rows.filter(row => row.group !== undefined), row => `${row.step}.${row.group}`);
  const all = [...found.values()].map(members => {
    const rewards = members.map(row => row.reward).filter(Number.isFinite), {step, group, number} = members[0];
    const low = rewards.length ? Math.min(...rewards) : null, high = rewards.length ? Math.max(...rewards) : null;
    const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
    return {step, group, number, count: members.length, mean, low, high, spread: low === null ? null : high - low};
  });
  return {...extent, groups: sorted(all, parameters.order, parameters.descending)};
}

function histogram(parameters) {
  const {rows, ...extent} = selected(parameters);
  const found = rows.map(row => [row.step, valueOf(row, parameters.column)]).filter(([, value]) => value !== null);
  if (!found.length) return {...extent, counts: []};
  const range = place => [Math.min, Math.max].map(end => end(...found.map(pair => pair[place])));
  const [first, last] = range(0), [low, high] = range(1), steps = Math.min(STEPS, last - first + 1);
  // The maximum belongs to the last bin, not to one after it.
  const cells = Map.groupBy(found, ([step, value]) => [Math.floor((step - first) * steps / (last - first + 1)),
    Math.min(BINS - 1, Math.floor((value - low) * BINS / (high - low || 1)))].join());
  const counts = [...cells].map(([cell, members]) => [...cell.split(",").map(Number), members.length]);
  return {...extent, low, high, first, last, bins: BINS, steps, counts};
}

const ANSWERS = {
  runs: () => exported.runs,
  metrics: parameters => runOf(parameters).metrics,
  settings: parameters => runOf(parameters).settings,
  sample: ({run, file, number}) => exported.runs[run].samples[file].rows.find(row => row.number === +number),
  samples, groups, histogram,
};

export const request = async (name, parameters = {}) => ANSWERS[name](parameters);

export const imageAddress = (run, name) => exported.runs[run.number].images[name];
