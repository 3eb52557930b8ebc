// The page of rlhf view and report.html: runs, their metrics, and a tab for each view.

import {render} from "preact";
import {useEffect, useRef, useState} from "preact/hooks";
import {Curves} from "view/curves.js";
import {headline, isLive, name as pageName, note, request} from "view/data.js";
import {Distribution} from "view/distribution.js";
import {Evaluations} from "view/evaluations.js";
import {Groups} from "view/groups.js";
import {Samples} from "view/samples.js";
import {Settings} from "view/settings.js";
import {colourOf, Failed, go, html, number, onArrows, useAddress, useRequest} from "view/shared.js";
import {Time} from "view/time.js";

const TABS = {
  curves: ["Curves", Curves],
  samples: ["Samples", Samples],
  groups: ["Groups", Groups],
  distribution: ["Histograms", Distribution],
  evaluations: ["Evaluations", Evaluations],
  time: ["Time", Time],
  settings: ["Settings", Settings],
};
const POLL = 2000;

// Metrics of all runs: new lines are requested while a run goes on.
function useMetrics(runs) {
  const [metrics, setMetrics] = useState(new Map());
  const store = useRef(new Map()), current = useRef(runs);
  current.current = runs;
  useEffect(() => {
    let timer = null, isOver = false;
    const update = async () => {
      let changed = false;
      for (const run of current.current ?? []) {
        const known = store.current.get(run.number) ?? {records: [], cursor: "", outcome: null};
        if (known.outcome === run.outcome && run.outcome !== "running") continue;
        changed = await fetchMetrics(run, known, store.current) || changed;
      }
      if (isOver) return;
      if (changed) setMetrics(new Map(store.current));
      timer = setTimeout(update, current.current ? POLL : 50);
    };
    update();
    return () => { isOver = true; clearTimeout(timer); };
  }, []);
  return metrics;
}

async function fetchMetrics(run, known, store) {
  let found = known, has_more = true, changed = false;
  while (has_more) {
    let part;
    try {
      part = await request("metrics", {run: run.number, cursor: found.cursor});
    } catch {
      return changed;  // the server ended, or the run is being replaced
    }
    const records = part.is_first ? part.records : [...found.records, ...part.records];
    changed ||= part.records.length > 0 || part.is_first;
    found = {...part, records: merged(records), outcome: run.outcome};
    has_more = part.has_more;
  }
  store.set(run.number, found);
  return changed;
}

// Lines of one step belong together, such as its evaluation.
function merged(records) {
  const bySteps = new Map();
  for (const record of records) bySteps.set(record.step, {...bySteps.get(record.step), ...record});
  return [...bySteps.values()].sort((a, b) => a.step - b.step);
}

function RunList({runs, metrics, hidden, setHidden}) {
  const toggle = run => setHidden(previous => {
    const next = new Set(previous);
    if (!next.delete(run.number)) next.add(run.number);
    return next;
  });
  const done = run => metrics.get(run.number)?.records.at(-1)?.step ?? 0;
  return html`<ul class="runs" aria-label="Runs">${runs.map(run => html`
    <li key=${run.number}><label title=${run.path}>
      <input type="checkbox" checked=${!hidden.has(run.number)} onChange=${() => toggle(run)}/>
      <i style=${{background: `var(${colourOf(run)})`}}></i>
      <b>${run.name}</b> <span class="soft">${run.command}, ${run.unit ?? "step"} ${done(run)}${run.total_steps
        ? ` of ${run.total_steps}` : ""}</span>
      <span class=${`chip ${{finished: "good", failed: "bad", killed: "bad"}[run.outcome] ?? "warn"}`}>${run.outcome}</span>
    </label>${run.alarms.length > 0 && html`<details><summary><span class="chip bad">${run.alarms.length === 1 ? "1 alarm"
      : `${run.alarms.length} alarms`}</span></summary>${run.alarms.map(message => html`<p class="small">${message}</p>`)}</details>`}
    </li>`)}</ul>`;
}

const Headline = () => headline.length > 0 && html`<dl class="tiles">${headline.map(([name, value]) => html`
  <div class="tile"><dt>${name}</dt><dd>${typeof value === "number" ? number(value) : value}</dd></div>`)}</dl>`;

function Tabs({tab}) {
  return html`<div role="tablist" aria-label="Views" onKeyDown=${event =>
    onArrows(event, "[role=tab]", ["ArrowLeft", "ArrowRight"])}>${Object.entries(TABS).map(([name, [title]]) => html`
      <button role="tab" id=${`tab-${name}`} aria-controls="panel" aria-selected=${String(name === tab)}
        tabindex=${name === tab ? 0 : -1} onClick=${() => go(name)}>${title}</button>`)}</div>`;
}

function App() {
  const {tab, parameters} = useAddress();
  const {data: runs, error} = useRequest("runs", {}, () => isLive ? POLL : null);
  const metrics = useMetrics(runs);
  const [hidden, setHidden] = useState(new Set());
  const name = tab in TABS ? tab : "curves", View = TABS[name][1];
  useEffect(() => { document.title = `${TABS[name][0]} · ${pageName}`; }, [name]);
  const shown = (runs ?? []).filter(run => !hidden.has(run.number));
  return html`
    <a class="skip" href="#panel" onClick=${event => { event.preventDefault(); document.getElementById("panel").focus(); }}>
      Skip to content</a>
    <div class="bar"><div><b>${pageName}</b><${Tabs} tab=${name}/></div></div>
    <main>
      <h1 class="unseen">${TABS[name][0]}</h1>
      ${name === "curves" && html`<${Headline}/>`}
      <${Failed} error=${error && `No answer from rlhf view: ${error}. Is it still running?`}/>
      ${runs && html`<${RunList} runs=${runs} metrics=${metrics} hidden=${hidden} setHidden=${setHidden}/>`}
      <div id="panel" role="tabpanel" aria-labelledby=${`tab-${name}`} tabindex="-1">
        ${runs && (shown.length ? html`<${View} runs=${shown} metrics=${metrics} parameters=${parameters}/>`
          : html`<p class="soft">No run is selected.</p>`)}
      </div>
      ${note && html`<p class="small soft">${note}</p>`}
    </main>`;
}

render(html`<${App}/>`, document.body);
