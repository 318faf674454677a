"use strict";
(() => {
  const link = document.getElementById("link");
  let version = document.body.dataset.version;
  let source = null;
  let retry = 0;

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
    source = new EventSource("events?since=" + encodeURIComponent(version));
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
