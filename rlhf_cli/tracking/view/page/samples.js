// Browser of samples: filters, a page of the list, and one sample in full.

import {useEffect, useRef, useState} from "preact/hooks";
import {Sample} from "view/sample.js";
import {Chip, Coverage, Failed, go, html, number, onArrows, useRequest} from "view/shared.js";

export const FILES = {"samples.jsonl": "training samples", "eval_samples.jsonl": "evaluation samples"};
const ORDERS = {
  "number 1": "newest", "number": "oldest", "reward 1": "highest reward", "reward": "lowest reward",
  "advantage 1": "highest advantage", "advantage": "lowest advantage", "length 1": "longest", "length": "shortest",
  "prompt": "prompt",
};
export const RANGES = {step: "iteration", reward: "reward", advantage: "advantage", length: "length", group: "group"};
const INDEX_AGAIN = 100, LIVE_AGAIN = 3000;

// The chosen run and file, or the first ones that exist.
export function sourceOf(runs, parameters) {
  const run = runs.find(one => String(one.number) === parameters.run) ?? runs.find(one => one.files.length) ?? runs[0];
  return {run, file: run.files.includes(parameters.file) ? parameters.file : run.files[0]};
}

export function SourceControls({runs, run, file, change}) {
  return html`
    ${runs.length > 1 && html`<label>Run <select value=${String(run.number)} onChange=${event =>
      change({run: event.target.value, number: "", skip: ""})}>
      ${runs.map(one => html`<option value=${String(one.number)}>${one.name}</option>`)}</select></label>`}
    ${run.files.length > 1 && html`<label>File <select value=${file} onChange=${event =>
      change({file: event.target.value, number: "", skip: ""})}>
      ${run.files.map(name => html`<option value=${name}>${FILES[name]}</option>`)}</select></label>`}`;
}

export function Range({name, title, parameters, change}) {
  const input = (end, label) => html`<input type="number" step="any" placeholder=${label}
    aria-label=${`${title}, ${label}`} value=${parameters[`${name}_${end}`] ?? ""}
    onChange=${event => change({[`${name}_${end}`]: event.target.value, skip: "", number: ""})}/>`;
  return html`<fieldset class="range"><legend>${title}</legend>${input("min", "from")}${input("max", "to")}</fieldset>`;
}

export const boundsOf = parameters => Object.fromEntries(
  Object.entries(parameters).filter(([name]) => /_(min|max)$/.test(name)));

// The first sample of a query. It stays while samples are added to its source, so that an open one is not replaced.
function useFirst(rows, query, source) {
  const first = useRef({});
  if (query && rows.length && first.current.query !== query) first.current = {query, source, number: String(rows[0].number)};
  return first.current.source === source ? first.current.number : null;
}

export function Samples({runs, parameters}) {
  const {run, file} = sourceOf(runs, parameters);
  const change = values => go("samples", {...parameters, ...values});
  const [order, descending] = (parameters.order ?? "number 1").split(" ");
  const skip = +(parameters.skip ?? 0);
  const {data, error, of, isCurrent} = useRequest(file && "samples",
    {run: run.number, file, order, descending, skip, text: parameters.text, ...boundsOf(parameters)},
    found => found.indexed < 1 ? INDEX_AGAIN : run.outcome === "running" ? LIVE_AGAIN : null);
  const rows = data?.rows ?? [], first = useFirst(rows, isCurrent ? of : null, `${run.number} ${file}`);
  const chosen = parameters.number ?? first;
  if (!file) return html`<p class="soft">This run has no samples yet.</p>`;
  return html`
    <form class="controls" aria-label="Filters" onSubmit=${event => event.preventDefault()}>
      <${SourceControls} runs=${runs} run=${run} file=${file} change=${change}/>
      <label>Order <select value=${parameters.order ?? "number 1"} onChange=${event =>
        change({order: event.target.value, skip: "", number: ""})}>
        ${Object.entries(ORDERS).map(([value, title]) => html`<option value=${value}>${title}</option>`)}</select></label>
      ${Object.entries(RANGES).map(([name, title]) => html`
        <${Range} name=${name} title=${title} parameters=${parameters} change=${change}/>`)}
      <label>Text <input type="search" placeholder="in prompts and responses" value=${parameters.text ?? ""}
        onChange=${event => change({text: event.target.value, skip: "", number: ""})}/></label>
      ${parameters.prompt_min && html`<button type="button" onClick=${() =>
        change({prompt_min: "", prompt_max: "", skip: "", number: ""})}>Show all prompts</button>`}
    </form>
    <${Failed} error=${error}/>
    ${data && html`<${Coverage} ...${data}/>`}
    <div class="rollouts panes">
      <${List} data=${data} rows=${rows} chosen=${chosen} skip=${skip} change=${change} unit=${run.unit}
        isSearch=${Boolean(parameters.text)}/>
      <section class="detail" aria-label="Sample">
        ${chosen && html`<${Sample} run=${run} file=${file} number=${chosen}/>`}</section>
    </div>`;
}

function List({data, rows, chosen, skip, change, unit, isSearch}) {
  const list = useRef(null);
  useEffect(() => list.current?.querySelector("[aria-current=true]")?.scrollIntoView({block: "nearest"}), [chosen]);
  const earlier = useRef([]);
  useEffect(() => { if (!skip) earlier.current = []; }, [skip]);
  const next = () => { earlier.current.push(skip); change({skip: data.next, number: ""}); };
  const previous = () => change({skip: earlier.current.pop() ?? 0, number: ""});
  const count = data ? `${data.total.toLocaleString("en")} samples` : "";
  return html`<div class="listing">
    <ol class="list" ref=${list} aria-label="Samples" onKeyDown=${event => onArrows(event, "button")}>
      ${rows.map(row => html`<li key=${row.number}><button class="item" aria-current=${String(String(row.number) === chosen)}
        onClick=${() => change({number: row.number})}>
        <span class="faint" title=${unit}>${row.step}</span>
        <span class="text">${row.response.trim() || "(empty)"}</span>
        <span class="faint small" title="length in tokens">${number(row.length)}</span>
        <${Chip} value=${row.reward} verdict=${row.verdict}/></button></li>`)}
      ${data && !rows.length && html`<li class="none">${isSearch && data.next !== null
        ? "No sample yet: search the next part." : "No sample fits."}</li>`}
    </ol>
    <div class="pages"><button disabled=${!skip} onClick=${previous}>Previous</button>
      <span class="small soft" role="status">${count}${isSearch ? ` searched from ${skip + 1}` : rows.length
        ? `, ${skip + 1} to ${skip + rows.length}` : ""}</span>
      <button disabled=${!data || data.next === null} onClick=${next}>Next</button></div></div>`;
}
