// Puts the parts of the page in place that the server sends, and tells it what was pressed. The server escapes all texts.
"use strict";
const query = location.search; // has the token
const cutOff = document.getElementById("cut-off");
let heard = new Date();

const stream = new EventSource("parts" + query);
stream.onmessage = (message) => {
  heard = new Date();
  cutOff.hidden = true;
  document.getElementById("reading")?.remove();
  for (const [part, html] of Object.entries(JSON.parse(message.data))) put(part, html);
};
stream.onerror = () => {
  cutOff.textContent =
    `No connection to \`multimac watch\`. What you see is from ${heard.toLocaleTimeString()}. ` +
    "If it has ended, start it again in a terminal.";
  cutOff.hidden = false;
};

function put(part, html) {
  const place = document.querySelector(`[data-part="${part}"]`);
  if (place.querySelector("button:active")) return; // a press that is going on would be lost; this comes every second
  const open = [...place.querySelectorAll("details")].map((one) => one.open);
  const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
  place.innerHTML = html;
  place.querySelectorAll("details").forEach((one, number) => { one.open = open[number] ?? false; });
  if (focused) document.getElementById(focused)?.focus();
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-do]");
  if (!button || (button.dataset.sure && !confirm(button.dataset.sure))) return;
  button.disabled = true;
  const { do: what, host, away } = button.dataset;
  const body = JSON.stringify(what === "away" ? { what, host, away: away === "true" } : { what });
  try {
    const answer = await fetch("do" + query, { method: "POST", headers: { "Content-Type": "application/json" }, body });
    const said = await answer.text();
    if (!answer.ok) throw new Error(said);
    button.textContent = said;
  } catch (error) {
    alert(error.message);
    button.disabled = false;
  }
});
