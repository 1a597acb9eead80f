// DOM without markup: text goes in as text, whatever a model or a client put into it.
import { label } from "../fold.js";

/** element("div", {class: "card", title: "…"}, "text", child) */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** Writes only what changed, so that a selection and a reader's place survive. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function chipElement(number) {
  return element("span", { class: "chip", "data-request": number }, label(number));
}

export function hueChip(node, theme, number) {
  node.style.background = theme.owners[(number - 1) % theme.owners.length];
  node.style.color = theme.ownerText;
}

/** White space that a reader must see: one token is one piece, and " the" is not "the". Lines may break before a dot. */
export function visible(text) {
  return text.replaceAll(" ", "\u200b·").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

/** The heading above a picture, inside it so that it takes no more room than it needs. */
export function heading(root, title, level = 2) {
  let node = root.querySelector(":scope > .title");
  if (!title) return node?.remove();
  if (!node) root.prepend((node = element(`h${level}`, { class: "title" })));
  setText(node, title);
}
