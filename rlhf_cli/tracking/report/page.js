// Values under the pointer in charts, and the browser of samples.
// Text is only inserted with textContent, so data can never become markup.

"use strict";

const number = value => {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3) return value.toExponential(2);
  if (size >= 1e5) return value.toLocaleString("en", {notation: "compact", maximumFractionDigits: 1});
  return String(+value.toPrecision(4));
};
const make = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};
const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);

// ---- charts
const tip = document.body.appendChild(make("div", "tip"));

function tipRow(line, value, unit) {
  const row = make("div"), mark = make("i");
  mark.style.background = `var(${line.v || "--c" + line.c})`;
  row.append(mark, line.n, make("b", "", number(value) + unit));
  return row;
}

function placeTip(event) {
  tip.style.display = "block";
  const right = event.clientX + 16, fits = right + tip.offsetWidth <= innerWidth;
  tip.style.left = (fits ? right : Math.max(0, event.clientX - 16 - tip.offsetWidth)) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}

for (const chart of document.querySelectorAll("svg.chart")) {
  const data = JSON.parse(chart.dataset.chart), bars = data.labels.length > 0;
  const [left, right, top, bottom] = data.box, [low, high] = data.x;
  const cross = chart.appendChild(document.createElementNS(chart.namespaceURI, "path"));
  cross.setAttribute("class", "cross");
  chart.addEventListener("pointerleave", () => {
    tip.style.display = "none";
    cross.removeAttribute("d");
  });
  chart.addEventListener("pointermove", event => {
    const box = chart.getBoundingClientRect(), scale = chart.viewBox.baseVal.width / box.width;
    const pointed = low + ((event.clientX - box.left) * scale - left) / (right - left) * (high - low);
    const [step] = nearest(data.s.map(line => nearest(line.p, pointed)), pointed);
    const x = left + (step - low) / (high - low) * (right - left);
    cross.setAttribute("d", `M${x} ${top}V${bottom}`);
    const heading = bars ? data.labels[Math.floor(step)] : Math.round(step);
    tip.replaceChildren(make("div", "faint", `${data.unit} ${heading}`));
    for (const line of data.s) {
      const [at, value] = nearest(line.p, step);
      const there = Math.abs(at - step) <= (high - low) / 80;
      if (there && (value || !bars)) tip.append(tipRow(line, value, bars ? " s" : ""));
    }
    placeTip(event);
  });
}

// ---- rollouts
const SHOWN = ["step", "source", "row", "group", "sample", "weight_version", "prompt", "response", "label", "reward",
  "verdict", "value", "images", "opening", "messages", "turn_rewards", "branches"];
const TEXTS = {prompt: "Prompt", opening: "Added by the environment", response: "Response", label: "Ground truth"};
const TONES = {correct: "good", wrong: "bad", invalid: "bad", failed: "warn"};
const hasReward = row => typeof row.reward === "number";

function verdict(row) {
  const sign = !hasReward(row) ? "warn" : row.reward > 0 ? "good" : row.reward < 0 ? "bad" : "";
  const label = row.verdict || "no score";
  return make("span", "chip " + (TONES[row.verdict] || sign), hasReward(row) ? number(row.reward) : label);
}

function plain(value) {
  if (typeof value === "number") return number(value);
  if (typeof value !== "object") return String(value);
  return Object.entries(value).map(([name, part]) => `${name} ${part === null ? "-" : plain(part)}`).join(", ");
}

function metaLine(row, unit) {
  const meta = make("div", "meta");
  meta.append(verdict(row), make("span", "", `${unit} ${row.step}`));
  if (row.verdict) meta.append(make("span", "", row.verdict));
  for (const [name, value] of Object.entries(row)) {
    if (SHOWN.includes(name) || value === null || plain(value) === "") continue;
    const item = make("span", "", name.replaceAll("_", " ") + " ");
    item.append(make("b", "", plain(value)));
    meta.append(item);
  }
  return meta;
}

function pictures(row, images) {
  const line = make("div", "pictures");
  for (const name of row.images || []) {
    if (!images[name]) continue;
    const picture = make("img");
    picture.src = images[name];
    picture.alt = "picture of the prompt";
    line.append(picture);
  }
  return line;
}

// An episode's messages are its turns and the answers to them, in OpenAI's form.
const isEpisode = row => Array.isArray(row.messages);
const asText = value => typeof value === "string" ? value : JSON.stringify(value);
const callText = call =>
  Object.entries(call.arguments ?? {}).map(([name, value]) => `${name}: ${asText(value)}`).join("\n");
const wordsOfCall = ({function: call}) => `${call.name} ${callText(call)}`;
const wordsOf = message => [message.content, ...(message.tool_calls ?? []).map(wordsOfCall)].join(" ");
const wordsOfEpisode = row => isEpisode(row) ? row.messages.map(wordsOf).join(" ") : "";

function answerHeading(message, isProgram) {
  if (message.name) return `Result of ${message.name}`;
  return isProgram ? `Message of the ${message.role}` : "Answer of the environment";
}

