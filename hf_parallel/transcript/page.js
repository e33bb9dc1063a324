"use strict";
// Reads all state from data attributes: the column of a card, the passes of its text, and the event that ended it.
const PLAY_SECONDS = 20, MAX_NAMED = 6; // length of a play; rows that are named
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : /(ch|s|x)$/.test(word) ? "es" : "s"}`;
const listed = names => names.length < 2 ? names.join("") : names.slice(0, -1).join(", ") + " and " + names.at(-1);

function play(section) {
  const find = selector => [...section.querySelectorAll(selector)];
  const slide = section.querySelector("input"), view = section.querySelector("select");
  const button = section.querySelector(".bar button"), says = section.querySelector(".says");
  const pieces = find("[data-p]"), ticks = find(".tick");
  const {visibility, unit, final_event: finalEvent, history, tick} = section.parentElement.dataset;
  const cards = find(".card").map(element => {
    const {c, b, e, s, n, who} = element.dataset;
    const number = value => value === "" ? null : +value;
    return {element, column: number(c), begin: +b, end: number(e), how: s, name: n, who};
  });
  const across = cards.filter(card => card.column === null);
  const isDone = (card, pass) => card.end !== null && card.end <= pass && (card.how === finalEvent || card.how === "join");
  const isThere = (card, pass) => card.begin <= pass;
  const joined = (card, pass) => across.some(other => other.begin >= card.end && other.begin <= pass);

  function sees(viewer, card, pass) {
    if (!isThere(card, pass)) return viewer === "all";
    if (viewer === card.column || (card.column === null && viewer !== "all")) return true;
    if (viewer === null) return isDone(card, pass) && joined(card, pass);
    return visibility === "live" || (visibility === "ended" && isDone(card, pass));
  }

  function reads(pass, writing, there) {
    const found = writing.map(writer => {
      const seen = there.filter(card => card.column !== writer.column && sees(writer.column, card, pass));
      const names = seen.map(card => history && isDone(card, pass) ? `the ${history}` : card.column === null ? `the ${card.who}` : card.who);
      return seen.length ? ` ${writer.column === null ? "The " : ""}${writer.who} reads ${listed([...new Set(names)])}.` : "";
    }).filter(text => text);
    return found.length > MAX_NAMED ? [...found.slice(0, MAX_NAMED), " \u2026"].join("") : found.join("");
  }

  function say(viewer, pass, there) {
    const writing = there.filter(card => pass < last ? card.end !== null && card.end > pass : card.how === "").sort((a, b) => a.column - b.column);
    const finished = there.filter(card => isDone(card, pass) && card.column !== null);
    const at = pass === 0 ? `Before the first ${tick}` : `After ${tick} ${pass}`;
    if (viewer === "all") {
      const who = [...new Set(writing.map(card => card.who))], one = who.length === 1;
      const does = pass < last ? one ? "is writing" : "are writing" : one ? "has not finished" : "have not finished";
      const now = who.length ? `${who.length > MAX_NAMED ? plural(who.length, "row") : listed(who)} ${does}` : pass < last ? "no row is writing" : "all rows have ended";
      const moved = history ? finished.sort((a, b) => a.end - b.end).map(card => card.name).join(" \u00b7 ") : "";
      return `${at}: ${now}. ` + (moved ? `In the ${history}: ${moved}.` : `${plural(finished.length, unit)} finished.`) + reads(pass, writing, there);
    }
    const seen = finished.filter(card => card.column !== viewer && sees(viewer, card, pass));
    const live = there.filter(card => card.column !== viewer && card.column !== null && !isDone(card, pass) && sees(viewer, card, pass)).sort((a, b) => a.column - b.column);
    const parts = ["the prompt", "its own text"];
    if (seen.length) parts.push(`${plural(seen.length, "finished " + unit)} of others`);
    if (live.length) parts.push(`what ${listed([...new Set(live.map(card => card.who))])} ${live.length === 1 ? "has" : "have"} written so far`);
    if (viewer !== null && across.some(card => card.begin < pass && isThere(card, pass))) parts.push("the text across all columns");
    return `${at}, ${view.selectedOptions[0].text} can see ${listed(parts)}.`;
  }

  const last = +slide.max;
  function show() {
    const pass = +slide.value, chosen = view.value;
    const viewer = chosen === "all" ? "all" : chosen === "" ? null : +chosen;
    section.querySelector("output").textContent = `${pass}/${last}`;
    for (const piece of pieces) piece.classList.toggle("later", +piece.dataset.p > pass);
    for (const card of cards) {
      const begun = card.begin <= pass;
      card.element.classList.toggle("later", !begun);
      card.element.classList.toggle("writing", begun && pass < last && card.end !== null && card.end > pass);
      card.element.classList.toggle("unseen", begun && viewer !== "all" && !sees(viewer, card, pass));
    }
    for (const tick of ticks) tick.classList.toggle("now", +tick.dataset.from <= pass && pass < +tick.dataset.to);
    says.textContent = say(viewer, pass, cards.filter(card => isThere(card, pass)));
  }

  let timer = 0;
  function pause() {
    clearInterval(timer);
    timer = 0;
    button.textContent = "\u25b6 Play";
    says.ariaLive = "polite";
  }
  const go = pass => { pause(); slide.value = pass; show(); };
  const next = () => { slide.value = +slide.value + 1; show(); if (+slide.value === last) pause(); };
  button.addEventListener("click", () => {
    if (timer) return pause();
    if (+slide.value === last) { slide.value = 0; show(); }
    button.textContent = "\u275a\u275a Pause";
    says.ariaLive = "off"; // a screen reader would read out every pass
    timer = setInterval(next, Math.min(400, Math.max(40, PLAY_SECONDS * 1000 / last)));
  });
  slide.addEventListener("input", () => go(slide.value));
  view.addEventListener("change", show);
  for (const tick of ticks) tick.addEventListener("click", () => go(tick.dataset.from));
  section.querySelector(".grid").addEventListener("click", event => {
    const piece = event.target.closest("[data-p]");
    if (piece && getSelection().isCollapsed) go(piece.dataset.p);
  });
  const asked = new URLSearchParams(location.hash.slice(1));
  if (asked.has("pass")) slide.value = asked.get("pass");
  if (asked.has("as")) view.value = asked.get("as");
  if (view.selectedIndex < 0) view.value = "all";
  section.querySelector(".bar").hidden = false;
  show();
}

document.querySelectorAll("section").forEach(play);
