"""A server with a thread per connection, and a limit of connections."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from http.server import ThreadingHTTPServer
from typing import Any

from your_ai.serving import wire


class LimitedServer(ThreadingHTTPServer):
    """Listens when it is created. More than wire.CONNECTIONS clients at once get `busy`."""

    request_queue_size = wire.CONNECTIONS

    def __init__(self, host: str, port: int, handler: Any, busy: bytes) -> None:
        """busy: the whole answer to a client too many."""
        self.busy = busy
        self.bodies = wire.Allowance(wire.BODIES_BYTES)
        self.connections = threading.BoundedSemaphore(wire.CONNECTIONS)
        self.is_local = wire.is_loopback(host)
        address: Any
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind as HTTPServer does, without looking up the host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.connections.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:
                self.connections.release()
                raise
            return
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(self.busy)
            request.recv(1 << 16)  # unread data would make the system discard the answer
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logging.debug("a request failed, or its client left", exc_info=True)

    @property
    def url(self) -> str:
        host = self.server_name
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}"
