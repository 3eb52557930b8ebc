// Groups, the samples of one prompt, next to each other.

import {Chip, Coverage, Failed, go, html, number, useRequest} from "view/shared.js";
import {boundsOf, Range, SourceControls, sourceOf} from "view/samples.js";

const ORDERS = {"step 1": "newest", "step": "oldest", "spread 1": "largest spread", "spread": "smallest spread",
  "mean": "lowest mean reward", "mean 1": "highest mean reward"};
const MOST = 100, INDEX_AGAIN = 200, LIVE_AGAIN = 5000;

const nameOfGroup = ({step, group}) => `${step}.${group}`;

// Where a text stops being equal to the first one of its group.
function commonLength(text, first) {
  let length = 0;
  while (length < Math.min(text.length, first.length) && text[length] === first[length]) length += 1;
  return length;
}

function Card({row, first, open}) {
  const text = row.response, common = row === first ? 0 : commonLength(text, first.response);
  return html`<article class="card"><div class="meta"><${Chip} value=${row.reward} verdict=${row.verdict}/>
      <span>sample <b>${row.sample ?? "–"}</b></span><span>advantage <b>${number(row.advantage)}</b></span>
      <span>length <b>${number(row.length)}</b></span>
      <button aria-label=${`Open sample ${row.sample}`} onClick=${open}>Open</button></div>
    <pre><span class="faint">${text.slice(0, common)}</span>${text.slice(common) || (text ? "" : "(empty)")}</pre></article>`;
}

function Group({run, file, name, close}) {
  const [step, group] = name.split(".");
  const {data, error} = useRequest("samples", {run: run.number, file, step_min: step, step_max: step, group_min: group,
    group_max: group, limit: MOST, texts: "1"});
  const rows = data?.rows ?? [];
  return html`<section class="column" aria-label=${`Group ${group}`}>
    <div class="cardhead"><h3>Group ${group}, ${run.unit} ${step}</h3>
      <button aria-label=${`Close group ${group}`} onClick=${close}>Close</button></div>
    <${Failed} error=${error}/>
    ${rows.length > 0 && html`<pre class="prompt">${typeof rows[0].prompt === "string" ? rows[0].prompt
      : JSON.stringify(rows[0].prompt, null, 1)}</pre>`}
    ${rows.map(row => html`<${Card} key=${row.number} row=${row} first=${rows[0]} open=${() =>
      go("samples", {run: run.number, file, step_min: step, step_max: step, group_min: group, group_max: group,
        number: row.number})}/>`)}</section>`;
}

export function Groups({runs, parameters}) {
  const {run, file} = sourceOf(runs, parameters);
  const change = values => go("groups", {...parameters, ...values});
  const [order, descending] = (parameters.order ?? "step 1").split(" ");
  const {data, error} = useRequest(file && "groups",
    {run: run.number, file, order, descending, limit: MOST, ...boundsOf(parameters)},
    found => found.indexed < 1 ? INDEX_AGAIN : run.outcome === "running" ? LIVE_AGAIN : null);
  const groups = data?.groups ?? [], opened = (parameters.open ?? "").split(",").filter(Boolean);
  const toggle = name => change({open: (opened.includes(name) ? opened.filter(one => one !== name)
    : [...opened, name]).join(",")});
  if (!file) return html`<p class="soft">This run has no samples yet.</p>`;
  return html`
    <form class="controls" aria-label="Filters" onSubmit=${event => event.preventDefault()}>
      <${SourceControls} runs=${runs} run=${run} file=${file} change=${values => change({...values, open: ""})}/>
      <label>Order <select value=${parameters.order ?? "step 1"} onChange=${event => change({order: event.target.value})}>
        ${Object.entries(ORDERS).map(([value, title]) => html`<option value=${value}>${title}</option>`)}</select></label>
      ${["step", "group"].map(name => html`
        <${Range} name=${name} title=${name === "step" ? "iteration" : "group"} parameters=${parameters} change=${change}/>`)}
      <span class="small">Choose one or more groups.</span></form>
    <${Failed} error=${error}/>${data && html`<${Coverage} ...${data}/>`}
    <div class="rollouts panes narrow"><ol class="list" aria-label="Groups">
      ${groups.map(group => html`<li key=${nameOfGroup(group)}><button class="item" aria-pressed=${
        String(opened.includes(nameOfGroup(group)))} onClick=${() => toggle(nameOfGroup(group))}>
        <span class="faint">${group.step}</span><span class="text">group ${group.group}</span>
        <span class="small faint">${number(group.low)} to ${number(group.high)}</span>
        <${Chip} value=${group.mean}/></button></li>`)}
      ${data && !groups.length && html`<li class="none">No group fits.</li>`}</ol>
      <div class="columns">${opened.length ? opened.map(name => html`<${Group} key=${name} run=${run} file=${file}
        name=${name} close=${() => toggle(name)}/>`) : html`<p class="soft">No group is chosen.</p>`}</div></div>`;
}
