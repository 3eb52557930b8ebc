// One sample: its numbers, prompt, response or turns, and images. Text is only inserted as text, never as markup.

import {imageAddress, isLive} from "view/data.js";
import {Tokens} from "view/tokens.js";
import {Chip, Failed, go, html, number, useRequest} from "view/shared.js";

const HEADINGS = {prompt: "Prompt", opening: "Added by the environment", response: "Response", label: "Ground truth"};
// Shown in other places than the list of values.
const SHOWN = ["number", "step", "prompt", "opening", "response", "label", "reward", "verdict", "images", "messages",
  "turn_rewards", "branches", "tools", "prompt_number", "judgements"];

const asText = value => typeof value === "string" ? value : JSON.stringify(value, null, 1);

export function plain(value) {
  if (typeof value === "number") return number(value);
  if (typeof value !== "object" || value === null) return String(value ?? "–");
  return Object.entries(value).map(([name, part]) => `${name} ${plain(part)}`).join(", ");
}

export function Sample({run, file, number: chosen}) {
  const {data: row, error} = useRequest("sample", {run: run.number, file, number: chosen});
  if (!row) return html`<${Failed} error=${error}/>`;
  const values = Object.entries(row).filter(([name, value]) => !SHOWN.includes(name) && value !== null && value !== "");
  return html`
    <div class="meta"><${Chip} value=${row.reward} verdict=${row.verdict}/>
      <span>${run.unit} <b>${row.step}</b></span>${row.verdict && html`<span>${row.verdict}</span>`}
      ${row.group !== undefined && html`<button onClick=${() =>
        go("groups", {run: run.number, file, step_min: row.step, step_max: row.step, open: `${row.step}.${row.group}`})}>
        Group ${row.group}</button>`}
      <button onClick=${() => go("samples", {run: run.number, file, prompt_min: row.prompt_number,
        prompt_max: row.prompt_number, order: "number"})}>Same prompt</button>
    </div>
    <${Images} run=${run} row=${row}/>
    ${Object.entries(HEADINGS).map(([name, heading]) => name === "response" && Array.isArray(row.messages)
      ? html`<${Episode} row=${row}/>`
      : row[name] !== null && row[name] !== undefined && html`<h3>${heading}</h3><pre>${asText(row[name])}</pre>`)}
    ${row.judgements?.length > 0 && html`<${Judgements} judgements=${row.judgements}/>`}
    ${run.is_explained && file === "samples.jsonl" && (isLive
      ? html`<${Tokens} key=${`${run.number} ${chosen}`} run=${run} number=${chosen} step=${row.step}/>`
      : html`<p class="small soft">To explain its tokens: <code>rlhf why ${run.path} --sample ${row.id}</code></p>`)}
    <h3>Values</h3>
    <dl class="values">${values.map(([name, value]) => html`<div><dt>${name}</dt><dd>${plain(value)}</dd></div>`)}</dl>`;
}

const Images = ({run, row}) => html`<div class="pictures">${
  (row.images ?? []).map(name => imageAddress(run, name)).filter(Boolean).map((address, place) => html`
  <img src=${address} alt=${`image ${place + 1} of the prompt`}/>`)}
</div>`;

// Verdicts of judges (rewards/judge/judge.py): what was decided, about what, and why.
function decision({failed, met, weight, criterion, against, shown, won, rank, of, score}) {
  const pair = `sample ${against}, shown ${shown}`;
  if (failed !== undefined) return {tone: "warn", text: "failed", about: against === undefined ? "" : pair};
  if (met !== undefined) {
    return {tone: met === (weight > 0) ? "good" : "bad", text: met ? "met" : "not met",
      about: `${criterion} (weight ${number(weight)})`};
  }
  if (against !== undefined) {
    return {tone: won === 1 ? "good" : won === 0 ? "bad" : "",
      text: won === 1 ? "better than" : won === 0 ? "worse than" : "equal to", about: pair};
  }
  if (rank !== undefined) return {tone: "", text: `rank ${rank} of ${of}`, about: ""};
  return {tone: "", text: `score ${number(score)}`, about: ""};
}

const Judgements = ({judgements}) => html`<h3>Verdicts of the judge</h3>
  <div class="scroller"><table aria-label="Verdicts of the judge"><tbody>${judgements.map(judgement => {
    const {tone, text, about} = decision(judgement);
    return html`<tr><th scope="row"><span class=${`chip ${tone}`}>${text}</span></th>
      <td>${about}${about && html`<br/>`}<span class="soft">${judgement.reason || judgement.failed || ""}</span></td></tr>`;
  })}</tbody></table></div>`;

// An environment without rewards gives zeros, which mean nothing next to the score of a verifier.
function turnRewards(row) {
  const rewards = row.turn_rewards ?? [];
  return "reward/environment" in row || rewards.some(reward => reward !== 0) ? rewards : [];
}

// One line per argument: programs among them stay readable.
function argumentsOf({arguments: values}) {
  if (typeof values === "string") return values;
  return Object.entries(values ?? {}).map(([name, value]) => `${name}: ${asText(value)}`).join("\n") || "(no arguments)";
}

function Message({message, heading, reward}) {
  const calls = message.tool_calls ?? [];
  return html`<div class=${`message ${message.role === "assistant" ? "own" : ""}`}>
    <h4>${heading}${typeof reward === "number" && html` <span class="chip">reward ${number(reward)}</span>`}</h4>
    ${message.content && html`<pre>${asText(message.content)}</pre>`}
    ${calls.map(({function: call}) => html`<h4>Call of ${call.name}</h4><pre>${argumentsOf(call)}</pre>`)}
  </div>`;
}

// Messages of an agent program begin with its own prompt and may have turns that the model did not write: rewards
// belong to the last ones.
function Turns({messages, rewards}) {
  const isProgram = messages.length > 0 && messages[0].role !== "assistant";
  const count = messages.filter(message => message.role === "assistant").length;
  const first = isProgram ? count - rewards.length : 0;
  let turn = 0;
  return messages.map(message => {
    if (message.role === "assistant") {
      turn += 1;
      return html`<${Message} message=${message} heading=${`Turn ${turn}`} reward=${rewards[turn - 1 - first]}/>`;
    }
    const heading = message.name ? `Result of ${message.name}` : `Message of the ${message.role}`;
    return html`<${Message} message=${message} heading=${heading}/>`;
  });
}

function Episode({row}) {
  const branches = row.branches ?? [];
  return html`<h3>Turns</h3>
    ${branches.map((messages, place) => html`<h3>Branch ${place + 1}</h3><${Turns} messages=${messages} rewards=${[]}/>`)}
    ${branches.length > 0 && html`<h3>Branch ${branches.length + 1}</h3>`}
    <${Turns} messages=${row.messages} rewards=${turnRewards(row)}/>
    ${row.finish_reason === "length" && html`<p><span class="chip warn">truncated${row.cut
      ? `: the environment ${row.cut}` : ""}</span></p>`}`;
}
