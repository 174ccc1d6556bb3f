"""moto's S3 server as a process of its own on loopback; run as a module, it is that process."""

from __future__ import annotations

import sys
import threading
from typing import Any

from tests.support.child import ChildServer


class MotoServer(ChildServer):
    """A running server; knows no keys, so it takes any."""

    def __init__(self) -> None:
        super().__init__("tests.support.s3_moto")


def main() -> None:
    """Serve until standard input ends."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or each answer waits for a delayed acknowledgement

        def log(self, *_args: object) -> None:
            pass

    app = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = (
        threading.Lock()
    )  # moto's store is not safe under threads: two writers of one key, and 500

    def serve(environ: Any, start_response: Any) -> Any:
        with one_at_a_time:
            return app(environ, start_response)

    server = make_server("127.0.0.1", 0, serve, threaded=True, request_handler=Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
