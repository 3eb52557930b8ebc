// Tokens of a sample, colored by their values, with the explanation by rlhf why: the server runs the iteration again.

import {useEffect, useState} from "preact/hooks";
import {request} from "view/data.js";
import {duration, Failed, html, number, onArrows} from "view/shared.js";

const AGAIN = 1500;
// What to color by: title, and value of a token. Positive values are blue, negative ones are red.
const COLOURS = {
  difference: ["log-prob difference, trainer - engine", values => values.anchor - values.rollout],
  ratio: ["log ratio, now - before the update", values => Math.log(values.ratio)],
  advantage: ["advantage", values => values.advantage],
  entropy: ["entropy", values => values.entropy],
  divergence: ["divergence from the teacher", values => values.divergence],
  gradient: ["gradient with respect to the log-prob", values => values.gradient],
};

function useExplanation(run, chosen) {
  const [found, setFound] = useState({state: "unknown"}), [error, setError] = useState(null), [tries, setTries] = useState(0);
  useEffect(() => {
    let timer = null, isOver = false;
    const ask = async method => {
      try {
        const next = await request("explanation", {run: run.number, number: chosen}, {method});
        if (isOver) return;
        setFound(next);
        setError(next.error ?? null);
        if (["waiting", "running"].includes(next.state)) timer = setTimeout(() => ask("GET"), AGAIN);
      } catch (problem) {
        if (!isOver) setError(problem.message);
      }
    };
    ask(tries ? "POST" : "GET");
    return () => { isOver = true; clearTimeout(timer); };
  }, [tries]);
  return [found, error, () => setTries(tries + 1)];
}

function background(value, most, name) {
  if (!Number.isFinite(value) || !most) return {};
  const tone = name === "entropy" ? "--c4" : value > 0 ? "--c1" : "--bad";
  return {background: `color-mix(in srgb, var(${tone}) ${Math.round(70 * Math.abs(value) / most)}%, transparent)`};
}

// Line breaks in a token are shown, and end the line too.
const visible = text => text.replaceAll("\n", "↵\n");

// The first lines repeat prompt and response.
const withoutHead = lines => lines.slice(lines.indexOf("") + 1);

function Coloured({tokens}) {
  const [name, setName] = useState(tokens[0].values.divergence === undefined ? "difference" : "divergence"), [place, setPlace] = useState(0);
  const [title, value] = COLOURS[name], values = tokens.map(token => value(token.values));
  const most = Math.max(0, ...values.filter(Number.isFinite).map(Math.abs));
  return html`
    <div class="controls"><label>Color by <select value=${name} onChange=${event => setName(event.target.value)}>
      ${Object.entries(COLOURS).map(([key, [words]]) => html`<option value=${key}>${words}</option>`)}</select></label>
      <span class="small">${`largest magnitude ${number(most)}; `}${name === "entropy" ? "stronger: higher"
        : "blue: positive, red: negative"}</span></div>
    <div class="tokens" role="group" aria-label="Tokens" onKeyDown=${event =>
      onArrows(event, "button", ["ArrowLeft", "ArrowRight"])}>${tokens.map((token, index) => html`
      <button tabindex=${index === place ? 0 : -1} aria-current=${String(index === place)} onClick=${() => setPlace(index)}
        aria-label=${`token ${index} ${token.text}, ${title} ${number(values[index])}`}
        title=${`token ${index}: ${number(values[index])}`} style=${background(values[index], most, name)}>${
          visible(token.text)}</button>`)}</div>
    <pre aria-live="polite">${withoutHead(tokens[place].lines).join("\n")}</pre>`;
}

export function Tokens({run, number: chosen, step}) {
  const [found, error, start] = useExplanation(run, chosen);
  const isBusy = ["waiting", "running"].includes(found.state);
  return html`<h3>Tokens</h3>
    <${Failed} error=${error}/>
    ${(found.state === "none" || (found.state === "done" && found.error)) && html`<p class="explain">
      <button onClick=${start}>Explain tokens</button>
      <span class="small soft">Runs ${run.unit} ${step} again with rlhf why, from the checkpoint before it. This starts the
        models of the run and may need minutes.</span></p>`}
    ${isBusy && html`<p class="explain" role="status"><progress aria-label="explanation"></progress>
      <span class="small soft">${found.state === "waiting" ? "Waiting for an earlier explanation"
        : `Running ${run.unit} ${step} again`}, ${duration(found.seconds)}</span></p>`}
    ${found.tokens && (found.tokens.length ? html`<${Coloured} tokens=${found.tokens}/>
      <p class="small soft">${found.equality.join(" ")}</p>` : html`<pre>${found.lines.join("\n")}</pre>`)}`;
}