function messageBlock(message, heading, reward) {
  const block = make("div", message.role === "assistant" ? "message own" : "message");
  const line = make("h4", "", heading);
  if (typeof reward === "number")
    line.append(make("span", "chip " + (reward > 0 ? "good" : reward < 0 ? "bad" : ""), `reward ${number(reward)}`));
  block.append(line);
  if (message.content) block.append(make("pre", "", message.content));
  for (const {function: call} of message.tool_calls ?? [])
    block.append(make("h4", "", `Call of ${call.name}`), make("pre", "", callText(call) || "(no arguments)"));
  return block;
}

// An environment without a reward gives zeros, which say nothing beside the score of a verifier.
function turnRewards(row) {
  const rewards = row.turn_rewards ?? [];
  return "reward/environment" in row || rewards.some(reward => reward !== 0) ? rewards : [];
}

function episodeEnd(row) {
  const line = make("div", "meta end"), rewards = turnRewards(row).filter(Number.isFinite);
  const count = row.messages.filter(message => message.role === "assistant").length;
  line.append(make("span", "", count === 1 ? "1 turn" : `${count} turns`));
  const total = make("span", "", "rewards of all turns ");
  total.append(make("b", "", number(rewards.reduce((sum, reward) => sum + reward, 0))));
  if (rewards.length) line.append(total);
  const cut = row.cut ? `truncated: the environment ${row.cut}` : "truncated";
  if (row.finish_reason === "length") line.append(make("span", "chip warn", cut));
  if (row.verdict === "failed") line.append(make("span", "chip bad", "failed"));
  return line;
}

// The messages of an agent program begin with its own prompt, which may have turns that the model did not write: the
// rewards are of the last ones.
function conversation(messages, rewards) {
  const isProgram = messages.length > 0 && messages[0].role !== "assistant";
  const count = messages.filter(message => message.role === "assistant").length;
  const first = isProgram ? count - rewards.length : 0;
  let turn = 0;
  return messages.map(message => {
    if (message.role !== "assistant") return messageBlock(message, answerHeading(message, isProgram));
    turn += 1;
    return messageBlock(message, `Turn ${turn}`, rewards[turn - 1 - first]);
  });
}

function episodeBlocks(row) {
  const earlier = row.branches ?? [], heading = number => make("h3", "", `Branch ${number}`);
  const branches = earlier.flatMap((messages, place) => [heading(place + 1), ...conversation(messages, [])]);
  const last = earlier.length ? [heading(earlier.length + 1)] : [];
  return [...branches, ...last, ...conversation(row.messages, turnRewards(row)), episodeEnd(row)];
}

function listItem(row) {
  const item = make("button", "item");
  const words = String(row.response ?? "").trim() || wordsOfEpisode(row);
  const line = words.trim().split("\n").join(" ").slice(0, 200);
  item.append(make("span", "faint", row.step), make("span", "text", line || "(empty)"), verdict(row));
  return item;
}

function fits(row, {step, low, high, text}) {
  if (step.value && row.step !== +step.value) return false;
  if (low.value !== "" && !(hasReward(row) && row.reward >= +low.value)) return false;
  if (high.value !== "" && !(hasReward(row) && row.reward <= +high.value)) return false;
  const words = `${row.id} ${row.prompt} ${row.response} ${row.label} ${wordsOfEpisode(row)}`;
  return words.toLowerCase().includes(text.value.toLowerCase());
}

const score = row => hasReward(row) ? row.reward : -Infinity;
const ORDERS = {
  early: (a, b) => a.step - b.step,
  late: (a, b) => b.step - a.step,
  best: (a, b) => score(b) - score(a),
  worst: (a, b) => score(a) - score(b),
};

for (const browser of document.querySelectorAll(".rollouts")) {
  const rows = JSON.parse(browser.querySelector("script").textContent);
  const images = JSON.parse(browser.querySelector("script.images")?.textContent ?? "{}");
  const list = browser.querySelector(".list"), detail = browser.querySelector(".detail");
  const controls = Object.fromEntries([...browser.querySelectorAll("[name]")].map(node => [node.name, node]));
  let shown = [], chosen = 0;

  const open = index => {
    list.querySelector(".on")?.classList.remove("on");
    chosen = index;
    const row = shown[index];
    if (!row) return detail.replaceChildren(make("div", "none", "No response fits."));
    list.children[index].classList.add("on");
    detail.replaceChildren(metaLine(row, browser.dataset.unit), pictures(row, images));
    for (const [name, heading] of Object.entries(TEXTS)) {
      if (name === "response" && isEpisode(row)) detail.append(...episodeBlocks(row));
      else if (row[name] !== null && row[name] !== undefined)
        detail.append(make("h4", "", heading), make("pre", "", String(row[name])));
    }
    detail.scrollTop = 0;
  };
  const update = () => {
    shown = rows.filter(row => fits(row, controls)).sort(ORDERS[controls.order.value]);
    list.replaceChildren(...shown.map(listItem));
    [...list.children].forEach((item, index) => { item.onclick = () => open(index); });
    browser.querySelector(".count").textContent = `${shown.length} of ${rows.length}`;
    open(0);
  };
  Object.values(controls).forEach(control => control.addEventListener("input", update));
  list.addEventListener("keydown", event => {
    const move = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (!move || !shown[chosen + move]) return;
    event.preventDefault();
    open(chosen + move);
    list.children[chosen].focus();
  });
  update();
}
