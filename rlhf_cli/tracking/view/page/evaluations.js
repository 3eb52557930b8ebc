// Evaluations of each run, newest first, with confidence intervals.

import {colourOf, html, number} from "view/shared.js";

function interval(record, name) {
  const ends = [record[`${name}_low`], record[`${name}_high`]];
  return ends.includes(undefined) ? "" : ` (${ends.map(number).join(" to ")})`;
}

function Table({run, records, names, titles}) {
  return html`<section class="card"><h3><i style=${{background: `var(${colourOf(run)})`}}></i>${run.name}</h3>
    <div class="scroll"><table class="fit"><thead><tr><th>${run.unit ?? "step"}</th>
      ${names.map(name => html`<th class="num">${titles[name].replace("evaluation ", "")}</th>`)}</tr></thead>
    <tbody>${records.map(record => html`<tr><td>${record.step}</td>${names.map(name => html`
      <td class="num">${name in record ? number(record[name]) + interval(record, name) : ""}</td>`)}</tr>`)}</tbody>
    </table></div></section>`;
}

export function Evaluations({runs, metrics}) {
  const known = runs.map(run => [run, metrics.get(run.number) ?? {records: [], prominent: [], titles: {}}]);
  const tables = known.map(([run, {records, prominent, titles}]) => {
    const names = prominent.filter(name => name.startsWith("eval/"));
    return {run, names, titles, records: records.filter(record => names.some(name => name in record)).toReversed()};
  }).filter(({records}) => records.length);
  return html`<div class="stack">${tables.length ? tables.map(table => html`<${Table} key=${table.run.number} ...${table}/>`)
    : html`<p class="soft">These runs have no evaluation yet; see --eval_dataset.</p>`}</div>`;
}
