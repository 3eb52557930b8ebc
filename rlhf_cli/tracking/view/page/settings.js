// Settings and facts of the runs next to each other, by default only those that differ.

import {useEffect, useState} from "preact/hooks";
import {request} from "view/data.js";
import {colourOf, Failed, html} from "view/shared.js";

const text = value => value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value);

function useSettings(runs) {
  const [found, setFound] = useState({}), [error, setError] = useState(null);
  const key = runs.map(run => `${run.number} ${run.outcome}`).join();
  useEffect(() => {
    let isOver = false;
    Promise.all(runs.map(run => request("settings", {run: run.number}).then(groups =>
      [run.number, {Run: run.facts ?? {}, ...groups}])))
      .then(pairs => { if (!isOver) setFound(Object.fromEntries(pairs)); }, problem => setError(problem.message));
    return () => { isOver = true; };
  }, [key]);
  return [found, error];
}

export function Settings({runs}) {
  const [found, error] = useSettings(runs);
  const [onlyDifferent, setOnly] = useState(runs.length > 1), [words, setWords] = useState("");
  const known = runs.filter(run => run.number in found);
  const groups = new Map();
  for (const run of known)
    for (const [group, values] of Object.entries(found[run.number]))
      groups.set(group, new Set([...groups.get(group) ?? [], ...Object.keys(values)]));
  const values = (group, name) => known.map(run => text(found[run.number][group]?.[name]));
  const fits = (group, name) => name.toLowerCase().includes(words.toLowerCase())
    && (!onlyDifferent || new Set(values(group, name)).size > 1);
  const rows = [...groups].map(([group, names]) => [group, [...names].filter(name => fits(group, name))])
    .filter(([, names]) => names.length);
  return html`
    <form class="controls" onSubmit=${event => event.preventDefault()}>
      <label>Settings <input type="search" placeholder="part of a name" value=${words}
        onInput=${event => setWords(event.target.value)}/></label>
      <label><input type="checkbox" checked=${onlyDifferent} onChange=${event => setOnly(event.target.checked)}/>
        only differences</label></form>
    <${Failed} error=${error}/>
    ${rows.length ? html`<div class="card scroller"><table class="compared">
      <thead><tr><th>setting</th>${known.map(run => html`<th><i style=${{background: `var(${colourOf(run)})`}}></i>
        ${run.name}</th>`)}</tr></thead>
      ${rows.map(([group, names]) => html`<tbody><tr><th colspan=${known.length + 1} scope="colgroup">${group}</th></tr>
        ${names.map(name => html`<tr><th scope="row" class="mono">${name}</th>${values(group, name).map(value => html`
          <td class="mono">${value}</td>`)}</tr>`)}</tbody>`)}</table></div>`
      : html`<p class="soft">${onlyDifferent ? "No setting differs." : "No setting fits."}</p>`}`;
}
