"""The server of the studio: its gate, its routes, and how a page answers.

The pages are clients of the functions that the command line and `import your_ai` use, of the
folders of runs and of their events. This process loads no MLX: what needs it is asked of a
`Worker`, or is a command of its own. Whatever is begun goes on without this process.
"""

from __future__ import annotations

import hmac
import secrets
import signal
import sys
import threading
import time
import webbrowser
from dataclasses import replace
from functools import cache, partial
from typing import NoReturn
from urllib.parse import parse_qsl

from anyio import to_thread
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from your_ai.dashboard.charts import DARK, LIGHT
from your_ai.errors import REPORT, RunError, UserError, first_line
from your_ai.files import read_text, replace_text
from your_ai.gates.console import echo, echo_error
from your_ai.gates.text import message_line
from your_ai.hub.find import store
from your_ai.run.child import DONE
from your_ai.run.stopping import recorded_signals
from your_ai.serving.live_page import check_reader, headers_of, listen
from your_ai.serving.web import Gate, RequestHead, RequestRefused, WebServer
from your_ai.studio import (
    data_page,
    jobs_page,
    models_page,
    plan_page,
    runs_page,
    ship_page,
    try_page,
    uploads,
)
from your_ai.studio.pages import FOLDER, Answer, PageRequest, Studio, compile_templates, templates

MODULES = (
    models_page,
    data_page,
    plan_page,
    runs_page,
    try_page,
    ship_page,
    jobs_page,
    uploads,
)
FIRST_PORT = 8780
TOKEN = "studio.token"  # in the store: a page stays valid when the server is started again
TOKEN_BYTES = 64
FIELDS_OF_FORM = 1000
POLL_S = 0.2
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    **headers_of(POLICY),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # with no-referrer, forms would be sent from origin `null`
}


def routes_of(studio: Studio) -> list[BaseRoute]:
    found: list[BaseRoute] = [
        Route(path, partial(answered, studio, answer), methods=[method])
        for module in MODULES
        for method, path, answer in module.PAGES
    ]
    live = [
        Route("/runs/{name}/live/", studio.boards.page),
        Route("/runs/{name}/live/events", studio.boards.changes),
        Route("/static/{name}", static),
    ]
    rest = Route("/{rest:path}", partial(answered, studio, missing))
    return [Mount(studio.root.rstrip("/"), routes=[*found, *live, rest])]


def missing(asked: PageRequest) -> Response:
    return asked.render("error", 404, text="there is no such page; choose one above")


async def answered(studio: Studio, answer: Answer, request: Request) -> Response:
    """Answer a request in a thread, since pages read files. Errors become pages of one line."""
    body = await request.body()
    names, query = request.path_params, dict(request.query_params)
    asked = PageRequest(studio, names, query, {}, body, "x-part" in request.headers)
    try:
        asked = replace(asked, form=form_of(request, body))
        response = await to_thread.run_sync(answer, asked, abandon_on_cancel=True)
    except UserError as error:
        response = asked.render("error", 422, text=message_line(error))
    except RunError as error:
        response = asked.render("error", 500, text=message_line(error))
    except Exception as error:
        text = message_line(f"{type(error).__name__}: {first_line(error)}; {REPORT}")
        echo_error(f"error: {text}")
        response = asked.render("error", 500, text=text)
    response.headers.update(HEADERS | dict(response.headers))
    return response


def form_of(request: Request, body: bytes) -> dict[str, str]:
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind != "application/x-www-form-urlencoded":
        return {}
    try:
        text = body.decode("ascii")
        fields = parse_qsl(text, max_num_fields=FIELDS_OF_FORM, errors="strict")
    except ValueError as error:
        raise UserError("the form cannot be read; load the page again") from error
    found: dict[str, str] = {}
    for name, value in fields:  # of a group of boxes, all values
        found[name] = f"{found[name]},{value}" if name in found else value
    return found


async def static(request: Request) -> Response:
    """The style and the script of all pages."""
    name = request.path_params["name"]
    kinds = {"studio.css": "text/css", "studio.js": "text/javascript"}
    if name not in kinds:
        raise HTTPException(404)
    return Response(asset(name), 200, HEADERS, kinds[name])


@cache
def asset(name: str) -> str:
    text = (FOLDER / "templates" / name).read_text(encoding="utf-8")
    if name.endswith(".js"):
        return (FOLDER.parent / "dashboard" / "adapt.js").read_text(encoding="utf-8") + text
    look = templates().get_template("style.html.j2").render(light=LIGHT, dark=DARK)
    return look.replace("<style>", "").replace("</style>", "") + text


# The gate, and the server's life


def gate_of(studio: Studio) -> Gate:
    def check(head: RequestHead) -> None:
        check_reader(head)
        given = head.target.encode()[: len(studio.root)]
        if not hmac.compare_digest(given, studio.root.encode()):
            raise RequestRefused(403, "open the address that `your_ai studio` printed")
        if head.method == "POST" and "origin" not in head.headers:
            raise RequestRefused(403, "only the studio's own pages may do that")

    def refusal(refused: RequestRefused, asked: Headers) -> Response:
        return PlainTextResponse(f"{refused.message}\n", refused.status, HEADERS)

    return Gate(("GET", "HEAD", "POST"), check, refusal)


def own_token() -> str:
    """The token of this user's studios: made once, and readable only by the user."""
    path = store() / TOKEN
    try:
        if len(found := read_text(path, TOKEN_BYTES).strip()) == 32 and found.isalnum():
            return found
    except (OSError, ValueError):
        pass
    made = secrets.token_hex(16)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, made)
        path.chmod(0o600)
    except OSError:  # then it is only for this server
        pass
    return made


def serve_studio(port: int | None, opens: bool) -> int:
    """Serve the studio of this folder until a signal; return the exit status.

    port: None for a free one. opens: show it in the browser. Raises UserError if the port cannot
    be used.
    """
    studio = Studio(own_token())
    with recorded_signals() as received:
        server = WebServer(listen(port, FIRST_PORT), routes_of(studio), gate_of(studio))
        address = f"{server.url}{studio.root}"
        try:
            threading.Thread(target=compile_templates, daemon=True).start()
            echo(f"studio: {address}")
            echo("Ctrl-C ends it; runs go on without it")
            sys.stdout.flush()
            if opens:
                webbrowser.open(address)
            while not received:
                time.sleep(POLL_S)
        finally:
            studio.close()
            server.stop()
    return DONE if received[0] == signal.SIGINT else 128 + received[0]


def main(port: str, opens: str) -> NoReturn:
    """Serve the studio as `serve_studio` does; an error is one line.

    port: a number, 0 for a free one. opens: 0 or 1.
    """
    try:
        status = serve_studio(int(port) or None, opens == "1")
    except (UserError, RunError) as error:
        echo_error(f"error: {error}")
        status = 2 if isinstance(error, UserError) else 1
    except OSError as error:  # of standard output
        echo_error(f"error: {first_line(error)}")
        status = 1
    except Exception as error:
        echo_error(f"error: {type(error).__name__}: {first_line(error)}; {REPORT}")
        status = 1
    except KeyboardInterrupt:  # before it listens
        status = 128 + signal.SIGINT
    sys.exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
