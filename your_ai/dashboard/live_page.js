"use strict";
(() => {
  const link = document.getElementById("link");
  let version = document.body.dataset.version;
  let source = null;
  let retry = 0;

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

  function show(message) {
    const { parts, title } = JSON.parse(message.data);
    version = message.lastEventId;
    document.title = title;
    for (const [name, html] of Object.entries(parts)) {
      const fresh = document.createElement("template");
      fresh.innerHTML = html;
      adapt(document.getElementById("part-" + name), fresh.content.firstElementChild);
    }
  }

  function disconnect() {
    clearTimeout(retry);
    if (source) source.close();
    source = null;
  }

  function connect() {
    disconnect();
    source = new EventSource("/events?since=" + encodeURIComponent(version));
    source.onopen = () => { link.hidden = true; };
    source.onmessage = show;
    source.onerror = () => {
      link.hidden = false;
      if (source.readyState === EventSource.CLOSED) retry = setTimeout(connect, 2000);
    };
  }

  // Browsers open few connections to a server, so a tab that nobody sees has none.
  document.addEventListener("visibilitychange", () => document.hidden ? disconnect() : connect());
  if (!document.hidden) connect();
})();
