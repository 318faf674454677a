"use strict";
// Make `old` like `fresh`, and keep the elements that are in both, with their scroll positions.
function adapt(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  const isOpen = old.nodeName === "DETAILS" && old.open;
  for (const { name } of [...old.attributes])
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes)
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (isOpen) old.open = true;
  adaptChildren(old, fresh);
}

function adaptChildren(old, fresh) {
  const wanted = [...fresh.childNodes];
  wanted.forEach((node, index) => {
    const present = old.childNodes[index];
    if (present) adapt(present, node);
    else old.append(node);
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}
