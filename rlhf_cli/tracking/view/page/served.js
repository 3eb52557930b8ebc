// Data of the runs from the server of rlhf view. In report.html, exported.js replaces this module.

export const isLive = true;
export const name = "rlhf view", headline = [], note = "";

// Addresses are relative to /KEY/, so every request carries the key.
export async function request(name, parameters = {}, options = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const response = await fetch(`api/${name}?${new URLSearchParams(given)}`, options);
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).detail ?? `status ${response.status}`);
  return response.json();
}

export const imageAddress = (run, name) => `api/image?${new URLSearchParams({run: run.number, name})}`;
