// Conveniences of the pages. Everything works without scripts, too, by clicks.
"use strict";
(() => {
  const LOOK_MS = 2000, SOON_MS = 300, LIVE_ROWS = 300;
  let looking = false;

  // Refresh live panes from the same address, except a pane that is in use.
  async function look() {
    const panes = [...document.querySelectorAll("[data-live]")];
    if (!panes.length || document.hidden || looking) return;
    looking = true;
    try {
      const answer = await fetch(location.href, { headers: { "X-Look": "1" } });
      if (!answer.ok) return;
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const pane of panes) {
        const now = page.getElementById(pane.id);
        if (!now || pane.innerHTML === now.innerHTML) continue;
        if (pane.contains(document.activeElement) || selects(pane)) continue;
        const open = [...pane.querySelectorAll("details")].map((d) => d.open);
        const left = [...pane.querySelectorAll(".scroll")].map((s) => s.scrollLeft);
        if (!("soon" in now.dataset)) delete pane.dataset.soon;
        if (!("live" in now.dataset)) delete pane.dataset.live;
        pane.replaceChildren(...now.childNodes);
        pane.querySelectorAll("details").forEach((d, i) => { if (open[i] !== undefined) d.open = open[i]; });
        pane.querySelectorAll(".scroll").forEach((s, i) => { if (left[i]) s.scrollLeft = left[i]; });
      }
    } catch {
      // The server does not answer: the next refresh tries again.
    } finally {
      looking = false;
    }
  }

  function selects(pane) {
    const selection = getSelection();
    return selection && !selection.isCollapsed && pane.contains(selection.anchorNode);
  }

  // A pane that waits for its rows refreshes sooner.
  function again() {
    if (document.querySelector("[data-soon]")) look().then(() => setTimeout(again, SOON_MS));
  }

  if (document.querySelector("[data-live]:not([data-soon])")) setInterval(look, LOOK_MS);
  if (document.querySelector("[data-soon]")) setTimeout(again, SOON_MS);
  if (document.querySelector("[data-again]")) setTimeout(() => location.reload(), SOON_MS);
  for (const select of document.querySelectorAll("select[name=sort]"))
    select.addEventListener("change", () => select.form.requestSubmit());

  // The slider shows its time while it moves, and loads it when released.
  for (const slider of document.querySelectorAll("input[type=range]")) {
    const written = document.getElementById(slider.dataset.writes);
    const { first, last, clock } = slider.dataset;
    const span = BigInt(last) - BigInt(first), steps = BigInt(slider.max) || 1n;
    slider.addEventListener("input", () => {
      const time = BigInt(first) + (span * BigInt(slider.value)) / steps;
      written.value = clock === "wall" ? instant(time) : String(time);
      slider.setAttribute("aria-valuetext", written.value);
    });
    slider.addEventListener("change", () => slider.form.requestSubmit());
  }

  function instant(micros) {
    const text = new Date(Number(micros / 1000n)).toISOString().replace("T", " ").replace("Z", "");
    return text.slice(0, 19) + "." + String(micros % 1000000n).padStart(6, "0");
  }

  // Live changes, newest on top; never parsed as HTML.
  for (const pane of document.querySelectorAll("[data-stream]")) {
    const button = pane.querySelector("button"), said = pane.querySelector("[role=status]");
    const head = pane.querySelector("thead"), body = pane.querySelector("tbody");
    let source = null, seen = 0;
    pane.hidden = false;
    button.addEventListener("click", () => (source ? stop("Not following.") : follow()));

    function follow() {
      source = new EventSource(pane.dataset.stream);
      button.setAttribute("aria-pressed", "true");
      button.textContent = "Stop";
      said.textContent = "Connecting…";
      source.onmessage = (event) => take(JSON.parse(event.data));
      source.onerror = () => {
        if (source && source.readyState === EventSource.CLOSED) stop("The stream ended.");
        else said.textContent = "No connection; trying again.";
      };
    }

    function stop(why) {
      source.close();
      source = null;
      button.setAttribute("aria-pressed", "false");
      button.textContent = "Follow";
      said.textContent = why;
    }

    function take(event) {
      if (event.end !== undefined) return stop(event.end);
      seen += event.rows.length + event.more;
      if (event.upper) said.textContent = `${seen} updates so far; complete before ${event.upper}.`;
      const rows = event.rows.map(row);
      if (event.more) rows.push(line([`and ${event.more} more`]));
      body.prepend(...rows.reverse());
      while (body.rows.length > LIVE_ROWS) body.lastChild.remove();
      if (body.rows.length) head.hidden = false;
    }

    function row({ cells, time, diff }) {
      const changed = line([time, (diff > 0 ? "+" : "") + diff, ...cells]);
      changed.cells[1].className = "n diff " + (diff > 0 ? "plus" : "minus");
      return changed;
    }

    function line(texts) {
      const tr = document.createElement("tr");
      tr.className = "fresh";
      for (const text of texts) {
        const cell = tr.insertCell(), isolated = document.createElement("bdi");
        cell.className = "cell";
        isolated.textContent = text;
        cell.append(isolated);
      }
      return tr;
    }
  }
})();
