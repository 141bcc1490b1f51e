"use strict";
const at = (id) => document.getElementById(id);
const here = location.origin + location.pathname.replace(/[^/]*$/, "");
let messages = [];
let running = null;

function said(who, mine) {
  const box = document.createElement("div");
  const name = document.createElement("b");
  const text = document.createElement("span");
  name.textContent = who;
  if (mine) box.className = "mine";
  box.append(name, text);
  at("log").append(box);
  return text;
}

async function* events(body) {
  const decoder = new TextDecoder();
  let kept = "";
  for (const reader = body.getReader(); ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    kept += decoder.decode(value, { stream: true });
    const parts = kept.split("\n\n");
    kept = parts.pop();
    for (const part of parts)
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

async function ask() {
  const question = at("question").value.trim();
  if (!question || running || !at("form").reportValidity()) return;
  const count = Number(at("several").value);
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  at("question").value = "";
  said("You", true).textContent = question;
  const mine = messages; // another list after "Clear"
  mine.push({ role: "user", content: question });
  at("log").setAttribute("aria-busy", "true");
  at("status").className = "";
  at("status").textContent = "The model answers.";
  const answers = [];
  let usage = null, cut = false;
  try {
    const response = await fetch(here + "v1/chat/completions", {
      method: "POST",
      signal: running.signal,
      headers: { "content-type": "application/json" },
      body: JSON.stringify({
        messages: mine, n: count, stream: true, stream_options: { include_usage: true },
        max_tokens: Number(at("most").value), temperature: Number(at("warmth").value),
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) usage = event.usage;
      for (const choice of event.choices) {
        const name = count > 1 ? `Answer ${choice.index + 1}` : "Model";
        const box = (answers[choice.index] ??= said(name, false));
        box.textContent += choice.delta.content || "";
        cut ||= choice.finish_reason === "length";
      }
      at("log").scrollTop = at("log").scrollHeight;
    }
    const ending = cut ? " An answer was cut off at the most tokens." : "";
    at("status").textContent = usage
      ? `${usage.prompt_tokens} tokens of prompt, ${usage.completion_tokens} of answer.${ending}` : "";
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (mine === messages) {
      at("status").className = stopped ? "" : "bad";
      at("status").textContent = stopped ? "Stopped." : error.message;
    }
  }
  if (answers[0] && answers[0].textContent) mine.push({ role: "assistant", content: answers[0].textContent });
  else mine.pop();
  at("log").setAttribute("aria-busy", "false");
  at("send").disabled = false;
  at("stop").disabled = true;
  running = null;
  at("question").focus();
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) running.abort(); });
at("stop").addEventListener("click", () => running && running.abort());
at("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  at("log").replaceChildren();
  at("status").textContent = "";
  at("question").focus();
});

function row(name, count, total) {
  const line = document.createElement("tr");
  const head = document.createElement("th"), number = document.createElement("td"), part = document.createElement("td");
  const meter = document.createElement("meter");
  head.scope = "row";
  head.textContent = name;
  number.className = "number";
  number.textContent = count.toLocaleString("en");
  meter.max = total;
  meter.value = count;
  meter.textContent = `${Math.round((100 * count) / total)} %`;
  meter.setAttribute("aria-label", `${name}: ${meter.textContent} of all slots`);
  part.append(meter, ` ${meter.textContent}`);
  line.append(head, number, part);
  return line;
}

function show(news) {
  const map = at("map"), pieces = at("pieces"), space = "http://www.w3.org/2000/svg";
  map.setAttribute("viewBox", `0 0 ${news.width} ${news.height}`);
  if (news.defs !== undefined) { at("defs").innerHTML = news.defs; pieces.replaceChildren(); }
  while (pieces.childElementCount > news.count) pieces.lastElementChild.remove();
  while (pieces.childElementCount < news.count) pieces.append(document.createElementNS(space, "g"));
  for (const [index, piece] of Object.entries(news.pieces)) pieces.children[index].innerHTML = piece;
  at("words").textContent = at("map-words").textContent = news.words;
  const total = Object.values(news.slots).reduce((sum, count) => sum + count, 0);
  at("slots").replaceChildren(...Object.entries(news.slots).map(([name, count]) => row(name, count, total)));
}

function watch() {
  const source = new EventSource(here + "map");
  source.onmessage = (event) => {
    at("link").textContent = "Live, a few times a second.";
    show(JSON.parse(event.data));
  };
  source.onerror = () => {
    at("link").textContent = "The map is not live: the server does not answer. It will be asked again.";
    source.close();
    setTimeout(watch, 3000);
  };
}
watch();
