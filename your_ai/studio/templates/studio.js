
(() => {
  const root = document.body.dataset.root;
  const said = document.getElementById("said");
  const PIECE = 1 << 19;
  const SILENT = "The studio does not answer. Start it again: your_ai studio. Runs go on without it.";

  // Ask for a part of a page; `into` becomes what is answered.
  async function fill(into, address, options = {}) {
    const headers = { "X-Part": "1" };
    const answer = await fetch(address, { ...options, headers, redirect: "follow" });
    const fresh = document.createElement("template");
    fresh.innerHTML = await answer.text();
    const found = into.id && fresh.content.getElementById(into.id);
    const made = into.cloneNode(false);
    made.append(...(found ? found : fresh.content).childNodes);
    made.removeAttribute("aria-busy");
    if (found) {
      for (const { name } of [...made.attributes]) made.removeAttribute(name);
      for (const { name, value } of found.attributes) made.setAttribute(name, value);
    }
    adapt(into, made);
  }

  // A form with data-live shows what follows from its fields while they change.
  for (const form of document.querySelectorAll("form[data-live]")) {
    const into = document.querySelector(form.dataset.into);
    let asked = 0;
    let timer = 0;
    const look = async () => {
      const own = ++asked;
      const body = new URLSearchParams(new FormData(form));
      for (const [name, value] of [...body]) if (value === "") body.delete(name);
      // Who reloads the page, or comes back to it, finds what was typed.
      history.replaceState(null, "", `${form.dataset.address}?${body}`);
      into.setAttribute("aria-busy", "true");
      try {
        const part = into.cloneNode(true);
        await fill(part, form.dataset.live, { method: "POST", body });
        if (own === asked) adapt(into, part);
      } catch { if (own === asked) into.textContent = SILENT; }
    };
    form.addEventListener("keydown", (event) => {  // it confirms a field, and starts nothing
      if (event.key === "Enter" && event.target.matches("input")) event.preventDefault();
    });
    form.addEventListener("input", (event) => {
      const output = event.target.id && form.querySelector(`output[for="${event.target.id}"]`);
      if (output) {
        const { value, max } = event.target;
        output.textContent = value === max && output.dataset.most || value + (output.dataset.unit || "");
      }
      clearTimeout(timer);
      timer = setTimeout(look, 60);
    });
    look();
  }

  // An element with data-every is asked for again and again, while somebody sees it and does not
  // type in it; with 0, once. What is answered may have no data-every: then it is done.
  for (const element of document.querySelectorAll("[data-every]")) {
    const again = async () => {
      const { every, from } = element.dataset;
      if (every === undefined) return;
      if (!document.hidden && !element.querySelector("input:focus, select:focus, textarea:focus"))
        try { await fill(element, from); said.textContent = ""; }
        catch { said.textContent = SILENT; }
      if (every !== "0") setTimeout(again, Number(every));
    };
    setTimeout(again, Number(element.dataset.every));
  }

  // In a field with data-enter, Enter sends its form, and Shift+Enter begins a line.
  document.addEventListener("keydown", (event) => {
    const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing;
    if (!sends || event.target.dataset.enter === undefined) return;
    event.preventDefault();
    event.target.form.requestSubmit();
  });

  // Ask before what cannot be undone; a form is sent once.
  document.addEventListener("submit", (event) => {
    const { confirm: question } = event.target.dataset;
    if (question && !window.confirm(question)) { event.preventDefault(); return; }
    const pressed = event.target.querySelectorAll("button");
    setTimeout(() => pressed.forEach((button) => { button.disabled = true; }));
  });
  window.addEventListener("pageshow", () => document.querySelectorAll("button:disabled").forEach((button) => { button.disabled = false; }));

  // Files are sent in pieces, so that their size does not matter.
  async function refused(answer) {
    const fault = document.createElement("template");
    fault.innerHTML = await answer.text();
    return new Error(fault.content.textContent.trim());
  }

  async function send(file, name, gift) {
    for (let at = 0; at === 0 || at < file.size; at += PIECE) {
      const query = new URLSearchParams({ gift, name, at, size: file.size });
      const answer = await fetch(`${root}upload?${query}`, {
        method: "POST", headers: { "X-Part": "1" }, body: file.slice(at, at + PIECE),
      });
      if (!answer.ok) throw await refused(answer);
      said.textContent = `${name}: ${Math.floor(100 * Math.min(1, (at + PIECE) / (file.size || 1)))}%`;
    }
  }

  // found: pairs of a path and a file; hidden files are left out.
  async function give(found) {
    const pairs = found.filter(([path]) => !path.split("/").some((part) => part.startsWith(".")));
    if (!pairs.length) return;
    const gift = crypto.randomUUID();
    try {
      for (const [path, file] of pairs) await send(file, path, gift);
      const answer = await fetch(`${root}upload/done?gift=${gift}`, { method: "POST", headers: { "X-Part": "1" } });
      if (!answer.ok) throw await refused(answer);
      location.assign(`${root}data?${new URLSearchParams(await answer.json())}`);
    } catch (error) {
      said.textContent = error instanceof TypeError ? SILENT : error.message;
      for (const input of document.querySelectorAll(".drop input")) input.value = "";
    }
  }

  // The files below a dropped file or folder.
  async function within(entry) {
    if (entry.isFile) {
      const file = await new Promise((found, failed) => entry.file(found, failed));
      return [[entry.fullPath.slice(1), file]];
    }
    const reader = entry.createReader();
    const all = [];
    for (;;) {
      const some = await new Promise((found, failed) => reader.readEntries(found, failed));
      if (!some.length) return all;
      for (const each of some) all.push(...await within(each));
    }
  }

  for (const drop of document.querySelectorAll(".drop")) {
    const input = drop.querySelector("input");
    input.addEventListener("change", () => give([...input.files].map((file) => [file.webkitRelativePath || file.name, file])));
    drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
    drop.addEventListener("dragleave", () => drop.classList.remove("over"));
    drop.addEventListener("drop", (event) => {
      event.preventDefault();
      drop.classList.remove("over");
      const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
      Promise.all(entries.map(within)).then((found) => give(found.flat()), (error) => { said.textContent = error.message; });
    });
  }
})();
